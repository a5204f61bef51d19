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
    """Hash of the commit, with `-dirty` where tracked files differ from it; None outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
