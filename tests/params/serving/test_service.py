"""Who is given parameters, and who is not: the service without its connections."""

import time

import pytest
import torch

from ringweave import wire
from ringweave.errors import DeadlineError
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Leave, Pull, Push, Setup, Start, TensorSpec
from ringweave.params.serving.optimizers import options_of
from ringweave.params.serving.service import ParameterService
from ringweave.wire import Answer, Call, Incoming

SPECS = [TensorSpec(name="weight", shape=[50], dtype="float32")]
OPTIONS = options_of(torch.optim.SGD([torch.zeros(1)], lr=0.5).param_groups[0])
NUM_RINGS = 4
SLOW = (2, 3)


class Rings:
    """The representatives of all rings: each calls as `ring_functions` does."""

    def __init__(self, compensation: float = 0.04) -> None:
        self.now_s = 0.0
        self.service = ParameterService(clock=lambda: self.now_s)
        self._handlers = {each.message: each for each in self.service.handlers()}
        self._sequence = [0] * NUM_RINGS
        self._base = [0] * NUM_RINGS
        setup = Setup(
            tensors=SPECS,
            optimizer="SGD",
            groups=[Group(parameters=[0], options=OPTIONS)],
            rings=[[ring] for ring in range(NUM_RINGS)],
            overlaps=False,
            compensation=compensation,
        )
        self._handle(0, Start(term=0, setup=setup), Flat(SPECS, [torch.zeros(50)]).buffers())

    def pull(self, ring: int) -> int:
        """The version; nothing of the answer is kept."""
        answer = self._handle(ring, Pull(term=0, ring=ring, after_sequence=self._sequence[ring]))
        self._base[ring] = answer.message.version
        return self._base[ring]

    def push(self, ring: int) -> None:
        """A push that takes long to arrive, if the ring is a slow one."""
        self._sequence[ring] += 1
        push = Push(
            term=0,
            ring=ring,
            sequence=self._sequence[ring],
            base_version=self._base[ring],
            content="gradient",
            num_samples=1,
            batch_share=0.25,
            options=[OPTIONS],
        )
        room = self._handlers[Push].allocate(Incoming(_peer(ring), push, (200,)))
        for each in room:
            each[:] = bytes(len(each))
        self.now_s += 10.0 if ring in SLOW else 1.0
        self._handle(ring, push, room)

    def leave(self, ring: int) -> None:
        self._handle(ring, Leave(term=0, ring=ring, is_for_good=False))

    def call_of(self, ring: int, after_sequence: int = 0) -> Call:
        """A pull, to be handled by `pull_with`."""
        message = Pull(term=0, ring=ring, after_sequence=after_sequence)
        return Call(peer=_peer(ring), message=message, buffers=(), deadline_s=time.monotonic() + 60.0)

    def pull_with(self, call: Call) -> Answer:
        answer = self._handlers[Pull].handle(call)
        assert isinstance(answer, Answer)
        return answer

    def _handle(self, ring: int, message: wire.Message, buffers: object = ()) -> Answer:
        # What waits here waits for nobody: a minute without an answer is never.
        deadline_s = time.monotonic() + 60.0 if isinstance(message, Pull) else float("inf")
        call = Call(peer=_peer(ring), message=message, buffers=buffers, deadline_s=deadline_s)  # type: ignore[arg-type]
        answer = self._handlers[type(message)].handle(call)
        return answer if isinstance(answer, Answer) else Answer(answer)


def _peer(ring: int) -> wire.Identity:
    return wire.Identity(job="test", role="worker", name=str(ring))


def trained(rings: Rings) -> Rings:
    """Three rounds of all rings, after which the slow ones are known."""
    for _ in range(3):
        for ring in range(NUM_RINGS):
            rings.pull(ring)
        for ring in range(NUM_RINGS):
            rings.push(ring)
    return rings


@pytest.mark.parametrize("compensation", [0.0, 0.04])
def test_slow_rings_that_meet_all_get_parameters(compensation):
    rings = trained(Rings(compensation))
    for ring in range(NUM_RINGS):
        rings.leave(ring)
    assert [rings.pull(ring) for ring in range(NUM_RINGS)] == [3 * NUM_RINGS] * NUM_RINGS


@pytest.mark.parametrize("compensation", [0.0, 0.04])
def test_a_slow_ring_that_lost_the_answer_gets_another(compensation):
    rings = trained(Rings(compensation))
    assert rings.pull(3) == rings.pull(3) == 3 * NUM_RINGS


def test_nothing_is_granted_to_who_does_not_wait_any_more():
    rings = Rings()
    call = rings.call_of(1)
    call.cancelled.set()
    with pytest.raises(DeadlineError, match=r"parameters for ring 1: 'nobody who waits', expected its push 0 applied"):
        rings.pull_with(call)
    assert rings.service.status().sent_bytes == 0


def test_a_pull_that_was_given_up_does_not_take_the_place_of_the_next():
    rings = trained(Rings())
    rings.pull(1)
    with pytest.raises(DeadlineError, match=r"parameters for ring 1: 'nobody who waits'"):
        rings.pull_with(rings.call_of(1, after_sequence=2))
    rings.push(1)  # on what it was given
