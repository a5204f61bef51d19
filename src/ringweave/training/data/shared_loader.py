"""Loader that `prepare` returns: gives this rank its portion of every batch and accounts for every sample."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Self

import numpy as np
import xxhash
from torch.utils.data import DataLoader, Subset

from ringweave.errors import TrainingError
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.data.order import Portion
from ringweave.training.data.sources import OrderSource, SampleSource
from ringweave.training.elastic.accounting import EpochAccount
from ringweave.training.gradients import SampleWeights
from ringweave.training.memory import microbatches
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

    def weigh_range(self, own: Portion, batch: Any, first: int, until: int) -> float:
        """Return the weight of some samples of this rank's portion."""
        del batch
        return float(self._weights[own.indices[first:until]].sum())

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
            raise TrainingError(what, got=f"{len(weights)} of them", expected=expected, do=do)
        found = cls(weights)
        bad = np.flatnonzero(~(np.isfinite(found._weights) & (found._weights >= 0)))
        if len(bad):
            got = f"{found._weights[bad[0]]} of sample {bad[0]}"
            raise TrainingError(what, got=got, expected="numbers from 0 on", do=do)
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
            raise TrainingError("weight of a batch", got=weight, expected="a number from 0 on", do=do)
        return weight, self._control.start_sum(weight)

    def weigh_range(self, own: Portion, batch: Any, first: int, until: int) -> float:
        """Return the weight of some samples of this rank's portion."""
        return float(self._weigh_batch(microbatches.slice_samples(batch, len(own.indices), first, until)))


class SharedLoader:
    """Iterates like the DataLoader it was made of; each pass is an epoch, with its own order.

    In a fixed set of ranks a pass ends for all at the same batch. Its position and its order do not depend on the
    number of ranks, so another number of ranks may load the state. In an elastic job a member that joins later
    continues where the others are: the passes of finished epochs yield no batch. Use `epochs` instead of `range` to
    skip them. In rings a pass is an epoch of all rings together, so rings have different numbers of batches.
    """

    def __init__(
        self,
        loader: DataLoader,
        source: SampleSource,
        weights: SampleWeights,
        timer: StepTimer,
        sample_weights: SampleWeightTable | BatchWeight | None = None,
    ) -> None:
        """Create it. The script's loader is read by the source, and never iterated."""
        self.source = source
        self._loader, self._weights, self._timer, self._sample_weights = loader, weights, timer, sample_weights
        self._members = source.membership
        self.latest_portion: Portion | None = None
        """This rank's portion of the batch that was handed out last."""

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a train step over all ranks, or members."""
        return self.source.spec.batch_samples

    @property
    def fraction(self) -> float:
        """This rank's planned fraction of the present batch (of its ring's batch, in rings), by weight.

        To log the true mean of a value, multiply it by this fraction before summing over the ranks.
        """
        return self._weights.fraction

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in the next whole batch; in rings, of each rank of this ring."""
        return self.source.shares

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members, by rank; in rings, of those of this ring. In a fixed set they are the ranks."""
        return self._members.members

    @property
    def account(self) -> EpochAccount | None:
        """Account of the last completed epoch."""
        return self.source.account

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass starts or continues; the members' epoch if it is later."""
        return self.source.next_epoch

    def __len__(self) -> int:
        """Train steps in a whole epoch, of all ranks and rings together, for any number of them."""
        if self.source.spec.num_samples is None:
            raise TypeError("a loader of a stream has no length")
        whole, rest = divmod(self.source.spec.epoch_samples, self.batch_size)
        return whole + (rest > 0)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's batches of the next epoch; over none if the other members have finished it.

        Raises:
            TrainingError: In an elastic job, the pass before was broken off before its first train step.
        """
        begun = self.source.begin_pass()
        if begun is None:
            return
        try:
            for batch, own, batch_part in self.source.batches(begun):
                self.latest_portion = own
                self._weights.set(len(own.indices), own.num_total, batch_part)
                if self._sample_weights is not None:
                    weigh_range = functools.partial(self._sample_weights.weigh_range, own, batch)
                    self._weights.set_weights(*self._sample_weights.weigh(own, batch), weigh_range)
                self._timer.record_samples(len(own.indices))
                yield batch
        except GeneratorExit:
            self.source.abort_pass(begun)
            raise
        self.source.end_pass(begun)

    def set_batch_weight(self, weight: float, total_weight: float) -> None:
        """Set other weights for the present batch: of this rank's portion, and the sum that the gradient divides by.

        For trainers that count tokens themselves, before the backward pass.
        """
        self._weights.set_weights(weight, total_weight)

    @property
    def timer(self) -> StepTimer:
        return self._timer

    @property
    def is_elastic(self) -> bool:
        """Members may come and go."""
        return self._members.is_elastic

    @property
    def is_last_batch(self) -> bool:
        """The batch that was handed out last ends its epoch, unless its step misses samples; False for a stream."""
        return self._order_source().is_at_end

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, for the script's outer loop."""
        return self.source.epochs(num_epochs)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Without it, passes count up from 0.

        In an elastic job, an epoch whose pass this script broke off starts again. If the others are in that epoch, the
        pass is the rest of it. If a checkpoint of rings resumes in that epoch, the pass is the rest of it.
        """
        self.source.set_epoch(epoch)

    def leave(self) -> None:
        """Let the worker of an elastic job leave as on SIGTERM: after its train step, its process ends with code 143.

        For scripts that handle SIGTERM themselves, or learn in another way that their machine will be taken away.
        Returns at once, also in a signal handler; the script continues its loop. In a fixed set it does nothing.
        """
        self._members.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position: the same on all ranks, so any rank's state may be saved.

        Raises:
            TrainingError: In rings; there the parameter server knows the position.
        """
        return self._order_source().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken, unless other members are further: the next pass is the rest of the epoch.

        Raises:
            TrainingError: The data are a stream, which cannot continue in the middle; or there are rings.
        """
        self._order_source().load_state_dict(state)

    @property
    def misses_samples(self) -> bool:
        """The last train step misses samples of a lost member, so the optimizer has skipped it.

        The next batch, or batches, have these samples, and the step with them is whole.
        """
        return self._members.misses_samples

    @property
    def has_joined_late(self) -> bool:
        """This member joined while others were training: it has their state and needs no checkpoint."""
        return self._members.has_joined_late

    @property
    def num_train_steps(self) -> int:
        """Committed train steps of an elastic job, as the script counts them; see `count_train_steps`.

        A step that the script goes through again for missing samples counts twice, on all members.
        """
        return self._members.num_train_steps

    def count_train_steps(self, num_train_steps: int) -> None:
        """Set the script's count of finished train steps; members that join later continue from it."""
        self._members.count_train_steps(num_train_steps)

    def split(self, loader: DataLoader) -> DataLoader:
        """Return a loader for evaluation: this rank's part of its samples, each sample on exactly one rank.

        The parts are in the proportions of the present shares and in the order of the data set; in rings of a fixed set
        they are equal, and each elastic ring has all samples. Nothing is communicated: add up sums over ranks, and call
        `model.module`, since ranks have different numbers of batches.
        """
        samples = order.evaluation_samples(loader)
        return subset_loader(loader, samples[self.evaluation_slice(len(samples))])

    def evaluation_slice(self, num_samples: int) -> slice:
        """Return this rank's slice of so many samples, in proportion to the present shares; it may be empty."""
        return self._members.evaluation_slice(num_samples)

    def _order_source(self) -> OrderSource:
        if isinstance(self.source, OrderSource):
            return self.source
        raise TrainingError(
            "state of a loader in rings",
            got="asked for",
            expected="none: the parameter server knows the position in the data",
            do="Save it with ringweave.Checkpoints(..., loader=loader)",
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
