"""What holds for every generator: its schedules are proved, no operation is idle, and they stay what they are."""

from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import Domain, ReceiveOp, Schedule
from tests import effort
from tests.schedules import generated, mutants
from tests.schedules.oracle import Listing

GOLDEN = Path(__file__).parent / "golden"
NAME = st.sampled_from(sorted(generated.ALL))


@pytest.mark.slow
@settings(max_examples=effort.share_of(800))
@given(NAME, st.integers(1, 64), generated.RANDOM)
def test_all_are_proved_on_exact_sets_up_to_64_ranks(name: str, num_ranks: int, random: Random) -> None:
    schedules.verify(generated.ALL[name](num_ranks, random), exact=True)


@pytest.mark.slow
@settings(max_examples=effort.share_of(80))
@given(NAME, st.integers(65, 150), generated.RANDOM)
def test_larger_ones_are_proved_by_chance_in_one_block_or_in_several(name: str, num_ranks: int, random: Random) -> None:
    schedule = generated.ALL[name](num_ranks, random)
    schedules.verify(schedule)
    schedules.verify(schedule, memory_bytes=8 * num_ranks * (1 + schedule.num_chunks // 3))


@given(NAME, generated.RANDOM)
def test_groups_of_one_move_nothing(name: str, random: Random) -> None:
    schedule = generated.ALL[name](1, random)
    assert generated.moved(schedule) == ([0], [0])
    schedules.verify(schedule)


@given(NAME, st.integers(1, 20), generated.RANDOM)
def test_the_same_arguments_make_the_same_schedule_and_every_round_and_chunk_is_used(
    name: str, num_ranks: int, random: Random
) -> None:
    state = random.getstate()
    one = generated.ALL[name](num_ranks, random)
    random.setstate(state)
    assert one == generated.ALL[name](num_ranks, random)
    assert min(one.shares) >= 1
    for round_ in one.rounds:
        assert len(round_)
        assert round_.num_chunks.min() >= 1


@given(NAME, st.integers(2, 16), generated.RANDOM)
def test_what_each_rank_moves_is_what_its_collective_needs(name: str, num_ranks: int, random: Random) -> None:
    """Exactly, but for the allreduces: some send more, to need fewer rounds or less of slow links."""
    schedule = generated.ALL[name](num_ranks, random)
    sent, received = generated.moved(schedule)
    kind, root, owners = schedule.collective.kind, schedule.collective.root, schedule.collective.owners
    for rank in range(num_ranks):
        if kind == "allreduce":
            assert received[rank] >= 1
            assert sent[rank] >= 1
        elif kind == "broadcast":
            assert received[rank] == (rank != root)
        elif kind == "reduce":
            assert sent[rank] == (rank != root)
        else:
            assert owners is not None
            own = sum(share for share, owner in zip(schedule.shares, owners, strict=True) if owner == rank)
            moved = sent if kind == "reduce-scatter" else received
            assert moved[rank] == 1 - Fraction(own, sum(schedule.shares))


def accepted(kind: str, schedule: Schedule) -> set[tuple[int, ReceiveOp]]:
    """(round, how) of every operation that can be broken in this way and the proof still succeeds."""
    listing, spared = Listing.of(schedule), set()
    for index, at in mutants.places(listing):
        (mutant,) = mutants.KINDS[kind](listing, index, at)
        try:
            schedules.verify(mutant.listing.schedule)
        except ScheduleError:
            continue
        spared.add((index, ReceiveOp("+=".index(listing.rounds[index][at].sign))))
    return spared


@pytest.mark.slow
@given(NAME, st.integers(2, 6), generated.RANDOM)
def test_no_operation_can_be_left_out_but_copies_inside_groups_that_the_broadcast_overwrites(
    name: str, num_ranks: int, random: Random
) -> None:
    schedule = generated.ALL[name](num_ranks, random)
    spared = accepted("drop", schedule)
    if name not in ("leader-matrix", "hierarchical"):
        assert not spared
    afterwards = [phase.first_round for phase in schedule.phases if phase.name != "allreduce inside groups"]
    assert all(how == ReceiveOp.COPY and index < afterwards[0] for index, how in spared)


@pytest.mark.slow
@given(NAME, st.integers(2, 6), generated.RANDOM)
def test_no_operation_can_add_for_copying_or_copy_for_adding(name: str, num_ranks: int, random: Random) -> None:
    assert not accepted("flip", generated.ALL[name](num_ranks, random))


def test_copies_inside_groups_can_indeed_be_left_out() -> None:
    """The published descriptions have an allreduce there, where a reduce to the leader would do."""
    copies = {(index, ReceiveOp.COPY) for index in (1, 2, 3)}
    assert accepted("drop", schedules.hierarchical([[0, 1, 2], [3, 4]])) == copies
    assert accepted("drop", schedules.leader_matrix([[0, 1, 2], [3, 4]])) == copies


def two_racks() -> Domain:
    """Ranks 0, 1 and 2, 3 in racks; each leads two chunks in its rack and one in all."""
    return Domain((Domain((0, 1), (0, 0, 1, 1)), Domain((2, 3), (2, 2, 3, 3))), (0, 2, 1, 3))


def relayed_racks() -> Domain:
    """Ranks 0, 1 and 2, 3 in racks; rank 0 leads the block of rank 1, the others lead their own."""
    return Domain((Domain((0, 1), (0, 0, 0, 1)), Domain((2, 3), (2, 3, 2, 3))), (0, 0, 2, 3))


GATHERED = schedules.multi_level_allgather(relayed_racks(), (1, 1, 1, 1), (0, 1, 2, 3))

SMALL = {
    "ring-5": schedules.ring(5),
    "leader-matrix-6": schedules.leader_matrix([[0], [1], [2], [3], [4], [5]]),
    "leader-matrix-5-ragged": schedules.leader_matrix([[0], [1], [2], [3], [4]]),
    "leader-matrix-nodes": schedules.leader_matrix([[0, 1], [2, 3], [4], [5, 6]]),
    "hierarchical-3-2": schedules.hierarchical([[0, 1, 2], [3, 4]]),
    "ps-4": schedules.parameter_server(4),
    "direct-4": schedules.direct(4, [2, 1, 0, 1]),
    "multi-level-two-racks": schedules.multi_level(two_racks(), (1, 1, 1, 1)),
    "multi-level-broadcast": schedules.multi_level_broadcast(two_racks(), (1, 1, 1, 1), 1),
    "multi-level-allgather": GATHERED,
    "multi-level-reduce-scatter": schedules.mirror(GATHERED),
    "ring-allgather-4": schedules.ring_block_allgather(4, [0, 2, 3, 1], [1, 2, 1, 1]),
    "halving-doubling-6": schedules.halving_doubling(6),
    "broadcast-binomial-5": schedules.binomial_broadcast(5, 1),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_stay_what_they_are(name: str, check_golden) -> None:
    schedules.verify(SMALL[name])
    check_golden(GOLDEN / f"{name}.txt", f"{schedules.render(SMALL[name])}digest {SMALL[name].digest}\n")


def test_the_pictures_of_the_docs_are_what_is_made() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "schedules.md").read_text(encoding="utf-8")
    pictures = [block.partition("```")[0] for block in text.split("```text\n")[1:]]
    made = [schedules.render(schedule) for schedule in SMALL.values()]
    assert len(pictures) == 10
    assert all(picture in made for picture in pictures)
    assert {picture.partition(":")[0] for picture in pictures} >= set(schedules.SCHEDULE_NAMES) - {schedules.NATIVE}


@pytest.mark.parametrize(("name", "column"), [("ring", "dst"), ("direct", "first_chunk"), ("ps", "src")])
def test_columns_that_do_not_change_are_shared_between_rounds(name: str, column: str) -> None:
    rounds = schedules.generate(name, 50).rounds
    assert np.shares_memory(getattr(rounds[0], column), getattr(rounds[1], column))
