"""A system whose ranks are one small program, and sessions of it."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from ringweave import topology
from ringweave.benchmarks.places.place import OnThisMachine
from ringweave.benchmarks.sessions.channels import Listener
from ringweave.benchmarks.sessions.session import Session
from ringweave.benchmarks.systems import Knob, Setup, Shape, Start, System
from ringweave.benchmarks.systems.system import PROGRAMS
from tests.lab import fixtures

lab_name, lab_problems = fixtures.lab_name, fixtures.lab_problems
WORKER = Path(__file__).parent / "fake_worker.py"


class Fake(System):
    """One rank that behaves in a given manner."""

    name = "fake"

    def __init__(self, manner: str) -> None:
        self._manner = manner

    def problem(self) -> str:
        return ""

    def knobs(self, shape: Shape) -> Sequence[Knob]:
        return [Knob(name="only one")]

    def starts(self, setup: Setup, knob: Knob) -> Sequence[Start]:
        argv = (sys.executable, str(WORKER), *setup.worker_options, self._manner)
        if self._manner == "is not there":
            argv = ("/nosuch/program",)
        if self._manner == "ends":
            argv = ("sh", "-c", "echo Segmentation fault; exit 3")
        return [Start(node=setup.node_of_rank[0], argv=argv, environ={"PYTHONPATH": str(PROGRAMS)})]


@pytest.fixture
def place() -> OnThisMachine:
    return OnThisMachine(topology.one_machine([1]))


@pytest.fixture
def make_session(tmp_path: Path, place: OnThisMachine) -> Iterator[Callable[[str], tuple[Session, Listener]]]:
    """`make_session("wrong")`: a session that was not started yet, and where its rank will come to."""
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(tmp_path / "control"))

        def make(manner: str) -> tuple[Session, Listener]:
            setup = Setup(
                place=place,
                node_of_rank=("node0",),
                cluster_path=tmp_path / "cluster.yaml",
                control_path=listener.path,
                session="1-fake",
                folder=tmp_path / "session",
                port=0,
            )
            return stack.enter_context(Session(Fake(manner), Knob(name="only one"), setup)), listener

        yield make


@pytest.fixture
def start_session(make_session: Callable[[str], tuple[Session, Listener]]) -> Callable[[str], Session]:
    """`start_session("wrong")`: a session whose rank has come."""

    def start(manner: str) -> Session:
        session, listener = make_session(manner)
        session.start(listener, {"node0": Path("/proc/self/ns/net").stat().st_ino})
        return session

    return start
