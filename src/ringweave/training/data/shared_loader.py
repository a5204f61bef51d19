"""Loader that `prepare` returns: gives this rank its portion of every batch and accounts for every sample."""

import abc
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xxhash
from torch.utils.data import DataLoader, Subset

from ringweave.errors import TrainingError, explain
from ringweave.planning import balancing
from ringweave.planning.balancing import EpochOrder, SampleAccount
from ringweave.training.balancer import ShareBalancer
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.data.order import LoaderSpec, Portion, portion_of_rank
from ringweave.training.data.sources import BatchSource, IndexedSource, StreamSource
from ringweave.training.gradients import SampleWeights
from ringweave.training.timing import StepTimer


class SampleWeightTable:
    """Weights of all samples of the data set, as the script gives them."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = np.asarray(weights, dtype=np.float64)

    @property
    def digest(self) -> str:
        """Checksum of all weights; the same on all ranks."""
        return xxhash.xxh3_64_hexdigest(self._weights.data)

    def weigh(self, own: Portion, batch: Any) -> tuple[float, float]:
        """Return the weight of this rank's portion, and of the whole batch."""
        del batch
        return float(self._weights[own.indices].sum()), float(self._weights[own.batch].sum())

    @classmethod
    def of_script(cls, weights: Sequence[float], loader: DataLoader) -> Self:
        """Return the table of the weights that a script gives.

        Raises:
            TrainingError: They are no weights of the samples of this data set.
        """
        what, do = "weight of the samples", "Give one number for each sample of the data set, in its order"
        num_samples = len(loader.dataset) if isinstance(loader.dataset, Sized) else None
        if len(weights) != num_samples:
            expected = "a data set with a length" if num_samples is None else f"{num_samples}"
            raise TrainingError(explain(what, got=f"{len(weights)} of them", expected=expected, do=do))
        found = cls(weights)
        bad = np.flatnonzero(~(np.isfinite(found._weights) & (found._weights >= 0)))
        if len(bad):
            got = f"{found._weights[bad[0]]} of sample {bad[0]}"
            raise TrainingError(explain(what, got=got, expected="numbers from 0 on", do=do))
        return found


class BatchWeight:
    """Function of a script that returns the weight of a batch; ranks exchange the weights of their portions."""

    def __init__(self, weigh_batch: Callable[[Any], float], control: ControlGroup) -> None:
        self._weigh_batch, self._control = weigh_batch, control

    def weigh(self, own: Portion, batch: Any) -> tuple[float, Callable[[], float]]:
        """Return the weight of this rank's portion, and a function that waits for that of the whole batch.

        Raises:
            TrainingError: The function of the script returns no weight.
        """
        weight = float(self._weigh_batch(batch)) if len(own.indices) else 0.0
        if not (math.isfinite(weight) and weight >= 0):
            do = "Return the number of tokens, or the sum of weights, of the batch"
            raise TrainingError(explain("weight of a batch", got=weight, expected="a number from 0 on", do=do))
        return weight, self._control.start_sum(weight)


class PreparedLoader(abc.ABC):
    """Base of all loaders that `prepare` returns; reads the script's loader and never iterates it."""

    def __init__(
        self,
        loader: DataLoader,
        spec: LoaderSpec,
        weights: SampleWeights,
        sample_weights: SampleWeightTable | BatchWeight | None = None,
    ) -> None:
        self._loader, self._spec, self._weights, self._sample_weights = loader, spec, weights, sample_weights

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a train step over all ranks, or members."""
        return self._spec.batch_samples

    @property
    def fraction(self) -> float:
        """This rank's planned fraction of the present batch (of its ring's batch, in rings), by weight.

        To log the true mean of a value, multiply it by this fraction before summing over the ranks.
        """
        return self._weights.fraction

    def _weigh(self, own: Portion, batch: Any, batch_part: float = 1.0) -> None:
        """Set the weights of the batch that the next passes compute, from this rank's portion of it."""
        self._weights.set(len(own.indices), own.num_total, batch_part)
        if self._sample_weights is not None:
            self._weights.set_weights(*self._sample_weights.weigh(own, batch))

    @property
    @abc.abstractmethod
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in the next whole batch; in rings, of each rank of this ring."""

    @property
    @abc.abstractmethod
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass starts or continues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochAccount:
    """Account of the samples that all ranks together have trained on in one epoch."""

    epoch: int
    expected: SampleAccount
    """Samples of the epoch, from the position where it was resumed."""
    by_rank: tuple[SampleAccount, ...]
    """Samples that each rank received."""

    @property
    def total(self) -> SampleAccount:
        """Samples of all ranks together."""
        return sum(self.by_rank, SampleAccount())

    @property
    def is_exact(self) -> bool:
        """Every sample was trained on exactly once."""
        return self.total == self.expected


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedLoaderParts:
    """Objects that the loader shares with the rest of the training."""

    control: ControlGroup
    balancer: ShareBalancer
    weights: SampleWeights
    timer: StepTimer
    record_account: Callable[[EpochAccount], object]
    """Called on every rank with the account of each epoch."""


class SharedLoader(PreparedLoader):
    """Iterates like the DataLoader it was made of; each pass is an epoch, with its own order.

    A pass ends for all ranks at the same batch. Its position and its order do not depend on the number of ranks, so
    another number of ranks may load the state.
    """

    def __init__(
        self,
        loader: DataLoader,
        spec: LoaderSpec,
        seed: int,
        parts: SharedLoaderParts,
        sample_weights: SampleWeightTable | BatchWeight | None = None,
    ) -> None:
        super().__init__(loader, spec, parts.weights, sample_weights)
        self._seed, self._parts = seed, parts
        self._source: BatchSource = (
            StreamSource(loader, self._portion, spec.batch_samples)
            if spec.num_samples is None
            else IndexedSource(loader, self._portion)
        )
        self._next_number = 0
        self._next_epoch, self._start = 0, 0
        self._epoch, self._position = 0, 0
        self.account: EpochAccount | None = None
        """Account of the last completed epoch."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in the next whole batch."""
        return self._parts.balancer.shares_of(self._next_number)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass starts or continues."""
        return self._next_epoch

    def __len__(self) -> int:
        """Train steps in a whole epoch, the same on all ranks and for any number of them."""
        if self._spec.num_samples is None:
            raise TypeError("a loader of a stream has no length")
        whole, rest = divmod(self._spec.num_samples, self.batch_size)
        return whole + (rest > 0 and not self._spec.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's batches of the next epoch."""
        parts = self._parts
        self._epoch, self._position = self._next_epoch, self._start
        self._next_epoch, self._start = self._epoch + 1, 0
        order = self._epoch_order()
        batches = self._source.batches(order, self._next_number)
        received, num_read = SampleAccount(), 0
        while True:
            parts.balancer.pass_step_boundary(self._next_number)
            parts.timer.begin_step()
            found = next(batches, None)
            if found is None:
                break
            batch, own = found
            self._next_number += 1
            self._position += own.num_total
            num_read += own.num_total
            received += SampleAccount.from_indices(own.indices)
            self._weigh(own, batch)
            parts.timer.record_samples(len(own.indices))
            yield batch
        self._check_account(received, order.trained_indices(order.num_batches) if order else np.arange(num_read))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Without it, passes count up from 0."""
        self._next_epoch, self._start = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position: the same on all ranks, so any rank's state may be saved."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where the state was taken: the next pass is the rest of that epoch.

        Raises:
            TrainingError: The data are a stream, which cannot continue in the middle.
        """
        if self._spec.num_samples is None:
            raise TrainingError("state of a loader of a stream: one, expected none. Let the data set keep its place.")
        self._next_epoch, self._start, self._seed = state["epoch"], state["position"], state["seed"]
        if self._start >= self._epoch_end:
            self._next_epoch, self._start = self._next_epoch + 1, 0
        self._epoch, self._position = self._next_epoch, self._start

    def split(self, loader: DataLoader) -> DataLoader:
        """Return a loader for evaluation: this rank's part of its samples, each sample on exactly one rank.

        The parts are in the proportions of the present shares and in the order of the data set. Nothing is
        communicated: add up sums over ranks, and call `model.module`, since ranks have different numbers of batches.
        """
        samples = order.evaluation_samples(loader)
        own = balancing.rank_slice(balancing.scale_shares(self.shares, len(samples)), self._parts.control.rank)
        return subset_loader(loader, samples[own])

    @property
    def _epoch_end(self) -> int:
        return len(self) * self.batch_size if self._spec.drop_last else self._spec.num_samples or 0

    def _epoch_order(self) -> EpochOrder | None:
        if self._spec.num_samples is None:
            return None
        broadcast = self._parts.control.broadcast
        return EpochOrder(
            indices=order.epoch_indices(self._loader, self._spec, self._seed, self._epoch, broadcast),
            batch_samples=self.batch_size,
            drop_last=self._spec.drop_last,
            start=self._position,
        )

    def _portion(self, number: int, batch: np.ndarray) -> Portion:
        return portion_of_rank(batch, self._parts.balancer.shares_of(number), self._parts.control.rank)

    def _check_account(self, received: SampleAccount, expected: np.ndarray) -> None:
        """Compare the samples that all ranks received with those of the epoch."""
        by_rank = tuple(self._parts.control.gather_accounts(received))
        self.account = EpochAccount(epoch=self._epoch, expected=SampleAccount.from_indices(expected), by_rank=by_rank)
        self._parts.record_account(self.account)
        if not self.account.is_exact:
            raise TrainingError(
                f"account of epoch {self._epoch}: {self.account.total}, expected {self.account.expected}. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )


def subset_loader(loader: DataLoader, samples: Sequence[int]) -> DataLoader:
    """Return a loader like this one, over some of its samples."""
    return DataLoader(
        Subset(loader.dataset, samples),
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )
