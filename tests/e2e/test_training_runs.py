"""The main job through the real command line: `ringweave run` trains the first example as torchrun with Gloo does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ringweave.telemetry.events import read
from tests.ending import ended

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1000)]  # three runs

SCRIPT = Path(__file__).parents[2] / "examples" / "01_train_text.py"
TINY = "--layers 1 --width 64 --heads 2 --context 32 --batch 40 --max-bytes 300000 --held-out-windows 40"
STEPS = 40
SETTINGS = [*TINY.split(), "--steps", str(STEPS), "--checkpoint-every", "10", "--evaluate-every", "20"]
RINGWEAVE = [str(Path(sys.executable).parent / "ringweave"), "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def start(command: list[str], out: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, str(SCRIPT), *SETTINGS, "--out", str(out), *more],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    with ended(process):
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) == STEPS
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def test_two_workers_have_the_losses_of_gloo_bit_for_bit_and_used_the_ring(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ringweave", tmp_path / "gloo"
    finish(start([*RINGWEAVE, "--workers", "2", "--schedule", "ring", "--run-dir", str(ours)], ours))
    finish(start([*TORCHRUN, "--nproc-per-node=2"], theirs))
    assert losses(ours) == losses(theirs)
    record = json.loads((ours / "run.json").read_text())
    assert record["collectives_by_schedule"]["ring"]["collectives"] >= STEPS
    assert record["collectives_by_schedule"]["ring"]["messages"] >= 2 * 2 * STEPS
    assert record["outcome"] == "done"
    assert record["held_out_nats_per_byte"] == json.loads((theirs / "run.json").read_text())["held_out_nats_per_byte"]


def test_unequal_nodes_have_the_losses_of_gloo_within_rounding_by_a_planned_schedule(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ringweave", tmp_path / "gloo"
    output = finish(start([*RINGWEAVE, "--workers", "3,2", "--no-tuning", "--run-dir", str(ours)], ours))
    finish(start([*TORCHRUN, "--nproc-per-node=5"], theirs))
    assert "5 workers on node0 (3), node1 (2)" in output
    assert largest_difference(losses(ours), losses(theirs)) <= 1e-6
    record = json.loads((ours / "run.json").read_text())
    assert record["tuned"] == []
    counts = record["collectives_by_schedule"]
    assert sum(count["collectives"] for name, count in counts.items() if name != "host") >= STEPS


def test_a_worker_is_killed_and_the_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    command = [*RINGWEAVE, "--workers", "4", "--schedule", "ring", "--run-dir"]
    process = start([*command, str(cut)], cut)
    with ended(process):
        while not (cut / "losses.jsonl").exists() or len((cut / "losses.jsonl").read_bytes().splitlines()) < 21:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        started = [event for event in read(cut / "events.jsonl") if event["kind"] == "worker_started"]
        pids = {event["rank"]: event["pid"] for event in started}
        os.kill(pids[2], signal.SIGKILL)
        output, _ = process.communicate(timeout=300)  # less than any time-out of the survivors
    assert process.returncode == 1
    assert "rank 2 on node node0 was killed by SIGKILL" in output
    assert not any(psutil.pid_exists(pid) for pid in pids.values())

    finish(start([*command, str(cut)], cut, "--resume"))
    finish(start([*command, str(whole)], whole))
    assert losses(cut) == losses(whole)
    assert json.loads((cut / "run.json").read_text())["collectives_by_schedule"]["ring"]["collectives"] > 0
    assert json.loads((cut / "run.json").read_text())["resumed_after_step"] in (10, 20, 30)
