"""The loader that `prepare` returns: this rank's part of every batch, and the account of all of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Subset

from ringweave.errors import TrainingError
from ringweave.planning import balancing
from ringweave.planning.balancing import Account, EpochOrder
from ringweave.training.balancer import Balancer
from ringweave.training.control import Control
from ringweave.training.loading import orders
from ringweave.training.loading.orders import Reading
from ringweave.training.loading.portions import Portion, portion
from ringweave.training.loading.prepared import PreparedLoader
from ringweave.training.loading.sources import IndexedSource, Source, StreamSource
from ringweave.training.reducing import SampleWeights
from ringweave.training.timing import StepTimer


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochAccount:
    """What all ranks together have trained on in one epoch."""

    epoch: int
    expected: Account
    """The samples that the epoch consists of, from where it was resumed."""
    by_rank: tuple[Account, ...]
    """What each rank was given."""

    @property
    def total(self) -> Account:
        """All ranks together."""
        return sum(self.by_rank, Account())

    @property
    def is_exact(self) -> bool:
        """Every sample exactly once."""
        return self.total == self.expected


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a loader works with; all of it is shared with the rest of the training."""

    control: Control
    balancer: Balancer
    weights: SampleWeights
    timer: StepTimer
    note: Callable[[EpochAccount], object]
    """Called on every rank with the account of each epoch."""


class SharedLoader(PreparedLoader):
    """Iterates like the DataLoader that it was made of; each pass is an epoch, with an order of its own.

    A pass ends for all ranks at the same batch. Its position and the order depend on no number of ranks, so a state
    may be loaded by another number of them.
    """

    def __init__(self, loader: DataLoader, reading: Reading, seed: int, parts: Parts) -> None:
        super().__init__(loader, reading, parts.weights)
        self._seed, self._parts = seed, parts
        self._source: Source = (
            StreamSource(loader, self._portion, reading.batch_samples)
            if reading.num_samples is None
            else IndexedSource(loader, self._portion)
        )
        self._next_number = 0
        self._next_epoch, self._start = 0, 0
        self._epoch, self._position = 0, 0
        self.account: EpochAccount | None = None
        """That of the last epoch that was completed."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in the next whole batch."""
        return self._parts.balancer.shares_of(self._next_number)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass is, or is the rest of."""
        return self._next_epoch

    def __len__(self) -> int:
        """Train steps in a whole epoch, the same on all ranks and for any number of them."""
        if self._reading.num_samples is None:
            raise TypeError("a loader of a stream has no length")
        whole, rest = divmod(self._reading.num_samples, self.batch_size)
        return whole + (rest > 0 and not self._reading.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next epoch."""
        parts = self._parts
        self._epoch, self._position = self._next_epoch, self._start
        self._next_epoch, self._start = self._epoch + 1, 0
        order = self._order()
        batches = self._source.batches(order, self._next_number)
        given, num_read = Account(), 0
        while True:
            parts.balancer.border(self._next_number)
            parts.timer.begin()
            found = next(batches, None)
            if found is None:
                break
            batch, own = found
            self._next_number += 1
            self._position += own.num_total
            num_read += own.num_total
            given += Account.of(own.indices)
            parts.weights.set(len(own.indices), own.num_total)
            parts.timer.give(len(own.indices))
            yield batch
        self._settle(given, order.passed(order.num_batches) if order else np.arange(num_read))

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass is. Without it passes count up from 0."""
        self._next_epoch, self._start = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Epoch and position: the same on all ranks, so that of any rank may be kept."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the state was taken: the next pass is the rest of that epoch.

        Raises:
            TrainingError: The data are a stream, which cannot go on in its midst.
        """
        if self._reading.num_samples is None:
            raise TrainingError("state of a loader of a stream: one, expected none. Let the data set keep its place.")
        self._next_epoch, self._start, self._seed = state["epoch"], state["position"], state["seed"]
        if self._start >= self._end:
            self._next_epoch, self._start = self._next_epoch + 1, 0
        self._epoch, self._position = self._next_epoch, self._start

    def split(self, loader: DataLoader) -> DataLoader:
        """A loader for evaluation: this rank's part of its samples, each sample on exactly one rank.

        The parts are in the proportions of the present shares and in the order of the data set. Nothing is
        communicated: add up sums over ranks, and call `model.module`, since ranks have different numbers of batches.
        """
        samples = orders.evaluated(loader)
        own = balancing.cut(balancing.scale(self.shares, len(samples)), self._parts.control.rank)
        return subset(loader, samples[own])

    @property
    def _end(self) -> int:
        """Position at which an epoch is over."""
        return len(self) * self.batch_size if self._reading.drop_last else self._reading.num_samples or 0

    def _order(self) -> EpochOrder | None:
        if self._reading.num_samples is None:
            return None
        broadcast = self._parts.control.broadcast
        return EpochOrder(
            indices=orders.indices_of(self._loader, self._reading, self._seed, self._epoch, broadcast),
            batch_samples=self.batch_size,
            drop_last=self._reading.drop_last,
            start=self._position,
        )

    def _portion(self, number: int, batch: np.ndarray) -> Portion:
        return portion(batch, self._parts.balancer.shares_of(number), self._parts.control.rank)

    def _settle(self, given: Account, expected: np.ndarray) -> None:
        """Compare what all ranks were given with what the epoch consists of."""
        by_rank = tuple(self._parts.control.gather_accounts(given))
        self.account = EpochAccount(epoch=self._epoch, expected=Account.of(expected), by_rank=by_rank)
        self._parts.note(self.account)
        if not self.account.is_exact:
            raise TrainingError(
                f"account of epoch {self._epoch}: {self.account.total}, expected {self.account.expected}. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )


def subset(loader: DataLoader, samples: Sequence[int]) -> DataLoader:
    """A loader like this one, of some of its samples."""
    return DataLoader(
        Subset(loader.dataset, samples),
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )
