"""A name for a lab that a test may bring up; imported by every conftest whose tests need one."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from ringweave import lab

_NUMBERS = itertools.count()
_CLI = "from ringweave.cli.main import main; main()"


@pytest.fixture(scope="session")
def lab_problems() -> list[str]:
    return lab.lab_problems()


@pytest.fixture
def lab_name(lab_problems: list[str]) -> Iterator[str]:
    """A name that no other lab has; what has it is taken down with the test. Skips where there can be no lab."""
    if lab_problems:
        pytest.skip(" ".join(lab_problems))
    name = f"test-{os.getpid()}-{next(_NUMBERS)}"
    yield name
    lab.down(name)


@pytest.fixture
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`cli("lab", "status")`: the real command line, to its end."""

    def call(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _CLI, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)  # type: ignore

    return call
