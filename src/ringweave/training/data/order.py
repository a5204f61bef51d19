"""Order of the samples and size of a batch, read from the user's loader; and a rank's portion of a batch."""

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

from ringweave.errors import TrainingError
from ringweave.planning import balancing
from ringweave.planning.balancing.epochs import Indices
from ringweave.planning.balancing.shares import Shares


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpec:
    """Properties of the user's loader."""

    batch_samples: int
    """Samples of a train step over all ranks."""
    num_samples: int | None
    """Samples of an epoch; None for a stream."""
    order: str
    """`shuffled`, `sequential`, `sampled` (by the user's own sampler) or `stream`."""
    drop_last: bool
    num_prefetched: int
    """Batches that are loaded ahead."""

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch, without those that `drop_last` leaves out; 0 for a stream."""
        total = self.num_samples or 0
        return total - total % self.batch_samples if self.drop_last else total


def read_loader(loader: DataLoader) -> LoaderSpec:
    """Read the properties of the user's loader.

    `batch_size` is the size of one train step, as in a single-process script; only with a DistributedSampler it is the
    size on each rank.

    Raises:
        TrainingError: Its batches cannot be shared.
    """
    batch_samples = _fixed_batch_size(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _stream_spec(loader, batch_samples)
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
    return LoaderSpec(
        batch_samples=batch_samples,
        num_samples=num_samples,
        order=order,
        drop_last=drop_last,
        num_prefetched=loader.num_workers * (loader.prefetch_factor or 0),
    )


def shuffle_seed(loader: DataLoader) -> int:
    """Return the seed of the shuffling: of the sampler, the loader's generator, or `torch.manual_seed`."""
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler.seed
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    return (generator.initial_seed() if generator is not None else torch.initial_seed()) % 2**63


def epoch_indices(
    loader: DataLoader, spec: LoaderSpec, seed: int, epoch: int, broadcast: Callable[[torch.Tensor], torch.Tensor]
) -> Indices:
    """Return all samples of an epoch in order, the same on all ranks.

    The user's own sampler runs on every rank, to keep its generator in step; rank 0's order is used.
    """
    assert spec.num_samples is not None
    if spec.order == "shuffled":
        return balancing.shuffle_indices(spec.num_samples, seed, epoch)
    if spec.order == "sequential":
        return np.arange(spec.num_samples)
    drawn = torch.tensor([int(index) for index in loader.sampler], dtype=torch.int64)
    return broadcast(drawn).numpy()


def evaluation_samples(loader: DataLoader) -> Sequence[int]:
    """Return the samples of a loader for evaluation, in data set order: all, or those of its sampler.

    Nothing is communicated, so all ranks must find the same samples.

    Raises:
        TrainingError: The data are a stream, the sampler draws other samples each time, or batch sizes vary.
    """
    _fixed_batch_size(loader)
    sampler, what = loader.sampler, "loader to be split"
    if isinstance(loader.dataset, IterableDataset):
        do = "Let the stream itself give each rank its part"
        raise TrainingError(what, got="one of a stream", expected="a data set with an index", do=do)
    total = len(loader.dataset)  # pyrefly: ignore - every data set with an index has a length
    draws_anew = isinstance(sampler, WeightedRandomSampler) or (
        isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != total)
    )
    if draws_anew:
        expected, do = "samples that are the same for every rank", "Name them by a Subset of the data set"
        raise TrainingError(what, got=f"one with {type(sampler).__name__}", expected=expected, do=do)
    if isinstance(sampler, (RandomSampler, SequentialSampler, DistributedSampler)):
        return range(total)
    return sorted(int(index) for index in sampler)


def _fixed_batch_size(loader: DataLoader) -> int:
    if loader.batch_size is None or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        what, got = "batches of the loader", type(loader.batch_sampler).__name__
        do = "Give the DataLoader batch_size, and a sampler where needed, but no batch_sampler"
        raise TrainingError(what, got=got, expected="batches of a fixed size", do=do)
    return loader.batch_size


def _stream_spec(loader: DataLoader, batch_size: int) -> LoaderSpec:
    if loader.num_workers:
        do = "Set num_workers=0, or use a data set with an index"
        raise TrainingError("workers of a loader of a stream", got=loader.num_workers, expected="none", do=do)
    return LoaderSpec(
        batch_samples=batch_size, num_samples=None, order="stream", drop_last=loader.drop_last, num_prefetched=0
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Portion:
    """Portion of one batch that a rank computes."""

    indices: Indices
    """Its samples, (num_samples,) int64; may be empty in a short last batch."""
    batch: Indices
    """Samples of the batch over all ranks."""

    @property
    def num_total(self) -> int:
        """Number of samples of the batch over all ranks."""
        return len(self.batch)

    @property
    def samples_to_load(self) -> list[int]:
        """Samples to request from the data set: never empty, since DDP needs a pass of every rank.

        A rank without samples of its own computes two of the batch, if there are two, and discards the result: layers
        that normalise over a batch reject a single one.
        """
        return self.indices.tolist() or self.batch[:2].tolist()


def portion_of_rank(batch: Indices, shares: Shares, rank: int) -> Portion:
    """Return a rank's portion of a batch; the shares are scaled if their sum differs, as in the last batch."""
    if len(batch) != sum(shares):
        shares = balancing.scale_shares(shares, len(batch))
    return Portion(indices=batch[balancing.rank_slice(shares, rank)], batch=batch)


def min_batch_samples(shares: Shares) -> int:
    """Return the smallest batch that leaves no rank with a single sample, which batch norms reject.

    It is at most a whole batch.
    """
    whole = sum(shares)
    return min(whole, -(-2 * whole // min(share for share in shares if share)))
