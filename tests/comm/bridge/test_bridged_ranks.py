"""The bridge in real processes with real connections, on devices of threads with random delays."""

import pytest

from ringweave.testing.ranks import Ranks, run_ranks
from tests.comm.bridge import bridged_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("nodes", [None, ["a", "a", "b"]], ids=["one node", "2 + 1"])
@pytest.mark.parametrize("schedule", ["ring", "multi-level", None])
def test_messages_of_all_sizes(nodes: list[str] | None, schedule: str | None) -> None:
    """Small ones go by Gloo, on the copy; forced or large ones by a schedule."""
    environ = {"RINGWEAVE_SCHEDULE": schedule} if schedule else {}
    function = bridged_functions.reduce_on_a_device_of_threads
    for counters in run_ranks(function, 3, 40, 300_000, nodes=nodes, environ=environ):
        assert sum(each["collectives"] for each in counters.values()) == 40
        assert counters["native"]["collectives"] > 0 or schedule is None
        if schedule:
            assert set(counters) == {schedule, "native"}


def test_a_dead_rank_is_named() -> None:
    with Ranks(bridged_functions.fail_on_a_device_of_threads, 3, environ={"RINGWEAVE_SCHEDULE": "ring"}) as ranks:
        for outcome in ranks.outcomes([0, 2]):
            assert "rank 1 (node" in outcome.value
