"""A worker, then a whole group, is killed while a job trains: retries, the step from which it continues, and losses.

    python bench/jobs/killed.py [--steps 40] [--out FILE]

Six CPU workers on two nodes run examples/01_train_text.py with a tiny model and a checkpoint every 5 steps, once
undisturbed and once with a SIGKILL to a worker of the second node and later to that node's agent.
"""

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms.api import JobView
from ringweave.platforms.local.platform import LocalPlatform

ROOT = Path(__file__).parents[2]
BAR = 1e-5
"""Largest difference of a loss from that of the undisturbed run."""
DEADLINE_S = 600.0


def request(name: str, out: Path, steps: int) -> JobRequest:
    """The job."""
    arguments = ["--out", out, "--resume", "--steps", steps, "--batch", 12, "--checkpoint-every", 5]
    arguments += [
        "--max-bytes",
        400_000,
        "--layers",
        1,
        "--width",
        32,
        "--heads",
        2,
        "--held-out-windows",
        16,
        "--evaluate-every",
        steps,
    ]
    return JobRequest(
        name=name,
        num_workers=6,
        device="cpu",
        directory=str(ROOT),
        script="examples/01_train_text.py",
        arguments=tuple(map(str, arguments)),
        environment={"OMP_NUM_THREADS": "1"},
        nodes=(NodeRequest(name="n0", capacity=3), NodeRequest(name="n1", capacity=3, max_retries=2)),
    )


def wait(service: LocalPlatform, name: str, claim: Callable[[JobView], bool]) -> JobView:
    """Return the job as soon as the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not claim(job := service.job(name)):
        if time.monotonic() > deadline or job.state.is_end:
            raise SystemExit(f"never came; last seen: {job}")
        time.sleep(0.05)
    return job


def steps_done(out: Path) -> int:
    """Return the train steps recorded so far."""
    path = out / "losses.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def named(folder: Path) -> list[psutil.Process]:
    """Return the processes with the folder in their command line: supervisors outlive their jobs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process] * (str(folder) in " ".join(process.cmdline()))
    return found


def kill(wanted: Callable[[psutil.Process], bool]) -> None:
    """Kill the first matching process by SIGKILL."""
    for process in psutil.process_iter():
        try:
            if wanted(process):
                process.send_signal(signal.SIGKILL)
                return
        except psutil.Error:
            continue
    raise SystemExit("nobody to kill")


def main() -> None:
    """Train twice, kill twice, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        service = LocalPlatform(home / "state", requester="bench", environ=os.environ)
        losses = {}
        for job_name in ("undisturbed", "killed"):
            out = home / job_name
            service.submit(request(job_name, out, asked.steps), base=ROOT)
            if job_name == "killed":
                disturb(service, home, out)
            job = wait(service, job_name, lambda job: job.state == "Succeeded")
            losses[job_name] = [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
        report = {
            "retries": {node.name: node.retries for node in job.nodes},
            "attempts": {node.name: [each.text for each in node.attempts] for node in job.nodes},
            "rounds": job.round,
            "resumed_after_step": json.loads((out / "run.json").read_text())["resumed_after_step"],
            "steps": {key: len(values) for key, values in losses.items()},
            "largest_difference": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
        }
        for each in ("undisturbed", "killed"):
            service.act(each, "delete")
        while service.jobs() or named(home):
            time.sleep(0.05)
    print(json.dumps(report, indent=2))
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=2) + "\n")
    if report["retries"] != {"n0": 0, "n1": 2} or report["largest_difference"] > BAR:
        raise SystemExit(f"missed: retries of n1 alone, two of them, and losses within {BAR:g}")


def disturb(service: LocalPlatform, home: Path, out: Path) -> None:
    """Kill a worker of n1 after step 12, and n1's agent 10 steps after training went on."""
    state = str(home / "state")
    wait(service, "killed", lambda _: steps_done(out) >= 12)
    kill(lambda p: p.environ().get("RANK") == "4" and state in p.environ().get("RINGWEAVE_RUN_DIR", ""))
    wait(service, "killed", lambda job: job.round == 2 and job.state == "Running")
    wait(service, "killed", lambda _: steps_done(out) >= 22)
    kill(lambda p: state in " ".join(p.cmdline()) and p.cmdline()[-2:] == ["1", "2"])
    wait(service, "killed", lambda job: job.round == 3)


if __name__ == "__main__":
    main()
