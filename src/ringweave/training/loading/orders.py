"""In which order a loader's samples are trained on, and how many make a batch: read off the user's loader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ringweave.errors import TrainingError, explain
from ringweave.planning import balancing
from ringweave.planning.balancing.epochs import Indices


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What the user's loader says."""

    batch_samples: int
    """Samples of a train step over all ranks."""
    num_samples: int | None
    """Samples of an epoch; None of a stream."""
    order: str
    """`shuffled`, `sequential`, `sampled` (by a sampler of the user's) or `stream`."""
    drop_last: bool
    num_prefetched: int
    """Batches that are loaded ahead."""


def read(loader: DataLoader) -> Reading:
    """What the user's loader says.

    `batch_size` is that of one train step, as in the script that runs alone; only a loader with a DistributedSampler
    has its batch size for each rank.

    Raises:
        TrainingError: Its batches cannot be shared.
    """
    batch_samples = _fixed_batch(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _read_stream(loader, batch_samples)
    sampler, drop_last = loader.sampler, loader.drop_last
    num_samples = len(sampler)  # pyrefly: ignore - every sampler of a data set with an index has a length
    order = "sampled"
    if isinstance(sampler, DistributedSampler):
        batch_samples, num_samples = batch_samples * sampler.num_replicas, len(sampler.dataset)  # pyrefly: ignore
        order, drop_last = "shuffled" if sampler.shuffle else "sequential", drop_last or sampler.drop_last
    elif type(sampler) is RandomSampler and not sampler.replacement and num_samples == len(sampler.data_source):
        order = "shuffled"
    elif type(sampler) is SequentialSampler:
        order = "sequential"
    return Reading(
        batch_samples=batch_samples,
        num_samples=num_samples,
        order=order,
        drop_last=drop_last,
        num_prefetched=loader.num_workers * (loader.prefetch_factor or 0),
    )


def seed_of(loader: DataLoader) -> int:
    """What shuffling depends on: the sampler's own seed, the loader's generator, or `torch.manual_seed`."""
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler.seed
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    return (generator.initial_seed() if generator is not None else torch.initial_seed()) % 2**63


def indices_of(
    loader: DataLoader, reading: Reading, seed: int, epoch: int, broadcast: Callable[[torch.Tensor], torch.Tensor]
) -> Indices:
    """All samples of an epoch in order, the same on all ranks.

    A sampler of the user's is asked on every rank, to keep its generator in step, and rank 0's answer counts.
    """
    assert reading.num_samples is not None
    if reading.order == "shuffled":
        return balancing.shuffled(reading.num_samples, seed, epoch)
    if reading.order == "sequential":
        return np.arange(reading.num_samples)
    drawn = torch.tensor([int(index) for index in loader.sampler], dtype=torch.int64)
    return broadcast(drawn).numpy()


def evaluated(loader: DataLoader) -> Sequence[int]:
    """The samples of a loader for evaluation, in the order of the data set: all, or those of the sampler.

    Nothing is communicated, so ranks have to find the same ones.

    Raises:
        TrainingError: It has none with an index, draws some anew each time, or its batches cannot be cut anew.
    """
    _fixed_batch(loader)
    sampler, what = loader.sampler, "loader to be split"
    if isinstance(loader.dataset, IterableDataset):
        do = "Let the stream itself give each rank its part"
        raise TrainingError(explain(what, got="one of a stream", expected="a data set with an index", do=do))
    total = len(loader.dataset)  # pyrefly: ignore - every data set with an index has a length
    draws_anew = isinstance(sampler, WeightedRandomSampler) or (
        isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != total)
    )
    if draws_anew:
        expected, do = "samples that are the same for every rank", "Name them by a Subset of the data set"
        raise TrainingError(explain(what, got=f"one with {type(sampler).__name__}", expected=expected, do=do))
    if isinstance(sampler, (RandomSampler, SequentialSampler, DistributedSampler)):
        return range(total)
    return sorted(int(index) for index in sampler)


def _fixed_batch(loader: DataLoader) -> int:
    """Samples of a batch."""
    if loader.batch_size is None or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        what, got = "batches of the loader", type(loader.batch_sampler).__name__
        do = "Give the DataLoader batch_size, and a sampler where needed, but no batch_sampler"
        raise TrainingError(explain(what, got=got, expected="batches of a fixed size", do=do))
    return loader.batch_size


def _read_stream(loader: DataLoader, batch_size: int) -> Reading:
    if loader.num_workers:
        do = "Set num_workers=0, or use a data set with an index"
        raise TrainingError(explain("workers of a loader of a stream", got=loader.num_workers, expected="none", do=do))
    return Reading(
        batch_samples=batch_size, num_samples=None, order="stream", drop_last=loader.drop_last, num_prefetched=0
    )
