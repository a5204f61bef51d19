"""What all tests share."""

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringweave.launcher import processes
from ringweave.testing import ranks
from tests import demands, effort

effort.load()
ranks.PRELOADED_MODULES += [
    "pytest",  # each process imports the main module of its parent, which is pytest's without xdist
    "tests.fakes.elastic_job",
    "tests.fakes.kubernetes.crashing_operator",  # if aiohttp is installed
]
# Before numpy and torch are imported: several processes of tests share few cores, and threads of each would only wait
# for those of the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every process would look for plugins of pydantic in all that is installed; none of our dependencies is one.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def pytest_configure() -> None:
    """Who starts tests in the background or under nohup has them ignore signals, and so would all that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_setup() -> None:
    """Orphans go to the first process again: a test that launches workers may have had this process adopt them, and a
    container does not end while one of its processes has a parent outside that does not wait for it.
    """
    ctypes.CDLL(None).prctl(processes.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: to look for garbage in it takes a tenth of the time of importing, and of many tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    effort.leave_out(config, items)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
    parser.addoption("--all-crashes", action="store_true", help="what leads jobs is killed in every life")
    parser.addoption("--kubeconfig", help="run tests/kube against this API server instead of the fake")
    parser.addoption("--mutations", type=int, default=30, help="wrong messages sent to a server or a coordinator")
    parser.addoption("--collectives", type=int, default=1000, help="random collectives on simulated devices")
    said = "tests that need what this machine lacks fail, and are not skipped"
    parser.addoption("--demand", action="append", default=[], choices=demands.KNOWN, help=said)


@pytest.fixture
def needs_lab(request: pytest.FixtureRequest) -> None:
    """Skips the test where there can be no lab, or fails it where one is demanded."""
    from ringweave import lab

    demands.need(request.config, demands.LAB, lab.lab_problems())


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """`check_golden(path, text)`: the file holds exactly this text; with --update-golden it is written."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, f"{path} differs; run pytest with --update-golden if it should"

    return check
