from pathlib import Path

import psutil
import pytest

from ringweave import topology
from ringweave.errors import LaunchError
from ringweave_bench.bench_cluster import LocalBenchCluster
from ringweave_bench.system_session import SessionFactory
from ringweave_bench.systems import SYSTEMS, Knob
from ringweave_bench.worker_channel import WorkerListener
from tests.benchmarks.conftest import Fake

HERE = Path("/proc/self/ns/net")
KNOB = Knob(name="only one")


@pytest.mark.parametrize(
    ("manner", "said", "last_words"),
    [
        ("refuses", "a worker: ValueError: no network here", "ValueError: no network here"),
        ("ends", "a process ended with exit code 3", "Segmentation fault"),
        ("is not there", r"\[Errno 2\] No such file or directory: '/nosuch/program'", r"\(none\)"),
    ],
)
def test_ranks_that_do_not_come_up(start_session, manner: str, said: str, last_words: str) -> None:
    expected = (
        rf"fake \(only one\) could not be started: {said}, expected all ranks to answer\. "
        rf"Its last words:\n(?s:.*){last_words}\n"
    )
    with pytest.raises(LaunchError, match=expected):
        start_session(manner)


def test_ranks_on_another_node_than_the_other_systems_have_them(make_session) -> None:
    session, listener = make_session("sums")
    expected = (
        r"node of rank 0 of fake: 'b', expected node0, where the other systems have it\. "
        r"Measure nothing: the library places ranks in another way\."
    )
    with pytest.raises(LaunchError, match=expected):
        session.start(listener, {"node0": 1, "b": HERE.stat().st_ino})


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_closed_session_leaves_no_process(start_session, has_failed: bool) -> None:
    before = set(psutil.Process().children(recursive=True))
    session = start_session("sums")
    assert set(psutil.Process().children(recursive=True)) - before
    session._has_failed = has_failed
    session.close()
    session.close()
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_second_try_is_allowed(tmp_path: Path) -> None:
    class Lazy(Fake):
        tries = 0

        def process_starts(self, setup, knob):
            self.tries += 1
            self._manner = "ends" if self.tries == 1 else "sums"
            return super().process_starts(setup, knob)

    place = LocalBenchCluster(topology.one_machine([1]))
    with WorkerListener(tmp_path / "control") as listener:
        hall = SessionFactory(place, listener, tmp_path, None)
        lazy = Lazy("sums")
        with hall.open_session(lazy, KNOB, ("node0",)) as session:
            assert session.version == "fake 1.0"
        assert lazy.tries == 2
        with (
            pytest.raises(LaunchError, match="could not be started"),
            hall.open_session(Fake("ends"), KNOB, ("node0",)),
        ):
            pass


def test_a_place_that_cannot_be_entered(tmp_path: Path) -> None:
    class Closed(LocalBenchCluster):
        def command(self, node, argv):
            return ["sh", "-c", "echo nobody is here"]

    expected = (
        r"network of node node0: 'nobody is here', expected the number of a namespace\. See whether the lab is up"
    )
    with WorkerListener(tmp_path / "control") as listener, pytest.raises(LaunchError, match=expected):
        SessionFactory(Closed(topology.one_machine([1])), listener, tmp_path, None)


def test_names_of_systems() -> None:
    assert {name: system.name for name, system in SYSTEMS.items()} == {name: name for name in SYSTEMS}
