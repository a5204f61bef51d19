"""Parts that the modules for trainers share: settings of the launcher, loaders, and gathering of unequal parts."""

import abc
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ringweave.environment import WorkerEnvironment
from ringweave.errors import UsageError
from ringweave.jobs import modes
from ringweave.planning import balancing
from ringweave.training import SharedLoader
from ringweave.training.data import order, sources
from ringweave.training.data.order import Portion
from ringweave.training.elastic.script_collectives import MAX_INPUT_BYTES

_MAX_DIMENSIONS = 8


def is_launched() -> bool:
    """Return True if a launcher has started this process, or it has a process group."""
    return "RANK" in os.environ or dist.is_initialized()


def is_elastic() -> bool:
    """Return True if this process is a worker of an elastic job."""
    return bool(WorkerEnvironment.from_environ(os.environ).coordinators)


def mode_of_launcher() -> str:
    """Return the mode: that of the launcher, else balanced.

    Raises:
        UsageError: It is one with a parameter server, or local.
    """
    mode = WorkerEnvironment.from_environ(os.environ).mode or modes.AUTO
    if mode in (*modes.SERVER_MODES, modes.LOCAL):
        do = "Start the trainer with --mode balanced, or write the loop yourself with ringweave.prepare"
        raise UsageError("mode of a trainer", got=mode, expected="sync, balanced or auto", do=do)
    return modes.BALANCED if mode == modes.AUTO else mode


# Loaders.


def whole_batch_loader(loader: DataLoader, factor: int) -> DataLoader:
    """Return the loader with `factor` times its batch size: that of a train step, from that of each process.

    One with a DistributedSampler stays as it is: `prepare` itself takes its batch size for that of each process.
    """
    is_regular = loader.batch_size is not None and type(loader.batch_sampler) is torch.utils.data.BatchSampler
    if factor == 1 or not is_regular or isinstance(loader.sampler, DistributedSampler):
        return loader  # `prepare` refuses batches of no fixed size
    assert loader.batch_size is not None, "regular"
    sampler: dict[str, Any] = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return DataLoader(
        loader.dataset,
        batch_size=factor * loader.batch_size,
        drop_last=loader.drop_last,
        **sampler,
        **sources.loading_options(loader),
    )


def has_index(loader: DataLoader) -> bool:
    """Return True if the batches of a loader for evaluation can be shared out."""
    is_regular = type(loader.batch_sampler) in (torch.utils.data.BatchSampler, type(None))
    return loader.batch_size is not None and is_regular and not isinstance(loader.dataset, IterableDataset)


class BatchOwner(abc.ABC):
    """Loader that knows this process's portion of its present batch."""

    @property
    @abc.abstractmethod
    def portion(self) -> Portion:
        """This process's portion of the present batch."""

    @property
    def num_own(self) -> int:
        """Samples of its own; none while it computes a placeholder sample, whose results count nowhere."""
        return len(self.portion.indices)


class PreparedLoader(BatchOwner):
    """Loader of the training, as `prepare` has returned it, and its place in the data."""

    def __init__(self, prepared: SharedLoader) -> None:
        self.prepared, self.dataset = prepared, prepared.dataset

    def __len__(self) -> int:
        """Train steps, or batches to accumulate, in a whole epoch."""
        return len(self.prepared)

    @property
    def portion(self) -> Portion:
        """This process's portion of the present batch."""
        assert self.prepared.latest_portion is not None, "a batch was handed out"
        return self.prepared.latest_portion

    @property
    def misses_samples(self) -> bool:
        """The last train step misses samples of a lost worker, which come as the next batches."""
        return self.prepared.misses_samples

    @property
    def has_joined_late(self) -> bool:
        """This worker joined while others were training."""
        return self.prepared.has_joined_late

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which begins in the middle where it was resumed or joined there."""
        if self.prepared.is_elastic or epoch != self.prepared.next_epoch:
            self.prepared.set_epoch(epoch)

    def start_at(self, epoch: int, num_batches: int) -> None:
        """Let the next pass begin in this epoch, after so many batches."""
        position = num_batches * self.prepared.batch_size
        self.prepared.load_state_dict({**self.prepared.state_dict(), "epoch": epoch, "position": position})

    def state_dict(self) -> dict[str, int]:
        return self.prepared.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.prepared.load_state_dict(state)


class PartLoader(BatchOwner):
    """Loader of an evaluation: each pass hands out every batch in parts."""

    def __init__(self, loader: DataLoader, slice_of: Callable[[int], slice]) -> None:
        """`loader` has the batches of all processes; `slice_of` returns this one's slice of so many samples."""
        self._loader, self._slice_of = loader, slice_of
        self.dataset = loader.dataset
        self._portion: Portion | None = None
        num_samples, batch_size = len(order.evaluation_samples(loader)), loader.batch_size
        assert batch_size is not None, "checked with the samples"
        self._num_batches = num_samples // batch_size if loader.drop_last else -(-num_samples // batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this process's parts; one without samples of a batch gets a placeholder sample."""
        portions = [Portion(indices=each[self._slice_of(len(each))], batch=each) for each in self._batches()]
        loader = sources.with_batch_sampler(self._loader, [each.samples_to_load for each in portions])
        for batch, portion in zip(loader, portions, strict=True):
            self._portion = portion
            yield batch

    @property
    def portion(self) -> Portion:
        """This process's portion of the present batch."""
        assert self._portion is not None, "a batch was handed out"
        return self._portion

    def _batches(self) -> Iterator[Any]:
        samples = torch.tensor(order.evaluation_samples(self._loader), dtype=torch.int64).numpy()
        assert self._loader.batch_size is not None, "checked with the samples"
        for index in range(self._num_batches):
            yield samples[index * self._loader.batch_size :][: self._loader.batch_size]


def equal_slice(num_samples: int) -> slice:
    """Return this process's slice of so many samples, equal to that of the others."""
    if not dist.is_initialized():
        return slice(0, num_samples)
    shares = balancing.scale_shares((1,) * dist.get_world_size(), num_samples)
    return balancing.rank_slice(shares, dist.get_rank())


# Gathering.


def gather_rows(rows: Tensor) -> Tensor:
    """Gather rows from all processes, which may have different numbers of them."""
    return torch.cat(gather_parts(rows[None] if rows.ndim == 0 else rows))


def gather_parts(part: Tensor, group: object = None) -> list[Tensor]:
    """Return the tensors of all processes by rank; their shapes may differ, up to 7 dimensions.

    Under `--elastic` pieces of up to 1 MiB are sent, so that a worker that dies meanwhile ends nothing. The output of a
    worker that is catching up is a copy of another one's there: by the sender's rank, which is sent beside the shape,
    each counts once. So it is a function for the state of metrics too; `group` is not used, as all processes take part.
    """
    del group
    part = part.detach().contiguous()
    header = torch.zeros(1 + _MAX_DIMENSIONS, dtype=torch.int64)
    header[: 2 + part.ndim] = torch.tensor([dist.get_rank(), part.ndim, *part.shape])
    headers = [each.tolist() for each in _all_gather(header.to(part.device))]
    shapes = [each[2 : 2 + each[1]] for each in headers]
    padded = part.new_zeros(max(int(math.prod(shape)) for shape in shapes))
    padded[: part.numel()] = part.flatten()
    pieces = [_all_gather(piece) for piece in padded.split(max(1, MAX_INPUT_BYTES // part.element_size()))]
    num_outputs = min(len(headers), *(len(piece) for piece in pieces))
    senders = {headers[index][0]: index for index in reversed(range(num_outputs))}
    return [
        torch.cat([piece[index] for piece in pieces])[: math.prod(shapes[index])].view(shapes[index])
        for _, index in sorted(senders.items())
    ]


def _all_gather(tensor: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    if tensor.numel():
        dist.all_gather(gathered, tensor)
    return gathered
