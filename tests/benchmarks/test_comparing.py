"""Whole comparisons of systems whose rank is one small program: what happens when a system misbehaves."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave import topology
from ringweave.cli.echo import ProgressPrinter
from ringweave.errors import CommunicationError, LaunchError, PeerError
from ringweave_bench import comparison, knob_search, machine_description
from ringweave_bench.bench_cluster import LocalBenchCluster
from ringweave_bench.benchmark_request import BenchmarkRequest
from ringweave_bench.comparison import ComparisonReport, compare
from ringweave_bench.system_session import SessionFactory
from ringweave_bench.systems import Knob
from ringweave_bench.worker_channel import WorkerListener
from tests.benchmarks.conftest import Fake

CLUSTER = topology.one_machine([1])


class Choosy(Fake):
    """Has several knobs, of which some do not work; remembers which it was started with."""

    def __init__(self, name: str, *manners: str) -> None:
        super().__init__(manners[0])
        self.name, self._manners = name, manners

    def knobs(self, shape):
        return [Knob(name=manner) for manner in self._manners]

    def process_starts(self, setup, knob):
        self._manner = knob.name
        return super().process_starts(setup, knob)


class Absent(Fake):
    """Is not installed."""

    def unavailable_reason(self) -> str:
        return "it is not here. Make it: make bench-setup"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ComparisonReport]:
    """`run({"a": system})`: the report of a comparison of these."""

    def go(systems: dict[str, Fake], keep=lambda report: None, **changes) -> ComparisonReport:
        monkeypatch.setattr(comparison, "SYSTEMS", systems)
        monkeypatch.setattr(knob_search, "SYSTEMS", systems)
        monkeypatch.setattr(machine_description, "_git_commit", lambda folder: "0123456789ab")
        monkeypatch.setattr(comparison, "MIN_ROUNDS", 3)
        values = {"num_rounds": 3, "num_search_rounds": 1, "sizes": (4000,)} | changes
        request = BenchmarkRequest(cluster=CLUSTER, is_local=True, systems=tuple(systems), **values)
        with WorkerListener(tmp_path / "control") as listener:
            hall = SessionFactory(LocalBenchCluster(CLUSTER), listener, tmp_path, None)
            return compare(request, hall, ProgressPrinter(io.StringIO()), keep)

    return go


def test_everybody_has_the_rounds_asked_for(run) -> None:
    report = run({"a": Choosy("a", "sums"), "b": Choosy("b", "sums")}, sizes=(4000, 8000))
    found = [(each.system, each.num_bytes, len(each.seconds), each.schedule) for each in report.results]
    assert found == [(name, size, 3, None) for size in (4000, 8000) for name in "ab"]
    assert (report.versions, report.notes) == ({"a": "fake 1.0", "b": "fake 1.0"}, [])
    assert report.search == []  # one knob each


def test_knobs_that_do_not_work_are_left_out(run) -> None:
    report = run({"a": Choosy("a", "ends", "sums", "dies")})
    assert [each.knob for each in report.results] == ["sums"]
    assert [each["knob"] for each in report.search] == ["sums"]
    assert [note[:39] for note in report.notes] == [
        "knob left out: a (ends) could not be st",
        "knob left out: a (dies) failed in 'run'",
    ]


def test_absent_systems_are_left_out_with_a_note(run) -> None:
    report = run({"a": Absent("sums"), "b": Choosy("b", "sums")})
    assert [each.system for each in report.results] == ["b"]
    assert report.notes == ["a is left out: it is not here. Make it: make bench-setup"]


def test_nobody_is_here(run) -> None:
    expected = (
        r"systems that can run here: \[\], expected at least one\. a: it is not here\. Make it: make bench-setup\."
    )
    with pytest.raises(LaunchError, match=expected):
        run({"a": Absent("sums")})


def test_nobody_starts(run) -> None:
    expected = (
        r"systems: none could be started, expected at least one\. a \(ends\) did not start and is left out: a \(ends\)"
    )
    with pytest.raises(LaunchError, match=expected):
        run({"a": Choosy("a", "ends")})


def test_a_peer_that_fails_is_left_out(run) -> None:
    report = run({"a": Choosy("a", "dies"), "b": Choosy("b", "sums")})
    assert [each.system for each in report.results] == ["b"]
    assert report.notes[0].startswith(
        "a is left out at 4kB: a (dies) failed in 'run': rank 0 ended, expected all ranks"
    )


def test_ringweave_may_not_fail(run) -> None:
    with pytest.raises(PeerError, match=r"ringweave \(dies\) failed in 'run'"):
        run({"ringweave": Choosy("ringweave", "dies"), "b": Choosy("b", "sums")})
    with pytest.raises(LaunchError, match=r"ringweave \(ends\) could not be started"):
        run({"ringweave": Choosy("ringweave", "ends"), "b": Choosy("b", "sums")})


@pytest.mark.parametrize("manners", [("wrong",), ("sums", "wrong")])
def test_a_wrong_sum_ends_everything(run, manners: tuple[str, ...]) -> None:
    with pytest.raises(CommunicationError, match=r"result of a \(wrong\) in element 3"):
        run({"a": Choosy("a", *manners), "b": Choosy("b", "sums")})


def test_after_each_size_the_report_so_far_can_be_kept(run) -> None:
    kept: list[dict] = []
    report = run({"a": Choosy("a", "sums")}, sizes=(4000, 8000), keep=lambda so_far: kept.append(so_far.document()))
    assert [[each["bytes"] for each in document["results"]] for document in kept] == [[4000], [4000, 8000]]
    assert [document["notes"] for document in kept] == [[comparison._PARTIAL_NOTE]] * 2
    document = report.document()
    assert (document["versions"]["a"], document["git_commit"], document["notes"]) == ("fake 1.0", "0123456789ab", [])
