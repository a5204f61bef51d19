import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import TrainingError
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.planning.balancing import Speed
from ringweave.rpc.state_transfer import BackgroundThrottle, ReadThrottle
from ringweave.training.elastic.recovery import (
    MAX_RETAINED_REDUCTIONS,
    CatchUp,
    GenerationStart,
    ReplayLog,
    reads_while_computing,
    replay_reduction,
)
from ringweave.training.elastic.retained_reductions import (
    Commit,
    ReductionRow,
    RetainedReduction,
    SumBuffers,
)
from ringweave.training.elastic.wire_choice import WireChoice

LAYOUT = [[3, "float32", "cpu"], [2, "float64", "cpu"]]
MEMBER = "2.1"


class Crew:
    """Notes in which order its script comes to what."""

    wires = WireChoice()

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.is_between_steps = True

    def apply_commit(self, commit: Commit) -> None:
        self.seen.append(commit.number)

    def begin_generation(self, membership: Membership, _: Any, *, is_joining: bool, recovering: frozenset[str]) -> None:
        self.seen.append((membership.generation_id, is_joining, sorted(recovering)))


def commit(number: int, *, is_level: bool = False) -> Commit:
    own = ReductionRow(is_recovering=True, is_caught_up=is_level)
    return Commit(number=number, members=("0.0", MEMBER), rows=(ReductionRow(num_planned=4), own))


def begun(number: int) -> GenerationStart:
    statuses = (MemberStatus(member="0.0", has_state=True), MemberStatus(member=MEMBER, is_recovering=True))
    return GenerationStart(
        membership=Membership(generation_id=(1, number), statuses=statuses),
        details=[{"exchange_s": 0.0}] * 2,
        is_joining=False,
    )


def counted(backlog: ReplayLog, number: int, *, is_level: bool = False) -> None:
    reduction = backlog.zero_reduction(number)
    for place, summed in enumerate(reduction.sums):
        summed.fill_(10.0 * number + place)
    reduction.copy_to_host()
    backlog.append_reduction(commit(number, is_level=is_level), reduction, [])


def handed_in(catching: CatchUp, shapes: tuple[int, ...] = (3, 2)) -> list[torch.futures.Future[Tensor]]:
    room, reduction = SumBuffers(), catching.current_backward()
    dtypes = (torch.float32, torch.float64)
    futures = [
        reduction.add_bucket(torch.ones(size, dtype=dtype), room) for size, dtype in zip(shapes, dtypes, strict=True)
    ]
    reduction.complete(ReductionRow(), 0, room)
    return futures


def made(committed: int = 4) -> tuple[CatchUp, ReplayLog, Crew]:
    backlog, crew = ReplayLog(LAYOUT, committed), Crew()
    double: Any = crew
    return CatchUp(MEMBER, double, backlog), backlog, crew


def test_its_part_in_a_reduction_is_nothing() -> None:
    part = ReplayLog(LAYOUT, 4).zero_reduction(5)
    assert (part.number, part.is_complete, part.contributes_zeros, part.layout) == (5, True, True, LAYOUT)
    assert [bucket.gradients.abs().sum().item() for message in part.messages for bucket in message.buckets] == [
        0.0,
        0.0,
    ]


def test_what_is_kept_is_bounded_by_memory_and_by_number() -> None:
    assert ReplayLog(LAYOUT, 0, max_bytes=1e12).max_retained == MAX_RETAINED_REDUCTIONS
    assert ReplayLog(LAYOUT, 0, max_bytes=5 * 28).max_retained == 5
    assert ReplayLog(LAYOUT, 0, max_bytes=0).max_retained == 2
    catching, backlog, _ = made()
    for number in range(5, 5 + backlog.max_retained):
        assert catching.has_room()
        counted(backlog, number)
    assert not catching.has_room()


def test_once_there_was_no_room_the_others_wait_until_it_is_level() -> None:
    catching, backlog, _ = made()
    for number in range(5, 5 + backlog.max_retained):
        counted(backlog, number)
    assert not catching.has_room()
    catching.is_loaded = True
    for _ in range(backlog.max_retained):
        handed_in(catching)
        catching.take_reduction()
        assert not catching.has_room()
    handed_in(catching)
    assert catching.is_caught_up
    assert catching.has_room()
    catching.begin_generation(begun(8))
    assert catching.has_room(), "its script waits as before, and has not been told of the epoch yet"
    assert not catching.is_behind()
    assert catching.has_room()


def test_the_script_does_what_the_others_did_in_their_order_with_their_sums() -> None:
    catching, backlog, crew = made()
    counted(backlog, 5)
    catching.begin_generation(begun(7))
    counted(backlog, 6)
    assert catching.is_behind()
    futures = handed_in(catching)
    replay, kept, is_last = catching.take_reduction()
    replay_reduction(replay, kept, is_mean=True)
    assert [future.value().tolist() for future in futures] == [[0.0] * 3, [0.0] * 2], "a mean over no samples"
    catching.log.recycle_sums(kept)
    assert (crew.seen, is_last, catching.log.last_replayed) == ([5], False, 5)
    assert catching.is_behind()
    assert crew.seen == [5, ((1, 7), False, [MEMBER])]
    futures = handed_in(catching)
    replay, kept, _ = catching.take_reduction()
    replay_reduction(replay, kept, is_mean=False)
    assert [future.value().tolist() for future in futures] == [[60.0] * 3, [61.0] * 2]
    assert not catching.is_behind()
    assert (crew.seen[-1], catching.log.last_replayed) == (6, 6)


def test_memory_is_used_again() -> None:
    catching, backlog, _ = made()
    counted(backlog, 5)
    handed_in(catching)
    _, kept, _ = catching.take_reduction()
    catching.log.recycle_sums(kept)
    assert [each.data_ptr() for each in backlog.zero_reduction(6).sums] == [each.data_ptr() for each in kept.sums]


def test_who_waits_for_what_all_wait_for_is_level() -> None:
    catching, backlog, crew = made()
    counted(backlog, 5)
    catching.is_loaded = True
    handed_in(catching)
    assert not catching.is_caught_up, "others have done that one"
    catching.take_reduction()
    assert not catching.is_caught_up, "it computes"
    handed_in(catching)
    assert catching.is_caught_up
    catching.is_loaded = False
    assert not catching.is_caught_up
    counted(backlog, 6, is_level=True)
    catching.begin_generation(begun(8))
    _, _, is_last = catching.take_reduction()
    assert is_last
    assert crew.seen == [5, 6, ((1, 8), False, [MEMBER])], "what began since then begins at once"


def test_it_is_at_a_border_unless_it_has_drawn_what_does_not_count_yet() -> None:
    catching, backlog, crew = made()
    assert catching.is_at_step_boundary
    crew.is_between_steps = False
    assert not catching.is_at_step_boundary
    catching.begin_generation(begun(9))
    assert not catching.is_at_step_boundary, "an epoch changes nothing about that"
    counted(backlog, 5)
    assert catching.is_at_step_boundary


def test_other_buckets_than_the_others_are_refused() -> None:
    catching, backlog, _ = made()
    counted(backlog, 5)
    handed_in(catching, (3, 3))
    with pytest.raises(TrainingError, match=r"buckets of this worker's gradients: \[.*, expected .*Build the model"):
        catching.take_reduction()


def test_buffers_become_those_of_the_others() -> None:
    catching, backlog, _ = made()
    buffer = torch.zeros(2)
    reduction = backlog.zero_reduction(5)
    reduction.copy_to_host()
    backlog.append_reduction(commit(5), reduction, [(buffer, torch.tensor([7.0, 8.0]))])
    handed_in(catching)
    replay, kept, _ = catching.take_reduction()
    assert buffer.tolist() == [0.0, 0.0]
    replay_reduction(replay, kept, is_mean=True)
    assert buffer.tolist() == [7.0, 8.0]


def test_a_reduction_that_was_given_up_is_begun_anew() -> None:
    part = ReplayLog(LAYOUT, 4).zero_reduction(5)
    part.detach_from_group()
    assert isinstance(part, RetainedReduction)
    assert part.layout == LAYOUT


class Stepped(threading.Event):
    """Notes that somebody waits for the others' first step."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return super().wait(0.0)


def joining(num_others: int, exchange_s: float = 0.0, s_per_sample: float = 0.01) -> GenerationStart:
    """Returns the start of a generation in which this member joins others with batches of 100 samples."""
    others = [MemberStatus(member=f"{slot}.0", has_state=True) for slot in range(num_others)]
    own = MemberStatus(member=MEMBER, is_recovering=True)
    speed = list(Speed(s_per_sample=s_per_sample).to_numbers())
    details = {"exchange_s": exchange_s, "speed": speed, "must_match": {"batch_samples": 100}}
    return GenerationStart(
        membership=Membership(generation_id=(1, 5), statuses=(*others, own)),
        details=[*[details] * num_others, {"exchange_s": 0.0, "speed": None, "must_match": {}}],
        is_joining=True,
    )


def test_a_state_that_is_read_while_the_others_compute_is_read_at_once() -> None:
    computing_s = 0.01 * 100 / 2
    assert reads_while_computing(joining(2, exchange_s=computing_s / 3.1))
    assert not reads_while_computing(joining(2, exchange_s=computing_s / 2.9)), "an optimizer has two moments"
    assert not reads_while_computing(joining(2)), "no exchange was measured yet"
    catching, _, _ = made()
    stepped = catching._others_stepped = Stepped()
    catching.begin_generation(joining(2, exchange_s=0.01))
    read: list[Exception | None] = []
    catching.start_read(lambda _: None, read.append)
    catching.wait_stopped(60.0)
    assert (stepped.num_waits, read) == (0, [None])


@pytest.mark.parametrize("is_alone", [True, False])
def test_who_is_to_have_the_state_soon_reads_it_at_once_and_gives_way_to_nobody(is_alone: bool) -> None:
    catching, _, _ = made()
    stepped = catching._others_stepped = Stepped()
    catching.begin_generation(joining(1 if is_alone else 2))
    pauses_s: list[float] = []

    def pull(pace: ReadThrottle) -> None:
        assert isinstance(pace, BackgroundThrottle)
        pauses_s.extend(pace.pause_s(1 << 20, seconds) for seconds in (0.1, 0.1, 1.0))

    catching.start_read(pull, lambda error: pauses_s.append(-1.0 if error else 0.0))
    catching.wait_stopped(60.0)
    assert stepped.num_waits == (0 if is_alone else 1)
    assert pauses_s == ([0.0] * 4 if is_alone else [0.0, 0.0, pytest.approx(2.0), 0.0])
