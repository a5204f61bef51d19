"""Rings in threads that push known gradients through servers which die, and what the parameters must be after it."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ringweave.param_server.client import RingClient, RingPush
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ParameterGroup, ServerSetup, TensorSpec
from ringweave.param_server.optimizers import group_options
from tests.fakes.parameter_servers import ReplicatedServers

SPECS = [TensorSpec(name="weight", shape=[400], dtype="float64")]
OPTIONS = group_options(torch.optim.SGD([torch.zeros(1)], lr=0.125).param_groups[0])


def setup_of(num_rings: int) -> ServerSetup:
    """Of an elastic job, in which nobody waits for a ring that is cut off."""
    return ServerSetup(
        tensors=SPECS,
        optimizer="SGD",
        groups=[ParameterGroup(parameters=[0], options=OPTIONS)],
        rings=[[ring] for ring in range(num_rings)],
        overlaps=False,
        compensation=0.0,
        shares=[[1]] * num_rings,
    )


def gradient(ring: int, sequence: int) -> FlatTensors:
    """Another one for every push, of whole numbers: sums are exact in any order."""
    found = torch.randint(-1000, 1000, (400,), generator=torch.Generator().manual_seed(1000 * ring + sequence))
    return FlatTensors(SPECS, [found.double()])


def expected(num_pushed: Sequence[int]) -> torch.Tensor:
    """After so many pushes of each ring, each applied once: plain SGD does not care for their order.

    Each is a train step of its own: damping, which depends on who was faster, weighs nothing within one.
    """
    total = sum(gradient(ring, each).pieces[0] for ring, last in enumerate(num_pushed) for each in range(1, last + 1))
    return -0.125 * total


@dataclass
class Ring:
    """One ring that does its rounds in a thread."""

    client: RingClient
    index: int
    num_rings: int
    num_pushes: int
    pause_s: float = 0.0
    """After each round; without it, rings that only wait for something else take the processors from that."""
    done: list[float] = field(default_factory=list)
    """When each round was over."""
    shards: list[tuple[int, int]] = field(default_factory=list)
    error: BaseException | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Ends it before it has done all its rounds."""

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, daemon=True)
        thread.start()
        return thread

    def _guarded(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self.error = error
            raise

    def run(self) -> None:
        room = FlatTensors(SPECS)
        version = self.client.pull(0, room.buffers())
        for sequence in range(1, self.num_pushes + 1):
            if self.stop.is_set():
                break
            # More than are taken: the last tickets of an epoch are smaller.
            self.shards.append(self.client.take_shard(0, 3, 3 * self.num_rings * (self.num_pushes + 1)))
            round_ = RingPush(
                sequence=sequence,
                base_version=version,
                content="gradient",
                num_samples=3,
                batch_share=1.0,
                options=[OPTIONS],
            )
            version = self.client.push_and_pull(round_, gradient(self.index, sequence).buffers(), room.buffers())[
                1
            ].version
            self.done.append(time.monotonic())
            self.stop.wait(self.pause_s)
        self.client.leave_ring(is_for_good=False)

    @property
    def longest_s(self) -> float:
        """The longest round but the first."""
        return max((after - before for before, after in zip(self.done, self.done[1:], strict=False)), default=0.0)


def begin(pair: ReplicatedServers, num_rings: int, num_pushes: int, *, pause_s: float = 0.0) -> list[Ring]:
    """A job with a standby that has everything, and its rings, which have not started."""
    pair.wait_leadership(2)
    clients = [pair.ring_client(ring) for ring in range(num_rings)]
    clients[0].start_job(setup_of(num_rings), FlatTensors(SPECS, [torch.zeros(400, dtype=torch.float64)]).buffers())
    return [Ring(client, index, num_rings, num_pushes, pause_s) for index, client in enumerate(clients)]


def newest(ring: Ring) -> tuple[int, torch.Tensor]:
    """Version and parameters now."""
    room = FlatTensors(SPECS)
    return ring.client.pull(len(ring.done), room.buffers()), room.pieces[0]


def check(rings: list[Ring]) -> None:
    """Every push was applied once, and every sample is on one ticket."""
    for ring in rings:
        if ring.error:
            raise ring.error
    version, parameters = newest(rings[0])
    num_pushed = [len(ring.done) for ring in rings]
    assert version == sum(num_pushed)
    torch.testing.assert_close(parameters, expected(num_pushed), rtol=0, atol=1e-9)
    given = sorted(ticket for ring in rings for ticket in ring.shards)
    assert given == [(3 * number, 3) for number in range(sum(num_pushed))]
