"""What is installed: Python, ringweave, the examples' packages, programs of other systems. Changes nothing."""

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ringweave.cli.checks.diagnosis import Observation

EXTRAS = ("matplotlib", "tensorboard", "tqdm", "scikit-learn")
TIMEOUT_S = 10


def python() -> Observation:
    """The interpreter."""
    state = "ok" if sys.version_info >= (3, 11) else "broken"
    return Observation(state=state, seen=f"{platform.python_version()} at {sys.executable}")


def ringweave() -> Observation:
    """The installed package and its entry point."""
    try:
        version = importlib.metadata.version("ringweave")
    except importlib.metadata.PackageNotFoundError:
        return Observation(state="missing", seen="imported from a folder, not installed")
    points = importlib.metadata.entry_points(group="torch.backends", name="ringweave")
    if not points:
        return Observation(state="broken", seen=f"{version}, but no entry point in group torch.backends")
    return Observation(state="ok", seen=f"{version}, entry point {next(iter(points)).value}")


def autoload(environ: Mapping[str, str]) -> Observation:
    """Whether torch loads backends by itself."""
    value = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    state = "broken" if value == "0" else "ok"
    return Observation(state=state, seen="switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0" if value == "0" else "on")


def extras() -> Observation:
    """The packages that only examples use."""
    found, absent = [], []
    for name in EXTRAS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        return Observation(state="missing", seen=f"not installed: {', '.join(absent)}")
    return Observation(state="ok", seen=", ".join(found))


def program(command: Sequence[str]) -> Observation:
    """A program, asked for its version."""
    path = shutil.which(command[0])
    if path is None:
        return Observation(state="missing", seen=f"{command[0]} is not on the PATH")
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Observation(state="broken", seen=f"{path}: {type(error).__name__}")
    lines = (answer.stdout.strip() or answer.stderr.strip()).splitlines() or [""]
    if answer.returncode != 0:
        return Observation(state="broken", seen=f"{path}: exit code {answer.returncode}, {lines[-1]}")
    return Observation(state="ok", seen=lines[0])
