"""Loader of a rank in a ring: gives it its part of the data shards that its ring takes from the server."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ringweave.errors import TrainingError, explain
from ringweave.param_server.client import RingClient
from ringweave.param_server.data_shards import Spans, spans_in_epoch
from ringweave.param_server.messages import ResumeDecision
from ringweave.param_server.worker import ParameterServerOptimizer, UnpushedSamples
from ringweave.planning import balancing
from ringweave.planning.balancing import SampleAccount, Speed
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.collectives import AccountExchange, ControlGroup
from ringweave.training.data import order, sources
from ringweave.training.data.order import LoaderSpec, Portion, min_batch_samples, portion_of_rank
from ringweave.training.data.shared_loader import EpochAccount, SampleWeightTable, subset_loader
from ringweave.training.gradients import SampleWeights
from ringweave.training.rings.ring_assignment import RingAssignment
from ringweave.training.rings.ring_formation import RingShares
from ringweave.training.rings.ring_resume import OfferedCheckpoint, ResumeStart, ServerBackedLoader, remaining_indices

_END_OF_PASS = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class RingLoaderParts:
    """Objects that the loader shares with the rest of the training."""

    control: ControlGroup
    weights: SampleWeights
    samples: UnpushedSamples
    assignment: RingAssignment
    shares: RingShares
    optimizer: ParameterServerOptimizer
    regroup: Callable[[Sequence[Speed] | None], None]
    """Called at a barrier of all rings, with the speeds of all ranks."""
    record_account: Callable[[EpochAccount], object]


class RingLoader(ServerBackedLoader):
    """Loader of a ring: this rank's parts of its ring's data shards; a pass is an epoch of all rings together.

    A pass ends when the samples of the epoch are used up, so rings have different numbers of batches. At the end of
    each epoch, all rings pass a barrier, check that every sample was taken once, and take the same parameters.

    A rank that breaks off a pass ends it for all rings: they get no further batch, and no account of the pass. Rings
    that break off take the newest parameters at the start of their next pass, the others at the end of this one.
    """

    def __init__(
        self,
        loader: DataLoader,
        spec: LoaderSpec,
        seed: int,
        parts: RingLoaderParts,
        sample_weights: SampleWeightTable | None = None,
    ) -> None:
        if spec.num_samples is None:
            do = "Use mode balanced, or a data set with an index"
            raise TrainingError(
                explain("data of mode ps-hra", got="a stream", expected="a data set with an index", do=do)
            )
        super().__init__(loader, spec, parts.weights, sample_weights)
        self._seed, self._parts = seed, parts
        self._shards = _ShardSampler(self._draw_shard)
        self._source = sources.with_batch_sampler(loader, self._shards)
        self._next_epoch = 0
        self._resume_start: ResumeStart | None = None
        """Position in the data to resume from, if any, until a pass has begun."""
        self._epoch = 0
        self._done_spans: Spans = ()
        """Spans of the running pass's epoch that were done before the pass."""
        self._num_passes = 0
        """Number of passes, the same on all ranks. Shards belong to a pass, since an epoch may be started again."""
        self._running: object = None
        """Token of the pass that has not ended."""
        self._abort_notice: AccountExchange | None = None
        """Message that tells other rings of a pass that was broken off."""
        self.account: EpochAccount | None = None
        """Account of the last completed epoch."""

    is_elastic = False
    has_joined_late = False

    def has_training_begun(self) -> bool:
        """Return False: rings that lose no members begin together."""
        return False

    @property
    def may_save(self) -> bool:
        """This rank represents the first ring, which always exists."""
        placement = self._parts.assignment.current
        return placement.client is not None and placement.index == 0

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, without those that `drop_last` leaves out."""
        return self._epoch_samples

    @property
    def seed(self) -> int:
        return self._seed

    def connect_server(self) -> RingClient:
        return self._parts.assignment.connect_server()

    def register_final_save(self, save: Callable[[], str]) -> None:
        """Do nothing: such a job ends with the first worker that fails."""

    def resume(self, offered: OfferedCheckpoint | None) -> ResumeDecision:
        """Resume all rings from a checkpoint; all ranks offer the same one."""
        if self._num_passes:
            raise TrainingError(
                explain(
                    "checkpoint to go on from",
                    got="one after the first pass has begun",
                    expected="it before",
                    do="Call Checkpoints.load right after prepare",
                )
            )
        start = ResumeStart.of_state(offered.state, self._epoch_samples) if offered else None
        decision = self._agree_with_server(offered, start)
        if start is not None:
            self._resume_start, self._seed, self._next_epoch = start, start.seed, start.epoch
            self._parts.assignment.current.worker.refresh()
        return decision

    def _agree_with_server(self, offered: OfferedCheckpoint | None, start: ResumeStart | None) -> ResumeDecision:
        """Return the server's decision to the representative; the other ranks, which do not ask, know it."""
        client = self._parts.assignment.current.client
        if client is not None:
            decision = client.offer_checkpoint(
                offered.train_step if offered else 0, offered.checksum if offered else ""
            )
            if decision.verdict == "give" and offered is not None and start is not None:
                client.restore_snapshot(offered.content(), decision, start.to_message(self._num_passes + 1))
        if offered is None:
            return ResumeDecision(verdict="nothing")
        step = offered.train_step
        return ResumeDecision(verdict="resumed", train_step=step, check=offered.checksum, num_done=step)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank of the ring in a whole shard."""
        return self._parts.shares.ring_shares

    @property
    def next_epoch(self) -> int:
        """Number of the epoch of the next pass."""
        return self._next_epoch

    def __len__(self) -> int:
        """Train steps of all rings together in an epoch; a fast ring has more batches than a slow one."""
        whole, rest = divmod(self._epoch_samples, self.batch_size)
        return whole + (rest > 0)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's batches of the next epoch."""
        self._finish_aborted_pass()
        epoch = self._next_epoch
        self._next_epoch += 1
        self._num_passes += 1
        start, self._resume_start = self._resume_start, None
        self._epoch, self._done_spans = epoch, start.done_spans_of(epoch) if start else ()
        indices = order.epoch_indices(self._loader, self._spec, self._seed, epoch, self._parts.control.broadcast)
        expected = remaining_indices(indices[: self._epoch_samples], self._done_spans)
        self._shards.begin(self._num_passes, expected)
        self._parts.shares.begin_pass()
        given, own_pass = SampleAccount(), object()
        self._running = own_pass
        try:
            for batch, own in self._iterate_batches():
                given += SampleAccount.from_indices(own.indices)
                yield batch
        except GeneratorExit:
            if self._running is own_pass:
                self._abort_pass()
            raise
        self._running = None
        self._parts.optimizer.go_idle()
        self._pass_barrier(epoch, given, SampleAccount.from_indices(expected))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; without it, passes count up from 0.

        If a checkpoint resumes in that epoch, the pass is the rest of it.
        """
        self._next_epoch = epoch

    def split(self, loader: DataLoader) -> DataLoader:
        """Return a loader for evaluation: this rank's part of its samples, each sample on exactly one rank.

        Ranks get equal parts, in the order of the data set. Nothing is communicated; at the end of an epoch all ranks
        have the same parameters.
        """
        control, samples = self._parts.control, order.evaluation_samples(loader)
        own = balancing.rank_slice(balancing.scale_shares((1,) * control.world_size, len(samples)), control.rank)
        return subset_loader(loader, samples[own])

    @property
    def _epoch_samples(self) -> int:
        total = self._spec.num_samples or 0
        return total - total % self.batch_size if self._spec.drop_last else total

    def _batch_part(self, first: int, count: int) -> float:
        """Return the train steps of synchronous training that these samples amount to."""
        first += sum(done for _, done in self._done_spans)
        return balancing.batch_fraction(first, count, batch_samples=self.batch_size, num_samples=self._epoch_samples)

    def _iterate_batches(self) -> Iterator[tuple[Any, Portion]]:
        """Yield the batches of a pass, each with its portion."""
        parts, batches = self._parts, iter(self._source)
        while True:
            parts.shares.begin_batch()
            batch = next(batches, _END_OF_PASS)
            if batch is _END_OF_PASS:
                return
            first, own = self._shards.handed_out.popleft()
            batch_part = self._batch_part(first, own.num_total)
            self._weigh(own, batch, batch_part)
            parts.samples.add(own.num_total, batch_part)
            parts.samples.note_spans(
                self._num_passes, self._epoch, spans_in_epoch(self._done_spans, first, own.num_total)
            )
            parts.shares.record_batch(len(own.indices))
            yield batch, own

    def _abort_pass(self) -> None:
        """Break off the pass: no ring gets a further batch of it, and no ring waits.

        Waits for no other rank, since the script may have broken off its loop, or failed in it.
        """
        self._running = None
        self._parts.optimizer.discard_unpushed()
        self._parts.assignment.discard_rest_of_pass(self._num_passes, self._epoch_samples, self._epoch)
        self._abort_notice = self._parts.control.start_account_exchange(None)

    def _finish_aborted_pass(self) -> None:
        """End a pass that was broken off, or whose iterator was dropped: take the newest parameters."""
        if self._running is not None:
            self._abort_pass()
        if self._abort_notice is not None:
            self._abort_notice.wait()
            self._abort_notice = None
            self._parts.assignment.current.worker.refresh()

    def _draw_shard(self, number: int, indices: Indices) -> tuple[int, Portion] | None:
        parts = self._parts
        shares = parts.shares.ring_shares
        with parts.shares.waiting_for_shard():
            first, count = parts.assignment.take_shard(number, sum(shares), len(indices), min_batch_samples(shares))
        if count == 0:
            return None
        parts.shares.count_shard()
        own = parts.assignment.current.ring.index(parts.control.rank)
        return first, portion_of_rank(indices[first : first + count], shares, own)

    def _pass_barrier(self, epoch: int, given: SampleAccount, expected: SampleAccount) -> None:
        """Pass the barrier at the end of an epoch: check the account, regroup, take the same parameters."""
        parts = self._parts
        by_rank = parts.control.start_account_exchange(given).wait()
        if by_rank is None:
            parts.assignment.current.worker.refresh()
            return
        self.account = EpochAccount(epoch=epoch, expected=expected, by_rank=tuple(by_rank))
        parts.record_account(self.account)
        if not self.account.is_exact:
            raise TrainingError(
                f"account of epoch {epoch}: {self.account.total}, expected {expected}. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )
        parts.regroup(parts.shares.rebalance_at_barrier())
        parts.assignment.current.worker.refresh()
        parts.control.gather_accounts(given)  # no ring pushes before all have the same parameters


class _ShardSampler(Iterable[list[int]]):
    """The DataLoader's batch sampler: the ring's shards as they are taken, ahead of time with load workers."""

    def __init__(self, draw: Callable[[int, Indices], tuple[int, Portion] | None]) -> None:
        self._draw = draw
        self._number, self._indices = 0, np.empty(0, np.int64)
        self.handed_out: deque[tuple[int, Portion]] = deque()

    def begin(self, number: int, indices: Indices) -> None:
        self._number, self._indices = number, indices
        self.handed_out.clear()

    def __iter__(self) -> Iterator[list[int]]:
        while (drawn := self._draw(self._number, self._indices)) is not None:
            self.handed_out.append(drawn)
            yield drawn[1].samples_to_load
