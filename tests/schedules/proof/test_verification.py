"""What the proof accepts and refuses for every collective, and the texts of what is wrong."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import Collective, ReceiveOp, Round, Schedule
from ringweave.schedules.generators.ring import ring
from tests.schedules import samples

GOLDEN = Path(__file__).parent / "golden"


def text(collective: str, ranks: int, shares: str, *rounds: str) -> Schedule:
    """A schedule as people write it."""
    lines = [f"round {index}: {ops}" for index, ops in enumerate(rounds)]
    head = ["schedule mine", f"collective {collective}", f"ranks {ranks}", f"shares {shares}"]
    return schedules.parse("\n".join(head + lines))


def refuse(schedule: Schedule, **options) -> str:
    with pytest.raises(ScheduleError, match=r"^schedule: ") as caught:
        schedules.verify(schedule, **options)
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_rings_in_any_order_by_sets_and_by_chance(num_ranks: int) -> None:
    for schedule in (ring(num_ranks), samples.random_ring(num_ranks, Random(num_ranks))):
        schedules.verify(schedule, exact=True)
        schedules.verify(schedule, exact=False)


@pytest.mark.parametrize("name", samples.ALL)
@pytest.mark.parametrize("num_ranks", [65, 100])
def test_large_groups_by_chance(name: str, num_ranks: int) -> None:
    schedules.verify(samples.ALL[name](num_ranks, Random(1)))


def test_a_ring_of_two_thousand() -> None:
    done: list[float] = []
    schedules.verify(ring(2000), progress=done.append)
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert 100 <= len(done) <= 110


CORRECT = {
    "reduce-scatter": text("reduce-scatter\nowners 2 0 1", 3, "1 1 1", "0>1:+0 1>2:+1 2>0:+2", "1>2:+0 2>0:+1 0>1:+2"),
    "reduce-scatter, several chunks of one owner, some empty": text(
        "reduce-scatter\nowners 0 0 0 2", 3, "2 0 1 5", "1>0:+0-2 0>2:+3", "2>0:+0-2 1>2:+3"
    ),
    "allgather": text("allgather\nowners 0 1", 2, "1 1", "0>1:=0 1>0:=1"),
    "allgather, several chunks of one owner": text(
        "allgather\nowners 2 2 0", 3, "1 0 1", "2>0:=0-1 0>1:=2", "2>1:=0-1 0>2:=2"
    ),
    "broadcast": text("broadcast\nroot 1", 4, "1", "1>3:=0", "1>0:=0 3>2:=0"),
    "broadcast, chunk after chunk": text("broadcast\nroot 0", 3, "3 1", "0>1:=0", "0>1:=1 1>2:=0", "1>2:=1"),
    "reduce": text("reduce\nroot 2", 3, "1 4", "0>1:+0-1", "1>2:+0-1"),
    "reduce, whatever the others hold": text("reduce\nroot 0", 3, "1", "2>1:+0", "1>0:+0", "1>2:=0"),
    "allreduce of one": text("allreduce", 1, "1 2"),
    "allreduce, a round with nothing in it": text("allreduce", 2, "1", "0>1:+0", "", "1>0:=0"),
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", CORRECT)
def test_correct_ones_of_every_kind(name: str, exact: bool) -> None:
    for memory_bytes in (1, 2**30):
        schedules.verify(CORRECT[name], exact=exact, memory_bytes=memory_bytes)


WRONG = {
    "reduce-scatter to the wrong owner": (
        text("reduce-scatter\nowners 0 1", 2, "1 1", "0>1:+0", "0>1:+1"),
        "rank 0 ends without the contribution of rank 1 to chunk 0, expected ranks 0, 1. The contribution of rank 1 to "
        "chunk 0 gets no further than rank 1, which holds it from the beginning and what was added up to 0>1:+0 in "
        "round 0: send it on. [round 1, rank 1]",
    ),
    "reduce-scatter without the owner": (
        text("reduce-scatter\nowners 2", 3, "1", "0>1:+0", "1>2:=0"),
        "rank 2 ends without the contribution of rank 2 to chunk 0, expected ranks 0, 1, 2. What it holds came from "
        "rank 1 by 1>2:=0 in round 1. The contribution of rank 2 to chunk 0 gets no further than rank 2, which holds "
        "it from the beginning, until 1>2:=0 in round 1 overwrote it: send it on. [round 0, rank 2]",
    ),
    "allgather that forgets one": (
        text("allgather\nowners 0 1 2", 3, "1 1 1", "0>1:=0 1>2:=1 2>0:=2", "0>1:=2 1>2:=0"),
        "rank 0 ends without the contribution of rank 1 to chunk 1, expected rank 1. The contribution of rank 1 to "
        "chunk 1 gets no further than rank 2, which holds it since 1>2:=1 in round 0: send it on. [round 1, rank 2]",
    ),
    "allgather of what has not arrived": (
        text("allgather\nowners 0 1", 3, "1 1", "0>1:=0 1>0:=1", "1>2:=1 0>2:=0", "2>0:=1"),
        "rank 0 receives chunk 1 from rank 2 and holds the same already in round 2, expected a copy that brings "
        "something. It holds it since 1>0:=1 in round 0. Drop the copy. [round 2, rank 0]",
    ),
    "broadcast too early": (
        text("broadcast\nroot 0", 3, "1 1", "0>1:=0-1", "2>1:=0 0>2:=1", "0>2:=0"),
        "rank 2 sends chunk 0 to rank 1, but holds nothing of it yet in round 1, expected somebody who holds it. So "
        "far ranks 0, 1 hold it. Send it after it has arrived. [round 1, rank 1]",
    ),
    "broadcast that adds": (
        text("broadcast\nroot 0", 2, "1", "0>1:+0"),
        "0>1:+0, expected copies (=) only, as broadcast combines nothing. Correct the generator. [round 0, op 0]",
    ),
    "allgather that adds to nothing": (
        text("allgather\nowners 0", 2, "1", "0>1:+0"),
        "0>1:+0, expected copies (=) only, as allgather combines nothing. Correct the generator. [round 0, op 0]",
    ),
    "reduce to the wrong root": (
        text("reduce\nroot 1", 2, "1", "1>0:+0"),
        "rank 1 ends without the contribution of rank 0 to chunk 0, expected ranks 0, 1. The contribution of rank 0 to "
        "chunk 0 gets no further than rank 0, which holds it from the beginning and what was added up to 1>0:+0 in "
        "round 0: send it on. [round 0, rank 0]",
    ),
    "reduce of one of two chunks": (
        text("reduce\nroot 0", 2, "1 1", "1>0:+1"),
        "rank 0 ends without the contribution of rank 1 to chunk 0, expected ranks 0, 1. The contribution of rank 1 to "
        "chunk 0 gets no further than rank 1, which holds it from the beginning: send it on. [round 0, rank 1]",
    ),
    "allreduce of two with no operation": (
        text("allreduce", 2, "1"),
        "rank 0 ends without the contribution of rank 1 to chunk 0, expected ranks 0, 1. The contribution of rank 1 to "
        "chunk 0 gets no further than rank 1, which holds it from the beginning: send it on. [round 0, rank 1]",
    ),
    "written twice by overlapping ranges": (
        text("reduce\nroot 0", 3, "1 1", "1>0:+0-1 2>0:+1", "2>0:+0"),
        "chunk 1 of rank 0 is written twice in round 0, expected operations that may run at the same time: 1>0:+1 in "
        "round 0, 2>0:+1 in round 0. Move one of them to another round. [round 0, rank 0]",
    ),
    "read where it is written": (
        text("reduce\nroot 2", 3, "1 1", "0>1:+0-1 1>2:+1", "1>2:+0"),
        "chunk 1 of rank 1 is read and written in round 0, expected operations that may run at the same time: 0>1:+1 "
        "in round 0, 1>2:+1 in round 0. Move one of them to another round. [round 0, rank 1]",
    ),
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_of_every_kind(name: str, exact: bool) -> None:
    schedule, expected = WRONG[name]
    for memory_bytes in (1, 2**30):
        message = refuse(schedule, exact=exact, memory_bytes=memory_bytes)
        assert message.partition("\n")[0] == f"schedule: {expected}"


def test_the_grid_around_a_fault(check_golden) -> None:
    broken = schedules.parse(str(ring(4)).replace("2>3:+1", "0>3:+1"))
    check_golden(GOLDEN / "ring-4-wrong-sender.txt", refuse(broken) + "\n")


def test_counting_twice_is_seen_by_sets_even_where_nobody_uses_the_sum() -> None:
    unused = text("allreduce", 3, "1", "0>1:+0", "1>2:+0", "0>1:+0", "2>0:=0", "2>1:=0")
    assert refuse(unused).startswith(
        "schedule: rank 1 receives chunk 0 from rank 0 and would count rank 0 twice in round 2, expected disjoint "
        "contributor sets. Rank 1 holds rank 0's contribution by 0>1:+0 in round 0; the same comes again by 0>1:+0 in "
        "round 2. Keep one of the two ways. [round 2, rank 1]\n"
    )
    schedules.verify(unused, exact=False)  # the result is right, and that is what chance can prove


def test_a_long_way_is_cut_in_the_middle() -> None:
    there = [f"{r}>{r + 1}:+0" for r in range(15)]
    message = refuse(text("reduce\nroot 0", 16, "1", *there, "15>0:+0"))
    assert "0>1:+0 in round 0, 1>2:+0 in round 1, 2>3:+0 in round 2, 3>4:+0 in round 3, ... 8 more ..., " in message
    assert message.count(" in round ") == 1 + 8


def test_sets_hold_no_more_than_64_ranks() -> None:
    schedules.verify(ring(64), exact=True)
    with pytest.raises(ValueError, match=r"^exact sets hold at most 64 ranks, the schedule has 65$"):
        schedules.verify(ring(65), exact=True)


def test_chance_is_handed_in() -> None:
    class Counting(np.random.Generator):
        draws = 0

        def integers(self, *args, **kwargs):
            Counting.draws += 1
            return super().integers(*args, **kwargs)

    schedules.verify(ring(3), exact=False, rng=Counting(np.random.PCG64(0)))
    assert Counting.draws == 1


def one_op(src: int, dst: int, first: int, how: int, count: int = 1) -> Schedule:
    """Behind a correct operation one with any numbers."""
    round_ = Round.of([1, src], [0, dst], [1, first], [ReceiveOp.REDUCE, how], [1, count])
    return Schedule("bad", Collective("allreduce"), 3, (1, 1, 1), (round_,))


BIG = 2**31 - 1


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((3, 0, 0, 0), "3>0:+0, expected ranks 0..2."),
        ((0, 3, 0, 0), "0>3:+0, expected ranks 0..2."),
        ((-1, 0, 0, 0), "-1>0:+0, expected ranks 0..2."),
        ((0, -1, 0, 1), "0>-1:=0, expected ranks 0..2."),
        ((BIG, 0, 0, 0), f"{BIG}>0:+0, expected ranks 0..2."),
        ((2, 2, 0, 0), "2>2:+0, expected two different ranks."),
        ((0, 2, 3, 0), "0>2:+3, expected chunks 0..2."),
        ((0, 2, -1, 0), "0>2:+-1, expected chunks 0..2."),
        ((0, 2, 1, 0, 3), "0>2:+1-3, expected chunks 0..2."),
        ((0, 2, 1, 0, 0), "0>2:+1-0, expected chunks 0..2."),
        ((0, 2, 1, 0, -1), "0>2:+1--1, expected chunks 0..2."),
        ((0, 2, BIG, 0), f"0>2:+{BIG}, expected chunks 0..2."),
        ((0, 2, 1, 0, BIG), f"0>2:+1-{BIG}, expected chunks 0..2."),
        ((0, 2, 0, 2), "0>2 with how=2, expected reduce (0) or copy (1)."),
        ((0, 2, 0, 255), "0>2 with how=255, expected reduce (0) or copy (1)."),
    ],
)
@pytest.mark.parametrize("memory_bytes", [1, 2**30])
def test_numbers_that_do_not_exist(numbers: tuple[int, ...], expected: str, memory_bytes: int) -> None:
    message = refuse(one_op(*numbers), memory_bytes=memory_bytes)
    assert message == f"schedule: {expected} Correct the generator. [round 0, op 1]"


def test_a_bad_rank_is_shown_though_another_operation_is_worse() -> None:
    round_ = Round.of([9, 0], [0, 1], 0, [ReceiveOp.REDUCE, 7])
    schedule = Schedule("bad", Collective("allreduce"), 2, (1,), (round_,))
    assert refuse(schedule) == "schedule: 9>0:+0, expected ranks 0..1. Correct the generator. [round 0, op 0]"


def test_ranges_of_chunks_that_only_together_are_too_long_are_not_refused() -> None:
    schedules.verify(text("reduce\nroot 0", 3, "1 1 1", "1>0:+0-1 2>0:+2", "1>0:+2 2>0:+0-1"))
