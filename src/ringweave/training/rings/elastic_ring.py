"""Elastic ring as the loader sees it: members draw the ring's shards together, through all generations."""

from collections.abc import Callable

from ringweave.errors import TrainingError, explain
from ringweave.param_server.client import RingClient
from ringweave.param_server.data_shards import Spans
from ringweave.param_server.messages import ResumeDecision
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.data.order import Portion
from ringweave.training.data.sources import EpochPass
from ringweave.training.elastic.accounting import ElasticAccount, samples_of_member
from ringweave.training.elastic.elastic_membership import SessionMembership
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.training_state import IncompleteStep
from ringweave.training.rings import elastic_trainer
from ringweave.training.rings.elastic_trainer import RingTrainerState
from ringweave.training.rings.elastic_worker import ElasticRingWorker
from ringweave.training.rings.shard_source import OfferedCheckpoint, ResumeStart
from ringweave.training.timing import StepTimer


class ElasticRing(SessionMembership):
    """Members of a ring that may lose some of them."""

    def __init__(
        self,
        session: ElasticSession,
        trainer: RingTrainerState,
        worker: ElasticRingWorker,
        timer: StepTimer,
        incomplete_step: IncompleteStep,
        record_account: Callable[[ElasticAccount], object],
        *,
        num_rings: int,
    ) -> None:
        super().__init__(session, trainer)
        self.trainer, self.worker, self.incomplete_step = trainer, worker, incomplete_step
        self._timer, self._record_account, self._num_rings = timer, record_account, num_rings
        self._aborted_epoch: int | None = None
        """Epoch of a pass that was broken off, until the rings have passed the barrier."""
        self._last_aborted_epoch: int | None = None
        """Last epoch that ended in this way."""

    @property
    def has_joined_late(self) -> bool:  # pyrefly: ignore - a constant of the base
        """This member has joined others in its ring, or the ring was training before."""
        return self.trainer.progress.has_joined_late or self.trainer.ring_cursor.num_shards > 0

    @property
    def may_save(self) -> bool:
        return self.worker.is_representative

    def has_training_begun(self) -> bool:
        """Return whether the server has applied a push."""
        return self.worker.has_training_begun()

    def connect_server(self) -> RingClient:
        return self.worker.connect_server()

    @property
    def start(self) -> ResumeStart | None:
        return self.trainer.ring_cursor.start

    def resume(self, offered: OfferedCheckpoint | None, epoch_samples: int) -> tuple[ResumeDecision, int | None]:
        decision = self.worker.resume(offered, epoch_samples)
        return decision, self.trainer.progress.epoch

    def finish_aborted_pass(self, epoch_samples: int) -> None:
        if self._aborted_epoch is None:
            return
        number, self._aborted_epoch = self._aborted_epoch, None
        self._last_aborted_epoch = number
        self.session.change_atomically(self.trainer.discard_open_batches)
        self.worker.pass_barrier(number, {}, use_up=epoch_samples)
        self.session.change_atomically(lambda: self.trainer.open_epoch(number + 1))

    def begin_epoch(self, number: int) -> tuple[int, Spans] | None:
        """Begin a pass of an epoch.

        Raises:
            TrainingError: This script has broken off its pass of that epoch.
        """
        if number < self.trainer.progress.epoch:
            if number == self._last_aborted_epoch:
                raise _epoch_over_error(number)
            return None
        if number > self.trainer.progress.epoch:
            self.session.change_atomically(lambda: self.trainer.open_epoch(number))
        return number, self.trainer.ring_cursor.done_spans_of(number)

    def begin_batch(self) -> None:
        """Do nothing: the boundary is passed when the shard is taken."""

    def pass_shard_boundary(self) -> tuple[Portion, float] | None:
        self.trainer.measure_step()
        self.session.pass_step_boundary(lambda: None)
        if not self.trainer.accounting.missing:
            self.worker.send_pending()
            return None
        self.incomplete_step.restore()
        self.session.change_atomically(self.trainer.record_missing)
        self._timer.begin_step()
        return self.trainer.accounting.own_part(self.trainer.member), self.trainer.batch_part

    def take_shard(self, pass_number: int, wanted: int, total: int, min_samples: int) -> tuple[int, int]:
        return self.worker.take_shard(pass_number, wanted, total, min_samples)

    def record_shard(self, batch: Indices, batch_part: float, first: int) -> Portion:
        self._timer.begin_step()
        self.session.change_atomically(lambda: self.trainer.record_batch(batch, batch_part, first))
        own = samples_of_member(batch, self.trainer.last_batch_shares, self.trainer.member)
        return Portion(indices=own, batch=batch)

    def record_batch(self, first: int, own: Portion, batch_part: float) -> None:
        del first, own, batch_part
        self.session.record_progress()

    def abort_pass(self, begun: EpochPass, epoch_samples: int) -> None:
        del epoch_samples
        self._aborted_epoch = begun.epoch
        self.worker.go_idle()

    def end_epoch(self, epoch: int, expected: SampleAccount) -> ElasticAccount | None:
        trainer = self.trainer
        report = elastic_trainer.ring_report(trainer.accounting, is_whole=trainer.has_whole_epoch)
        by_ring = self.worker.pass_barrier(epoch, report)
        self.session.change_atomically(lambda: trainer.open_epoch(epoch + 1))
        if not by_ring or not all(by_ring.values()):
            return None  # the others finished it long before, or one of them has broken off its pass
        account = elastic_trainer.sum_accounts(epoch, expected, list(by_ring.values()), self._num_rings)
        if elastic_trainer.reporting_ring(by_ring) == trainer.ring_cursor.ring:
            self._record_account(account)
        account.check()
        return account


def _epoch_over_error(number: int) -> TrainingError:
    return TrainingError(
        explain(
            "epoch of an elastic job of rings",
            got=number,
            expected="one whose pass was not broken off, since it is over for all rings",
            do="Name the next one; look at a batch of the DataLoader that prepare was given",
        )
    )
