"""A standby compensates pushes as its leader does: it has the same parameters after them."""

import random
from collections.abc import Sequence

import pytest
import torch

from ringweave.param_server import snapshots
from ringweave.param_server.messages import Push
from ringweave.param_server.replication import ReplicatedFact
from ringweave.param_server.service import ParameterService
from ringweave.param_server.standby import LeaderReplay
from tests.param_server.serving.callers import Callers

NUM_RINGS = 3


class Mirror:
    """A replica that tells another service at once, in this thread."""

    def __init__(self) -> None:
        self.service: ParameterService | None = None
        self.is_leading: list[float] = []

    def check_term(self, term: int) -> None:
        assert term == 0

    def replicate_start(self) -> None:
        pass

    def replicate_push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        if self.service:
            LeaderReplay(self.service).replay_push(push, [memoryview(bytearray(each)) for each in buffers])

    def replicate_grant(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        assert is_between_pushes
        self.is_leading.append(ahead)
        if self.service:
            LeaderReplay(self.service).replay_grant(ring, version, ahead)

    def replicate_fact(self, fact: ReplicatedFact) -> None:
        raise AssertionError(f"nobody takes samples or leaves: {fact}")


def push_and_pull(rings: Callers, ring: int) -> None:
    """The ring's push of numbers drawn at random, and the parameters that follow."""

    def gradient(sequence: int) -> bytes:
        draw = torch.Generator().manual_seed(100 * ring + sequence)
        return torch.randn(50, dtype=torch.float64, generator=draw).numpy().tobytes()

    rings.push(ring, gradient=gradient)
    rings.pull(ring)


def parameters(service: ParameterService) -> torch.Tensor:
    with service.paused_state() as state:
        return snapshots.snapshot_from_bytes(state).parameters[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_standby_compensates_by_the_same_parameters(seed):
    mirror, follower, draw = Mirror(), ParameterService(), random.Random(seed)
    leader = ParameterService(replicator=mirror)
    rings = Callers(leader, NUM_RINGS, compensation=0.04, dtype=torch.float64, lr=0.5, momentum=0.9)
    for ring in range(NUM_RINGS):
        rings.pull(ring)
    with leader.paused_state() as state:  # rings compute by now: what they do is copied, too
        follower.resume(snapshots.snapshot_from_bytes(bytes(state)))
    mirror.service = follower
    for _ in range(15):  # in cycles, so that nobody has to wait for the slowest
        for ring in draw.sample((0, 0, 1, 2), 4):
            push_and_pull(rings, ring)
    assert max(mirror.is_leading) > 0.1, "parameters were given ahead of time"
    assert follower.version == leader.version == 60
    assert parameters(leader).abs().max() > 0.1
    assert torch.equal(parameters(follower), parameters(leader))
