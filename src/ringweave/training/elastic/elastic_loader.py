"""Loader of an elastic job: gives this member its part of every batch, through all changes of the membership."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ringweave.errors import TrainingError, explain
from ringweave.planning import balancing
from ringweave.planning.balancing import EpochOrder, SampleAccount
from ringweave.training.data import order, sources
from ringweave.training.data.order import LoaderSpec, Portion
from ringweave.training.data.shared_loader import PreparedLoader, SampleWeightTable, subset_loader
from ringweave.training.data.sources import IndexedSource
from ringweave.training.elastic.accounting import (
    ElasticAccount,
    MissingBatch,
    SampleAccounting,
    samples_of_member,
)
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.elastic.training_state import IncompleteStep
from ringweave.training.gradients import SampleWeights
from ringweave.training.timing import StepTimer


@dataclass(kw_only=True, slots=True)
class DataProgress:
    """Progress of the job in its data: the same on all members that are between two steps."""

    epoch: int = 0
    position: int = 0
    """Samples of the epoch that were handed out."""
    num_drawn: int = 0
    """Batches that were handed out, through all epochs."""
    num_since_commit: int = 0
    """Batches since the last committed reduction."""
    committed: tuple[int, int] = (0, 0)
    """Epoch and position after the last committed reduction."""
    num_steps_before: int = 0
    """Train steps, as the script counts them, before the first reduction of this job; negative if it counts fewer steps
    than there were reductions since."""
    has_joined_late: bool = False
    """This member has received the job's state from another one."""

    def repeat_step(self, batches: Iterable[MissingBatch]) -> None:
        """Go back to the start of the train step of these batches, whose missing samples are handed out next."""
        self.position -= self._samples_of_epoch(batches)

    def record_missing(self, missing: MissingBatch) -> None:
        """Record that missing samples of this batch are handed out."""
        self.position += self._samples_of_epoch([missing])
        self.num_drawn += 1
        self.num_since_commit += 1

    def give_up_step(self, batches: Iterable[MissingBatch]) -> None:
        """Go on after that step without its missing samples."""
        self.position += self._samples_of_epoch(batches)
        self.committed = (self.epoch, self.position)

    def _samples_of_epoch(self, batches: Iterable[MissingBatch]) -> int:
        """Return the samples of these whole batches, without batches of the epoch before."""
        return sum(len(each.batch) for each in batches if each.epoch == self.epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticLoaderParts:
    """Objects that the loader shares with the rest of the training."""

    member: str
    session: ElasticSession
    share_table: ShareTable
    accounting: SampleAccounting
    progress: DataProgress
    weights: SampleWeights
    timer: StepTimer
    measure_step: Callable[[], None]
    """Measures the step that has ended."""
    incomplete_step: IncompleteStep
    record_account: Callable[[ElasticAccount], object]


class ElasticLoader(PreparedLoader):
    """Loader of an elastic job: iterates like the DataLoader it was made of; each pass is an epoch with its own order.

    A member that joins later continues where the others are: the passes of finished epochs yield no batch. Use `epochs`
    instead of `range` to skip them.
    """

    def __init__(
        self,
        loader: DataLoader,
        spec: LoaderSpec,
        seed: int,
        parts: ElasticLoaderParts,
        sample_weights: SampleWeightTable | None = None,
    ) -> None:
        check_elastic_data(spec)
        super().__init__(loader, spec, parts.weights, sample_weights)
        self._seed, self._parts = seed, parts
        self._source = IndexedSource(loader, self._portion)
        self._pass_epoch = 0
        self._aborted_epoch: int | None = None
        """Epoch of a pass that the script broke off, until the next pass begins."""
        self._aborted_before_step = False
        """The pass was broken off before its first train step."""
        self.account: ElasticAccount | None = None
        """Account of the last completed epoch."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each member in the next whole batch."""
        return self._parts.share_table.shares_of_batch(self._parts.progress.num_drawn).shares

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members, by rank."""
        return self._parts.session.membership.members

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next pass starts or continues; the members' epoch if it is later."""
        return max(self._pass_epoch, self._parts.progress.epoch)

    def __len__(self) -> int:
        """Train steps in a whole epoch."""
        whole, rest = divmod(self._num_samples, self.batch_size)
        return whole + (rest > 0 and not self._spec.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this member's batches of the next epoch; over none if the others have finished it.

        Raises:
            TrainingError: The pass before was broken off before its first train step.
        """
        if self._aborted_before_step:
            raise _aborted_before_step_error()
        place, number = self._parts.progress, self._pass_epoch
        aborted, self._aborted_epoch = self._aborted_epoch, None
        self._pass_epoch += 1
        if number < place.epoch:
            return
        if number > place.epoch:
            self._open_epoch(number)
        elif number == aborted:
            self._parts.accounting.discard_open_batches()
            place.num_since_commit = 0
            self._open_epoch(number)
        if place.position < self._epoch_end or self._parts.accounting.missing:
            yield from self._iterate_rest(number)
        self.account = self._parts.accounting.epoch_account()
        self._open_epoch(number + 1)
        self._parts.record_account(self.account)
        if not self.account.is_accounted:
            raise TrainingError(
                f"account of epoch {number}: {self.account}, expected every sample once. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, for the script's outer loop."""
        while self._parts.progress.epoch < num_epochs:
            self._pass_epoch = number = self._parts.progress.epoch
            yield number
            if self._parts.progress.epoch == number:  # the script broke off its pass
                self._open_epoch(number + 1)

    def leave(self) -> None:
        """Let this worker leave as on SIGTERM: after its train step, its process ends with code 143.

        For scripts that handle SIGTERM themselves, or learn in another way that their machine will be taken away.
        Returns at once, also in a signal handler; the script continues its loop.
        """
        self._parts.session.leave_nowait()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Without it, passes count up from 0.

        An epoch whose pass this script broke off starts again. If the others are in that epoch, the pass is the rest of
        it.
        """
        self._pass_epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position: the same on all members."""
        place = self._parts.progress
        return {"epoch": place.epoch, "position": place.position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where the state was taken, unless the other members are further."""
        place = self._parts.progress
        if place.num_drawn:
            return
        place.epoch, place.position, self._seed = state["epoch"], state["position"], state["seed"]
        self._parts.accounting.open_epoch(place.epoch)
        if place.position >= self._epoch_end:
            place.epoch, place.position = place.epoch + 1, 0
        place.committed = (place.epoch, place.position)
        self._pass_epoch = place.epoch

    @property
    def misses_samples(self) -> bool:
        """The last train step misses samples of a lost member, so the optimizer has skipped it.

        The next batch, or batches, have these samples, and the step with them is whole.
        """
        return bool(self._parts.accounting.missing)

    @property
    def has_joined_late(self) -> bool:
        """This member joined while others were training: it has their state and needs no checkpoint."""
        return self._parts.progress.has_joined_late

    @property
    def num_train_steps(self) -> int:
        """Committed train steps, as the script counts them; see `count_train_steps`.

        A step that the script goes through again for missing samples counts twice, on all members.
        """
        return self._parts.progress.num_steps_before + self._parts.session.num_committed

    def count_train_steps(self, num_train_steps: int) -> None:
        """Set the script's count of finished train steps; members that join later continue from it."""
        self._parts.progress.num_steps_before = num_train_steps - self._parts.session.num_committed

    def register_final_save(self, save: Callable[[dict[str, int]], str]) -> None:
        """Register a function that saves the state if the job ends early and this member owns the final checkpoint.

        `save` gets this loader's state after the last committed train step, and returns a text about the outcome.
        """
        place = self._parts.progress

        def counted() -> str:
            epoch, position = place.committed
            return save({"epoch": epoch, "position": position, "seed": self._seed})

        self._parts.session.save_final_checkpoint = counted

    def split(self, loader: DataLoader) -> DataLoader:
        """Return a loader for evaluation: this member's part of its samples by the present shares."""
        batch_shares = self._parts.share_table.latest
        samples = order.evaluation_samples(loader)
        shares = balancing.scale_shares(batch_shares.shares, len(samples))
        return subset_loader(
            loader, samples[balancing.rank_slice(shares, batch_shares.members.index(self._parts.member))]
        )

    @property
    def _num_samples(self) -> int:
        assert self._spec.num_samples is not None, "checked"
        return self._spec.num_samples

    @property
    def _epoch_end(self) -> int:
        return len(self) * self.batch_size if self._spec.drop_last else self._num_samples

    def _open_epoch(self, number: int) -> None:
        self._parts.progress.epoch, self._parts.progress.position = number, 0
        self._parts.accounting.open_epoch(number)

    def _iterate_rest(self, number: int) -> Iterator[Any]:
        """Yield the rest of the epoch; note if the script breaks off its pass."""
        place = self._parts.progress
        num_before = place.num_drawn
        try:
            yield from self._iterate_batches()
        except GeneratorExit:
            self._aborted_epoch = number
            self._aborted_before_step = place.num_since_commit >= place.num_drawn - num_before
            self._give_up_missing()
            raise

    def _iterate_batches(self) -> Iterator[Any]:
        """Yield batches from the present position on; read ahead again after every change of members."""
        parts, place = self._parts, self._parts.progress
        order, version = self._epoch_order(), parts.share_table.version
        expected = parts.accounting.drawn_account + SampleAccount.from_indices(order.trained_indices(order.num_batches))
        batches, index = self._source.batches(order, place.num_drawn), 0
        while index < order.num_batches or parts.accounting.missing:
            if parts.accounting.missing:
                version = -1  # members have changed, and so have the numbers of the batches
                yield from self._iterate_missing()
                continue
            parts.measure_step()
            batch_indices = order.batch(index)
            parts.session.pass_step_boundary(lambda indices=batch_indices: self._record_draw(indices))
            parts.timer.begin_step()
            if parts.share_table.version != version:  # the batches that were read ahead were cut for other members
                version, order, index = parts.share_table.version, self._epoch_order(len(batch_indices)), 0
                batches = self._source.batches(order, place.num_drawn - 1)
            batch, own = next(batches)
            parts.accounting.check_received(own.indices, parts.member)
            index += 1
            self._weigh(own, batch)
            parts.timer.record_samples(len(own.indices))
            parts.session.record_progress()
            yield batch
        parts.accounting.check_drawn(expected)

    def _iterate_missing(self) -> Iterator[Any]:
        """Yield this member's part of the missing samples, batch by batch as in the step that misses them."""
        parts = self._parts
        while parts.accounting.missing:
            parts.incomplete_step.restore()  # again, if another member was lost in the step with the missing samples
            parts.measure_step()
            parts.session.pass_step_boundary(self._record_missing)
            parts.timer.begin_step()
            own = parts.accounting.own_part(parts.member)
            batch = sources.load_batch(self._loader, own.samples_to_load)
            self._weigh(own, batch)
            parts.timer.record_samples(len(own.indices))
            parts.session.record_progress()
            yield batch

    def _record_missing(self) -> None:
        """Record that the next missing samples are taken; needs the session's lock."""
        place, parts = self._parts.progress, self._parts
        shares = parts.share_table.shares_of_batch(place.num_drawn)
        place.record_missing(parts.accounting.record_next_missing(shares))

    def _give_up_missing(self) -> None:
        """Finish a train step that misses samples when the script draws no batch any more, as if they were dropped."""
        parts = self._parts
        if not parts.accounting.missing or parts.session.has_stopped:
            return

        total = sum(len(each.batch) for each in parts.accounting.missing)
        missing = sum(len(each.indices) for each in parts.accounting.missing)

        def give_up() -> None:
            parts.progress.give_up_step(parts.accounting.missing)
            parts.accounting.lose_missing()

        parts.session.change_atomically(give_up)
        if missing < total:
            parts.incomplete_step.take_without_missing(total / (total - missing) if parts.weights.is_mean else 1.0)

    def _record_draw(self, indices: np.ndarray) -> None:
        """Record that the next batch is taken; needs the session's lock."""
        place, parts = self._parts.progress, self._parts
        parts.accounting.record_batch(indices, parts.share_table.shares_of_batch(place.num_drawn))
        place.position += len(indices)
        place.num_drawn += 1
        place.num_since_commit += 1

    def _epoch_order(self, num_back: int = 0) -> EpochOrder:
        """Return the epoch's order from the present position, or from so many samples before it."""
        place = self._parts.progress
        return EpochOrder(
            indices=order.epoch_indices(self._loader, self._spec, self._seed, place.epoch, lambda drawn: drawn),
            batch_samples=self.batch_size,
            drop_last=self._spec.drop_last,
            start=place.position - num_back,
        )

    def _portion(self, number: int, batch: np.ndarray) -> Portion:
        own = samples_of_member(batch, self._parts.share_table.shares_of_batch(number), self._parts.member)
        return Portion(indices=own, batch=batch)


def _aborted_before_step_error() -> TrainingError:
    return TrainingError(
        explain(
            "pass of the loader of an elastic job",
            got="broken off before its first train step",
            expected="train steps",
            do="Look at a batch of the DataLoader that prepare was given: a worker that joins has to draw what the "
            "others draw, and cannot look at a batch that they have drawn before",
        )
    )


def check_elastic_data(spec: LoaderSpec) -> None:
    """Refuse data whose order or position a joining member cannot know.

    Raises:
        TrainingError: The data are a stream, or have the script's own sampler.
    """
    if spec.order in ("stream", "sampled"):
        raise TrainingError(
            explain(
                "data of an elastic job",
                got="a stream" if spec.order == "stream" else "a sampler of the script's own",
                expected="a data set with an index, in sequence or shuffled",
                do="Leave out the sampler, so that a worker that joins can know the order",
            )
        )
