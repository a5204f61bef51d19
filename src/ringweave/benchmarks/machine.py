"""What a number was measured on: machine, versions, commit."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

import ringweave

_RESULTS = "bench/results"
"""Tracked too, and written by each bench: they say nothing on the code of the next one."""


def describe() -> dict[str, Any]:
    """The machine and what runs on it, for the JSON document."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017
        "machine": {
            "cpu": _cpu_model(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")),
            "num_cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "kernel": platform.release(),
        },
        "versions": {
            "ringweave": ringweave.__version__,
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            "torch": _version("torch"),
        },
        "git_commit": _git_commit(Path(ringweave.__file__).parent),
    }


def _cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    """Hash of the commit, with `-dirty` where tracked files but results differ; None outside of a checkout."""
    try:
        commit = _git(folder, "describe", "--always", "--abbrev=12", "--exclude=*")
        differ = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", f":(top,exclude){_RESULTS}")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if differ else commit


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
