"""Speed of each rank, measured by trials of the script's own model on its own data.

`prepare` does not know the script's loss. A trial computes the model's output and the gradients of its mean square,
which takes as long except for the loss itself.

In the speed test at the start, every rank trains on as many test samples, and the order in which they finish counts.
Source: Huang & Yang (2022), algorithm 1; the central node is rank 0. All ranks begin together, once each has its
samples. The store's atomic counter counts completions, so the order of arrival is the order that the store saw. No rank
can be left out of a process group of torch: a script that calls `dist.barrier()` would wait for it. So a rank that
never reports ends the wait of the others with an error that names it. `ringweave run --elastic` forms rings without
this test (`rings/startup_rendezvous.py`).
"""

import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, distributed_c10d
from torch.utils.data import DataLoader, IterableDataset

from ringweave.comm import peer_data
from ringweave.errors import PeerError
from ringweave.planning.balancing.speed import BLOCK_S
from ringweave.training import gradients, timing
from ringweave.training.timing import HostTimeline

START_TIMEOUT_S = 300.0
"""Time that the first ready rank waits for the last: ranks may load their data meanwhile."""
TEST_S = 0.5
"""Time that the fastest rank computes before it reports, about: a dozen periods of a CPU quota."""
_SAME_TIME_RATIO = 1.25
"""Ranks whose times differ by less than this ratio finish together: the test is no more exact."""
_GRACE_S = 10.0
"""Time that the others wait for rank 0's answer beyond rank 0's own wait."""
_POLL_S = 0.01
_MAX_TRIALS = 1_000_000
"""Twice the most trials that `wait_start` ever returns."""

_ParsedT = TypeVar("_ParsedT")


@contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, mode and torch's random numbers afterwards."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    was_training = model.training
    for parameter in gradients:
        parameter.grad = None
    devices = timing.cuda_devices(model)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        model.train(was_training)


class SpeedTestParticipant:
    """One rank's part in the test. Every rank has one; ranks that run no trials call `withdraw`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = START_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create it; `store` belongs to the test alone, `timeout_s` limits the wait of ready ranks for the others."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._clock, self._sleep = timeout_s, clock, sleep
        self._is_ready = self._has_reported = False
        self._began_s = 0.0

    def wait_start(self, trial_s: float) -> int:
        """Report that this rank has its test samples, wait until all have, and begin together.

        Args:
            trial_s: Seconds of one trial of this rank, about.

        Returns:
            Number of trials of each rank: the same on all ranks.

        Raises:
            PeerError: A rank does not take part.
            DisagreementError: A rank's message is malformed.
        """
        self._report_ready(trial_s)
        if self._rank == 0:
            reports = self._collect("ready")
            fastest_s = min((each_s for _, each_s in reports if each_s is not None), default=TEST_S)
            self._publish("go", reports, math.ceil(TEST_S / max(fastest_s, 1e-6)))
        num_trials = self._wait_published("go", _parse_num_trials)
        self._began_s = self._clock()
        return num_trials

    def report_finished(self) -> None:
        """Report that this rank has run its trials."""
        self._report_arrival(self._clock() - self._began_s)

    def withdraw(self) -> None:
        """Report that this rank runs no trials, so that no rank waits for it; does nothing after a report."""
        if not self._is_ready:
            self._report_ready(None)
            if self._rank == 0:  # the others need not wait for a rank without trials
                self._store.set("go", json.dumps({"absent": [], "content": 1}))
        if not self._has_reported:
            self._report_arrival(None)

    def finish_order(self) -> tuple[int, ...] | None:
        """Return the ranks in the order in which they finished; None if a rank ran no trials.

        Ranks that finish together are in the order of ranks, so that ranks of a node stay together.

        Raises:
            PeerError: A rank has not reported in time; raised on all ranks, and on that one when it reports after all.
        """
        if self._rank == 0:
            reports = self._collect("arrived")
            self._publish("order", reports, order_of_arrival(reports))
        return self._wait_published("order", functools.partial(_parse_order, world_size=self._world_size))

    def _report_ready(self, trial_s: float | None) -> None:
        self._is_ready = True
        self._append_report("ready", trial_s)

    def _report_arrival(self, seconds: float | None) -> None:
        self._has_reported = True
        self._append_report("arrived", seconds)

    def _append_report(self, list_name: str, seconds: float | None) -> None:
        place = self._store.add(list_name, 1)
        self._store.set(f"{list_name}/{place}", json.dumps([self._rank, seconds]))

    def _collect(self, list_name: str) -> list[tuple[int, float | None]]:
        """Return the reports that came in time, in the order of arrival."""
        reports: list[tuple[int, float | None]] = []
        deadline_s = self._clock() + self._timeout_s
        for place in range(1, self._world_size + 1):
            if not self._wait_key(f"{list_name}/{place}", deadline_s):
                break
            value, expected = self._store.get(f"{list_name}/{place}"), "a rank and the seconds that something took it"
            take = functools.partial(_parse_report, world_size=self._world_size)
            reports.append(
                peer_data.decode_peer_data(value, "speed test", take, expected=expected, where=f"{list_name}/{place}")
            )
        return reports

    def _publish(self, key: str, reports: list[tuple[int, float | None]], content: object) -> None:
        absent = sorted(set(range(self._world_size)) - {rank for rank, _ in reports})
        self._store.set(key, json.dumps({"absent": absent, "content": content}))

    def _wait_published(self, key: str, take: Callable[[Any], _ParsedT]) -> _ParsedT:
        """Return rank 0's answer; raise an error if rank 0, or another rank, is missing."""

        def read(said: Any) -> tuple[list[int], list[_ParsedT]]:
            absent = [_check_rank(each, self._world_size) for each in said["absent"]]
            return absent, [] if absent else [take(said["content"])]

        absent, waited_s = [0], 2 * self._timeout_s + _GRACE_S
        if self._wait_key(key, self._clock() + waited_s):
            value, expected = self._store.get(key), "the message of rank 0"
            absent, contents = peer_data.decode_peer_data(value, "speed test", read, expected=expected, where=key)
            if contents:
                return contents[0]
            waited_s = self._timeout_s
        names = ", ".join(map(str, absent))
        raise PeerError(
            f"speed test of {self._world_size} workers",
            got=f"nothing from worker {names} within {waited_s:g} s",
            expected="a report of each",
            do="Look into the log of that worker; give slow ones longer by Asynchronous(speed_test_s=...); "
            "ringweave run --elastic goes on without it",
        )

    def _wait_key(self, key: str, deadline_s: float) -> bool:
        """Wait for a key; return False on a timeout. Polls: a wait inside of the store would block other ranks."""
        while not self._store.check([key]):
            if self._clock() >= deadline_s:
                return False
            self._sleep(_POLL_S)
        return True


def _check_rank(value: Any, world_size: int) -> int:
    if type(value) is not int or not 0 <= value < world_size:
        raise ValueError(f"{value!r} is no rank")
    return value


def _parse_report(entry: Any, world_size: int) -> tuple[int, float | None]:
    rank, seconds = entry
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} seconds")
    return _check_rank(rank, world_size), None if seconds is None else float(seconds)


def _parse_num_trials(content: Any) -> int:
    if type(content) is not int or not 1 <= content <= _MAX_TRIALS:
        raise ValueError(f"{content!r} trials")
    return content


def _parse_order(content: Any, world_size: int) -> tuple[int, ...] | None:
    if content is None:
        return None
    order = tuple(_check_rank(each, world_size) for each in content)
    if sorted(order) != list(range(world_size)):
        raise ValueError("an order of other ranks")
    return order


def order_of_arrival(reports: list[tuple[int, float | None]]) -> list[int] | None:
    """Return the ranks in the order of arrival; ranks with about the same time are sorted by rank.

    Args:
        reports: (rank, seconds of its trials, None if it ran none) in the order of arrival.
    """
    order: list[int] = []
    together: list[int] = []
    first_s = 0.0
    for rank, seconds in reports:
        if seconds is None:
            return None
        if together and seconds >= first_s * _SAME_TIME_RATIO:
            order += sorted(together)
            together = []
        if not together:
            first_s = seconds
        together.append(rank)
    return order + sorted(together)


def join_speed_test(timeout_s: float, rank: int, world_size: int) -> SpeedTestParticipant:
    """Join a test among all ranks of the default group; each rank has to join as many tests."""
    store = distributed_c10d._get_default_store()
    number = store.add(f"ringweave-speed-test/rank-{rank}", 1)
    return SpeedTestParticipant(
        PrefixStore(f"ringweave-speed-test/{number}", store), rank, world_size, timeout_s=timeout_s
    )


TRIAL_BUDGET_S = 1.0
"""Time budget of the trials, after one to warm up."""
_MAX_TRIAL_S = 5.0
"""Time budget with fewer than `_MIN_BLOCKS` blocks; a longer trial runs once."""
_MAX_BLOCKS = 8
_MIN_BLOCKS = 4
"""With fewer blocks, one that stalled would be taken for the rank's speed."""
_STALL_RATIO = 1.5
"""Times above this multiple of the median are stalls of the machine; smaller differences are noise of a short test."""
_START_FRACTION = 0.05
"""Fraction of the steps that are long because of the start."""
_MAX_TIMES = 64
"""Number of times of a rank in a forecast, all equally likely."""
_MAX_PROBLEM_CHARS = 300
"""Limit of characters of a problem sent to the other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTrial:
    """Result of a rank's model trial."""

    sample_s: list[float] | None = None
    """Seconds of a sample in each block of trials; None if the model cannot run."""
    problem: str = ""
    """Reason why it cannot run; empty if it can."""


def run_model_trial(
    model: nn.Module,
    loader: DataLoader,
    num_samples: int,
    timeline: HostTimeline | None = None,
    participant: SpeedTestParticipant | None = None,
) -> ModelTrial:
    """Measure the seconds of a sample.

    Args:
        model: The module, which is not changed. Of a DistributedDataParallel it is the module inside: ranks run as many
            trials as fit into the time, and must not wait for each other in them.
        loader: Source of the samples: the first of the data set, without drawing from the sampler.
        num_samples: Samples of a trial.
        timeline: Source of times; None is the clock, without the effect of a quota's pauses on the CPU.
        participant: Sets the number of trials for all ranks, and reports when this rank has run them; None runs as many
            as fit.

    Raises:
        PeerError: Another rank does not take part in the test.
    """
    if isinstance(loader.dataset, IterableDataset):
        return ModelTrial(problem="the data set is a stream")
    inner = gradients.unwrap_ddp(model)
    try:
        with preserve_model_state(inner):
            batch = first_batch(loader, num_samples, inner)
            run_forward_backward(inner, batch)
            on_host = next(inner.parameters()).device.type == "cpu"
            timeline = timeline or (HostTimeline.of_this_process() if on_host else HostTimeline())
            blocks_s = _counted_blocks(lambda: run_forward_backward(inner, batch), timeline, participant)
            return ModelTrial(sample_s=[seconds / num_samples for seconds in blocks_s])
    except PeerError:
        raise
    except Exception as error:  # the script's own code, which may still work in training
        return ModelTrial(problem=f"{type(error).__name__}: {error}"[:_MAX_PROBLEM_CHARS])


def denoise_trials(sample_s: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the expected step times of each rank: its median, with stalls as often as all ranks saw them.

    One rank has too few trials to know the frequency of stalls, so the stalls of all ranks are pooled. Smaller
    differences are taken as noise.
    """
    middles = [statistics.median(each) for each in sample_s]
    factors = [time_s / middle for each, middle in zip(sample_s, middles, strict=True) for time_s in each]
    stalls = [factor for factor in factors if factor > _STALL_RATIO]
    if not stalls:
        return [[middle] for middle in middles]
    return _scaled_times(middles, [1.0] * (len(factors) - len(stalls)) + stalls)


def spread_step_times(sample_s: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the expected step times of each rank from past steps: its median, scaled by all ranks' deviations.

    Ranks wait for each other in whole steps, so differences between steps are no noise of a short test. A few of the
    longest are left out: they happen once, after a start.
    """
    middles = [statistics.median(each) for each in sample_s]
    factors = sorted(time_s / middle for each, middle in zip(sample_s, middles, strict=True) for time_s in each)
    return _scaled_times(middles, factors[: len(factors) - int(_START_FRACTION * len(factors))])


def _scaled_times(middles: Sequence[float], factors: Sequence[float]) -> list[list[float]]:
    """Return each rank's time scaled by all factors; of very many factors, by representatives of equal parts."""
    kinds, count = sorted(factors), min(len(factors), _MAX_TIMES)
    kinds = [kinds[(2 * index + 1) * len(kinds) // (2 * count)] for index in range(count)]
    return [[middle * factor for factor in kinds] for middle in middles]


def _counted_blocks(
    once: Callable[[], None], timeline: HostTimeline, participant: SpeedTestParticipant | None
) -> list[float]:
    """Return blocks of trials; report when the common number of trials is reached, perhaps after the blocks."""
    if participant is None:
        return _measure_blocks(once, timeline)
    begin = timeline.mark()
    once()
    num_left = participant.wait_start(timeline.seconds((begin, timeline.mark())))

    def counted() -> None:
        nonlocal num_left
        once()
        num_left -= 1
        if num_left == 0:
            participant.report_finished()

    found = _measure_blocks(counted, timeline)
    while num_left > 0:
        counted()
    return found


def _measure_blocks(once: Callable[[], None], timeline: HostTimeline) -> list[float]:
    """Return the seconds of a trial, as means over blocks: kernels throttle in periods, so single trials say little."""
    found: list[float] = []
    began = timeline.mark()
    while len(found) < _MAX_BLOCKS:
        if found and timeline.seconds((began, timeline.mark())) >= (
            TRIAL_BUDGET_S if len(found) >= _MIN_BLOCKS else _MAX_TRIAL_S
        ):
            break
        begin = timeline.mark()
        for count in itertools.count(1):
            once()
            span = begin, timeline.mark()
            if timeline.seconds(span) >= BLOCK_S:
                found.append(timeline.steady_s(timeline.seconds(span), timeline.processor_s(span)) / count)
                break
    return found


def first_batch(loader: DataLoader, num_samples: int, model: nn.Module) -> Any:
    """Return the first samples of the data set on the model's device, repeated if it has fewer."""
    total = len(loader.dataset)  # pyrefly: ignore - it is no stream
    collate = loader.collate_fn or torch.utils.data.default_collate
    batch = collate([loader.dataset[index % total] for index in range(num_samples)])
    device = next(model.parameters()).device
    if isinstance(batch, (list, tuple)):
        return [each.to(device) if isinstance(each, Tensor) else each for each in batch]
    return [batch.to(device) if isinstance(batch, Tensor) else batch]


def run_forward_backward(model: nn.Module, batch: list[Any]) -> None:
    """Run forward and backward on the first part of a batch, or on all of it if the model needs that."""
    try:
        output = model(batch[0])
    except TypeError:
        output = model(*batch)
    tensors = [each for each in _output_tensors(output) if each.requires_grad]
    loss = sum(each.float().square().mean() for each in tensors)
    assert isinstance(loss, Tensor), "the output depends on parameters"
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    for device in timing.cuda_devices(model):  # no other: that would make a context on it
        torch.cuda.synchronize(device)


def _output_tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [each for each in output if isinstance(each, Tensor)]
