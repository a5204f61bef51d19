"""Model trial: runs the script's own model on its own data for about a second, to measure this rank's speed.

`prepare` does not know the script's loss. A trial computes the model's output and the gradients of its mean square,
which takes as long except for the loss itself.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ringweave.errors import PeerError
from ringweave.planning.balancing.speed import BLOCK_S
from ringweave.training import gradients, speed_test, timing
from ringweave.training.speed_test import SpeedTestParticipant
from ringweave.training.timing import HostTimeline

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
        with speed_test.preserve_model_state(inner):
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
