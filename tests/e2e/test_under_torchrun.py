"""Scripts that know nothing of ringweave, under real torchrun: one variable sets the backend; the run is recorded."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringweave.launcher import node_context
from ringweave.launcher import run_dir as launcher_run_dir
from ringweave.launcher.run_dir import RunDir
from ringweave.telemetry import read_events
from tests.ending import ended

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.distributed]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = [*TORCHRUN, "--standalone"]
UNAVAILABLE = "there is no --elastic, --standby or ringweave scale, and no mode ps-hra or ps"

NAMES = """
import sys, torch, torch.distributed as dist
for name in ({}, {"backend": "gloo"}, {"backend": "nccl"}, {"backend": "cpu:gloo,cuda:nccl"}):
    dist.init_process_group(**name)
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor)
    small = dist.new_group([0, 1], backend="gloo")
    dist.barrier(small)  # without it one rank may destroy the group while the other still connects, as in torch
    groups = (dist.group.WORLD, small)
    names = " ".join(type(each).__name__ for each in groups)
    sys.stdout.write(f"{names} {int(tensor[0])}\\n")  # one write: both ranks share the output
    del small, groups
    dist.destroy_process_group()
"""
KILLED_AT_FIRST = """
import os, torch, torch.distributed as dist
os.chdir("elsewhere")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1_000_000))
if os.environ["RANK"] == "1" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(os.environ["KILLS"]):
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""
ENDLESS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(10))
"""
ONE_REDUCTION = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1_000_000))
dist.destroy_process_group()
"""


def environ(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGWEAVE_")}
    return clean | {"OMP_NUM_THREADS": "1", "RINGWEAVE_REPLACE_BACKEND": "1"} | more


def start(folder: Path, script: str, options: list[str], **more: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    return subprocess.Popen(
        [*options, "train.py"],
        cwd=folder,
        env=environ(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with ended(process):
        stdout, stderr = process.communicate(timeout=300)
    return process.returncode, stdout, stderr


def record_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def kinds_of(run_dir: Path) -> list[str]:
    return [event["kind"] for event in read_events(run_dir / "events.jsonl")]


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_killed_worker_is_the_cause_and_a_restart_is_another_attempt(tmp_path: Path, kills: int) -> None:
    (tmp_path / "elsewhere").mkdir()
    options = [*ALONE, "--nproc-per-node=2", "--max-restarts=1"]
    process = start(tmp_path, KILLED_AT_FIRST, options, KILLS=str(kills), RINGWEAVE_RUN_DIR=str(tmp_path / "run"))
    exit_code, _, stderr = finish(process)
    first, last = record_of(tmp_path / "run" / "attempts" / "1"), record_of(tmp_path / "run")
    assert first["outcome"] == "failed"
    assert first["cause"] == "torchrun has restarted the workers; its own output has the cause"
    assert last["attempt"] == 2
    if kills == 1:
        assert (exit_code, last["outcome"], last["cause"]) == (0, "done", None), stderr
    else:
        node = os.uname().nodename
        assert (exit_code, last["outcome"]) == (1, "failed")
        assert last["cause"] == f"rank 1 on node {node} was killed by SIGKILL"
        exits = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "worker_exited"]
        assert {"rank": 1, "signal": "SIGKILL", "stopped": False}.items() <= exits[-1].items()


def test_a_signal_to_torchrun_is_an_interruption(tmp_path: Path) -> None:
    process = start(tmp_path, ENDLESS, [*ALONE, "--nproc-per-node=1"], RINGWEAVE_RUN_DIR="run")
    with ended(process):
        until_s = time.monotonic() + 300
        while not (tmp_path / "run" / "run.json").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    record = record_of(tmp_path / "run")
    assert (record["outcome"], record["cause"]) == ("interrupted", "interrupted by SIGTERM")


def test_one_variable_makes_ringweave_of_every_backend_and_each_of_two_nodes_writes_its_events(tmp_path: Path) -> None:
    def node(index: int, **more: str) -> subprocess.Popen[str]:
        options = [f"--nnodes=2 --nproc-per-node=1 --node-rank={index}", *master]
        return start(tmp_path / f"node{index}", NAMES, [*TORCHRUN, *" ".join(options).split()], **more)

    master = ["--master-addr=127.0.0.1", f"--master-port={node_context.free_port(random.Random())}"]
    first = node(0, RINGWEAVE_NODE="a", RINGWEAVE_PROBE="never")
    with ended(node(1, RINGWEAVE_NODE="b", RINGWEAVE_PROBE="never", RINGWEAVE_RUN_DIR="own")) as second:
        exit_code, stdout, stderr = finish(first)
        assert exit_code == 0, stderr
        said, errors = second.communicate(timeout=300)
    assert second.returncode == 0, errors
    assert said.splitlines() == stdout.splitlines() == ["RingweaveProcessGroup RingweaveProcessGroup 2"] * 4
    (run_dir,) = (tmp_path / "node0" / "runs").iterdir()
    assert run_dir.name.endswith("-train")
    assert f"ringweave: 2 workers on a (1), b (1), by torchrun; files in {run_dir}\n" in stderr
    assert (stderr.count(UNAVAILABLE), errors.count(UNAVAILABLE)) == (1, 0)
    record = record_of(run_dir)
    assert (record["outcome"], record["exit_code"], record["cause"], record["attempt"]) == ("done", 0, None, 1)
    assert record["command"] == ["train.py"]
    assert UNAVAILABLE in record["unavailable"]
    assert record["launcher"]["name"] == "torchrun"
    assert [node["name"] for node in record["cluster"]["nodes"]] == ["a", "b"]
    counts = record["collectives_by_schedule"].items()
    assert sum(count["collectives"] for schedule, count in counts if schedule != "native") == 1, (
        "of the last group; not once a node"
    )
    assert kinds_of(run_dir).count("run_started") == 1
    assert kinds_of(run_dir)[-1] == "run_ended"
    (own,) = (tmp_path / "node1").glob("own")
    assert [path.name for path in own.iterdir()] == ["events.jsonl"]
    assert kinds_of(own)[0] == "worker_started"


def test_a_run_directory_in_use_is_left_alone_and_the_run_goes_on(tmp_path: Path) -> None:
    with launcher_run_dir.hold_run_dir(RunDir(root=tmp_path / "run")):
        process = start(tmp_path, ONE_REDUCTION, [*ALONE, "--nproc-per-node=1"], RINGWEAVE_RUN_DIR="run")
        exit_code, _, stderr = finish(process)
    assert exit_code == 0, stderr
    assert "ringweave: this run is not recorded: run directory: " in stderr
    assert "expected one that no other run uses. Wait for that run, or give another" in stderr
    assert not (tmp_path / "run" / "run.json").exists()
