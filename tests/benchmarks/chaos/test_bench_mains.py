"""Benches of faults judge a job that was kept, from its files to their exit code."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringweave.planning.balancing import SampleAccount
from ringweave.telemetry import EVENTS_FORMAT
from tests.telemetry.examples import example

BENCH = Path(__file__).parents[3] / "bench" / "faults"
STEPS, BEFORE, BACK = 30, 12, 18
"""Worker 1 is killed after step 12, and has samples again from step 19 on; a step takes a second."""
BEGIN_S = 100.0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    __import__(request.param)
    return sys.modules[request.param]


def members(step: int) -> list[str]:
    """Whose samples count in it."""
    return ["0.0", "1.0"] if step <= BEFORE else ["0.0"] if step <= BACK else ["0.0", "1.1"]


def drawn(step: int) -> dict[str, SampleAccount]:
    """Of each member of a step; the one that is killed has drawn its part of the next one."""
    who = members(BEFORE) if step == BEFORE + 1 else members(step)
    size = 256 // len(who)
    return {
        member: SampleAccount.from_indices(range(step * 256 + i * size, step * 256 + (i + 1) * size))
        for i, member in enumerate(who)
    }


def keep(folder: Path, line: str, target: str = "process 3") -> None:
    """Files of a job of two workers in which that line of a script happened."""
    checks = folder / "checks"
    checks.mkdir(parents=True)
    said: dict[str, list[str]] = {"0.0": [], "1.0": [], "1.1": []}
    events = [
        {"time": BEGIN_S - 20, "kind": "run_started", "format": EVENTS_FORMAT, "attempt": 1},
        *(watched(rank, BEGIN_S - 10) for rank in (0, 1)),
        epoch(BEGIN_S - 1, ["0.0", "1.0"], ["0.0", "1.0"]),
        {"time": BEGIN_S, "kind": "training_prepared", "batch_samples": 256},
        {"time": BEGIN_S + BEFORE + 0.2, "kind": "fault_begun", "fault": line, "target": target},
        epoch(BEGIN_S + BEFORE + 0.5, ["0.0"], []),
        recomputed(BEGIN_S + BEFORE + 0.9, BEFORE + 1),
        watched(1, BEGIN_S + BACK - 2),
        epoch(BEGIN_S + BACK + 0.2, ["0.0", "1.1"], ["1.1"]),
        {"time": BEGIN_S + BACK + 0.9, "kind": "members_caught_up", "members": ["1.1"]},
        {"time": BEGIN_S + STEPS + 0.5, "kind": "chaos_ended", "outcome": "stopped"},
    ]
    total, epochs = SampleAccount(), []
    for step in range(1, STEPS + 1):
        for member, own in drawn(step).items():
            said[member].append(f"drawn {step} {own.num_samples} {own.fingerprint} {(step - 1) // 6}")
            if member in members(step):
                total += own
                said[member].append(f"done {step} {step:016x}")
                rank = int(member.partition(".")[0])
                events.append({"time": BEGIN_S + step, "kind": "train_step_done", "rank": rank})
            else:  # the other one computes these too
                total += own
                said["0.0"].append(f"drawn {step} {own.num_samples} {own.fingerprint} {(step - 1) // 6}")
        if step % 6 == 0:
            epochs.append(accounted(BEGIN_S + step, step // 6 - 1, total))
            total = SampleAccount()
    counts: dict[tuple[float, int], int] = {}
    for event in sorted([*events, *epochs], key=lambda each: each["time"]):
        if event["kind"] == "worker_watched":
            counts[event["rank"]] = 0
        if event["kind"] == "train_step_done":
            counts[event["rank"]] += 1
            event["steps_since_start"] = counts[event["rank"]]
        with (folder / "events.jsonl").open("a", encoding="ascii") as file:
            file.write(json.dumps(example(event["kind"]) | event) + "\n")
    for member, lines in said.items():
        (checks / f"{member}-7.txt").write_text("".join(f"{each}\n" for each in lines), encoding="ascii")
    (checks / "end.json").write_text(json.dumps({"train_step": STEPS, "held_out_loss": 0.5}), encoding="ascii")


def watched(rank: int, time: float) -> dict[str, Any]:
    return {"time": time, "kind": "worker_watched", "rank": rank, "node": f"a-{rank}", "pid": 3}


def epoch(time: float, who: list[str], newcomers: list[str]) -> dict[str, Any]:
    number = {"term": 1, "number": round(time * 10), "part": ""}
    return {
        "time": time,
        "kind": "generation_begun",
        **number,
        "committed": max(0, int(time - BEGIN_S)),
        "members": who,
        "newcomers": newcomers,
    }


def recomputed(time: float, step: int) -> dict[str, Any]:
    numbers = {"reduction": step, "members": ["0.0"], "samples": 128, "missing": 128}
    return {"time": time, "kind": "samples_recomputed", **numbers}


def accounted(time: float, number: int, total: SampleAccount) -> dict[str, Any]:
    words = {"samples": total.num_samples, "expected": 6 * 256, "fingerprint": f"{total.fingerprint:016x}"}
    return {"time": time, "kind": "samples_accounted", "epoch": number, **words}


def judge(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the document."""
    out = folder / "found.json"
    shared = ["--again", "--keep", str(folder), "--workers", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *shared, *words])
    return bench.main(), json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("bench", ["kills"], indirect=True)
def test_kills(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fault,) = bench.draw(1, 2, seed=5, every_s=14.0, calm_s=10.0, outside=True)
    keep(tmp_path / "job", f"at {fault.at_s:g}s kill worker 1")
    code, found = judge(bench, monkeypatch, tmp_path, "--kills", "1", "--outside", "--seed", "5")
    said = capsys.readouterr().out
    assert (found["steps"], found["steps_lost"], found["samples_lost"], found["attempts"]) == (STEPS, 0, 0, 1)
    assert (found["samples_counted"], found["samples_recomputed"]) == (STEPS * 256, 128)
    assert found["checks_alike"] == 2 * STEPS - (BACK - BEFORE)
    assert (found["stall_p95_s"], found["evicted"], found["never_back"]) == (0.0, 0, [])
    assert (found["never_began"], code, "missed:" in said) == ([], 0, False)
    code, _ = judge(bench, monkeypatch, tmp_path, "--kills", "2", "--outside", "--seed", "5")
    said = capsys.readouterr().out
    assert code == 1
    assert "never began\n" in said
    assert "missed: 1 members were killed, not 2\n" in said


@pytest.mark.parametrize("bench", ["kills"], indirect=True)
def test_what_is_wrong_is_missed_with_all_else_after_the_figures_are_written(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path / "job", "at 10.74s kill worker 1")
    with (tmp_path / "job" / "checks" / "0.0-7.txt").open("a", encoding="ascii") as file:
        file.write(f"done 3 {4:016x}\ndrawn 3 1 7 0\n")
    code, _ = judge(bench, monkeypatch, tmp_path, "--kills", "2", "--outside", "--seed", "5")
    assert code == 1
    first, second = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["wrong"]
    assert first.startswith("parameters of 0.0 after step 3 are 0000000000000004, not ")
    assert second.startswith("epoch 0: processes drew SampleAccount(num_samples=1537, ")
    printed = capsys.readouterr().out
    assert f"missed: {first}\nmissed: {second}\n" in printed
    assert "missed: 1 members were killed, not 2\n" in printed


@pytest.mark.parametrize("bench", ["at_once"], indirect=True)
def test_at_once(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path / "job", "at 10s kill worker 1")
    code, found = judge(bench, monkeypatch, tmp_path, "--workers", "3")
    assert (code, found["smallest"], found["members_at_the_end"]) == (1, 1, 2)
    said = capsys.readouterr().out
    assert "missed: at 35s kill coordinator: never began\n" in said
    assert "missed: 2 members at the end, not 3\n" in said
    assert "missed: fail-over in s: not known, the bar is 3\n" in said


@pytest.mark.parametrize("bench", ["kills"], indirect=True)
def test_a_kill_at_another_moment_than_was_drawn_is_missed(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fault,) = bench.draw(1, 2, seed=5, every_s=14.0, calm_s=10.0, outside=False)
    line = f"at {fault.at_s:g}s kill worker {fault.target} during {fault.moment}"
    wanted, other = f"process 3 during {fault.moment}", "process 3 during lunch"
    for name, target in (("good", wanted), ("bad", other)):
        keep(tmp_path / name / "job", line, target)
        code, found = judge(bench, monkeypatch, tmp_path / name, "--kills", "1", "--seed", "5")
        assert (found["moments"], code) == ({target.partition(" during ")[2]: 1}, int(name == "bad"))
    printed = capsys.readouterr().out
    assert f"killed during {fault.moment} " in printed
    assert f"missed: {line}: it died during lunch\n" in printed


@pytest.mark.parametrize("bench", ["mixed"], indirect=True)
def test_mixed(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("seed-7", "seed-8", "without"):
        keep(tmp_path / name, "at 10s kill worker 1")
    words = ["--faults", "2", "--steps", str(STEPS)]
    code, found = judge(bench, monkeypatch, tmp_path, *words)
    assert (found["apart"], found["begun"], found["wanted"], found["seed"]) == (0.0, 1, 2, 7)
    assert code == 1
    assert "missed: seed 7: 1 faults began, not 2\n" in capsys.readouterr().out
    code, _ = judge(bench, monkeypatch, tmp_path, *words, "--jobs", "2")
    assert code == 1
    printed = capsys.readouterr().out
    assert all(f"missed: seed {seed}: 1 faults began, not 2\n" in printed for seed in (7, 8))
    assert "without faults" not in printed.partition("missed")[2]
    seeds = [json.loads((tmp_path / f"found-{seed}.json").read_text(encoding="utf-8"))["seed"] for seed in (7, 8)]
    assert seeds == [7, 8]


@pytest.mark.parametrize("bench", ["mixed"], indirect=True)
def test_jobs_that_end_before_their_last_step_are_missed_without_faults_too(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("seed-7", "without"):
        keep(tmp_path / name, "at 10s kill worker 1")
    code, _ = judge(bench, monkeypatch, tmp_path, "--faults", "1", "--steps", str(STEPS + 1))
    assert code == 1
    printed = capsys.readouterr().out
    for which in ("seed 7", "without faults"):
        assert f"missed: {which}: the job ended after {STEPS} train steps, not {STEPS + 1}\n" in printed


@pytest.mark.parametrize("bench", ["joining"], indirect=True)
def test_joining(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path / "peers", "at 12s kill worker 1")
    code, found = judge(bench, monkeypatch, tmp_path, "--only", "peers", "--joins", "1")
    assert (code, "missed:" in capsys.readouterr().out) == (0, False)
    assert [(each["newcomers"], each["stall_s"], each["caught_up_s"]) for each in found["joins"]] == [(1, 0.0, 0.7)]
    code, _ = judge(bench, monkeypatch, tmp_path, "--only", "peers", "--joins", "2")
    assert (code, "missed: 1 times workers joined, not 2\n" in capsys.readouterr().out) == (1, True)
    without_level(tmp_path / "peers" / "events.jsonl")
    code, _ = judge(bench, monkeypatch, tmp_path, "--only", "peers", "--joins", "1")
    assert (code, "missed: join 1: the newcomer never caught up\n" in capsys.readouterr().out) == (1, True)


def without_level(events: Path) -> None:
    kept = [line for line in events.read_text().splitlines() if "members_caught_up" not in line]
    events.write_text("".join(f"{line}\n" for line in kept))


@pytest.mark.parametrize("bench", ["overhead"], indirect=True)
def test_overhead(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_WARM_STEPS", 5)
    for name in ("0-on", "0-off"):
        keep(tmp_path / name, "at 12s kill worker 1")
    code, found = judge(bench, monkeypatch, tmp_path, "--rounds", "1", "--steps", str(STEPS))
    assert (code, found["ratio"], found["wrong"]) == (0, 1.0, [])
    assert "missed:" not in capsys.readouterr().out
    code, _ = judge(bench, monkeypatch, tmp_path, "--rounds", "1", "--steps", "100")
    printed = capsys.readouterr().out
    assert code == 1
    for which in ("with --elastic", "without"):
        assert f"missed: round 0, {which}: the job ended after {STEPS} train steps, not 100\n" in printed
    monkeypatch.setattr(bench, "BAR", 0.99)
    code, _ = judge(bench, monkeypatch, tmp_path, "--rounds", "1", "--steps", str(STEPS))
    assert (code, "missed: ratio of the medians: 1, the bar is 0.99\n" in capsys.readouterr().out) == (1, True)


@pytest.mark.parametrize("bench", ["goodput"], indirect=True)
def test_goodput(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kill that is drawn happens; three workers are asked for, of whom two were ever there."""
    words = ["--systems", "ringweave", "--for", "10", "--calm", "5", "--workers", "3", "--seed", "8"]
    (fault,) = drawn_faults(bench, monkeypatch, words)
    keep(tmp_path / "ringweave", f"at {fault.at_s:g}s kill worker {fault.target}")
    code, found = judge(bench, monkeypatch, tmp_path, *words)
    assert found["formula"] == bench.FORMULA
    away_s = BACK - 2 - (BEFORE + 0.2)
    assert found["ringweave"]["goodput"] == pytest.approx(
        STEPS / (STEPS - 0.5) / (1 - away_s / 3 / (STEPS - 0.5)), abs=0.001
    )
    assert found["checked"] == {
        "checks_alike": 2 * STEPS - (BACK - BEFORE),
        "samples_counted": STEPS * 256,
        "samples_lost": 0,
        "wrong": [],
    }
    said = capsys.readouterr().out
    assert said.startswith(f"goodput = {bench.FORMULA}\nsystem ")
    assert (code, "missed:" in said) == (0, False)
    with (tmp_path / "ringweave" / "checks" / "0.0-7.txt").open("a", encoding="ascii") as file:
        file.write(f"done 3 {4:016x}\n")
    code, found = judge(bench, monkeypatch, tmp_path, *words)
    assert (code, len(found["checked"]["wrong"])) == (1, 1)
    assert f"missed: {found['checked']['wrong'][0]}\n" in capsys.readouterr().out


def drawn_faults(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> list[Any]:
    """Those that the bench draws."""
    found: list[Any] = []

    def measure(_options: object, happens: list[Any], _system: str) -> None:
        found.extend(happens)
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(bench, "measure", measure)
        patched.setattr(sys, "argv", ["bench", *words])
        with pytest.raises(InterruptedError):
            bench.main()
    return found
