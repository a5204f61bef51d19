"""Real labs, where this machine can have them."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave import lab, topology
from ringweave.lab import Lab, lab_state
from tests.lab import fixtures

lab_name, lab_problems = fixtures.lab_name, fixtures.lab_problems


@pytest.fixture
def up(lab_name: str) -> Callable[..., Lab]:
    """`up(text)`: a lab of that cluster file."""
    return lambda text, **options: lab.up(topology.loads(text), lab_name, **options)


@pytest.fixture
def run_in() -> Callable[..., str]:
    """`run_in(lab, node, "echo hi")`: what a shell prints there."""

    def run(where: Lab, node: str, script: str, device: int | None = None) -> str:
        command = where.command(node, ["sh", "-c", script], device=device)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout

    return run


@pytest.fixture
def left_of() -> Callable[[str], list[str]]:
    """`left_of(name)`: everything of a lab that is still there."""
    return _left_of


def _left_of(name: str) -> list[str]:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [
        *(str(path) for path in lab_state.NETNS_FOLDER.glob(f"rw-{name}:*")),
        *(point for point in mounts if f"/{name}/" in point),
        *(str(path) for path in Path("/sys/fs/cgroup").glob(f"*/rw-{name}")),
        *(str(path) for path in Path("/sys/fs/cgroup").glob(f"rw-{name}")),
        *(str(path) for path in [lab_state.lab_folder(name), lab_state.LAB_HOME / "locks" / name] if path.exists()),
    ]
