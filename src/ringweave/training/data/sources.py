"""Batch sources: data sets with an index, and streams."""

import abc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ringweave.planning.balancing import EpochOrder
from ringweave.training.data.order import Portion

PortionFunction = Callable[[int, np.ndarray], Portion]
"""(number of the batch, its samples) -> this rank's portion."""


class BatchSource(abc.ABC):
    """One pass over the data: this rank's batches, each with its portion."""

    @abc.abstractmethod
    def batches(self, order: EpochOrder | None, first_number: int) -> Iterator[tuple[Any, Portion]]:
        """Start a pass; batches are numbered from `first_number` on."""


class IndexedSource(BatchSource):
    """A data set with an index, read by a DataLoader with its workers, pinned memory and collation."""

    def __init__(self, loader: DataLoader, portion_of: PortionFunction) -> None:
        self._portions = _PortionSampler(portion_of)
        self._loader = with_batch_sampler(loader, self._portions)

    def batches(self, order: EpochOrder | None, first_number: int) -> Iterator[tuple[Any, Portion]]:
        """Iterate over batches; the DataLoader keeps the order of its sampler, so portions wait in a queue."""
        assert order is not None
        self._portions.begin(order, first_number)
        for batch in self._loader:
            yield batch, self._portions.handed_out.popleft()


class _PortionSampler(Iterable[list[int]]):
    """The DataLoader's batch sampler; called ahead of time, as far as the loader's workers load ahead."""

    def __init__(self, portion_of: PortionFunction) -> None:
        self._portion_of = portion_of
        self._order: EpochOrder | None = None
        self._first_number = 0
        self.handed_out: deque[Portion] = deque()

    def begin(self, order: EpochOrder, first_number: int) -> None:
        self._order, self._first_number = order, first_number
        self.handed_out.clear()

    def __iter__(self) -> Iterator[list[int]]:
        assert self._order is not None
        for index in range(self._order.num_batches):
            self.handed_out.append(self._portion_of(self._first_number + index, self._order.batch(index)))
            yield self.handed_out[-1].samples_to_load

    def __len__(self) -> int:
        return self._order.num_batches if self._order else 0


class StreamSource(BatchSource):
    """An IterableDataset: every rank reads the whole stream, and collates its own part of each batch."""

    def __init__(self, loader: DataLoader, portion_of: PortionFunction, batch_samples: int) -> None:
        self._loader, self._portion_of, self._batch_samples = loader, portion_of, batch_samples

    def batches(self, order: EpochOrder | None, first_number: int) -> Iterator[tuple[Any, Portion]]:
        """Iterate over batches; samples are numbered as they come."""
        num_read, samples = 0, []
        number = first_number
        for sample in self._loader.dataset:
            samples.append(sample)
            if len(samples) == self._batch_samples:
                yield self._collated(samples, num_read, number)
                num_read, samples, number = num_read + len(samples), [], number + 1
        if samples and not self._loader.drop_last:
            yield self._collated(samples, num_read, number)

    def _collated(self, samples: list[Any], num_read: int, number: int) -> tuple[Any, Portion]:
        own = self._portion_of(number, np.arange(num_read, num_read + len(samples)))
        collate: Any = self._loader.collate_fn
        return collate([samples[index - num_read] for index in own.samples_to_load]), own


def load_batch(loader: DataLoader, samples: list[int]) -> Any:
    """Load one batch of a loader's data set in this process; no state of any random generator changes."""
    alone = DataLoader(
        loader.dataset,
        batch_sampler=[samples],
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=torch.Generator(),
    )
    return next(iter(alone))


def with_batch_sampler(loader: DataLoader, batch_sampler: Iterable[list[int]]) -> DataLoader:
    """Return the same loader with other batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=True,
    )
