"""Elastic membership of the loader: members join and leave, and each step counts when it is committed."""

from collections.abc import Callable

import torch

from ringweave.errors import TrainingError
from ringweave.planning import balancing
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.data.order import LoaderSpec, Portion
from ringweave.training.data.sources import EpochPass, TrainingMembership
from ringweave.training.elastic.accounting import EpochAccount, samples_of_member
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.trainer import TrainerState
from ringweave.training.elastic.training_state import IncompleteStep
from ringweave.training.timing import StepTimer


class SessionMembership(TrainingMembership):
    """Members of one elastic session."""

    is_elastic = True

    def __init__(self, session: ElasticSession, trainer: TrainerState) -> None:
        self.session = session
        self._trainer = trainer

    @property
    def members(self) -> tuple[str, ...]:
        return self.session.membership.members

    @property
    def has_joined_late(self) -> bool:  # pyrefly: ignore - a constant of the base
        return self._trainer.progress.has_joined_late

    @property
    def misses_samples(self) -> bool:  # pyrefly: ignore - a constant of the base
        return bool(self._trainer.accounting.missing)

    @property
    def shares(self) -> tuple[int, ...]:
        return self._trainer.share_table.shares_of_batch(self._trainer.progress.num_drawn).shares

    def evaluation_slice(self, num_samples: int) -> slice:
        latest = self._trainer.share_table.latest
        shares = balancing.scale_shares(latest.shares, num_samples)
        return balancing.rank_slice(shares, latest.members.index(self._trainer.member))

    def next_epoch(self, wanted: int) -> int:
        return max(wanted, self._trainer.progress.epoch)

    @property
    def num_train_steps(self) -> int:  # pyrefly: ignore - a constant of the base
        return self._trainer.progress.num_steps_before + self.session.num_committed

    def count_train_steps(self, num_train_steps: int) -> None:
        self._trainer.progress.num_steps_before = num_train_steps - self.session.num_committed

    def register_final_save(self, save: Callable[[], str]) -> None:
        self.session.register_final_save(save)

    def leave(self) -> None:
        self.session.leave_nowait()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the samples in order, which every member draws alike."""
        return tensor


class ElasticMembership(SessionMembership):
    """Members that reduce the gradients of each batch together."""

    def __init__(
        self,
        session: ElasticSession,
        trainer: TrainerState,
        timer: StepTimer,
        incomplete_step: IncompleteStep,
        record_account: Callable[[EpochAccount], object],
        *,
        is_mean: bool,
    ) -> None:
        super().__init__(session, trainer)
        self.trainer, self.incomplete_step = trainer, incomplete_step
        self._timer, self._record_account, self._is_mean = timer, record_account, is_mean
        self.progress, self._accounting = trainer.progress, trainer.accounting
        self._aborted_epoch: int | None = None
        """Epoch of a pass that the script broke off, until the next pass begins."""
        self._aborted_before_step = False
        """The pass was broken off before its first train step."""
        self._expected = SampleAccount()

    @property
    def version(self) -> int:
        """Grows with every change of members, which makes batches that were read ahead invalid."""
        return self.trainer.share_table.version

    @property
    def missing(self) -> bool:
        return bool(self._accounting.missing)

    @property
    def may_resume(self) -> bool:
        """The members have drawn no batch yet, so none of them is further than a checkpoint."""
        return not self.progress.num_drawn

    def portion(self, number: int, batch: Indices) -> Portion:
        shares = self.trainer.share_table.shares_of_batch(number)
        return Portion(indices=samples_of_member(batch, shares, self.trainer.member), batch=batch)

    def resume_at(self, epoch: int, position: int) -> None:
        self.progress.epoch, self.progress.position = epoch, position
        self.progress.committed = (epoch, position)
        self._accounting.open_epoch(epoch)

    def epoch_to_continue(self, wanted: int) -> int:
        return self.progress.epoch

    def leave_epoch(self, number: int) -> None:
        if self.progress.epoch == number:  # the script broke off its pass
            self.trainer.open_epoch(number + 1)

    def begin_epoch(self, number: int, start: int) -> bool:
        """Begin a pass of an epoch; return False if the others have finished it.

        Raises:
            TrainingError: The pass before was broken off before its first train step.
        """
        del start
        if self._aborted_before_step:
            raise _aborted_before_step_error()
        aborted, self._aborted_epoch = self._aborted_epoch, None
        if number > self.progress.epoch:
            self.trainer.open_epoch(number)
        elif number == self.progress.epoch == aborted:
            self._accounting.discard_open_batches()
            self.progress.num_since_commit = 0
            self.trainer.open_epoch(number)
        return number == self.progress.epoch

    def begin_batches(self, expected: SampleAccount | None) -> None:
        assert expected is not None, "elastic jobs have no streams"
        self._expected = self._accounting.drawn_account + expected

    def pass_step_boundary(self, indices: Indices | None) -> None:
        assert indices is not None, "no boundary without a batch"
        self.trainer.measure_step()
        self.session.pass_step_boundary(lambda: self.trainer.record_batch(indices))
        self._timer.begin_step()

    def record_received(self, own: Portion) -> None:
        """Compare the samples of a batch with those that this member has to compute.

        Raises:
            TrainingError: They differ.
        """
        self._accounting.check_received(own.indices, self.trainer.member)
        self.session.record_progress()

    def draw_missing(self) -> Portion:
        """Return this member's part of the next missing samples of the last train step."""
        self.incomplete_step.restore()  # again, if another member was lost in the step with the missing samples
        self.trainer.measure_step()
        self.session.pass_step_boundary(self.trainer.record_missing)
        self._timer.begin_step()
        self.session.record_progress()
        return self._accounting.own_part(self.trainer.member)

    def abort_pass(self, begun: EpochPass) -> None:
        self._aborted_epoch = begun.epoch
        self._aborted_before_step = self.progress.num_since_commit >= self.progress.num_drawn - begun.num_drawn
        self._give_up_missing()

    def end_epoch(self, epoch: int) -> EpochAccount:
        """Compare the batches that were drawn with those of the epoch, and open the next one.

        Raises:
            TrainingError: Batches were skipped or doubled.
        """
        self._accounting.check_drawn(self._expected)
        account = self._accounting.epoch_account()
        self.trainer.open_epoch(epoch + 1)
        self._record_account(account)
        return account

    def _give_up_missing(self) -> None:
        """Finish a train step that misses samples when the script draws no batch any more, as if they were dropped."""
        if not self.missing or self.session.has_stopped:
            return
        total = sum(len(each.batch) for each in self._accounting.missing)
        missing = sum(len(each.indices) for each in self._accounting.missing)

        def give_up() -> None:
            self.progress.give_up_step(self._accounting.missing)
            self._accounting.lose_missing()

        self.session.change_atomically(give_up)
        if missing < total:
            self.incomplete_step.take_without_missing(total / (total - missing) if self._is_mean else 1.0)


def _aborted_before_step_error() -> TrainingError:
    return TrainingError(
        "pass of the loader of an elastic job",
        got="broken off before its first train step",
        expected="train steps",
        do="Look at a batch of the DataLoader that prepare was given: a worker that joins has to draw what the "
        "others draw, and cannot look at a batch that they have drawn before",
    )


def check_elastic_data(spec: LoaderSpec) -> None:
    """Refuse data whose order or position a joining member cannot know.

    Raises:
        TrainingError: The data are a stream, or have the script's own sampler.
    """
    if spec.order in ("stream", "sampled"):
        raise TrainingError(
            "data of an elastic job",
            got="a stream" if spec.order == "stream" else "a sampler of the script's own",
            expected="a data set with an index, in sequence or shuffled",
            do="Leave out the sampler, so that a worker that joins can know the order",
        )
