"""The speed test: every rank trains on test samples at the start, and the order in which they finish makes rings.

Source: Huang & Yang (2022), algorithm 1; the central node is rank 0. Completions are counted by the store's atomic
counter, so arrival order is what the store saw. A rank that does not report in time is left out of the rings.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import Store

from ringweave.errors import PeerError
from ringweave.planning.grouping import CompletionQueue

_REPEATS = 3
_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedTest:
    """What rank 0 saw, the same on all ranks."""

    rings: tuple[tuple[int, ...], ...]
    """Ranks of each ring, the fastest ring first."""
    seconds: tuple[float, ...]
    """Measured by each rank for one trial; infinite for those that have not reported."""
    absent: tuple[int, ...]
    """Ranks that have not reported in time."""


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers, mode and torch's random numbers back to what they were."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    was_training = model.training
    for parameter in gradients:
        parameter.grad = None
    devices = {parameter.device.index for parameter in gradients if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(index or 0 for index in devices)):
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        model.train(was_training)


def measure(
    model: nn.Module, trial: Callable[[nn.Module], torch.Tensor], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds in which this rank computes a trial and its gradients: the median of three, after one to warm up.

    Args:
        model: The module itself, not under DistributedDataParallel: nothing is communicated.
        trial: model -> the loss of the test samples, the same number of samples on all ranks.
        clock: Gives seconds.
    """

    def once() -> float:
        started_s = clock()
        trial(model).backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return clock() - started_s

    with leaving_no_trace(model):
        once()
        return statistics.median(once() for _ in range(_REPEATS))


class Referee:
    """Collects completions over the group's store, and makes rings of them."""

    def __init__(self, store: Store, rank: int, world_size: int, *, timeout_s: float = 60.0) -> None:
        """`store` is the test's own; `timeout_s` is how long the fastest waits for the slowest."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s = timeout_s

    def report(self, seconds: float) -> None:
        """This rank has finished its trials."""
        place = self._store.add("arrivals", 1)
        self._store.set(f"arrival/{place}", json.dumps([self._rank, seconds]))

    def form_rings(self, num_rings: int, clock: Callable[[], float] = time.monotonic) -> SpeedTest:
        """The rings, once there are enough completions or time is up; every rank that has reported calls this.

        Raises:
            PeerError: Rank 0 said nothing.
        """
        if self._rank == 0:
            self._store.set("rings", json.dumps(asdict(self._collect(num_rings, clock))))
        try:
            self._store.wait(["rings"], timedelta(seconds=2 * self._timeout_s))
        except RuntimeError as cause:
            raise PeerError(
                f"speed test: rank 0 formed no rings within {2 * self._timeout_s:g} s, expected them when time is up. "
                "Look into the log of that rank."
            ) from cause
        said = json.loads(self._store.get("rings"))
        rings = tuple(tuple(ring) for ring in said["rings"])
        return SpeedTest(rings=rings, seconds=tuple(said["seconds"]), absent=tuple(said["absent"]))

    def _collect(self, num_rings: int, clock: Callable[[], float]) -> SpeedTest:
        queue = CompletionQueue(self._world_size, num_rings)
        seconds = [math.inf] * self._world_size
        deadline = clock() + self._timeout_s
        for place in range(1, self._world_size + 1):
            if not self._wait(f"arrival/{place}", deadline - clock()):
                queue.close()
                break
            worker, seconds_of_worker = json.loads(self._store.get(f"arrival/{place}"))
            seconds[worker] = seconds_of_worker
            queue.report(worker)
        return SpeedTest(rings=queue.rings, seconds=tuple(seconds), absent=queue.absent)

    def _wait(self, key: str, limit_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=max(limit_s, _POLL_S)))
        except RuntimeError:
            return False
        return True
