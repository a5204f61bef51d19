"""Schedules as text, both ways, and the grid for people."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import Collective, Round, Schedule, parse, render
from ringweave.schedules.generators.ring import ring
from ringweave.schedules.schedule import COLLECTIVE_KINDS
from tests.schedules import generated

GOLDEN = Path(__file__).parent / "golden"
NUMBER = st.integers(0, 10**9 - 10)


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    """Any that can be built, correct or not."""
    num_ranks, shares = draw(st.integers(1, 9)), draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
    kind, rank = draw(st.sampled_from(COLLECTIVE_KINDS)), st.integers(0, num_ranks - 1)
    owners = tuple(draw(rank) for _ in shares) if kind in ("reduce-scatter", "allgather") else None
    collective = Collective(kind, owners, draw(rank) if kind in ("broadcast", "reduce") else None)
    op = st.tuples(NUMBER, NUMBER, NUMBER, st.integers(0, 1), st.integers(-3, 9))
    op = op.filter(lambda row: row[2] + row[4] >= 1)
    rounds = []
    for rows in draw(st.lists(st.lists(op, max_size=3), max_size=4)):
        rounds.append(Round.of(*zip(*rows, strict=True)) if rows else Round.of((), 0, 0, 0))
    name = draw(st.from_regex(r"[a-z][a-z -]{0,5}[a-z]", fullmatch=True))
    return Schedule(name, collective, num_ranks, tuple(shares), tuple(rounds))


@given(any_schedule())
def test_text_reads_back(schedule: Schedule) -> None:
    again = parse(str(schedule))
    assert again == schedule
    assert again.name == schedule.name
    assert str(again) == str(schedule)


@given(st.sampled_from(sorted(generated.EVERYTHING)), st.integers(2, 9), generated.RANDOM)
def test_correct_schedules_read_back(name: str, num_ranks: int, random: Random) -> None:
    schedule = generated.EVERYTHING[name](num_ranks, random)
    assert parse(str(schedule)) == schedule
    assert parse(str(schedule)).digest == schedule.digest


def test_the_text_of_a_ring() -> None:
    assert str(ring(2)) == (
        "schedule ring\ncollective allreduce\nranks 2\nshares 1 1\n"
        "phase reduce-scatter\nround 0: 0>1:+0 1>0:+1\nphase allgather\nround 1: 0>1:=1 1>0:=0\n"
    )  # fmt: skip


def test_comments_blank_lines_and_spaces_are_free() -> None:
    text = "# mine\n\n  schedule  ring \n\tcollective allreduce\nranks 2\nshares 1  1\nround 0:\n"
    assert parse(text) == Schedule("ring", Collective("allreduce"), 2, (1, 1), (Round.of((), 0, 0, 0),))


GOOD = str(ring(3))


@pytest.mark.parametrize(
    ("was", "becomes", "expected"),
    [
        ("ranks 3", "rank 3", "schedule text: 'rank 3', expected schedule, collective, ranks, root, owners, shares, "
         "wire (once each), phase or round. Correct this line. [line 3]"),
        ("ranks 3", "ranks 3\nranks 3", "schedule text: 'ranks 3', expected schedule, collective, ranks, root, owners, "
         "shares, wire (once each), phase or round. Correct this line. [line 4]"),
        ("ranks 3\n", "", "schedule text: no line 'ranks', expected one. Add it."),
        ("shares 1 1 1\n", "", "schedule text: no line 'shares', expected one. Add it."),
        ("schedule ring\n", "", "schedule text: no line 'schedule', expected one. Add it."),
        ("collective allreduce\n", "", "schedule text: no line 'collective', expected one. Add it."),
        ("schedule ring", "schedule", "schedule name: '', expected one line without spaces around it. Shorten it."),
        ("allreduce", "alreduce", "collective: 'alreduce', expected one of allreduce, reduce-scatter, allgather, "
         "broadcast, reduce. Name one."),
        ("ranks 3", "ranks three", "ranks: 'three', expected whole numbers. Correct that line."),
        ("ranks 3", "ranks", "ranks: '', expected whole numbers. Correct that line."),
        ("ranks 3", "ranks 3 3", "ranks: '3 3', expected one whole number. Correct that line."),
        ("ranks 3", "ranks 1_0", "ranks: '1_0', expected whole numbers. Correct that line."),
        ("ranks 3", "ranks -3", "num_ranks: -3, expected at least 1. Name the ranks."),
        ("ranks 3", "ranks 3\nroot 0", "allreduce: a root belongs to broadcast and reduce, and only to them."),
        ("allreduce", "reduce\nroot 0 1", "root: '0 1', expected one whole number. Correct that line."),
        ("allreduce", "allgather\nowners 0 x", "owners: '0 x', expected whole numbers. Correct that line."),
        ("shares 1 1 1", "shares 1 1.5", "shares: '1 1.5', expected whole numbers. Correct that line."),
        ("shares 1 1 1", "shares 0", "shares: (0,), expected one whole number per chunk, none negative and not all 0. "
         "Give each chunk its relative size."),
        ("round 1:", "round 2:", "round: '2: 0>1:+2 1>2:+0 2>0:+1', expected '1:' and operations. Number the rounds "
         "from 0. [line 7]"),
        ("round 1: 0>1:+2 1>2:+0 2>0:+1", "round 1", "round: '1', expected '1:' and operations. Number the rounds from "
         "0. [line 7]"),
        ("0>1:+2", "0>1+2", "operation: '0>1+2', expected like 0>1:+4 or 0>1:=4-6. Correct it. [line 7]"),
        ("0>1:+2", "0>1:*2", "operation: '0>1:*2', expected like 0>1:+4 or 0>1:=4-6. Correct it. [line 7]"),
        ("0>1:+2", "0>-1:+2", "operation: '0>-1:+2', expected like 0>1:+4 or 0>1:=4-6. Correct it. [line 7]"),
        ("0>1:+2", "0>1:+2-", "operation: '0>1:+2-', expected like 0>1:+4 or 0>1:=4-6. Correct it. [line 7]"),
        ("0>1:+2", "0>9999999999:+2", "operation: '0>9999999999:+2', expected like 0>1:+4 or 0>1:=4-6. Correct it. "
         "[line 7]"),
        ("phase allgather", "phase", "phase name: '', expected one line without spaces around it. Shorten it."),
        ("phase allgather", "phase a\nphase b", "phases: [0, 2, 2], expected rounds 0..3 in ascending order. Name each "
         "by its first round."),
        ("2>0:=2", "2>0:=2\nphase end", "phases: [0, 2, 4], expected rounds 0..3 in ascending order. Name each by its "
         "first round."),
    ],
)  # fmt: skip
def test_every_line_that_is_not_understood(was: str, becomes: str, expected: str) -> None:
    assert was in GOOD
    with pytest.raises(ScheduleError) as caught:
        parse(GOOD.replace(was, becomes, 1))
    assert str(caught.value) == expected


def test_a_large_group_is_cut_and_says_so(check_golden) -> None:
    text = render(ring(100), max_rounds=3, max_ranks=5)
    check_golden(GOLDEN / "ring-100-cut.txt", text)
    assert "... 195 more rounds\n... 95 more ranks to the right\n" in text


def test_a_group_that_fits_is_not_cut() -> None:
    assert "more" not in render(ring(12))
    assert "... 1 more ranks to the right" in render(ring(13))
    assert render(ring(1)) == (
        "ring: allreduce of 1 ranks, 1 chunks, 0 rounds\n"
        "3>1 sends chunk 3 to rank 1; +4<0 adds chunk 4 from rank 0; =4<0 overwrites with it\n"
        "  rank0\n"
    )


def test_a_range_of_chunks_in_the_grid() -> None:
    text = "schedule x\ncollective reduce\nranks 2\nroot 0\nshares 1 1 1\nround 0: 1>0:+0-2\n"
    schedule = parse(text)
    schedules.verify(schedule)
    assert str(schedule) == text
    assert render(schedule).splitlines()[-1] == "round 0:  +0-2<1  0-2>0"
