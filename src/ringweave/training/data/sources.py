"""Sample sources: the batches of each pass over the data, and this rank's portion of them.

An `OrderSource` cuts the epoch's order, which all ranks know, into batches. A `ShardSource` (rings/shard_source.py)
takes shards of the epoch that the parameter server hands out. Both ask their membership, fixed or elastic, for the
portion of this rank, and report step boundaries and passes to it.
"""

import abc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from ringweave.errors import TrainingError
from ringweave.planning import balancing
from ringweave.planning.balancing import EpochOrder, SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.balancer import ShareBalancer
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.data.order import LoaderSpec, Portion, portion_of_rank
from ringweave.training.elastic.accounting import DataProgress, EpochAccount, MissingBatch
from ringweave.training.timing import StepTimer

if TYPE_CHECKING:
    from ringweave.training.elastic.elastic_membership import ElasticMembership

DrawnBatch = tuple[Any, Portion, float]
"""Loaded batch, this rank's portion of it, and the train steps that it makes: less than one in rings."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochPass:
    """One pass over the data."""

    epoch: int
    number: int = 0
    """Number of the pass, where passes are counted."""
    num_drawn: int = 0
    """Batches that were drawn before it."""


class TrainingMembership(abc.ABC):
    """Workers that share each batch, as the loader sees them. Without an override, nothing happens to them."""

    is_elastic = False
    has_joined_late = False
    misses_samples = False
    num_train_steps = 0
    sites: tuple[tuple[int, ...], ...] = ()
    """Ranks of each site, if ranks of different sites have different states of optimizers and schedules."""
    site_state: Any = None
    """Further state that differs between sites, with `state_dict` and `load_state_dict`."""

    @property
    @abc.abstractmethod
    def members(self) -> tuple[str, ...]:
        """Names of the members, by rank."""

    @abc.abstractmethod
    def evaluation_slice(self, num_samples: int) -> slice:
        """Return this rank's part of so many samples."""

    def next_epoch(self, wanted: int) -> int:
        """Return the epoch of the next pass of a script that wants this one."""
        return wanted

    def epoch_to_continue(self, wanted: int) -> int:
        """Return the epoch that the script's outer loop continues with."""
        return self.next_epoch(wanted)

    def leave_epoch(self, number: int) -> None:
        """Leave an epoch whose pass the script may have broken off."""
        del number

    def count_train_steps(self, num_train_steps: int) -> None:
        """Set the script's count of finished train steps."""
        del num_train_steps

    def register_final_save(self, save: Callable[[], str]) -> None:
        """Register a function that saves the state if the job ends early; it returns a text about the outcome."""
        del save

    def register_deferred_save(self, save: Callable[[int], None]) -> Callable[[], bool] | None:
        """Register a function that saves the state after so many train steps, if states differ between those times.

        Returns:
            A function that asks for a save, and returns False if the caller can save at once; None if it always can.
        """
        del save
        return None

    def leave(self) -> None:
        """Leave after this train step."""
        return


class StaticMembership(TrainingMembership):
    """Fixed set of ranks: balances the shares, and commits nothing."""

    version = 0
    missing: Sequence[MissingBatch] = ()
    may_resume = True

    def __init__(
        self,
        control: ControlGroup,
        balancer: ShareBalancer,
        timer: StepTimer,
        record_account: Callable[[EpochAccount], object],
    ) -> None:
        """Create it; `record_account` is called on every rank with the account of each epoch."""
        self.balancer, self.control, self._timer, self._record_account = balancer, control, timer, record_account
        self.progress = DataProgress()
        self._received = SampleAccount()
        self._expected: SampleAccount | None = None

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.control.world_size)))

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in the next whole batch."""
        return self.balancer.shares_of(self.progress.num_drawn)

    def evaluation_slice(self, num_samples: int) -> slice:
        return balancing.rank_slice(balancing.scale_shares(self.shares, num_samples), self.control.rank)

    def portion(self, number: int, batch: Indices) -> Portion:
        return portion_of_rank(batch, self.balancer.shares_of(number), self.control.rank)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give all ranks the first rank's samples in order."""
        return self.control.broadcast(tensor)

    def resume_at(self, epoch: int, position: int) -> None:
        self.progress.epoch, self.progress.position = epoch, position

    def begin_epoch(self, number: int, start: int) -> bool:
        self.resume_at(number, start)
        return True

    def begin_batches(self, expected: SampleAccount | None) -> None:
        self._received, self._expected = SampleAccount(), expected

    def pass_step_boundary(self, indices: Indices | None) -> None:
        del indices
        self.balancer.pass_step_boundary(self.progress.num_drawn)
        self._timer.begin_step()

    def record_received(self, own: Portion) -> None:
        self.progress.num_drawn += 1
        self.progress.position += own.num_total
        self._received += SampleAccount.from_indices(own.indices)

    def draw_missing(self) -> Portion:
        raise AssertionError("no sample of a fixed set of ranks is missing")

    def abort_pass(self, begun: EpochPass) -> None:
        """Do nothing: the next pass is a new one."""

    def end_epoch(self, epoch: int) -> EpochAccount:
        """Compare the samples that all ranks received with those of the epoch."""
        expected = self._expected
        if expected is None:  # a stream has as many as were read
            expected = SampleAccount.from_indices(np.arange(self.progress.position))
        account = EpochAccount.of_ranks(epoch, expected, self.control.gather_accounts(self._received))
        self._record_account(account)
        return account


MembershipT = TypeVar("MembershipT", bound=TrainingMembership)


class SampleSource(abc.ABC, Generic[MembershipT]):
    """Source of the batches of one loader, pass by pass."""

    def __init__(self, loader: DataLoader, spec: LoaderSpec, seed: int, membership: MembershipT) -> None:
        self.spec, self.membership = spec, membership
        self._loader, self._seed, self._pass_epoch = loader, seed, 0
        self.account: EpochAccount | None = None

    @property
    @abc.abstractmethod
    def shares(self) -> tuple[int, ...]:
        """Samples of each member in the next whole batch."""

    @property
    def next_epoch(self) -> int:
        return self.membership.next_epoch(self._pass_epoch)

    def set_epoch(self, epoch: int) -> None:
        self._pass_epoch = epoch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        while (number := self.membership.epoch_to_continue(self._pass_epoch)) < num_epochs:
            if self._pass_epoch != number:
                self.set_epoch(number)
            yield number
            self.membership.leave_epoch(number)
            if self._pass_epoch == number:  # the script has not begun this pass
                self.set_epoch(number + 1)

    @abc.abstractmethod
    def begin_pass(self) -> EpochPass | None:
        """Begin the next pass; return None if the others have finished that epoch."""

    @abc.abstractmethod
    def batches(self, begun: EpochPass) -> Iterator[DrawnBatch]:
        """Yield the batches of a pass."""

    @abc.abstractmethod
    def abort_pass(self, begun: EpochPass) -> None:
        """Note that the script has broken off a pass."""

    @abc.abstractmethod
    def end_pass(self, begun: EpochPass) -> None:
        """Set the account of a complete pass.

        Raises:
            TrainingError: Samples were lost or doubled.
        """


class OrderSource(SampleSource["StaticMembership | ElasticMembership"]):
    """Own order of an epoch, which all members know, cut into batches of all members."""

    def __init__(
        self, loader: DataLoader, spec: LoaderSpec, seed: int, membership: "StaticMembership | ElasticMembership"
    ) -> None:
        super().__init__(loader, spec, seed, membership)
        self._start = 0
        self._reader: BatchReader = (
            StreamReader(loader, membership.portion, spec.batch_samples)
            if spec.num_samples is None
            else IndexedReader(loader, membership.portion)
        )

    @property
    def shares(self) -> tuple[int, ...]:
        return self.membership.shares

    @property
    def is_at_end(self) -> bool:
        """All batches of the epoch are handed out, and none of their samples is missing."""
        is_drawn = self.spec.num_samples is not None and self.membership.progress.position >= self.spec.epoch_samples
        return is_drawn and not self.membership.missing

    def set_epoch(self, epoch: int) -> None:
        self._pass_epoch, self._start = epoch, 0

    def begin_pass(self) -> EpochPass | None:
        number, start = self._pass_epoch, self._start
        is_open = self.membership.begin_epoch(number, start)
        self.set_epoch(number + 1)
        return EpochPass(epoch=number, num_drawn=self.membership.progress.num_drawn) if is_open else None

    def batches(self, begun: EpochPass) -> Iterator[DrawnBatch]:
        """Yield batches from the present position on; read ahead again after every change of members."""
        members, progress = self.membership, self.membership.progress
        order, version, index = self._epoch_order(), members.version, 0
        members.begin_batches(SampleAccount.from_indices(order.trained_indices(order.num_batches)) if order else None)
        batches = self._reader.batches(order, progress.num_drawn)
        while True:
            if members.missing:
                version = -1  # members have changed, and so have the numbers of the batches
                yield from self._missing_batches()
                continue
            indices = order.batch(index) if order is not None and index < order.num_batches else None
            if members.is_elastic and indices is None:  # a fixed set passes a boundary at the end, too
                return
            members.pass_step_boundary(indices)
            if members.version != version and indices is not None:  # batches read ahead were cut for other members
                version, order, index = members.version, self._epoch_order(len(indices)), 0
                batches = self._reader.batches(order, progress.num_drawn - 1)
            found = next(batches, None)
            if found is None:
                return
            members.record_received(found[1])
            index += 1
            yield *found, 1.0

    def _missing_batches(self) -> Iterator[DrawnBatch]:
        """Yield this member's part of the missing samples, batch by batch as in the step that misses them."""
        while self.membership.missing:
            own = self.membership.draw_missing()
            yield load_batch(self._loader, own.samples_to_load), own, 1.0

    def abort_pass(self, begun: EpochPass) -> None:
        self.membership.abort_pass(begun)

    def end_pass(self, begun: EpochPass) -> None:
        self.account = self.membership.end_epoch(begun.epoch)
        self.account.check()

    def state_dict(self) -> dict[str, Any]:
        progress = self.membership.progress
        return {"epoch": progress.epoch, "position": progress.position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.spec.num_samples is None:
            raise TrainingError("state of a loader of a stream: one, expected none. Let the data set keep its place.")
        if not self.membership.may_resume:
            return
        epoch, start, self._seed = state["epoch"], state["position"], state["seed"]
        if start >= self.spec.epoch_samples:
            epoch, start = epoch + 1, 0
        self._pass_epoch, self._start = epoch, start
        self.membership.resume_at(epoch, start)

    def register_final_save(self, save: Callable[[dict[str, int]], str]) -> None:
        """Register a function that saves the state; it gets that of the loader after the last committed train step."""

        def save_committed() -> str:
            epoch, position = self.membership.progress.committed
            return save({"epoch": epoch, "position": position, "seed": self._seed})

        self.membership.register_final_save(save_committed)

    def _epoch_order(self, num_back: int = 0) -> EpochOrder | None:
        """Return the epoch's order from the present position, or from so many samples before it; None of a stream."""
        if self.spec.num_samples is None:
            return None
        progress = self.membership.progress
        return EpochOrder(
            indices=order.epoch_indices(self._loader, self.spec, self._seed, progress.epoch, self.membership.broadcast),
            batch_samples=self.spec.batch_samples,
            drop_last=self.spec.drop_last,
            start=progress.position - num_back,
        )


PortionFunction = Callable[[int, np.ndarray], Portion]
"""(number of the batch, its samples) -> this rank's portion."""


class BatchReader(abc.ABC):
    """Reader of this rank's batches, each with its portion."""

    @abc.abstractmethod
    def batches(self, order: EpochOrder | None, first_number: int) -> Iterator[tuple[Any, Portion]]:
        """Start a pass; batches are numbered from `first_number` on."""


class IndexedReader(BatchReader):
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


class StreamReader(BatchReader):
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
    return DataLoader(loader.dataset, batch_sampler=batch_sampler, in_order=True, **loading_options(loader))


def loading_options(loader: DataLoader) -> dict[str, Any]:
    """Return a loader's options that say how it loads a batch, whatever its samples are."""
    return {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
