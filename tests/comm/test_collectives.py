"""Allgather, reduce-scatter and broadcast of the backend against torch in one process, in real processes."""

import pytest

from ringweave.testing.ranks import Ranks, run_ranks
from tests.comm import collective_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TWO_NODES = ["a", "a", "b"]


@pytest.mark.parametrize("schedule", ["ring", "direct", "multi-level"])
def test_every_form_of_collectives_on_blocks_is_exact(schedule: str) -> None:
    environ = {"RINGWEAVE_SCHEDULE": schedule}
    for counters in run_ranks(collective_functions.check_blocks, 3, environ=environ, nodes=TWO_NODES):
        assert counters[schedule]["collectives"] > 50
        assert set(counters) <= {schedule, "native"}


def test_broadcasts_from_every_rank_are_exact() -> None:
    environ = {"RINGWEAVE_SCHEDULE": "ring"}
    for counters in run_ranks(collective_functions.check_broadcasts, 3, environ=environ, nodes=TWO_NODES):
        assert counters["ring"]["collectives"] >= 3 * 5


@pytest.mark.parametrize(
    ("forced", "taken"), [("ring", {"ring"}), ("direct", {"direct"}), ("multi-level", {"ring", "direct"})]
)
def test_blocks_of_different_sizes_are_exact_whatever_their_sizes(forced: str, taken: set[str]) -> None:
    environ = {"RINGWEAVE_SCHEDULE": forced}
    for counters in run_ranks(collective_functions.check_unequal_blocks, 3, environ=environ, nodes=TWO_NODES):
        num_gathered, num_scattered = 3 * 5 * 2 + 1, 5 + 2  # Gloo takes small blocks to add, but of a dtype it lacks
        found = sum(counters[name]["collectives"] for name in taken & counters.keys())
        assert found == num_gathered + num_scattered, counters


@pytest.mark.parametrize("schedule", ["ring", "direct", "multi-level"])
def test_reductions_of_large_blocks_are_exact_and_leave_their_input(schedule: str) -> None:
    run_ranks(
        collective_functions.check_reductions_in_pieces, 3, environ={"RINGWEAVE_SCHEDULE": schedule}, nodes=TWO_NODES
    )


def test_blocks_of_different_sizes_run_by_schedules_on_one_node_and_without_tuning() -> None:
    for counters in run_ranks(collective_functions.check_unequal_blocks, 3):
        assert counters["direct"]["collectives"] == 3 * 5 * 2 + 1 + 3, counters  # 3 of a dtype that Gloo cannot add


def test_ranks_with_other_blocks_are_named() -> None:
    with Ranks(collective_functions.disagree_in_block_sizes, 3, nodes=TWO_NODES) as ranks:
        texts = [outcome.error for outcome in ranks.outcomes()]
    assert any("allgather in blocks of 60, 80, 220 of 360 x torch.uint8" in text for text in texts), texts


def test_schedules_that_trials_choose_are_exact() -> None:
    run_ranks(collective_functions.check_blocks, 3, nodes=TWO_NODES)


@pytest.mark.parametrize("environ", [{}, {"RINGWEAVE_SCHEDULE": "ring"}], ids=["tuned", "forced"])
def test_many_collectives_of_all_kinds_in_flight(environ: dict[str, str]) -> None:
    run_ranks(collective_functions.check_many_at_once, 4, environ=environ, nodes=["a", "a", "b", "b"])


def test_ranks_that_call_different_collectives_are_named() -> None:
    environ = {"RINGWEAVE_SCHEDULE": "ring"}
    with Ranks(collective_functions.disagree_in_kind, 3, environ=environ, nodes=TWO_NODES) as ranks:
        texts = [outcome.error for outcome in ranks.outcomes()]
    assert any("is about to run broadcast(from rank 1) of 240000 x torch.uint8 by ring" in text for text in texts)
    assert any("allgather of 720000 x torch.uint8" in text for text in texts)
