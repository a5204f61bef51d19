"""Real labs, where this machine can have them."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringweave import lab, topology
from ringweave.lab import Lab, state

_NUMBERS = itertools.count()
_CLI = "from ringweave.cli.main import main; main()"


@pytest.fixture(scope="session")
def _problems() -> list[str]:
    return lab.problems()


@pytest.fixture
def lab_name(_problems: list[str]) -> Iterator[str]:
    """A name that no other lab has; what has it is taken down with the test. Skips where there can be no lab."""
    if _problems:
        pytest.skip(" ".join(_problems))
    name = f"test-{os.getpid()}-{next(_NUMBERS)}"
    yield name
    lab.down(name)


@pytest.fixture
def up(lab_name: str) -> Callable[..., Lab]:
    """`up(text)`: a lab of that cluster file."""
    return lambda text, **options: lab.up(topology.loads(text), lab_name, **options)


@pytest.fixture
def run_in() -> Callable[..., str]:
    """`run_in(lab, node, "echo hi")`: what a shell prints there."""

    def run(where: Lab, node: str, script: str, device: int | None = None) -> str:
        command = where.command(node, ["sh", "-c", script], device=device)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout

    return run


@pytest.fixture
def left_of() -> Callable[[str], list[str]]:
    """`left_of(name)`: everything of a lab that is still there."""
    return _left_of


def _left_of(name: str) -> list[str]:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [
        *(str(path) for path in state.NETNS.glob(f"rw-{name}:*")),
        *(point for point in mounts if f"/{name}/" in point),
        *(str(path) for path in Path("/sys/fs/cgroup").glob(f"*/rw-{name}")),
        *(str(path) for path in Path("/sys/fs/cgroup").glob(f"rw-{name}")),
        *(str(path) for path in [state.folder(name)] if path.exists()),
    ]


@pytest.fixture
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`cli("lab", "status")`: the real command line, to its end."""

    def call(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _CLI, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)  # type: ignore

    return call


@pytest.fixture
def cluster_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return path

    return write
