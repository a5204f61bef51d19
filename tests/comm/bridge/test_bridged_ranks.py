"""The bridge in real processes with real connections, on devices of threads with random delays."""

from functools import partial

import pytest

from ringweave.testing.ranks import Ranks, run_ranks
from tests import effort
from tests.comm.bridge import bridged_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
NODES = [None, ["a", "a", "b"]]


@pytest.mark.parametrize(("nodes", "schedule"), effort.alternating(NODES, ["ring", "multi-level", None]))
def test_messages_of_all_sizes(nodes: list[str] | None, schedule: str | None) -> None:
    """Small ones go by Gloo, on the copy; forced or large ones by a schedule."""
    environ = {"RINGWEAVE_SCHEDULE": schedule} if schedule else {}
    function = bridged_functions.reduce_on_a_device_of_threads
    for counters in run_ranks(function, 3, 40, 300_000, nodes=nodes, environ=environ):
        assert sum(each["collectives"] for each in counters.values()) == 40
        assert counters["native"]["collectives"] > 0 or schedule is None
        if schedule:
            assert set(counters) == {schedule, "native"}


@pytest.mark.parametrize(("nodes", "schedule"), effort.alternating(NODES[::-1], ["ring", "multi-level", None]))
def test_blocks_and_broadcasts(nodes: list[str] | None, schedule: str | None) -> None:
    """Without NCCL, small messages go by Gloo on the copy."""
    environ = {"RINGWEAVE_SCHEDULE": schedule} if schedule else {}
    function = bridged_functions.exchange_on_a_device_of_threads
    for counters in run_ranks(function, 3, 40, 100_000, nodes=nodes, environ=environ):
        assert sum(each["collectives"] for each in counters.values()) == 40
        if schedule:
            assert set(counters) == {schedule, "native"}


def test_nccl_in_the_plans_order_is_tried_beside_the_schedules() -> None:
    """Ranks that lie shuffled on the nodes; Gloo takes NCCL's place."""
    for orders, order, counters in run_ranks(
        bridged_functions.try_nccl_beside_schedules, 4, 16, nodes=["a", "b", "a", "b"]
    ):
        assert orders == [order]
        assert sorted(order, key=lambda rank: rank % 2) in ([*order], [*order[2:], *order[:2]]), "node by node"
        assert counters["native"]["collectives"] >= 6, "trials of both kinds"
        assert len(counters) > 1


def test_a_synchronous_reduce_scatter_does_not_block_python_but_the_stream() -> None:
    found = run_ranks(partial(bridged_functions.scatter_before_the_others_come, orders_streams=True), 3, 5)
    assert found[0] == [True] * 5
    found = run_ranks(partial(bridged_functions.scatter_before_the_others_come, orders_streams=False), 3, 1)
    assert found[0] == [False], "the wait that blocks"


@pytest.mark.parametrize("orders_streams", [True, False])
def test_a_dead_rank_is_named_and_no_stream_waits_for_it(orders_streams: bool) -> None:
    """By the wait that blocks, or by the next collective."""
    function = partial(bridged_functions.fail_on_a_device_of_threads, orders_streams=orders_streams)
    with Ranks(function, 3, environ={"RINGWEAVE_SCHEDULE": "ring"}) as ranks:
        for outcome in ranks.outcomes([0, 2]):
            has_returned, text = outcome.value
            assert has_returned == orders_streams
            assert "rank 1 (node" in text
