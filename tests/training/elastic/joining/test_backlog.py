import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import TrainingError
from ringweave.membership.rules.records import Decree, Standing
from ringweave.training.elastic.joining.backlog import MOST_KEPT, Backlog, Begun
from ringweave.training.elastic.joining.catching import Catching, redo
from ringweave.training.elastic.kept import Reduction, Room
from ringweave.training.elastic.rows import Commit, Row
from ringweave.wire.pacing import GivingWay, Pace

LAYOUT = [[3, "float32", "cpu"], [2, "float64", "cpu"]]
MEMBER = "2.1"


class Crew:
    """Notes in which order its script comes to what."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.is_between_steps = True

    def commit(self, commit: Commit) -> None:
        self.seen.append(commit.number)

    def begin(self, decree: Decree, _: Any, *, is_newcomer: bool, followers: frozenset[str]) -> None:
        self.seen.append((decree.ballot, is_newcomer, sorted(followers)))


def commit(number: int, *, is_level: bool = False) -> Commit:
    own = Row(is_following=True, is_level=is_level)
    return Commit(number=number, members=("0.0", MEMBER), rows=(Row(num_planned=4), own))


def begun(number: int) -> Begun:
    standings = (Standing(member="0.0", has_state=True), Standing(member=MEMBER, is_following=True))
    return Begun(decree=Decree(ballot=(1, number), standings=standings), notes=[{}, {}], is_newcomer=False)


def counted(backlog: Backlog, number: int, *, is_level: bool = False) -> None:
    reduction = backlog.nothing(number)
    for place, summed in enumerate(reduction.sums):
        summed.fill_(10.0 * number + place)
    backlog.keep(commit(number, is_level=is_level), reduction, [])


def handed_in(catching: Catching, shapes: tuple[int, ...] = (3, 2)) -> list[torch.futures.Future[Tensor]]:
    room, reduction = Room(), catching.present()
    dtypes = (torch.float32, torch.float64)
    futures = [reduction.add(torch.ones(size, dtype=dtype), room) for size, dtype in zip(shapes, dtypes, strict=True)]
    reduction.end(Row(), 0, room)
    return futures


def made(committed: int = 4) -> tuple[Catching, Backlog, Crew]:
    backlog, crew = Backlog(LAYOUT, committed), Crew()
    double: Any = crew
    return Catching(MEMBER, double, backlog), backlog, crew


def test_its_part_in_a_reduction_is_nothing() -> None:
    part = Backlog(LAYOUT, 4).nothing(5)
    assert (part.number, part.is_whole, part.is_nothing, part.layout) == (5, True, True, LAYOUT)
    assert [bucket.kept.abs().sum().item() for message in part.messages for bucket in message.buckets] == [0.0, 0.0]


def test_what_is_kept_is_bounded_by_memory_and_by_number() -> None:
    assert Backlog(LAYOUT, 0, most_bytes=1e12).most_kept == MOST_KEPT
    assert Backlog(LAYOUT, 0, most_bytes=5 * 28).most_kept == 5
    assert Backlog(LAYOUT, 0, most_bytes=0).most_kept == 2
    catching, backlog, _ = made()
    for number in range(5, 5 + backlog.most_kept):
        assert catching.has_room()
        counted(backlog, number)
    assert not catching.has_room()


def test_once_there_was_no_room_the_others_wait_until_it_is_level() -> None:
    catching, backlog, _ = made()
    for number in range(5, 5 + backlog.most_kept):
        counted(backlog, number)
    assert not catching.has_room()
    catching.is_loaded = True
    for _ in range(backlog.most_kept):
        handed_in(catching)
        catching.take()
        assert not catching.has_room()
    handed_in(catching)
    assert catching.is_level
    assert catching.has_room()
    catching.begin(begun(8))
    assert catching.has_room(), "its script waits as before, and has not been told of the epoch yet"
    assert not catching.is_behind()
    assert catching.has_room()


def test_the_script_does_what_the_others_did_in_their_order_with_their_sums() -> None:
    catching, backlog, crew = made()
    counted(backlog, 5)
    catching.begin(begun(7))
    counted(backlog, 6)
    assert catching.is_behind()
    futures = handed_in(catching)
    replay, kept, is_last = catching.take()
    redo(replay, kept, is_mean=True)
    assert [future.value().tolist() for future in futures] == [[0.0] * 3, [0.0] * 2], "a mean over no samples"
    catching.give_back(kept)
    assert (crew.seen, is_last, catching.number) == ([5], False, 5)
    assert catching.is_behind()
    assert crew.seen == [5, ((1, 7), False, [MEMBER])]
    futures = handed_in(catching)
    replay, kept, _ = catching.take()
    redo(replay, kept, is_mean=False)
    assert [future.value().tolist() for future in futures] == [[60.0] * 3, [61.0] * 2]
    assert not catching.is_behind()
    assert (crew.seen[-1], catching.number) == (6, 6)


def test_memory_is_used_again() -> None:
    catching, backlog, _ = made()
    counted(backlog, 5)
    handed_in(catching)
    _, kept, _ = catching.take()
    catching.give_back(kept)
    assert [each.data_ptr() for each in backlog.nothing(6).sums] == [each.data_ptr() for each in kept.sums]


def test_who_waits_for_what_all_wait_for_is_level() -> None:
    catching, backlog, crew = made()
    counted(backlog, 5)
    catching.is_loaded = True
    handed_in(catching)
    assert not catching.is_level, "others have done that one"
    catching.take()
    assert not catching.is_level, "it computes"
    handed_in(catching)
    assert catching.is_level
    catching.is_loaded = False
    assert not catching.is_level
    counted(backlog, 6, is_level=True)
    catching.begin(begun(8))
    _, _, is_last = catching.take()
    assert is_last
    assert crew.seen == [5, 6, ((1, 8), False, [MEMBER])], "what began since then begins at once"


def test_it_is_at_a_border_unless_it_has_drawn_what_does_not_count_yet() -> None:
    catching, backlog, crew = made()
    assert catching.is_at_border
    crew.is_between_steps = False
    assert not catching.is_at_border
    catching.begin(begun(9))
    assert not catching.is_at_border, "an epoch changes nothing about that"
    counted(backlog, 5)
    assert catching.is_at_border


def test_other_buckets_than_the_others_are_refused() -> None:
    catching, backlog, _ = made()
    counted(backlog, 5)
    handed_in(catching, (3, 3))
    with pytest.raises(TrainingError, match=r"buckets of this worker's gradients: \[.*, expected .*Build the model"):
        catching.take()


def test_buffers_become_those_of_the_others() -> None:
    catching, backlog, _ = made()
    buffer = torch.zeros(2)
    backlog.keep(commit(5), backlog.nothing(5), [(buffer, torch.tensor([7.0, 8.0]))])
    handed_in(catching)
    replay, kept, _ = catching.take()
    assert buffer.tolist() == [0.0, 0.0]
    redo(replay, kept, is_mean=True)
    assert buffer.tolist() == [7.0, 8.0]


def test_a_reduction_that_was_given_up_is_begun_anew() -> None:
    part = Backlog(LAYOUT, 4).nothing(5)
    part.let_go()
    assert isinstance(part, Reduction)
    assert part.layout == LAYOUT


class Stepped(threading.Event):
    """Notes that somebody waits for the others' first step."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return super().wait(0.0)


@pytest.mark.parametrize("is_alone", [True, False])
def test_who_is_to_have_the_state_soon_reads_it_at_once_and_gives_way_to_nobody(is_alone: bool) -> None:
    catching, _, _ = made()
    stepped = catching._has_stepped = Stepped()
    others = [Standing(member=f"{slot}.0", has_state=True) for slot in ([0] if is_alone else [0, 1])]
    own = Standing(member=MEMBER, is_following=True)
    catching.begin(Begun(decree=Decree(ballot=(1, 5), standings=(*others, own)), notes=[], is_newcomer=True))
    pauses_s: list[float] = []

    def pull(pace: Pace) -> None:
        assert isinstance(pace, GivingWay)
        pauses_s.extend(pace.pause_s(1 << 20, seconds) for seconds in (0.1, 0.1, 1.0))

    catching.read(pull, lambda error: pauses_s.append(-1.0 if error else 0.0))
    catching.wait_stopped(60.0)
    assert stepped.num_waits == (0 if is_alone else 1)
    assert pauses_s == ([0.0] * 4 if is_alone else [0.0, 0.0, pytest.approx(2.0), 0.0])
