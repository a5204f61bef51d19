import pytest

from ringweave.testing.ranks import Ranks, run_ranks
from tests.pipeline.moving import moving_functions
from tests.pipeline.moving.moving_functions import Trained

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WAIT_S = 300.0
"""For ranks that train many times, on a busy machine."""
LONG = pytest.mark.timeout(WAIT_S + 60)


def all_bits(trained: list[Trained]) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in trained:
        assert not found.keys() & each.bits.keys(), "a block lies on two ranks"
        found |= each.bits
    assert sorted(found) == list(range(moving_functions.NUM_BLOCKS)), "a block is missing"
    return found


@LONG
@pytest.mark.parametrize("num_stages", [2, 4])
def test_twenty_random_moves_have_the_bits_of_none(num_stages: int) -> None:
    """Dropout, batch norm, AdamW, a schedule of the rate, frozen weights, extra state; several blocks at once."""
    partitions = moving_functions.random_partitions(num_stages, num_stages, 20)
    start = moving_functions.random_partitions(99, num_stages, 1)[0]
    pairs = run_ranks(moving_functions.train_both, num_stages, start, partitions, backend="gloo", wait_s=WAIT_S)
    plain, moved = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    outcomes = moved[0].outcomes
    assert len(outcomes) == 20
    assert [outcome.splits for outcome in outcomes] == partitions
    assert all(outcome.is_done for outcome in outcomes), [outcome.cause for outcome in outcomes]
    assert all(each.outcomes == outcomes and each.splits == partitions[-1] for each in moved)
    assert all(each.losses == plain[0].losses for each in (*plain, *moved))
    assert all_bits(moved) == all_bits(plain)


@LONG
def test_moves_go_on_where_stages_encode_what_they_exchange() -> None:
    partitions = moving_functions.random_partitions(7, 2, 8)
    for plain, moved in run_ranks(moving_functions.train_encoded, 2, (3,), partitions, backend="gloo", wait_s=WAIT_S):
        assert [(each.splits, each.is_done) for each in moved.outcomes] == [(splits, True) for splits in partitions]
        assert moved.losses != plain.losses
        mean, exact = (sum(map(sum, each.losses)) for each in (moved, plain))
        assert mean == pytest.approx(exact, rel=0.01)


@LONG
def test_what_is_left_behind_shows() -> None:
    """The check above can fail: whatever is left out of the moves, it does."""
    partitions = moving_functions.random_partitions(5, 2, 6)
    found = run_ranks(moving_functions.train_wrongly, 2, (3,), partitions, backend="gloo", wait_s=WAIT_S)
    bits = all_bits([each["none"] for each in found])
    for fault in moving_functions.FAULTS:
        moved = [each[fault] for each in found]
        assert len(moved[0].outcomes) == 6
        assert all(outcome.is_done for outcome in moved[0].outcomes), moved[0].outcomes
        assert (all_bits(moved) == bits) == (fault == "nothing"), fault


def test_ranks_compare_what_moved() -> None:
    """With the state left behind the update differs; the move is dropped and the old partition trains on."""
    found = run_ranks(moving_functions.train_comparing, 2, (3,), [(5,)], backend="gloo")
    for _, each in found:
        assert [outcome.is_done for outcome in each.outcomes] == [False]
        assert "2 blocks differ" in each.outcomes[0].cause
        assert each.splits == (3,)
    assert all_bits([each for _, each in found]) == all_bits([plain for plain, _ in found])


@LONG
def test_a_failure_at_any_boundary_leaves_the_old_partition() -> None:
    """Sender or receiver; the bits are those of no move, and the same move then succeeds."""
    failures = [
        ("packing", 0), ("packing", 1), ("making room", 1), ("making room", 2), ("copying", 0), ("copying", 2),
        ("changes", 1), ("arrived", 2), ("filling", 1), ("filling", 2), ("updating", 1), ("updating", 2),
        ("updated", 0), ("updated", 2),
    ]  # fmt: skip
    start, other = (2, 5), (1, 3)
    found = run_ranks(moving_functions.train_with_failures, 3, start, other, failures, backend="gloo", wait_s=WAIT_S)
    bits, losses = all_bits([plain for plain, _ in found]), found[0][0].losses
    for place, (boundary, rank) in enumerate(failures):
        moved = [after[place] for _, after in found]
        for each in moved:
            assert [outcome.is_done for outcome in each.outcomes] == [False, True], (boundary, rank)
            assert each.outcomes[0].cause == f"rank {rank}: MemoryError('no room at {boundary}')"
            assert each.splits == other
            assert each.losses == losses
        assert all_bits(moved) == bits


@LONG
def test_a_failure_is_told_of_the_rank_that_had_it() -> None:
    """Not of the one that waits for its block, though that one stands before it."""
    failures = [("packing", 1), ("changes", 2)]
    found = run_ranks(moving_functions.train_with_failures, 3, (1, 3), (2, 5), failures, backend="gloo", wait_s=WAIT_S)
    for place, (boundary, rank) in enumerate(failures):
        for _, after in found:
            assert after[place].outcomes[0].cause == f"rank {rank}: MemoryError('no room at {boundary}')"
            assert after[place].outcomes[1].is_done


@pytest.mark.parametrize(
    ("boundary", "rank"),
    [("packing", 0), ("making room", 1), ("copying", 0), ("changes", 0), ("arrived", 1), ("updated", 0)],
)
def test_a_rank_that_is_killed_leaves_the_others_with_the_old_partition(boundary: str, rank: int) -> None:
    with Ranks(moving_functions.die, 3, boundary, rank, (2, 5), (1, 3), backend="gloo") as ranks:
        outcomes = ranks.outcomes()
    assert outcomes[rank].exit_code == -9
    for survivor in {0, 1, 2} - {rank}:
        value = outcomes[survivor].value
        assert value is not None, outcomes[survivor].error
        assert value["splits"] == (2, 5)
        assert value["held"] == tuple(value["own"])
        assert value["whole"]
        assert value["text"]


def test_replicas_move_alike_and_steps_may_be_left_out() -> None:
    """A `GradScaler` leaves updates out: the move waits for the next one."""
    found = run_ranks(moving_functions.train_replicas_both, 4, [(5,), (2,)], backend="gloo")
    for first in (0, 2):
        plain, moved = [each[0][0] for each in found[first : first + 2]], [each[1] for each in found[first : first + 2]]
        assert [[outcome.splits for outcome in outcomes] for _, outcomes in moved] == [[(5,), (2,)]] * 2
        assert all(outcome.is_done for _, outcomes in moved for outcome in outcomes)
        assert plain[0] | plain[1] == moved[0][0] | moved[1][0]
        assert sorted(moved[0][0]) == [0, 1]


def test_moves_that_cannot_begin() -> None:
    texts = run_ranks(moving_functions.refusals, 2, backend="gloo")[0]
    assert texts == [
        "splits: (1, 2), expected 1 splits. A pipeline keeps its number of stages; leave one empty if need be.",
        "move of blocks: (4,), expected no other under way. Wait until it has ended, with the next update.",
    ]
