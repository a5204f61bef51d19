"""The schedule as data: what belongs together, borders of chunks, identity."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import ScheduleError
from ringweave.schedules import Collective, ReceiveOp, Round, Schedule, SchedulePhase
from ringweave.schedules.generators.ring import ring

EMPTY = Round.of((), 0, 0, 0)


def make(**changes) -> Schedule:
    given = {"name": "x", "collective": Collective("allreduce"), "num_ranks": 2, "shares": (1,), "rounds": ()}
    return Schedule(**{**given, **changes})


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            lambda: Collective("gossip"),  # pyrefly: ignore
            "collective: 'gossip', expected one of allreduce, reduce-scatter, allgather, broadcast, reduce. "
            "Name one of these.",
        ),
        (
            lambda: Collective("allgather"),
            "allgather: owners belong to reduce-scatter and allgather, and only to them.",
        ),
        (
            lambda: Collective("reduce", owners=(0,), root=0),
            "reduce: owners belong to reduce-scatter and allgather, and only to them.",
        ),
        (lambda: Collective("broadcast"), "broadcast: a root belongs to broadcast and reduce, and only to them."),
        (
            lambda: Collective("allreduce", root=0),
            "allreduce: a root belongs to broadcast and reduce, and only to them.",
        ),
        (lambda: Collective("broadcast", root=0.5), "root: 0.5, expected whole numbers. Round them."),
        (lambda: make(num_ranks=0), "num_ranks: 0, expected at least 1. Name the ranks."),
        (lambda: make(num_ranks=2.0), "num_ranks: 2.0, expected whole numbers. Round them."),
        (lambda: make(shares=(0.5, 0.5)), "shares: 0.5, expected whole numbers. Round them."),
        (lambda: make(name=""), "schedule name: '', expected one line without spaces around it. Shorten it."),
        (lambda: make(name="a\nb"), "schedule name: 'a\\nb', expected one line without spaces around it. Shorten it."),
        (lambda: make(name=" a"), "schedule name: ' a', expected one line without spaces around it. Shorten it."),
        (
            lambda: make(phases=(SchedulePhase(0, "a"),)),
            "phases: [0], expected none, for no rounds. Name each by its first round.",
        ),
        (
            lambda: make(rounds=(EMPTY, EMPTY), phases=(SchedulePhase(1, "a"), SchedulePhase(0, "b"))),
            "phases: [1, 0], expected rounds 0..1 in ascending order. Name each by its first round.",
        ),
        (
            lambda: make(rounds=(EMPTY,), phases=(SchedulePhase(0, "a "),)),
            "phase name: 'a ', expected one line without spaces around it. Shorten it.",
        ),
        (
            lambda: make(collective=Collective("allgather", owners=(0, 1))),
            "allgather: 2 owners for 1 chunks.",
        ),
        (
            lambda: make(collective=Collective("reduce-scatter", owners=(2,))),
            "owner: 2, expected ranks 0..1. Name a rank of the group.",
        ),
        (
            lambda: make(collective=Collective("reduce", root=-1)),
            "root: -1, expected ranks 0..1. Name a rank of the group.",
        ),
    ],
)
def test_what_does_not_belong_together(build, expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build()
    assert str(caught.value) == expected


@pytest.mark.parametrize("shares", [(), (0,), (0, 0), (1, -1), (3, -1)])
def test_shares_that_divide_nothing(shares: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="expected one whole number per chunk, none negative and not all 0"):
        make(shares=shares)


@pytest.mark.parametrize(
    ("src", "shown"),
    [([2**31], "[2147483648]"), ([2**70], "[1180591620717411303424]"), ([0.5], "[0.5]"), (np.array([2**33 + 1]), None)],
)
def test_numbers_that_a_column_would_cut_off(src, shown: str | None) -> None:
    with pytest.raises(
        ScheduleError, match=r"^round: \[.*\], expected whole numbers from -2147483648 to 2147483647\. Correct"
    ):
        Round.of(src, 0, 0, ReceiveOp.COPY)
    with pytest.raises(ScheduleError) as caught:
        Round.of(0, src, 0, ReceiveOp.COPY)
    assert (shown or "[8589934593]") in str(caught.value)
    with pytest.raises(
        ScheduleError, match=r"^round: \[256\], expected whole numbers from 0 to 255\. Correct the generator"
    ):
        Round.of([0], 1, 0, 256)


def test_columns_that_do_not_fit_together() -> None:
    two, three, how = np.zeros(2, np.int32), np.zeros(3, np.int32), np.zeros(2, np.uint8)
    with pytest.raises(ScheduleError, match=r"^round: columns of shapes .*, expected five of equal length\. Build it"):
        Round(two, three, two, two, how)
    with pytest.raises(
        ScheduleError, match=r"^round: columns of other types, expected int32, for how uint8\. Build it by"
    ):
        Round(two, two, two, two.astype(np.int64), how)  # pyrefly: ignore


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(0, 1000))
def test_chunks_cover_a_message_by_their_shares(shares: list[int], num_elements: int) -> None:
    borders = make(shares=tuple(shares)).offsets(num_elements)
    assert borders == sorted(borders)
    assert (borders[0], borders[-1], len(borders)) == (0, num_elements, len(shares) + 1)
    for share, begin, end in zip(shares, borders, borders[1:], strict=False):
        assert abs((end - begin) - num_elements * share / sum(shares)) < 1
        assert share or begin == end


def test_identity_is_what_is_sent_not_how_it_is_called_or_stored() -> None:
    base = make(rounds=(Round.of([1], [0], [0], ReceiveOp.REDUCE), Round.of([0], [1], [0], ReceiveOp.COPY)))
    stored = make(
        name="y",
        phases=(SchedulePhase(1, "z"),),
        num_ranks=np.int64(2),
        shares=tuple(np.array([1])),
        rounds=[Round.of(np.array([1], np.int64), 0, 0, 0), Round.of((0,), 1, 0, 1)],
    )
    assert base == stored
    assert hash(base) == hash(stored)
    assert base != "base"
    assert ring(4) == ring(4, [0, 1, 2, 3])


def variants() -> dict[str, Schedule]:
    one, two = Round.of([1], [0], [0], ReceiveOp.REDUCE), Round.of([0], [1], [0], ReceiveOp.COPY)
    both = Round.of([1, 0], [0, 1], [0, 1], ReceiveOp.REDUCE)
    swapped = Round.of([0, 1], [1, 0], [1, 0], ReceiveOp.REDUCE)
    return {
        "nothing": make(),
        "one": make(rounds=(one,)),
        "two": make(rounds=(one, two)),
        "order of rounds": make(rounds=(two, one)),
        "an empty round": make(rounds=(one, EMPTY, two)),
        "an empty round elsewhere": make(rounds=(one, two, EMPTY)),
        "src": make(num_ranks=3, rounds=(Round.of([2], [0], [0], ReceiveOp.REDUCE),)),
        "dst": make(num_ranks=3, rounds=(Round.of([1], [2], [0], ReceiveOp.REDUCE),)),
        "ranks": make(num_ranks=3, rounds=(one,)),
        "how": make(rounds=(Round.of([1], [0], [0], ReceiveOp.COPY),)),
        "chunk": make(shares=(1, 1), rounds=(Round.of([1], [0], [1], ReceiveOp.REDUCE),)),
        "count": make(shares=(1, 1), rounds=(Round.of([1], [0], [0], ReceiveOp.REDUCE, 2),)),
        "shares": make(shares=(1, 1), rounds=(one,)),
        "unequal shares": make(shares=(2, 1), rounds=(one,)),
        "joined": make(shares=(1, 1), rounds=(both,)),
        "order in a round": make(shares=(1, 1), rounds=(swapped,)),
        "kind": make(collective=Collective("reduce", root=0), rounds=(one,)),
        "root": make(collective=Collective("reduce", root=1), rounds=(one,)),
        "owners": make(collective=Collective("reduce-scatter", owners=(0,)), rounds=(one,)),
        "other owners": make(collective=Collective("reduce-scatter", owners=(1,)), rounds=(one,)),
    }


def test_everything_that_decides_what_is_sent_is_in_the_digest() -> None:
    digests = {name: schedule.digest for name, schedule in variants().items()}
    assert len(set(digests.values())) == len(digests)


@given(st.lists(st.lists(st.sampled_from([0, 1, 2**24, -1]), max_size=3), max_size=4), st.data())
def test_digests_of_other_columns_differ(columns: list[list[int]], data: st.DataObject) -> None:
    """Columns that repeat or are uniform are hashed in short forms: none of these may collide."""

    def schedule(of: list[list[int]]) -> Schedule:
        return make(rounds=tuple(Round.of([0] * len(column), 1, column, 0) for column in of))

    other = data.draw(st.lists(st.lists(st.sampled_from([0, 1, 2**24, -1]), max_size=3), max_size=4))
    assert (schedule(columns) == schedule(other)) == (columns == other)


def test_the_digest_of_the_ring_stays_what_it_is() -> None:
    assert ring(5).digest == "39564e1d80bccd89a024b2134e7c5511ee27ceb4092307c509505449072fc7df"
