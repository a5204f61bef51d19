"""`ringweave chaos` as it is typed."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave import lab, topology
from ringweave.cli.main import run_command_line
from ringweave_bench.chaos import chaos_report, chaos_session, fault_script

ROOT = Path(__file__).parents[2]
CLUSTER = str(ROOT / "examples" / "clusters" / "unequal-nics.yaml")
PAIR = "name: pair\nnodes: [{name: a, nic: 200Mbit/s, devices: 1}, {name: b, nic: 200Mbit/s, devices: 1}]\n"
JOB = """
import itertools
import pathlib
import sys
import torch
import torch.distributed as dist
from torch import nn
import ringweave

dist.init_process_group()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
checkpoints = ringweave.Checkpoints(sys.argv[1], model=model, optimizer=optimizer)
done = checkpoints.load()
begun = pathlib.Path(sys.argv[2], f"begun-{dist.get_rank()}")
is_first = not begun.exists()
begun.touch()
for train_step in itertools.count(done + 1) if is_first else range(done + 1, done + 10):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if train_step % 5 == 0:
        checkpoints.save(train_step)
        checkpoints.wait()
dist.destroy_process_group()
"""


def chaos(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command_line(["chaos", *arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_the_faults_of_a_seed_are_shown_by_a_dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--random", "kill,cut", "--every", "15", "--seed", "3", "--for", "100", "--dry-run"]
    code, text, _ = chaos(capsys, CLUSTER, *options)
    assert code == 0
    assert text.startswith("at 20s ")
    (tmp_path / "script.txt").write_text(text)
    assert chaos(capsys, CLUSTER, "--script", str(tmp_path / "script.txt"), "--dry-run") == (0, text, "")
    document = json.loads(chaos(capsys, CLUSTER, *options, "--json")[1])
    assert document == {"faults": text.splitlines()}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--dry-run"], "faults: none given, expected some. Give --script FILE, or --random kill,pause."),
        (["--random", "kill"], "script: none given, expected one after --. For example: ringweave chaos C.yaml"),
        (["--random", "kill", "--system", "torchrn"], 'torchft. Did you mean "torchrun"?'),
        (["--script", "/absent"], "script of faults: [Errno 2] No such file or directory"),
        (
            ["--script", "x", "--seed", "0", "--moments", "commit", "--dry-run"],
            "options of --random: '--moments, --seed', expected none of them beside --script. "
            "Leave them out, or give --random in the place of --script.",
        ),
        (
            ["--script", "x", "--services", "server", "--every", "9", "--lasts", "1", "--calm", "2"],
            "options of --random: '--services, --every, --lasts, --calm', expected none of them beside --script.",
        ),
        (["--script", "x", "--random", "kill"], "--script and --random: both given, expected one of them."),
        (["--random", " "], "kinds of faults: 'none', expected some of kill, pause"),
        (
            ["--random", "kill", "--every", "0"],
            "--every: 0.0, expected 0.01 or more seconds. Give",
        ),
        (["--random", "kill", "--lasts", "-3"], "--lasts: -3.0, expected 0 or more seconds."),
        (["--random", "kill", "--for", "nan"], "--for: nan, expected 0 or more seconds."),
        (["--random", "kill", "--restart-after", "-1"], "--restart-after: -1.0, expected 0 or more seconds."),
        (["--random", "kill", "--services", "servr"], 'Did you mean "server"?'),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    code, _, complaint = chaos(capsys, CLUSTER, *arguments)
    assert code == 2
    assert text in complaint


def test_services_are_among_what_a_seed_hits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--random", "kill", "--services", "coordinator,server", "--every", "2", "--for", "100", "--dry-run"]
    code, text, _ = chaos(capsys, CLUSTER, *options)
    assert code == 0
    assert {line.split()[3] for line in text.splitlines()} == {"worker", "coordinator", "server"}


@pytest.mark.parametrize(("broken", "code"), [((), 0), (("4 train steps were lost",), 1)])
def test_a_broken_promise_is_said_and_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...], code: int
) -> None:
    events = [{"time": 1.0 + step, "kind": "train_step_done", "rank": 0, "steps_since_start": step} for step in (1, 2)]
    wanted = fault_script.parse_faults("at 7s kill server")
    found = replace(
        chaos_report.build_report(events, num_workers=1, workers_on={}, restart_s=0, wanted=wanted), broken=broken
    )
    monkeypatch.setattr(chaos_session, "run_chaos", lambda *_: found)
    given, text, _ = chaos(capsys, CLUSTER, "--random", "kill", "--", "x.py")
    assert given == code
    assert "at 7s kill server: never began\n" in text
    assert [line for line in text.splitlines() if "broken" in line] == [f"broken: {each}" for each in broken]
    document = json.loads(chaos(capsys, CLUSTER, "--random", "kill", "--json", "--", "x.py")[1])
    assert (document["broken"], document["never_began"]) == (list(broken), ["at 7s kill server"])


@pytest.mark.parametrize("is_random", [True, False], ids=["random", "script"])
def test_the_report_says_what_was_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_random: bool
) -> None:
    found = chaos_report.build_report([], num_workers=1, workers_on={}, restart_s=0)
    monkeypatch.setattr(chaos_session, "run_chaos", lambda *_: found)
    script = tmp_path / "script.txt"
    script.write_text("at 7s kill worker 1\n")
    shared = ["--for", "100", "--restart-after", "2", "--option=--mode=sync", "--out", str(tmp_path), "--json"]
    drawn = ["--random", "kill,pause", "--services", "server", "--seed", "3", "--every", "15"]
    arguments = [*(drawn if is_random else ["--script", str(script)]), *shared, "--", "x.py", "{disk}"]
    document = json.loads(chaos(capsys, CLUSTER, *arguments)[1])
    run = document["run"]
    assert topology.loads(run.pop("cluster")) == topology.load(CLUSTER)
    assert run == {
        "cluster_path": CLUSTER,
        "system": "ringweave",
        "script": ["x.py", "{disk}"],
        "options": ["--mode=sync"],
        "for_s": 100.0,
        "restart_after_s": 2.0,
        "out": str(tmp_path),
        "faults_path": None if is_random else str(script),
        "random": {
            "kinds": ["kill", "pause"],
            "moments": [],
            "services": ["server"],
            "every_s": 15.0,
            "lasts_s": 10.0,
            "calm_s": 20.0,
            "seed": 3,
        }
        if is_random
        else None,
    }
    shown = chaos(capsys, CLUSTER, *drawn, "--for", "100", "--dry-run")[1] if is_random else script.read_text()
    assert document["script"] == shown.splitlines(), "of the same seed, or of the script"


def test_moments_at_which_workers_died_are_printed_and_those_that_were_not_asked_for_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    died = {"at 3s kill worker 0 during bucket 1": "commit", "at 4s kill worker 0 during forward": "forward"}
    events = [{"time": 1.0 + step, "kind": "train_step_done", "rank": 0, "steps_since_start": step} for step in (1, 2)]
    events += [
        {"time": 5.0, "kind": "fault_begun", "fault": line, "target": f"process 7 during {moment}"}
        for line, moment in died.items()
    ]
    wanted = fault_script.parse_faults("\n".join(died))
    found = chaos_report.build_report(events, num_workers=1, workers_on={}, restart_s=0, wanted=wanted)
    monkeypatch.setattr(chaos_session, "run_chaos", lambda *_: found)
    lines = chaos(capsys, CLUSTER, "--random", "kill", "--", "x.py")[1].splitlines()
    assert [line.split() for line in lines if line.startswith("killed")] == [
        ["killed", "during", "commit", "1"],
        ["killed", "during", "forward", "1"],
    ]
    assert "at 3s kill worker 0 during bucket 1: it died during commit" in lines


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("needs_lab")
def test_a_job_in_a_lab_is_killed_and_goes_on_from_its_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first attempt never ends by itself; the second one ends nine steps after its checkpoint.

    On a busy machine the first may be killed before it has one, or has done three steps.
    """
    for name, text in {"pair.yaml": PAIR, "job.py": JOB, "script.txt": "at 3s kill worker 1\n"}.items():
        (tmp_path / name).write_text(text)
    arguments = [str(tmp_path / "pair.yaml"), "--script", str(tmp_path / "script.txt"), "--out", str(tmp_path / "out")]
    code, text, _ = chaos(
        capsys, *arguments, "--json", "--", str(tmp_path / "job.py"), "{disk}/checkpoints", str(tmp_path)
    )
    assert code == 0, (tmp_path / "out" / "job.log").read_text()
    document = json.loads(text)
    assert document["script"] == ["at 3s kill worker 1"]
    assert document["faults"] == 1
    assert document["steps_lost"] <= 5, "a checkpoint every five steps, each waited for"
    assert document["steps"] >= 9
    assert document["recover_p50_s"] > 0
    is_measured = document["fault_free_steps_per_s"] is not None
    assert document["goodput"] > 0 if is_measured else document["goodput"] is None
    assert not (tmp_path / "out" / "disk").is_mount()
    assert not [name for name in lab.names() if name == f"chaos-{os.getpid()}"]
