"""Machine, versions and commit that a number was measured on."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

import ringweave

_RESULTS_FOLDER = "bench/results"
"""Results are tracked too and written by each bench, so changes there do not make the code dirty."""


def describe_machine() -> dict[str, Any]:
    """Describe the machine and its software, for the JSON document."""
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
    """Return the commit's hash, with `-dirty` if tracked files other than results differ; None outside a checkout."""
    try:
        commit = _git(folder, "describe", "--always", "--abbrev=12", "--exclude=*")
        differ = _git(
            folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", f":(top,exclude){_RESULTS_FOLDER}"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if differ else commit


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
