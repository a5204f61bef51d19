from dataclasses import replace

from ringweave import topology
from ringweave_bench.benchmark_request import BenchmarkRequest
from ringweave_bench.comparison import find_caveats

GOOD = BenchmarkRequest(cluster=topology.one_machine([2]), is_local=True, sizes=(4,), systems=("a", "b"), num_rounds=9)


def test_a_full_comparison_of_a_commit_has_nothing_to_confess() -> None:
    assert find_caveats(GOOD, ("a", "b"), "0123456789ab") == []
    assert find_caveats(GOOD, ("a", "b"), None) == []


def test_what_falls_short_is_said() -> None:
    short = replace(GOOD, systems=("b",), num_rounds=8)
    assert find_caveats(short, ("a", "b", "c"), "0123456789ab-dirty") == [
        "not asked for, so not measured: a, c",
        "8 rounds were asked for, fewer than the 9 of a result to rely on",
        "tracked files other than results differ from the commit (0123456789ab-dirty)",
    ]
