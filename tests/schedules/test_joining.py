import itertools

import pytest

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import (
    Collective,
    LazyRounds,
    Round,
    Schedule,
    SchedulePhase,
    compose_allreduce,
    compose_side_by_side,
)
from ringweave.schedules.compose import concatenate_rounds
from tests.schedules import generated

EXPECTED = (
    "expected a reduce-scatter and the allgather of the same owners, or a reduce and the broadcast of the same root, "
    "of the same group and shares. Make both from the same arguments."
)


def counted(num_rounds: int, made: list[int]) -> LazyRounds:
    def make(index: int) -> Round:
        made.append(index)
        return Round.of([index], [index + 1], 0, 1)

    return LazyRounds(num_rounds, make)


def test_a_mirror_reduces_to_the_owners_what_an_allgather_spreads() -> None:
    gathered = schedules.ring_block_allgather(5, [3, 1, 0, 4, 2])
    scattered = schedules.mirror(gathered)
    assert (scattered.collective.kind, scattered.name) == ("reduce-scatter", "ring reduce-scatter")
    assert scattered.collective.owners == gathered.collective.owners == tuple(range(5))
    assert generated.moved(scattered) == generated.moved(gathered)[::-1]
    schedules.verify(scattered)


def test_phases_of_a_mirror_are_reversed() -> None:
    racks = schedules.Domain((schedules.Domain((0, 1), (0, 1)), 2), (0, 2))
    gathered = schedules.multi_level_allgather(racks, (1, 1), (0, 1))
    assert [tuple(phase) for phase in gathered.phases] == [
        (0, "allgather to leaders at depth 0"),
        (1, "allgather at depth 0"),
        (2, "allgather at depth 1"),
    ]
    assert [tuple(phase) for phase in schedules.mirror(gathered).phases] == [
        (0, "reduce-scatter at depth 1"),
        (1, "reduce-scatter at depth 0"),
        (2, "reduce-scatter to leaders at depth 0"),
    ]


def test_only_what_copies_has_a_mirror() -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.mirror(schedules.ring(3))
    assert str(caught.value) == (
        "schedule to mirror: 'allreduce', expected an allgather or a broadcast. Mirror its other half."
    )


def test_rounds_are_made_when_asked_for_and_come_in_order() -> None:
    first, second = [], []
    rounds, phases = concatenate_rounds(("a", counted(2, first)), ("none", ()), ("b", counted(3, second)))
    assert (len(rounds), first, second) == (5, [], [])
    assert phases == ((0, "a"), (2, "b"))
    assert [int(round_.src[0]) for round_ in rounds] == [0, 1, 0, 1, 2]
    assert int(rounds[-1].src[0]) == 2
    with pytest.raises(IndexError, match="round 5 of 5"):
        rounds[5]


def test_nothing_after_nothing() -> None:
    rounds, phases = concatenate_rounds(("a", ()))
    assert (len(rounds), phases) == (0, ())


def test_phases_of_the_parts_are_kept_and_others_are_named_after_their_collective() -> None:
    scatter, gather = schedules.ring_reduce_scatter(4), schedules.ring_allgather(4)
    named = Schedule(
        "x", gather.collective, 4, gather.shares, gather.rounds, (SchedulePhase(0, "one"), SchedulePhase(2, "rest"))
    )
    whole = compose_allreduce("mine", scatter, named)
    assert whole.name == "mine"
    assert whole.phases == ((0, "reduce-scatter"), (3, "one"), (5, "rest"))
    assert whole == schedules.ring(4)
    schedules.verify(whole)


def test_halves_of_different_makers_fit_if_their_owners_do() -> None:
    scatter, gather = schedules.ring_reduce_scatter(5, first=-1), schedules.direct_allgather(5)
    schedules.verify(compose_allreduce("mixed", scatter, gather))


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (
            schedules.ring_allgather(3),
            schedules.ring_reduce_scatter(3),
            "allgather of 3 ranks and 3 chunks, then reduce-scatter of 3 ranks and 3 chunks",
        ),
        (
            schedules.ring_reduce_scatter(3),
            schedules.ring_allgather(3, first=0),
            "reduce-scatter of 3 ranks and 3 chunks, then allgather of 3 ranks and 3 chunks",
        ),
        (
            schedules.direct_reduce_scatter(3, [1, 2, 3]),
            schedules.direct_allgather(3),
            "reduce-scatter of 3 ranks and 3 chunks, then allgather of 3 ranks and 3 chunks",
        ),
        (
            schedules.chain_reduce(3, 1),
            schedules.chain_broadcast(3, 2),
            "reduce of 3 ranks and 1 chunks, then broadcast of 3 ranks and 1 chunks",
        ),
        (
            schedules.chain_reduce(3),
            schedules.chain_broadcast(4),
            "reduce of 3 ranks and 1 chunks, then broadcast of 4 ranks and 1 chunks",
        ),
        (
            schedules.ring(2),
            schedules.ring(2),
            "allreduce of 2 ranks and 2 chunks, then allreduce of 2 ranks and 2 chunks",
        ),
    ],
)
def test_parts_that_do_not_fit(first: Schedule, second: Schedule, what: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        compose_allreduce("mine", first, second)
    assert str(caught.value) == f"allreduce mine: {what}, {EXPECTED}"


def test_parts_of_a_message_run_side_by_side_phase_by_phase() -> None:
    """Two chunks by a ring, then three by another one in the other direction, in the same rounds."""
    one = schedules.ring_reduce_scatter(3)
    other = schedules.ring_reduce_scatter(3, [2, 1, 0])
    both = compose_side_by_side(one, other)
    assert both.shares == (1,) * 6
    assert both.collective.owners == (*one.collective.owners, *other.collective.owners)
    assert len(both.rounds) == len(one.rounds)
    for mine, now in zip(one.rounds, both.rounds, strict=True):
        assert [row for row in now.rows() if row[2] < 3] == list(mine.rows())
    schedules.verify(both)


def phased(names: dict[str, int]) -> Schedule:
    """A reduce-scatter of one chunk of two ranks, with rounds that do nothing in phases."""
    starts = list(itertools.accumulate(names.values(), initial=0))
    phases = tuple(SchedulePhase(start, name) for start, name in zip(starts, names, strict=False))
    rounds = [Round.of([], [], [], [])] * starts[-1]
    return Schedule("x", Collective("reduce-scatter", (0,)), 2, (1,), rounds, phases)


def test_phases_of_one_name_run_together_and_others_keep_their_order() -> None:
    both = compose_side_by_side(
        phased({"deep": 2, "top": 1}), phased({"deeper": 1, "deep": 1, "top": 3}), phased({"top": 1})
    )
    assert both.phases == ((0, "deeper"), (1, "deep"), (3, "top"))
    assert len(both.rounds) == 6


def test_parts_that_cannot_be_side_by_side() -> None:
    first = schedules.ring_reduce_scatter(3)
    for other in (schedules.ring_allgather(3), schedules.ring_reduce_scatter(4)):
        with pytest.raises(ScheduleError) as caught:
            compose_side_by_side(first, other)
        what = f"{other.collective.kind} of {other.num_ranks} ranks and {other.num_chunks} chunks"
        assert str(caught.value) == (
            f"{first.name}: reduce-scatter of 3 ranks and 3 chunks, beside {what}, expected the same collective of the "
            "same group and root. Make all parts by the same generator."
        )
    with pytest.raises(ScheduleError, match=r"expected phases of the same names in the same order\. Make all parts by"):
        compose_side_by_side(phased({"a": 1, "b": 1}), phased({"b": 1, "a": 1}))
