"""A standby compensates pushes as its leader does: it has the same parameters after them."""

import random
import time
from collections.abc import Sequence

import pytest
import torch

from ringweave import wire
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Leave, Pull, Push, Setup, Start, TensorSpec
from ringweave.params.rules import Ticket
from ringweave.params.serving import snapshots
from ringweave.params.serving.optimizers import options_of
from ringweave.params.serving.service import ParameterService
from ringweave.wire import Answer, Call, Incoming

SPECS = [TensorSpec(name="weight", shape=[50], dtype="float64")]
OPTIONS = options_of(torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9).param_groups[0])
NUM_RINGS = 3


class Mirror:
    """A replica that tells another service at once, in this thread."""

    def __init__(self) -> None:
        self.service: ParameterService | None = None
        self.leads: list[float] = []

    def check_term(self, term: int) -> None:
        assert term == 0

    def started(self) -> None:
        pass

    def pushing(self, push: Push, buffers: Sequence[memoryview]) -> None:
        if self.service:
            self.service.follow_push(push, [memoryview(bytearray(each)) for each in buffers])

    def granted(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        assert is_between_pushes
        self.leads.append(ahead)
        if self.service:
            self.service.follow_grant(ring, version, ahead)

    def ticketed(self, ticket: Ticket) -> None:
        raise AssertionError("no tickets here")

    def left(self, leave: Leave) -> None:
        raise AssertionError("nobody leaves")


class Leader:
    """A service whose rings push in turns that are drawn at random."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.service = ParameterService(replica=self.mirror)
        self._handlers = {each.message: each for each in self.service.handlers()}
        self._sequence, self._base = [0] * NUM_RINGS, [0] * NUM_RINGS
        groups = [Group(parameters=[0], options=OPTIONS)]
        rings = [[ring] for ring in range(NUM_RINGS)]
        setup = Setup(tensors=SPECS, optimizer="SGD", groups=groups, rings=rings, overlaps=False, compensation=0.04)
        first = Flat(SPECS, [torch.zeros(50, dtype=torch.float64)])
        self._handle(0, Start(term=0, setup=setup), first.buffers())
        for ring in range(NUM_RINGS):
            self._pull(ring)

    def round(self, ring: int) -> None:
        """The ring's push, and the parameters that follow."""
        self._sequence[ring] += 1
        push = Push(
            term=0,
            ring=ring,
            sequence=self._sequence[ring],
            base_version=self._base[ring],
            content="gradient",
            num_samples=1,
            batch_share=0.3,
            options=[OPTIONS],
        )
        room = self._handlers[Push].allocate(Incoming(_peer(ring), push, (400,)))
        draw = torch.Generator().manual_seed(100 * ring + self._sequence[ring])
        room[0][:] = torch.randn(50, dtype=torch.float64, generator=draw).numpy().tobytes()
        self._handle(ring, push, room)
        self._pull(ring)

    def _pull(self, ring: int) -> None:
        answer = self._handle(ring, Pull(term=0, ring=ring, after_sequence=self._sequence[ring]))
        assert isinstance(answer, Answer)
        self._base[ring] = answer.message.version

    def _handle(self, ring: int, message: wire.Message, buffers: Sequence[memoryview] = ()) -> object:
        call = Call(peer=_peer(ring), message=message, buffers=buffers, deadline_s=time.monotonic() + 60.0)
        return self._handlers[type(message)].handle(call)


def _peer(ring: int) -> wire.Identity:
    return wire.Identity(job="job", role="worker", name=str(ring))


def parameters(service: ParameterService) -> torch.Tensor:
    with service.standing_still() as state:
        return snapshots.from_bytes(state).parameters[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_standby_compensates_by_the_same_parameters(seed):
    leader, follower, draw = Leader(), ParameterService(), random.Random(seed)
    with leader.service.standing_still() as state:  # rings compute by now: what they do is copied, too
        follower.resume(snapshots.from_bytes(bytes(state)))
    leader.mirror.service = follower
    for _ in range(15):  # in cycles, so that nobody has to wait for the slowest
        for ring in draw.sample((0, 0, 1, 2), 4):
            leader.round(ring)
    assert max(leader.mirror.leads) > 0.1, "parameters were given ahead of time"
    assert follower.version == leader.service.version == 60
    assert parameters(leader.service).abs().max() > 0.1
    assert torch.equal(parameters(follower), parameters(leader.service))
