"""Loader of a member of an elastic ring: gives it its part of the data shards that the ring takes from the server."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ringweave.errors import TrainingError, explain
from ringweave.param_server.client import RingClient
from ringweave.param_server.messages import ResumeDecision
from ringweave.planning import balancing
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.data import order
from ringweave.training.data.order import LoaderSpec, Portion, min_batch_samples
from ringweave.training.data.shared_loader import SampleWeightTable, subset_loader
from ringweave.training.elastic.accounting import ElasticAccount, samples_of_member
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.training_state import IncompleteStep
from ringweave.training.gradients import SampleWeights
from ringweave.training.rings import elastic_trainer
from ringweave.training.rings.elastic_trainer import RingCursor, RingTrainerState
from ringweave.training.rings.elastic_worker import ElasticRingWorker
from ringweave.training.rings.ring_resume import OfferedCheckpoint, ServerBackedLoader, remaining_indices
from ringweave.training.timing import StepTimer


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRingLoaderParts:
    """Objects that the loader shares with the rest of the training."""

    name: str
    session: ElasticSession
    trainer: RingTrainerState
    worker: ElasticRingWorker
    weights: SampleWeights
    timer: StepTimer
    num_rings: int
    incomplete_step: IncompleteStep
    record_account: Callable[[ElasticAccount], object]


class ElasticRingLoader(ServerBackedLoader):
    """Loader of an elastic ring: this member's parts of its data shards; a pass is an epoch of all rings.

    At the end of a pass, all rings that are not lost pass a barrier and take the same parameters. Batches are loaded in
    the training process: the next shard is known only when the members of the ring have agreed on it.
    """

    def __init__(
        self,
        loader: DataLoader,
        spec: LoaderSpec,
        seed: int,
        parts: ElasticRingLoaderParts,
        sample_weights: SampleWeightTable | None = None,
    ) -> None:
        super().__init__(loader, spec, parts.weights, sample_weights)
        self._seed, self._parts = seed, parts
        self._shards = _SequentialShardSampler(self._draw_shard)
        self._source = DataLoader(
            loader.dataset,
            batch_sampler=self._shards,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
        )
        self._pass_epoch = 0
        self._aborted_epoch: int | None = None
        """Epoch of a pass that was broken off, until the rings have passed the barrier."""
        self._last_aborted_epoch: int | None = None
        """Last epoch that ended in this way."""
        self.account: ElasticAccount | None = None
        """Account of the last completed epoch."""

    is_elastic = True

    @property
    def has_joined_late(self) -> bool:
        """This member has joined others in its ring, or the ring was training before."""
        return self._parts.trainer.progress.has_joined_late or self.ring_cursor.num_shards > 0

    def has_training_begun(self) -> bool:
        """Return whether the server has applied a push."""
        return self._parts.worker.has_training_begun()

    @property
    def may_save(self) -> bool:
        return self._parts.worker.is_representative

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, without those that `drop_last` leaves out."""
        return self._epoch_samples

    @property
    def seed(self) -> int:
        start = self.ring_cursor.start
        return self._seed if start is None else start.seed

    def connect_server(self) -> RingClient:
        return self._parts.worker.connect_server()

    def register_final_save(self, save: Callable[[], str]) -> None:
        self._parts.session.save_final_checkpoint = save

    def resume(self, offered: OfferedCheckpoint | None) -> ResumeDecision:
        """Resume all rings from a checkpoint; the offer of the ring's first member counts for the ring."""
        decision = self._parts.worker.resume(offered, self._epoch_samples)
        self._pass_epoch = self._parts.trainer.progress.epoch
        return decision

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each member of the ring in a whole shard."""
        return self._parts.trainer.share_table.shares_of_batch(self._parts.trainer.progress.num_drawn).shares

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the ring's members, by rank."""
        return self._parts.session.membership.members

    @property
    def ring_cursor(self) -> RingCursor:
        return self._parts.trainer.ring_cursor

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass starts or continues; the ring's epoch if it is later."""
        return max(self._pass_epoch, self._parts.trainer.progress.epoch)

    def __len__(self) -> int:
        """Train steps of all rings together in an epoch; a fast ring has more batches than a slow one."""
        whole, rest = divmod(self._epoch_samples, self.batch_size)
        return whole + (rest > 0)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this member's batches of the next epoch; over none if the others have finished it.

        Raises:
            TrainingError: This script has broken off its pass of that epoch.
        """
        parts, progress, number = self._parts, self._parts.trainer.progress, self._pass_epoch
        self._finish_aborted_pass()
        self._pass_epoch += 1
        if number < progress.epoch:
            if number == self._last_aborted_epoch:
                raise _epoch_over_error(number)
            return
        if number > progress.epoch:
            parts.session.change_atomically(lambda: self._open_epoch(number))
        expected = self._epoch_indices(number)
        self._shards.begin(number, expected)
        try:
            for batch in self._source:
                own = self._shards.last_portion
                self._weigh(own, batch, parts.trainer.batch_part)
                parts.timer.record_samples(len(own.indices))
                parts.session.record_progress()
                yield batch
        except GeneratorExit:
            self._aborted_epoch = number
            parts.worker.go_idle()
            raise
        self._pass_barrier(number, SampleAccount.from_indices(expected))

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, for the script's outer loop."""
        while (number := self.next_epoch) < num_epochs:
            self._pass_epoch = number
            yield number
            if self._pass_epoch == number:  # the script has not begun this pass
                self._pass_epoch = number + 1

    def leave(self) -> None:
        """Let this worker leave as on SIGTERM: after its train step, its process ends with code 143.

        For scripts that handle SIGTERM themselves, or learn in another way that their machine will be taken away.
        Returns at once, also in a signal handler; the script continues its loop.
        """
        self._parts.session.leave_nowait()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; without it, passes count up from 0."""
        self._pass_epoch = epoch

    def split(self, loader: DataLoader) -> DataLoader:
        """Return a loader for evaluation: this member's part of its samples; each ring has all samples."""
        batch_shares = self._parts.trainer.share_table.latest
        samples = order.evaluation_samples(loader)
        shares = balancing.scale_shares(batch_shares.shares, len(samples))
        return subset_loader(
            loader, samples[balancing.rank_slice(shares, batch_shares.members.index(self._parts.name))]
        )

    @property
    def _epoch_samples(self) -> int:
        total = self._spec.num_samples or 0
        return total - total % self.batch_size if self._spec.drop_last else total

    def _epoch_indices(self, epoch: int) -> Indices:
        """Return the samples of an epoch that are to be drawn."""
        found = order.epoch_indices(self._loader, self._spec, self.seed, epoch, lambda drawn: drawn)
        return remaining_indices(found[: self._epoch_samples], self.ring_cursor.done_spans_of(epoch))

    def _open_epoch(self, number: int) -> None:
        self._parts.trainer.open_epoch(number)

    def _draw_shard(self, epoch: int, indices: Indices) -> Portion | None:
        """Take the ring's next shard and return this member's portion; None at the end of the epoch."""
        parts, trainer = self._parts, self._parts.trainer
        trainer.measure_step()
        parts.session.pass_step_boundary(lambda: None)
        if trainer.accounting.missing:
            return self._draw_missing()
        parts.worker.send_pending()
        first, count = parts.worker.take_shard(epoch, sum(self.shares), len(indices), min_batch_samples(self.shares))
        if count == 0:
            return None
        parts.timer.begin_step()
        batch = indices[first : first + count]
        at = first + self._epoch_samples - len(indices)
        part = balancing.batch_fraction(at, count, batch_samples=self.batch_size, num_samples=self._epoch_samples)
        parts.session.change_atomically(lambda: trainer.record_batch(batch, part, first))
        own = samples_of_member(batch, trainer.last_batch_shares, parts.name)
        return Portion(indices=own, batch=batch)

    def _draw_missing(self) -> Portion:
        """Return this member's portion of the next missing samples of the step."""
        parts = self._parts
        parts.incomplete_step.restore()
        parts.session.change_atomically(parts.trainer.record_missing)
        parts.timer.begin_step()
        return parts.trainer.accounting.own_part(parts.name)

    def _finish_aborted_pass(self) -> None:
        """End a broken-off pass: its samples are used up, and all rings take the same parameters."""
        if self._aborted_epoch is None:
            return
        number, self._aborted_epoch = self._aborted_epoch, None
        parts, self._last_aborted_epoch = self._parts, number
        parts.session.change_atomically(parts.trainer.discard_open_batches)
        parts.worker.pass_barrier(number, {}, use_up=self._epoch_samples)
        parts.session.change_atomically(lambda: self._open_epoch(number + 1))

    def _pass_barrier(self, number: int, expected: SampleAccount) -> None:
        """Pass the barrier at the end of an epoch, and check that no sample was lost or doubled."""
        parts = self._parts
        by_ring = parts.worker.pass_barrier(
            number, elastic_trainer.ring_report(parts.trainer.accounting, is_whole=parts.trainer.has_whole_epoch)
        )
        parts.session.change_atomically(lambda: self._open_epoch(number + 1))
        if not by_ring or not all(by_ring.values()):
            return  # the others finished it long before, or one of them has broken off its pass
        self.account = elastic_trainer.sum_accounts(number, expected, list(by_ring.values()), parts.num_rings)
        if elastic_trainer.reporting_ring(by_ring) == parts.trainer.ring_cursor.ring:
            parts.record_account(self.account)
        if not self.account.is_accounted:
            raise TrainingError(
                f"account of epoch {number}: {self.account}, expected every sample once. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )


def _epoch_over_error(number: int) -> TrainingError:
    return TrainingError(
        explain(
            "epoch of an elastic job of rings",
            got=number,
            expected="one whose pass was not broken off, since it is over for all rings",
            do="Name the next one; look at a batch of the DataLoader that prepare was given",
        )
    )


class _SequentialShardSampler(Iterable[list[int]]):
    """The DataLoader's batch sampler; takes one shard after the other, since there are no load workers."""

    def __init__(self, draw: Callable[[int, Indices], Portion | None]) -> None:
        self._draw = draw
        self._epoch, self._indices = 0, np.empty(0, np.int64)
        self.last_portion = Portion(indices=self._indices, batch=self._indices)

    def begin(self, epoch: int, indices: Indices) -> None:
        self._epoch, self._indices = epoch, indices

    def __iter__(self) -> Iterator[list[int]]:
        while (drawn := self._draw(self._epoch, self._indices)) is not None:
            self.last_portion = drawn
            yield drawn.samples_to_load
