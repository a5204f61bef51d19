"""What a member's local steps push, and what they make of the answers; without processes."""

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.errors import ConnectionLostError
from ringweave.params import flat
from ringweave.params.flat import Flat
from ringweave.params.ring.client import Round
from ringweave.params.ring.member import Samples
from ringweave.training.elastic.books import Books
from ringweave.training.rings.elastic.changes import LocalChanges
from ringweave.training.rings.elastic.places import RingPlace


class Server:
    """Adds what is pushed, once for each number; another ring moves the parameters by one meanwhile."""

    def __init__(self) -> None:
        self.value, self.version, self.sequence = 0.0, 0, 0
        self.rounds: list[Round] = []
        self.error: Exception | None = None

    def push(self, round_: Round, content: Sequence[memoryview]) -> None:
        if self.error is not None:
            raise self.error
        if round_.sequence == self.sequence:
            return
        assert round_.sequence == self.sequence + 1
        self.rounds.append(round_)
        self.sequence = round_.sequence
        self.value += 1.0 + float(torch.frombuffer(content[0], dtype=torch.float64)[0])
        self.version += 2

    def exchange(self, round_: Round, content: Sequence[memoryview], into: Sequence[memoryview]) -> int:
        self.push(round_, content)
        torch.frombuffer(into[0], dtype=torch.float64).fill_(self.value)
        return self.version


class Member:
    """One member of a ring of one, or of one whose other members are looked at apart: it fetches all itself."""

    def __init__(self, server: Any, num_steps: int = 2) -> None:
        self.parameter = torch.zeros(3, dtype=torch.float64)
        specs = flat.specs_of([("weight", self.parameter)])
        self.landed = Flat(specs)
        self.is_first = True
        self.crew: Any = SimpleNamespace(ring_place=RingPlace(ring=0), samples=Samples(), books=Books())
        self.server = server
        self.num_spread = 0
        self.changes = LocalChanges(self, lambda: self.crew, [self.parameter], specs, num_steps)
        self.changes.begin_anew()

    def exchange(self, round_: Round, outbox: Flat) -> int:
        return self.server.exchange(round_, outbox.buffers(), self.landed.buffers())

    def push(self, round_: Round, outbox: Flat) -> None:
        self.server.push(round_, outbox.buffers())

    def change(self, change: Callable[[], None]) -> None:
        change()

    def spread(self, fetch: Callable[[], Any], tensors: Sequence[Tensor] = ()) -> Any:
        self.num_spread += 1
        return json.loads(json.dumps(fetch()))

    def step(self, by: float) -> None:
        """A local step of four samples that moves the parameters."""
        self.crew.samples.add(4, 0.5)
        self.parameter += by
        self.changes.count_step()


def test_what_is_pushed_is_taken_in_one_push_later_with_the_ring_s_own_change_on_top() -> None:
    member = Member(server := Server())
    for by in (1.0, 2.0):
        member.step(by)
    assert member.parameter[0] == 3.0
    assert server.rounds == [], "it begins between two steps"
    member.changes.send()
    member.changes.wait_answered()
    assert server.value == 4.0
    for by in (10.0, 20.0):
        member.step(by)
    assert member.parameter[0] == 4.0 + 30.0, "what the server has, and the two steps since"
    place = member.crew.ring_place
    assert (place.num_pushed, place.base_version, place.next_version) == (1, 0, 2)
    member.changes.send()
    member.changes.wait_answered()
    assert server.value == 4.0 + 1.0 + 30.0
    assert [each.base_version for each in server.rounds] == [0, 0], "the first two were computed on the same parameters"
    assert [(each.num_samples, each.batch_share, each.content) for each in server.rounds] == [(8, 0.5, "change")] * 2


def test_before_rings_meet_what_is_left_is_pushed_and_what_comes_back_is_not_asked_for() -> None:
    member = Member(server := Server())
    for by in (1.0, 2.0, 5.0):
        member.step(by)
    member.changes.finish()
    assert [each.num_samples for each in server.rounds] == [8, 4]
    assert server.value == 1.0 + 3.0 + 1.0 + 5.0
    place = member.crew.ring_place
    assert (place.num_pushed, place.pending, member.crew.samples.num_batches) == (2, None, 0)
    member.changes.finish()
    assert len(server.rounds) == 2, "there is nothing left"


def test_of_a_pass_that_is_broken_off_only_what_was_pushed_stays() -> None:
    member = Member(server := Server())
    for by in (1.0, 2.0, 5.0):
        member.step(by)
    member.changes.give_up()
    member.changes.wait_answered()
    member.changes.finish()
    assert server.value == 1.0 + 3.0
    assert member.crew.ring_place.pending is None


def test_who_joins_and_represents_the_ring_pushes_what_the_others_have_made() -> None:
    old = Member(server := Server())
    for by in (1.0, 2.0):
        old.step(by)
    new = Member(server)
    new.parameter.copy_(old.parameter)
    for own, others in zip(new.changes.outbox.pieces, old.changes.outbox.pieces, strict=True):
        own.copy_(others)
    new.crew.ring_place.load(json.loads(json.dumps(old.crew.ring_place.to_words())))
    new.changes.begin_anew()
    new.changes.send()
    for by in (10.0, 20.0):
        new.step(by)
    assert new.parameter[0] == 4.0 + 30.0


def test_a_representative_that_takes_the_place_of_a_dead_one_says_the_same_again() -> None:
    old, new = Member(server := Server()), Member(server)
    for member in (old, new):
        for by in (1.0, 2.0):
            member.step(by)
    old.changes.send()
    old.changes.wait_answered()
    for by in (10.0, 20.0):
        new.step(by)
    assert len(server.rounds) == 1
    assert new.parameter[0] == 4.0 + 30.0


def test_who_does_not_represent_the_ring_begins_no_push() -> None:
    member = Member(server := Server())
    member.is_first = False
    for by in (1.0, 2.0):
        member.step(by)
    member.changes.send()
    assert server.rounds == []


def test_a_push_that_fails_is_said_where_it_is_waited_for() -> None:
    member = Member(server := Server())
    server.error = ConnectionLostError("no server")
    for by in (1.0, 2.0):
        member.step(by)
    member.changes.send()
    member.step(3.0)
    with pytest.raises(ConnectionLostError, match="no server"):
        member.step(4.0)
