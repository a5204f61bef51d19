"""A system whose ranks are one small program, and sessions of it."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from ringweave import topology
from ringweave_bench.bench_cluster import LocalBenchCluster
from ringweave_bench.system_session import SystemSession
from ringweave_bench.systems import PROGRAMS_FOLDER, BenchmarkedSystem, Knob, ProcessStart, RankShape, SessionSetup
from ringweave_bench.worker_channel import WorkerListener
from tests.lab import fixtures

lab_name, lab_problems = fixtures.lab_name, fixtures.lab_problems
WORKER = Path(__file__).parent / "fake_worker.py"


class Fake(BenchmarkedSystem):
    """One rank that behaves in a given manner."""

    name = "fake"

    def __init__(self, manner: str) -> None:
        self._manner = manner

    def unavailable_reason(self) -> str:
        return ""

    def knobs(self, shape: RankShape) -> Sequence[Knob]:
        return [Knob(name="only one")]

    def process_starts(self, setup: SessionSetup, knob: Knob) -> Sequence[ProcessStart]:
        argv = (sys.executable, str(WORKER), *setup.worker_options, self._manner)
        if self._manner == "is not there":
            argv = ("/nosuch/program",)
        if self._manner == "ends":
            argv = ("sh", "-c", "echo Segmentation fault; exit 3")
        return [ProcessStart(node=setup.node_of_rank[0], argv=argv, environ={"PYTHONPATH": str(PROGRAMS_FOLDER)})]


@pytest.fixture
def place() -> LocalBenchCluster:
    return LocalBenchCluster(topology.one_machine([1]))


@pytest.fixture
def make_session(
    tmp_path: Path, place: LocalBenchCluster
) -> Iterator[Callable[[str], tuple[SystemSession, WorkerListener]]]:
    """`make_session("wrong")`: a session that was not started yet, and where its rank will come to."""
    with ExitStack() as stack:
        listener = stack.enter_context(WorkerListener(tmp_path / "control"))

        def make(manner: str) -> tuple[SystemSession, WorkerListener]:
            setup = SessionSetup(
                bench_cluster=place,
                node_of_rank=("node0",),
                cluster_path=tmp_path / "cluster.yaml",
                control_path=listener.path,
                session="1-fake",
                folder=tmp_path / "session",
                port=0,
            )
            return stack.enter_context(SystemSession(Fake(manner), Knob(name="only one"), setup)), listener

        yield make


@pytest.fixture
def start_session(
    make_session: Callable[[str], tuple[SystemSession, WorkerListener]],
) -> Callable[[str], SystemSession]:
    """`start_session("wrong")`: a session whose rank has come."""

    def start(manner: str) -> SystemSession:
        session, listener = make_session(manner)
        session.start(listener, {"node0": Path("/proc/self/ns/net").stat().st_ino})
        return session

    return start
