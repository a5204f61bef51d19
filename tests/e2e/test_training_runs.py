"""The main job through the real command line: `ringweave run` trains the first example as torchrun with Gloo does."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ringweave.telemetry.events import read_events
from tests.ending import ended

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1000)]  # three runs

SCRIPT = Path(__file__).parents[2] / "examples" / "01_train_text.py"
TINY = "--layers 1 --width 32 --heads 2 --context 32 --batch 42 --max-bytes 300000 --held-out-windows 42"
STEPS, KILL_AFTER = 40, 25
SETTINGS = [*TINY.split(), "--checkpoint-every", "20", "--evaluate-every", "20"]
RINGWEAVE = [str(Path(sys.executable).parent / "ringweave"), "run"]
TWO_IN_A_RING = [*RINGWEAVE, "--workers", "2", "--schedule", "ring", "--run-dir"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TWO_BY_GLOO = [*TORCHRUN, "--nproc-per-node=2"]
PNG_SIGNATURE = b"\x89PNG"
PACED = f"""
import runpy, sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
from support.report import Report
step = Report.step
def step_and_pause(report, train_step, *more):
    step(report, train_step, *more)
    time.sleep(0.5 if train_step >= {KILL_AFTER} else 0)
Report.step = step_and_pause
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
"""The script, which goes on slowly once it can be killed: it would else be through before a busy machine does that."""


def start(
    command: list[str], out: Path, *more: str, num_steps: int = STEPS, script: Path = SCRIPT
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, str(script), *SETTINGS, "--steps", str(num_steps), "--out", str(out), *more],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_paced(command: list[str], out: Path) -> subprocess.Popen[str]:
    script = out / "paced.py"
    script.write_text(PACED)
    return start(command, out, script=script)


def finish(process: subprocess.Popen[str]) -> str:
    with ended(process):
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]


def record_of(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())


def largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def wait_for_steps(process: subprocess.Popen[str], out: Path) -> None:
    """Until so many steps are done, of which there are many more to come."""
    path = out / "losses.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < KILL_AFTER:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


def assert_repeats(resumed: Path, whole: Path) -> None:
    """A run that was resumed has the curves and the result of the uninterrupted one."""
    for curve in ("losses.jsonl", "held_out.jsonl"):
        assert (resumed / curve).read_text() == (whole / curve).read_text()
    assert record_of(resumed)["held_out_nats_per_byte"] == record_of(whole)["held_out_nats_per_byte"]
    assert record_of(resumed)["resumed_after_step"] in range(20, STEPS, 20)


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two workers under torchrun, uninterrupted: their files, and what was printed."""
    out = tmp_path_factory.mktemp("gloo")
    return out, finish(start(TWO_BY_GLOO, out))


@pytest.fixture(scope="module")
def by_ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers in a ring of ours, uninterrupted."""
    out = tmp_path_factory.mktemp("ring")
    finish(start([*TWO_IN_A_RING, str(out)], out))
    return out


def test_torchrun_trains_an_ordinary_script(by_gloo: tuple[Path, str]) -> None:
    out, output = by_gloo
    assert len(losses(out)) == STEPS
    assert (out / "loss.png").read_bytes().startswith(PNG_SIGNATURE)
    assert (out / "sample.txt").read_bytes().startswith(b"def ")
    assert re.search(r"loss \d", output)
    assert "a bigram model: " in output


def test_two_workers_have_the_losses_of_gloo_bit_for_bit_and_used_the_ring(
    by_ring: Path, by_gloo: tuple[Path, str]
) -> None:
    assert losses(by_ring) == losses(by_gloo[0])
    record = record_of(by_ring)
    assert record["collectives_by_schedule"]["ring"]["collectives"] >= STEPS
    assert record["collectives_by_schedule"]["ring"]["messages"] >= 2 * 2 * STEPS
    assert record["outcome"] == "done"
    assert record["held_out_nats_per_byte"] == record_of(by_gloo[0])["held_out_nats_per_byte"]


@pytest.mark.thorough
def test_unequal_nodes_have_the_losses_of_gloo_within_rounding_by_a_planned_schedule(tmp_path: Path) -> None:
    ours, theirs, num_steps = tmp_path / "ringweave", tmp_path / "gloo", 40
    command = [*RINGWEAVE, "--workers", "2,1", "--no-tuning", "--run-dir", str(ours)]
    output = finish(start(command, ours, num_steps=num_steps))
    finish(start([*TORCHRUN, "--nproc-per-node=3"], theirs, num_steps=num_steps))
    assert "3 workers on node0 (2), node1 (1)" in output
    assert len(losses(ours)) == num_steps
    assert largest_difference(losses(ours), losses(theirs)) <= 1e-6
    record = record_of(ours)
    assert record["tuned"] == []
    counts = record["collectives_by_schedule"]
    assert sum(count["collectives"] for name, count in counts.items() if name != "native") >= num_steps


def test_a_worker_is_killed_and_the_resumed_run_repeats_the_uninterrupted_one(by_ring: Path, tmp_path: Path) -> None:
    command = [*TWO_IN_A_RING, str(tmp_path)]
    process = start_paced(command, tmp_path)
    with ended(process):
        wait_for_steps(process, tmp_path)
        started = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "worker_started"]
        pids = {event["rank"]: event["pid"] for event in started}
        os.kill(pids[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=300)  # less than any time-out of the survivor
    assert process.returncode == 1
    assert "rank 1 on node node0 was killed by SIGKILL" in output
    assert not any(psutil.pid_exists(pid) for pid in pids.values())

    finish(start(command, tmp_path, "--resume"))
    assert_repeats(tmp_path, by_ring)
    assert record_of(tmp_path)["collectives_by_schedule"]["ring"]["collectives"] > 0


@pytest.mark.thorough
def test_under_torchrun_the_resumed_run_repeats_the_uninterrupted_one(
    by_gloo: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text('{"written_by": "another program"}')
    process = start_paced(TWO_BY_GLOO, tmp_path)
    with ended(process):
        wait_for_steps(process, tmp_path)
        psutil.Process(process.pid).children()[-1].send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
    assert process.returncode != 0
    assert KILL_AFTER <= len((tmp_path / "losses.jsonl").read_bytes().splitlines()) < STEPS

    finish(start(TWO_BY_GLOO, tmp_path, "--resume"))
    assert_repeats(tmp_path, by_gloo[0])
    assert record_of(tmp_path)["written_by"] == "another program"
