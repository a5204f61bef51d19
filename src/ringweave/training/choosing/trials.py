"""A trial of the script's own model on its own data, for a second at most: how fast this rank computes.

`prepare` does not know the script's loss. A trial computes the model's output and the gradients of its mean square,
which takes as long but for the loss itself.
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
from ringweave.planning.balancing.estimating import BLOCK_S
from ringweave.training import reducing, speed_test
from ringweave.training.speed_test import Referee
from ringweave.training.timing import HostTimeline

BUDGET_S = 1.0
"""How long trials go on, after one to warm up."""
_MOST_S = 5.0
"""How long, where there are fewer than `_LEAST_BLOCKS` by then; one trial that is longer is made once."""
_MOST_BLOCKS = 8
_LEAST_BLOCKS = 4
"""Of fewer, one that stalled would be taken for the rank's speed."""
_STALL = 1.5
"""Times that are so many times the median are stalls of the machine; smaller differences are noise of a short test."""
_START = 0.05
"""Part of all steps that are long because of the start."""
_MOST_KINDS = 64
"""Times of a rank that a forecast reckons with, all equally likely."""
_MOST_TEXT = 300
"""Characters of a problem that are told to the other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What trials have shown."""

    sample_s: list[float] | None = None
    """Seconds that a sample has taken in each block of trials; None where the model cannot be tried out."""
    problem: str = ""
    """Why it cannot."""


def measure(
    model: nn.Module,
    loader: DataLoader,
    num_samples: int,
    timeline: HostTimeline | None = None,
    referee: Referee | None = None,
) -> Trial:
    """How long a sample takes.

    Args:
        model: The module, which is left as it was. Of one under DistributedDataParallel it is the module inside: ranks
            make as many trials as fit into the time, and must not wait for each other in them.
        loader: Where samples come from: the first of the data set, without drawing from the sampler.
        num_samples: Samples of a trial.
        timeline: Gives seconds; None is the clock, without what a quota's pauses add where the processor computes.
        referee: Says how many trials all ranks make, and hears when this one has made them; None makes as many as fit.

    Raises:
        PeerError: Another rank does not come to the test.
    """
    if isinstance(loader.dataset, IterableDataset):
        return Trial(problem="the data set is a stream")
    inner = reducing.inside(model)
    try:
        with speed_test.leaving_no_trace(inner):
            batch = first_batch(loader, num_samples, inner)
            try_out(inner, batch)
            on_host = next(inner.parameters()).device.type == "cpu"
            timeline = timeline or (HostTimeline.of_this_process() if on_host else HostTimeline())
            blocks_s = _counted_blocks(lambda: try_out(inner, batch), timeline, referee)
            return Trial(sample_s=[seconds / num_samples for seconds in blocks_s])
    except PeerError:
        raise
    except Exception as error:  # the script's own code; what it does not take here it may well take in training
        return Trial(problem=f"{type(error).__name__}: {error}"[:_MOST_TEXT])


def settle(sample_s: Sequence[Sequence[float]]) -> list[list[float]]:
    """What steps will take each rank: its median, and stalls as often as all ranks together have seen them.

    A rank alone has tried too few times to say how often; so stalls of all are taken to be of one kind, and what is
    less than a stall to be noise.
    """
    middles = [statistics.median(each) for each in sample_s]
    factors = [time_s / middle for each, middle in zip(sample_s, middles, strict=True) for time_s in each]
    stalls = [factor for factor in factors if factor > _STALL]
    if not stalls:
        return [[middle] for middle in middles]
    return _of_kinds(middles, [1.0] * (len(factors) - len(stalls)) + stalls)


def spread(sample_s: Sequence[Sequence[float]]) -> list[list[float]]:
    """What steps will take each rank, by steps that it has taken: its median, as much shorter or longer as any's were.

    Whole steps are what ranks wait for each other in, so what differs from one to the next is no noise of a short test.
    A few of the longest are left out: what has just been started has such steps once and never again.
    """
    middles = [statistics.median(each) for each in sample_s]
    factors = sorted(time_s / middle for each, middle in zip(sample_s, middles, strict=True) for time_s in each)
    return _of_kinds(middles, factors[: len(factors) - int(_START * len(factors))])


def _of_kinds(middles: Sequence[float], factors: Sequence[float]) -> list[list[float]]:
    """Each rank's time by all of these factors; of very many, by some that stand for equal parts of them."""
    kinds, count = sorted(factors), min(len(factors), _MOST_KINDS)
    kinds = [kinds[(2 * index + 1) * len(kinds) // (2 * count)] for index in range(count)]
    return [[middle * factor for factor in kinds] for middle in middles]


def _counted_blocks(once: Callable[[], None], timeline: HostTimeline, referee: Referee | None) -> list[float]:
    """Blocks of trials; the referee hears when there were as many as all ranks make, which may be after the blocks."""
    if referee is None:
        return _blocks(once, timeline)
    begin = timeline.mark()
    once()
    num_left = referee.start(timeline.seconds((begin, timeline.mark())))

    def counted() -> None:
        nonlocal num_left
        once()
        num_left -= 1
        if num_left == 0:
            referee.report()

    found = _blocks(counted, timeline)
    while num_left > 0:
        counted()
    return found


def _blocks(once: Callable[[], None], timeline: HostTimeline) -> list[float]:
    """Seconds of a trial, means over blocks: single ones say little where the kernel throttles in periods."""
    found: list[float] = []
    began = timeline.mark()
    while len(found) < _MOST_BLOCKS:
        if found and timeline.seconds((began, timeline.mark())) >= (
            BUDGET_S if len(found) >= _LEAST_BLOCKS else _MOST_S
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
    """The first samples of the data set, again from the beginning if it has fewer, where the model is."""
    total = len(loader.dataset)  # pyrefly: ignore - it is no stream
    collate = loader.collate_fn or torch.utils.data.default_collate
    batch = collate([loader.dataset[index % total] for index in range(num_samples)])
    device = next(model.parameters()).device
    if isinstance(batch, (list, tuple)):
        return [each.to(device) if isinstance(each, Tensor) else each for each in batch]
    return [batch.to(device) if isinstance(batch, Tensor) else batch]


def try_out(model: nn.Module, batch: list[Any]) -> None:
    """Forward and backward, by the first part of a batch, or all of it where the model takes that."""
    try:
        output = model(batch[0])
    except TypeError:
        output = model(*batch)
    tensors = [each for each in _tensors(output) if each.requires_grad]
    loss = sum(each.float().square().mean() for each in tensors)
    assert isinstance(loss, Tensor), "the output depends on parameters"
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [each for each in output if isinstance(each, Tensor)]
