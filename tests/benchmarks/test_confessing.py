from dataclasses import replace

from ringweave import topology
from ringweave.benchmarks.confessing import confess
from ringweave.benchmarks.requests import Request

GOOD = Request(cluster=topology.one_machine([2]), is_local=True, sizes=(4,), systems=("a", "b"), num_rounds=9)


def test_a_full_comparison_of_a_commit_has_nothing_to_confess() -> None:
    assert confess(GOOD, ("a", "b"), "0123456789ab") == []
    assert confess(GOOD, ("a", "b"), None) == []


def test_what_falls_short_is_said() -> None:
    short = replace(GOOD, systems=("b",), num_rounds=8)
    assert confess(short, ("a", "b", "c"), "0123456789ab-dirty") == [
        "not asked for, so not measured: a, c",
        "8 rounds were asked for, fewer than the 9 of a result to rely on",
        "tracked files other than results differ from the commit (0123456789ab-dirty)",
    ]
