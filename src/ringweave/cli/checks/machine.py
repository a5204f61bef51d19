"""What this machine lets us do, tried for real: torch, the lab, CPU quotas. Nothing remains."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from ringweave import lab as ringweave_lab
from ringweave.cli.checks import torch_trial
from ringweave.cli.checks.diagnosis import Observation

TORCH_TIMEOUT_S = 90
CGROUP = Path("/sys/fs/cgroup")
_DEPEND_ON_TORCH = ("backend", "gloo", "nccl", "gpus")


def torch(timeout_s: float = TORCH_TIMEOUT_S) -> dict[str, Observation]:
    """torch, and what depends on it."""
    command = [sys.executable, torch_trial.__file__]
    try:
        trial = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd="/", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return _all_of_torch(Observation(state="broken", seen=f"no answer in {timeout_s:.0f} s"))
    return read_trial(trial.stdout, trial.stderr, trial.returncode)


def read_trial(stdout: str, stderr: str, returncode: int) -> dict[str, Observation]:
    """Observations from what the trial printed; what it could not try counts as broken."""
    try:
        answer = json.loads(stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (stderr.strip().splitlines() or ["no output"])[-1]
        return _all_of_torch(Observation(state="broken", seen=f"exit code {returncode}: {last}"))
    found = _all_of_torch(Observation(state="missing", seen="torch is not installed"))
    return found | {name: Observation(state=state, seen=seen) for name, (state, seen) in answer.items()}


def _all_of_torch(observation: Observation) -> dict[str, Observation]:
    return dict.fromkeys(("torch", *_DEPEND_ON_TORCH), observation)


def lab() -> Observation:
    """Everything that a lab needs but quotas: namespaces, cables, bridges, links with limited rates."""
    problems = ringweave_lab.problems()
    if not problems:
        return Observation(state="ok", seen="made namespaces, a bridge and a link limited by tbf")
    return Observation(state="missing" if problems[0].startswith("programs:") else "broken", seen=" ".join(problems))


def cpu_quota(root: Path = CGROUP) -> Observation:
    """A CPU quota in a control group of our own, which is removed again."""
    trials = ((root, "cpu.max", "50000 100000", "cgroup v2"), (root / "cpu", "cpu.cfs_quota_us", "50000", "cgroup v1"))
    for parent, file, quota, version in trials:
        is_here = (parent / "cgroup.controllers").exists() if version == "cgroup v2" else (parent / file).exists()
        if is_here:
            return _try_quota(parent, file, quota, version)
    return Observation(state="missing", seen=f"no cpu controller in {root}")


def _try_quota(parent: Path, file: str, quota: str, version: str) -> Observation:
    group = parent / f"ringweave-doctor-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(quota, encoding="ascii")
    except OSError as error:
        return Observation(state="broken", seen=f"{version}: {error.strerror} ({error.filename})")
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
    return Observation(state="ok", seen=f"{version}, set a quota")
