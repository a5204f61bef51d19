"""Ring of a fixed set of ranks as the loader sees it: its representative takes shards, and no rank is ever lost."""

from collections.abc import Callable, Sequence

import torch

from ringweave.errors import TrainingError, explain
from ringweave.param_server.client import RingClient
from ringweave.param_server.data_shards import Spans, spans_in_epoch
from ringweave.param_server.messages import ResumeDecision
from ringweave.planning import balancing
from ringweave.planning.balancing import SampleAccount, Speed
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.collectives import AccountExchange, ControlGroup
from ringweave.training.data.order import Portion, portion_of_rank
from ringweave.training.data.sources import EpochPass, TrainingMembership
from ringweave.training.elastic.accounting import EpochAccount
from ringweave.training.rings.ring_assignment import RingAssignment
from ringweave.training.rings.ring_formation import RingShares
from ringweave.training.rings.shard_source import OfferedCheckpoint, ResumeStart


class StaticRing(TrainingMembership):
    """Ranks of one ring, which no rank joins or leaves but at the end of an epoch.

    A rank that breaks off a pass ends it for all rings: they get no further batch, and no account of the pass. Rings
    that break off take the newest parameters at the start of their next pass, the others at the end of this one.
    """

    def __init__(
        self,
        control: ControlGroup,
        assignment: RingAssignment,
        shares: RingShares,
        regroup: Callable[[Sequence[Speed] | None], None],
        record_account: Callable[[EpochAccount], object],
    ) -> None:
        """Create it; `regroup` is called at a barrier of all rings, with the speeds of all ranks."""
        self._control, self.assignment, self.ring_shares = control, assignment, shares
        self._regroup, self._record_account = regroup, record_account
        self.start: ResumeStart | None = None
        """Position in the data to resume from, if any, until a pass has begun."""
        self._epoch = 0
        self._done_spans: Spans = ()
        """Spans of the running pass's epoch that were done before the pass."""
        self._num_passes = 0
        """Number of passes, the same on all ranks. Shards belong to a pass, since an epoch may be started again."""
        self._received = SampleAccount()
        self._running: object = None
        """The pass that has not ended."""
        self._abort_notice: AccountExchange | None = None
        """Message that tells other rings of a pass that was broken off."""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(map(str, self.assignment.current.ring))

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank of the ring in the next whole shard."""
        return self.ring_shares.ring_shares

    def evaluation_slice(self, num_samples: int) -> slice:
        """Return an equal part: at the end of an epoch all ranks have the same parameters."""
        equal = balancing.scale_shares((1,) * self._control.world_size, num_samples)
        return balancing.rank_slice(equal, self._control.rank)

    def has_training_begun(self) -> bool:
        """Return whether the others are training. Rings that lose no members begin together."""
        return False

    @property
    def may_save(self) -> bool:
        """This process represents a ring that may be the one to write checkpoints: the first, which always exists."""
        placement = self.assignment.current
        return placement.client is not None and placement.index == 0

    def connect_server(self) -> RingClient:
        """Return a separate connection of this process for its ring; the caller closes it."""
        return self.assignment.connect_server()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give all ranks the first rank's samples in order."""
        return self._control.broadcast(tensor)

    def resume(self, offered: OfferedCheckpoint | None, epoch_samples: int) -> tuple[ResumeDecision, int | None]:
        """Agree with all rings on a checkpoint, and resume from it: parameters and data. All ranks offer the same one.

        Returns:
            The decision, and the epoch of the next pass; None leaves it to the script.

        Raises:
            TrainingError: Training has begun, or the checkpoint belongs to other data or another model.
        """
        if self._num_passes:
            raise TrainingError(
                explain(
                    "checkpoint to go on from",
                    got="one after the first pass has begun",
                    expected="it before",
                    do="Call Checkpoints.load right after prepare",
                )
            )
        start = ResumeStart.of_state(offered.state, epoch_samples) if offered else None
        decision = self._agree_with_server(offered, start)
        if start is None:
            return decision, None
        self.start = start
        self.assignment.current.worker.refresh()
        return decision, start.epoch

    def _agree_with_server(self, offered: OfferedCheckpoint | None, start: ResumeStart | None) -> ResumeDecision:
        """Return the server's decision to the representative; the other ranks, which do not ask, know it."""
        client = self.assignment.current.client
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

    # One pass, in this order.

    def finish_aborted_pass(self, epoch_samples: int) -> None:
        """End a pass that was broken off, or whose iterator was dropped: take the newest parameters."""
        if self._running is not None:
            self._discard_pass(epoch_samples)
        if self._abort_notice is not None:
            self._abort_notice.wait()
            self._abort_notice = None
            self.assignment.current.worker.refresh()

    def begin_epoch(self, number: int) -> tuple[int, Spans] | None:
        """Begin a pass of an epoch.

        Returns:
            Number of the pass, and the spans of the epoch that are not drawn; None if the others have finished it.
        """
        start, self.start = self.start, None
        self._epoch, self._done_spans = number, start.done_spans_of(number) if start else ()
        self._num_passes += 1
        self._received, self._running = SampleAccount(), self._num_passes
        self.ring_shares.begin_pass()
        return self._num_passes, self._done_spans

    def begin_batch(self) -> None:
        """Begin the next batch: the computation of the one before is over."""
        self.ring_shares.begin_batch()

    def pass_shard_boundary(self) -> tuple[Portion, float] | None:
        """Pass the boundary before a shard is taken; return missing samples of the last step if they come first."""
        return None

    def take_shard(self, pass_number: int, wanted: int, total: int, min_samples: int) -> tuple[int, int]:
        """Take the ring's next shard; return (first sample, number of samples)."""
        with self.ring_shares.waiting_for_shard():
            return self.assignment.take_shard(pass_number, wanted, total, min_samples)

    def record_shard(self, batch: Indices, batch_part: float, first: int) -> Portion:
        """Record a shard that the ring computes later; return this rank's portion."""
        del batch_part, first
        own = self.assignment.current.ring.index(self._control.rank)
        portion = portion_of_rank(batch, self.ring_shares.ring_shares, own)
        self.ring_shares.count_shard()
        return portion

    def record_batch(self, first: int, own: Portion, batch_part: float) -> None:
        """Record that the batch is loaded."""
        samples = self.assignment.current.worker.link.samples
        samples.add(own.num_total, batch_part)
        spans = spans_in_epoch(self._done_spans, first, own.num_total)
        samples.note_spans(self._num_passes, self._epoch, spans)
        self.ring_shares.count_batch()
        self._received += SampleAccount.from_indices(own.indices)

    def abort_pass(self, begun: EpochPass, epoch_samples: int) -> None:
        """Break off a pass: no ring gets a further batch of it, and no ring waits.

        Waits for no other rank, since the script may have broken off its loop, or failed in it.
        """
        if self._running == begun.number:
            self._discard_pass(epoch_samples)

    def _discard_pass(self, epoch_samples: int) -> None:
        self._running = None
        self.assignment.current.worker.discard_unpushed()
        self.assignment.current.worker.link.samples.clear()
        self.assignment.discard_rest_of_pass(self._num_passes, epoch_samples, self._epoch)
        self._abort_notice = self._control.start_account_exchange(None)

    def end_epoch(self, epoch: int, expected: SampleAccount) -> EpochAccount | None:
        """Pass the barrier at the end of an epoch: check the account, regroup, take the same parameters.

        Returns:
            The account; None if a rank has broken off its pass.

        Raises:
            TrainingError: Samples were lost or doubled.
        """
        self._running = None
        self.assignment.current.worker.go_idle()
        by_rank = self._control.start_account_exchange(self._received).wait()
        if by_rank is None:
            self.assignment.current.worker.refresh()
            return None
        account = EpochAccount(epoch=epoch, expected=expected, by_rank=tuple(by_rank))
        self._record_account(account)
        account.check()
        self._regroup(self.ring_shares.rebalance_at_barrier())
        self.assignment.current.worker.refresh()
        self._control.gather_accounts(self._received)  # no ring pushes before all have the same parameters
        return account
