"""A job in a lab whose ranks write a line for each step, and a callback that changes the lab while the job runs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringweave import lab, topology
from ringweave.lab import Lab

ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_S = 900
_LOOK_EVERY_S = 0.02


class Step(NamedTuple):
    """Step of all ranks, by the machine's clock."""

    first_begun_s: float
    last_begun_s: float
    ended_s: float
    """End on the slowest rank."""
    more: tuple[Any, ...]
    """The first rank's further values."""


def run(
    script: str,
    own: Sequence[str],
    cluster: topology.Cluster,
    folder: Path,
    on_step: Callable[[Lab, int], None],
    environ: Mapping[str, str] | None = None,
    **settings: Any,
) -> list[Step]:
    """Run a job in a lab of its own, and return its steps.

    Args:
        script: Each rank writes its steps to `folder` by `Lines`.
        own: Options of the script.
        cluster: Cluster of the lab.
        folder: Folder of the run; steps and events of an earlier run are deleted.
        on_step: Called with each step that the first rank has begun; with -1 before it starts.
        environ: Environment variables of the job, beside this process's.
        settings: Further arguments of `lab.up`.

    Raises:
        SystemExit: The job failed.
    """
    place = lab.up(cluster, f"steps-{os.getpid()}", **settings)
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("steps-*.jsonl"), folder / "events.jsonl"]:
        old.unlink(missing_ok=True)
    verb = [sys.executable, "-c", "from ringweave.cli.main import main; main()", "lab", "run", "--lab", place.name]
    try:
        on_step(place, -1)
        command = [*verb, "--run-dir", str(folder), script, *own]
        with subprocess.Popen(command, env=os.environ | (environ or {})) as process:
            _follow(process, folder / "steps-0.jsonl", lambda step: on_step(place, step))
    finally:
        lab.down(place.name)
    if process.returncode != 0:
        raise SystemExit(f"workers: exit code {process.returncode}, expected 0")
    return _gather(folder)


class Lines:
    """A rank's steps, a line each, as soon as they have ended."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"steps-{rank}.jsonl").open("w", buffering=1)

    def write(self, begun_s: float, *more: Any) -> None:
        """A step has ended now."""
        self._file.write(json.dumps([begun_s, time.time(), *more]) + "\n")


def commit() -> str:
    """Return the environment with the sources' paths."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def _follow(process: subprocess.Popen[bytes], path: Path, on_step: Callable[[int], None]) -> None:
    """Call `on_step` once for each line of a growing file, until the process has ended."""
    deadline_s, known = time.monotonic() + RUN_TIMEOUT_S, -1
    while process.poll() is None:
        if time.monotonic() > deadline_s:
            process.terminate()
        count = len(path.read_bytes().splitlines()) if path.exists() else -1
        for step in range(known + 1, count + 1):
            on_step(step)
        known = max(known, count)
        time.sleep(_LOOK_EVERY_S)


def _gather(folder: Path) -> list[Step]:
    rows = [[json.loads(line) for line in path.open()] for path in sorted(folder.glob("steps-*.jsonl"))]
    steps = []
    for step in zip(*rows, strict=True):
        begun = [row[0] for row in step]
        steps.append(Step(min(begun), max(begun), max(row[1] for row in step), tuple(step[0][2:])))
    return steps
