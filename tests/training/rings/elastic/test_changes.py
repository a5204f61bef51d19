"""What a member's local steps push, and what they make of the answers; without processes."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import ConnectionLostError, RemoteError
from ringweave.param_server.client import RingPush
from ringweave.param_server.messages import PullResult
from ringweave.training.elastic.accounting import SampleAccounting
from ringweave.training.rings import ring_progress
from ringweave.training.rings.ring_progress import RingCursor, UnpushedSamples
from ringweave.training.rings.ring_worker import RingWorker


class Server:
    """Adds what is pushed, once for each number; another ring moves the parameters by one meanwhile."""

    def __init__(self) -> None:
        self.value, self.version, self.sequence = 0.0, 0, 0
        self.rounds: list[RingPush] = []
        self.error: Exception | None = None
        self.has_left = False
        self.now_s, self.push_s = 0.0, 0.0
        """Virtual time, and what a push takes of it."""

    def push(self, round_: RingPush, content: Sequence[memoryview]) -> None:
        self.now_s += self.push_s
        if self.error is not None:
            raise self.error
        if round_.sequence == self.sequence:
            return
        assert round_.sequence == self.sequence + 1
        self.rounds.append(round_)
        self.sequence = round_.sequence
        self.value += 1.0 + float(torch.frombuffer(content[0], dtype=torch.float64)[0])
        self.version += 2

    def push_and_pull(
        self, round_: RingPush, content: Sequence[memoryview], into: Sequence[memoryview]
    ) -> tuple[None, PullResult]:
        self.push(round_, content)
        torch.frombuffer(into[0], dtype=torch.float64).fill_(self.value)
        return None, PullResult(version=self.version)

    def leave_ring(self, *, is_for_good: bool) -> None:
        assert not is_for_good
        self.has_left = True

    def pull(self, after_sequence: int, into: Sequence[memoryview], next_fragment: int) -> int:
        assert next_fragment == 0
        assert after_sequence == self.sequence
        assert self.has_left, "else it may only pull what follows the push that was refused"
        torch.frombuffer(into[0], dtype=torch.float64).fill_(self.value)
        return self.version


class Member:
    """One member of a ring of one, or of one whose other members are looked at apart: it fetches all itself."""

    starts_pushes_at_once = misses_samples = is_connected = False

    def __init__(self, server: Any, num_steps: int = 2, max_steps: int | None = None) -> None:
        self.parameter = torch.zeros(3, dtype=torch.float64)
        self.is_representative = True
        self.cursor, self.samples = RingCursor(ring=0), UnpushedSamples()
        self.server = server
        self.num_spread = 0
        clock = lambda: server.now_s  # noqa: E731 - virtual time
        worker = RingWorker(self, [self.parameter], local_steps=num_steps, max_local_steps=max_steps, clock=clock)
        assert worker.changes is not None
        self.changes = worker.changes
        self.changes.reset_base()

    def client(self) -> Any:
        return self.server

    def last_words(self) -> str:
        return ring_progress.ring_progress_json(SampleAccounting())

    def change_atomically(self, change: Callable[[], None]) -> None:
        change()

    def broadcast_from_first(self, fetch: Callable[[], Any], tensors: Sequence[Tensor] = ()) -> Any:
        self.num_spread += 1
        return json.loads(json.dumps(fetch()))

    def step(self, by: float) -> None:
        """A local step of four samples, a virtual second, that moves the parameters."""
        self.server.now_s += 1.0
        self.samples.add(4, 0.5)
        self.parameter += by
        self.changes.count_step()


def test_what_is_pushed_is_taken_in_one_push_later_with_the_ring_s_own_change_on_top() -> None:
    member = Member(server := Server())
    for by in (1.0, 2.0):
        member.step(by)
    assert member.parameter[0] == 3.0
    assert server.rounds == [], "it begins between two steps"
    member.changes.send_pending()
    member.changes.wait_answered()
    assert server.value == 4.0
    for by in (10.0, 20.0):
        member.step(by)
    assert member.parameter[0] == 4.0 + 30.0, "what the server has, and the two steps since"
    place = member.cursor
    assert (place.num_pushed, place.base_version, place.next_version) == (1, 0, 2)
    member.changes.send_pending()
    member.changes.wait_answered()
    assert server.value == 4.0 + 1.0 + 30.0
    assert [each.base_version for each in server.rounds] == [0, 0], "the first two were computed on the same parameters"
    assert [(each.num_samples, each.batch_share, each.content) for each in server.rounds] == [(8, 0.5, "change")] * 2


def steps_between_pushes(member: Member, server: Server, num_pushes: int) -> list[int]:
    """Step and push; return the local steps before each push."""
    counts, since = list[int](), 0
    while len(counts) < num_pushes:
        member.step(1.0)
        since += 1
        if member.cursor.pending is not None and member.samples.num_batches == 0:
            counts.append(since)
            since = 0
            member.changes.send_pending()
            member.changes.wait_answered()
    return counts


def test_derived_local_steps_are_as_many_as_an_exchange_needs_and_follow_drift(capsys: pytest.CaptureFixture) -> None:
    member = Member(server := Server(), num_steps=64, max_steps=500)
    server.push_s = 21.0
    assert steps_between_pushes(member, server, 4) == [64, 64, 30, 30], "an exchange takes 0.7 of its round"
    server.push_s = 140.0
    assert steps_between_pushes(member, server, 16)[-1] == 200
    server.push_s = 1e6
    assert steps_between_pushes(member, server, 16)[-1] == 500
    assert "ring 0: 30 local steps a push, not 64: an exchange takes 21 s, a step 1 s" in capsys.readouterr().out


def test_fixed_local_steps_stay() -> None:
    member = Member(server := Server(), num_steps=4)
    server.push_s = 100.0
    assert steps_between_pushes(member, server, 4) == [4, 4, 4, 4]


def test_who_joins_knows_the_derived_local_steps() -> None:
    old, new = Member(server := Server(), num_steps=64, max_steps=500), Member(server, num_steps=64, max_steps=500)
    server.push_s = 21.0
    steps_between_pushes(old, server, 3)
    new.cursor.load_json(json.loads(json.dumps(old.cursor.to_json())))
    assert (old.changes.num_steps, new.changes.num_steps) == (30, 30)


def test_before_rings_meet_what_is_left_is_pushed_and_what_comes_back_is_not_asked_for() -> None:
    member = Member(server := Server())
    for by in (1.0, 2.0, 5.0):
        member.step(by)
    member.changes.push_rest()
    assert [each.num_samples for each in server.rounds] == [8, 4]
    assert server.value == 1.0 + 3.0 + 1.0 + 5.0
    place = member.cursor
    assert (place.num_pushed, place.pending, member.samples.num_batches) == (2, None, 0)
    member.changes.push_rest()
    assert len(server.rounds) == 2, "there is nothing left"


def test_of_a_pass_that_is_broken_off_only_what_was_pushed_stays() -> None:
    member = Member(server := Server())
    for by in (1.0, 2.0, 5.0):
        member.step(by)
    member.changes.discard_steps()
    member.changes.wait_answered()
    member.changes.push_rest()
    assert server.value == 1.0 + 3.0
    assert member.cursor.pending is None


def test_who_joins_and_represents_the_ring_pushes_what_the_others_have_made() -> None:
    old = Member(server := Server())
    for by in (1.0, 2.0):
        old.step(by)
    new = Member(server)
    new.parameter.copy_(old.parameter)
    for own, others in zip(new.changes.outbox.pieces, old.changes.outbox.pieces, strict=True):
        own.copy_(others)
    new.cursor.load_json(json.loads(json.dumps(old.cursor.to_json())))
    new.changes.reset_base()
    new.changes.send_pending()
    for by in (10.0, 20.0):
        new.step(by)
    assert new.parameter[0] == 4.0 + 30.0


def test_a_representative_that_takes_the_place_of_a_dead_one_says_the_same_again() -> None:
    old, new = Member(server := Server()), Member(server)
    for member in (old, new):
        for by in (1.0, 2.0):
            member.step(by)
    old.changes.send_pending()
    old.changes.wait_answered()
    for by in (10.0, 20.0):
        new.step(by)
    assert len(server.rounds) == 1
    assert new.parameter[0] == 4.0 + 30.0


def test_who_does_not_represent_the_ring_begins_no_push() -> None:
    member = Member(server := Server())
    member.is_representative = False
    for by in (1.0, 2.0):
        member.step(by)
    member.changes.send_pending()
    assert server.rounds == []


def test_a_push_that_fails_is_said_where_it_is_waited_for() -> None:
    member = Member(server := Server())
    server.error = ConnectionLostError("no server")
    for by in (1.0, 2.0):
        member.step(by)
    member.changes.send_pending()
    member.step(3.0)
    with pytest.raises(ConnectionLostError, match="no server"):
        member.step(4.0)


@pytest.mark.parametrize("at_end", [False, True], ids=["in the epoch", "at its end"])
def test_changes_that_come_after_the_others_have_ended_the_epoch_are_lost(at_end: bool) -> None:
    """The member goes on with the server's parameters, and its next push has the number of the lost one."""
    member = Member(server := Server())
    for by in (1.0, 2.0):
        member.step(by)
    server.error = RemoteError("push 1 of ring 0: 'no grant'", "ExpiredGrantError")
    server.value, server.version = 7.0, 5
    if at_end:
        member.changes.push_rest()
    else:
        member.step(10.0)
        member.step(20.0)
    assert (member.parameter[0], server.sequence, member.cursor.pending) == (7.0, 0, None)
    assert (member.cursor.num_pushed, member.cursor.base_version, member.cursor.next_version) == (0, 5, 5)
    assert member.samples.num_samples == 0
    server.error = None
    for by in (1.0, 2.0):
        member.step(by)
    member.changes.send_pending()
    member.changes.wait_answered()
    assert [(each.sequence, each.base_version, each.num_samples) for each in server.rounds] == [(1, 5, 8)]


def test_other_failures_of_a_push_are_no_loss() -> None:
    member = Member(server := Server())
    server.error = RemoteError("push 1 of ring 0: out of order", "TrainingError")
    for by in (1.0, 2.0):
        member.step(by)
    with pytest.raises(RemoteError, match="out of order"):
        member.changes.push_rest()


def test_gradients_that_come_too_late_are_lost_and_training_goes_on() -> None:
    member = Member(server := Server())
    worker = RingWorker(member, [member.parameter])
    member.parameter.grad = torch.ones(3, dtype=torch.float64)
    member.samples.add(4, 0.5)
    server.error, server.value, server.version = RemoteError("'no grant'", "ExpiredGrantError"), 7.0, 5
    worker.push_gradients([{}])
    assert (member.parameter[0], member.cursor.num_pushed, member.samples.num_samples) == (7.0, 0, 0)
    assert member.cursor.base_version == 5
    server.error = None
    worker.push_gradients([{}])
    assert [(each.sequence, each.base_version) for each in server.rounds] == [(1, 5)]
