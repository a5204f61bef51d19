"""Commit protocol of one operation (a reduction, a broadcast, a collective of the script), until all have committed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.errors import explain
from ringweave.membership.membership_records import Membership, resolve_reduction
from ringweave.planning.balancing import SampleAccount
from ringweave.training.elastic import member_details, recovery, retained_reductions, script_collectives
from ringweave.training.elastic.recovery import CatchUp
from ringweave.training.elastic.retained_reductions import (
    Commit,
    FetchedJson,
    FetchOnceBroadcast,
    PartialSums,
    ReductionRow,
    RetainedReduction,
    SumBuffers,
)
from ringweave.training.elastic.script_collectives import (
    CollectiveCall,
    CollectiveResult,
    OperationHeader,
    ScriptCollective,
)
from ringweave.training.elastic.session_state import SessionState
from ringweave.training.gradients import GradientResiduals

_FutureT = TypeVar("_FutureT")
_LOGGER = logging.getLogger("ringweave")


@dataclass(frozen=True, slots=True)
class _PreparedCommit:
    """Results of a reduction, applied when it is committed."""

    commit: Commit
    buffers: Sequence[tuple[Tensor, Tensor]]
    """(buffer of the model, its new value)."""


@dataclass(frozen=True, slots=True)
class _PreparedCollective:
    """Result of a collective of the script, applied when it is committed."""

    collective: ScriptCollective
    result: CollectiveResult


class CommitProtocol:
    """Commit protocol of one member, through all generations. Called without the lock, unless noted."""

    def __init__(
        self,
        state: SessionState,
        buffers: Callable[[], list[Tensor]],
        *,
        is_mean: bool,
        num_parameters: int,
        partial_sums: PartialSums | None = None,
    ) -> None:
        """Create it; every reduction sets the tensors `buffers` to the first member's values.

        Without `partial_sums`, samples of lost members are dropped.
        """
        self._state, self._buffers, self._is_mean, self._partial_sums = state, buffers, is_mean, partial_sums
        self._num_parameters = num_parameters
        self._sum_buffers = SumBuffers(state.trainer.wires)
        self._prepared: _PreparedCommit | _PreparedCollective | None = None
        self._has_reported_faults = False
        """The last sums were not finite by this member's own gradients, and it has said so."""
        self._is_delivering = False
        """A reduction is committed and the script does not have it yet; guarded by the lock."""
        self.buffer_source = 0
        """Rank of the member whose buffers all get."""

    @property
    def recomputes(self) -> bool:
        """Samples of lost members are computed by the others."""
        return self._partial_sums is not None

    # The training thread.

    @property
    def residuals(self) -> GradientResiduals | None:
        """Residuals of the gradients; None if they always travel exactly."""
        return self._sum_buffers.residuals

    def add_bucket(self, bucket: Tensor, parameters: Sequence[Tensor] = ()) -> torch.futures.Future[Tensor]:
        """Add gradients of these parameters in this backward pass; the future has the mean once all are committed."""
        return self._add_to_reduction(lambda reduction: reduction.add_bucket(bucket, self._sum_buffers, parameters))

    def end_backward(self, used_bits: int) -> torch.futures.Future[int]:
        """Complete the buckets of this backward pass, in which this member has used the parameters of these bits.

        Returns:
            Future of the parameters that any member has used, once the reduction is committed.
        """

        def end(reduction: RetainedReduction) -> torch.futures.Future[int]:
            state = self._state
            future = reduction.complete(state.trainer.reduction_row(), used_bits, self._sum_buffers)
            state.layout, state.is_waiting = reduction.layout, True
            return future

        return self._add_to_reduction(end)

    def _add_to_reduction(
        self, add: Callable[[RetainedReduction], torch.futures.Future[_FutureT]]
    ) -> torch.futures.Future[_FutureT]:
        state = self._state
        with state.lock:
            state.num_progress += 1
            reduction = self._current_reduction()
            future = add(reduction)
            error, abort_count = state.start_reduction(), state.abort_count
            if state.stop is not None and state.catch_up is None:
                reduction.fail(member_details.stop_error(state.stop))
            if reduction.is_complete:  # else no thread waits for it
                state.lock.notify_all()
        state.report_broken_group(error, abort_count)
        return future

    def _current_reduction(self) -> RetainedReduction:
        """Return the reduction of the script's backward pass; needs the lock."""
        state = self._state
        if state.catch_up is not None:
            return state.catch_up.current_backward()
        reduction = state.reduction or RetainedReduction(number=state.num_reductions + 1)
        assert isinstance(reduction, RetainedReduction), "what is spread is waited for"
        state.reduction = reduction
        return reduction

    def begin_broadcast(self, fetch: Callable[[], FetchedJson], tensors: Sequence[Tensor]) -> FetchOnceBroadcast:
        """Start a fetch by the first member, for all members."""
        state = self._state
        with state.lock:
            state.num_progress += 1
            broadcast = FetchOnceBroadcast(state.num_reductions + 1, fetch, tensors, lambda: state.abort_count)
            state.reduction, state.is_waiting = broadcast, True
            state.status = replace(
                state.status, at_step_boundary=False
            )  # a member that joined now would have no part in it
            error, abort_count = state.start_reduction(), state.abort_count
            state.lock.notify_all()
        state.report_broken_group(error, abort_count)
        return broadcast

    def wait_committed(self) -> None:
        """Wait until the reduction is committed and delivered.

        Raises:
            MembershipError: It never will be: this member was evicted, or the job is over.
        """
        state = self._state
        with state.saves_final_checkpoint(), state.lock:
            state.lock.wait_for(lambda: not self._is_delivering and (state.reduction is None or state.has_ended))
            if state.reduction is not None or state.error is not None:
                state.raise_if_stopped()

    def run_collective(self, call: CollectiveCall) -> CollectiveResult:
        """Return the result of a collective of the script, once all members have committed it.

        Raises:
            MembershipError: It never will be: this member was evicted, or the job is over.
        """
        state = self._state
        with state.saves_final_checkpoint(), state.lock:
            state.num_progress += 1
            # Only another thread of the script can have handed in what comes before.
            state.lock.wait_for(
                lambda: state.has_ended or (state.collective is None and not state.is_reduction_complete)
            )
            state.raise_if_stopped()
            collective = state.collective = ScriptCollective(call)
            state.is_waiting = True
            state.status = replace(
                state.status, at_step_boundary=False
            )  # a member that joined now would have no part in it
            state.lock.notify_all()
            state.lock.wait_for(lambda: collective.result is not None or state.has_ended)
            if collective.result is None:
                state.raise_if_stopped()
            assert collective.result is not None, "it is committed"
            return collective.result

    # The session's own thread.

    def commit_next(
        self, operation: RetainedReduction | FetchOnceBroadcast | ScriptCollective, abort_count: int
    ) -> None:
        """Commit the next operation: this member's, or the others' collective if it is recovering.

        Raises:
            TrainingError: Members are in different operations.
        """
        state = self._state
        is_announced = isinstance(operation, ScriptCollective) or state.groups.reduce_group is not None
        try:
            headers = self._announce(operation) if is_announced else []
            if any(header.is_collective for header in headers):
                collective = operation if isinstance(operation, ScriptCollective) else ScriptCollective(None)
                self._commit_collective(collective, headers, abort_count)
                return
        except RuntimeError as error:
            state.report_broken_group(error, abort_count)
            return
        assert not isinstance(operation, ScriptCollective), "all members are in the same"
        self._commit_reduction(operation, abort_count)

    def _announce(self, operation: RetainedReduction | FetchOnceBroadcast | ScriptCollective) -> list[OperationHeader]:
        """Tell the others the operation of this member, and return the headers of all."""
        state = self._state
        assert state.membership is not None, "a group is up"
        members = state.membership.members
        if isinstance(operation, ScriptCollective):
            assert operation.call is not None, "the script has called it"
            header = OperationHeader.of_call(operation.call, members)
        else:
            header = OperationHeader.of_gradients(is_neutral=_contributes_zeros(operation))
        words = header.to_tensor(retained_reductions.row_width(self._num_parameters))
        return script_collectives.check_same_operation(state.groups.allgather_rows(words), members)

    def _commit_collective(
        self, collective: ScriptCollective, headers: Sequence[OperationHeader], abort_count: int
    ) -> None:
        """Exchange the inputs, learn that all members have them, and commit."""
        state = self._state
        assert state.membership is not None, "a group is up"
        header = next(each for each in headers if each.is_collective)
        payload = self._payload(collective, headers, header, abort_count)
        rows = state.groups.allgather_rows(payload) if header.num_bytes else payload.new_empty((len(headers), 0))
        result = script_collectives.result_of_rows(headers, state.membership.members, rows)
        with state.lock:
            if abort_count != state.abort_count:
                return
            prepared = self._prepared = _PreparedCollective(collective, result)
            state.status = replace(state.status, is_prepared=True)
            wants_pause = state.wants_pause and collective.call is not None
        pauses = bool(state.groups.allgather_rows(torch.tensor([wants_pause], dtype=torch.uint8)).all())
        with state.lock:
            if abort_count != state.abort_count:
                return  # an order came first: the next generation decides about this collective
            state.pauses_at_boundary = pauses
            self._apply_collective(prepared)

    def _payload(
        self,
        collective: ScriptCollective,
        headers: Sequence[OperationHeader],
        header: OperationHeader,
        abort_count: int,
    ) -> Tensor:
        """Return the input of this member: zeros if it is recovering, unless it is the source of a broadcast.

        The script of a recovering source comes to the broadcast later. The others wait for it.
        """
        state = self._state
        assert state.membership is not None, "a group is up"
        if collective.call is not None:
            return collective.call.payload
        catch_up, own_rank = state.catch_up, state.membership.members.index(state.member)
        sources = {each.source for each in headers if not each.is_neutral}
        if header.kind != "broadcast" or sources != {own_rank} or catch_up is None:
            return torch.zeros(header.num_bytes, dtype=torch.uint8)
        with state.lock:
            self._wait_for_replay(catch_up, abort_count)
            if catch_up.waiting_call is None or catch_up.waiting_call.digest != header.digest:
                raise recovery.replay_error("another operation", header.text)
            return catch_up.waiting_call.payload

    def _apply_collective(self, prepared: _PreparedCollective) -> None:
        """Apply the commit of a collective to this member; needs the lock."""
        state, collective, result = self._state, prepared.collective, prepared.result
        state.num_collectives += 1
        state.status = replace(
            state.status, committed=state.status.committed + 1, is_prepared=False, at_step_boundary=False
        )
        state.num_progress += 1
        if collective.call is None:
            assert state.catch_up is not None, "a recovering member has a log"
            state.catch_up.log.append_collective(result)
        else:
            state.trainer.unpublish_state()  # the script may change the state by the result
            state.startup_log.record(result)
            state.collective, state.is_waiting = None, False
            collective.result = result
        state.lock.notify_all()

    def _commit_reduction(self, reduction: RetainedReduction | FetchOnceBroadcast, abort_count: int) -> None:
        """Sum the rest, learn that all members have all sums, and commit."""
        state = self._state
        assert state.membership is not None, "a group is up"
        try:
            if _contributes_zeros(reduction):
                with state.lock:
                    if state.catch_up is not None and state.catch_up.is_blocking_others:  # others wait for its script
                        self._wait_for_replay(state.catch_up, abort_count)
                if not state.is_reduction_void:
                    reduction.wait_done()  # its script may have caught up by then, which the row reports
            with state.lock:
                row = self._own_row(reduction)
            received = state.groups.allgather_small(
                retained_reductions.row_to_tensor(row, reduction.used_bits, self._num_parameters)
            )
            script_collectives.check_same_operation(received, state.membership.members)
            every, used_bits = retained_reductions.rows_of_tensor(received)
            number = state.num_reductions + 1
            commit = Commit(number=number, members=state.membership.members, rows=every, used_bits=used_bits)
            if not commit.restarts_step:
                reduction.wait_done()  # the others wait for everything that follows
            if _contributes_zeros(reduction):
                reduction.copy_to_host()  # before the lock is held
            buffers = self._sync_buffers(self._buffers() if isinstance(reduction, RetainedReduction) else ())
            with state.lock:
                if abort_count != state.abort_count:
                    return
                prepared = self._prepared = _PreparedCommit(commit, buffers)
                state.status = replace(state.status, is_prepared=True)
                wants_pause = state.wants_pause and row.may_pause
            pauses = state.groups.all_agree(agrees=wants_pause)
        except RuntimeError as error:
            state.report_broken_group(error, abort_count)
            return
        with state.lock:
            if abort_count != state.abort_count:
                return  # an order came first: the next generation decides about this reduction
            state.pauses_at_boundary = pauses
            self._apply_commit(prepared, reduction)
        self._deliver(prepared, reduction)

    def settle_unfinished(self, membership: Membership, abort_count: int) -> bool:
        """Settle the unfinished reduction: commit it if a member may have done so, else repeat it.

        Returns:
            False if this member has promised to follow another order meanwhile.
        """
        state = self._state
        with state.lock:
            reduction, outcome = state.reduction, resolve_reduction(state.current_status(), membership)
        if reduction is not None:
            reduction.detach_from_group()
        prepared = self._prepared
        with state.lock:
            if abort_count != state.abort_count:
                return False
            if outcome != "commit" or isinstance(prepared, _PreparedCollective):
                if outcome == "commit" and isinstance(prepared, _PreparedCollective):
                    self._apply_collective(prepared)
                state.status = replace(state.status, is_prepared=False)
                if _contributes_zeros(reduction):
                    state.reduction = None  # another one will be created
                return True
            assert reduction is not None, "it was prepared"
            assert prepared is not None, "it was prepared"
            self._apply_commit(prepared, reduction)
        self._deliver(prepared, reduction)
        return True

    def _wait_for_replay(self, catch_up: CatchUp, abort_count: int) -> None:
        """Wait until the script of a recovering member has replayed everything; needs the lock.

        Raises:
            RuntimeError: The generation is over.
        """
        state = self._state
        state.lock.wait_for(lambda: abort_count != state.abort_count or state.has_ended or catch_up.has_replayed_all)
        if abort_count != state.abort_count or state.has_ended:
            raise RuntimeError("the generation is over")

    def _own_row(self, reduction: RetainedReduction | FetchOnceBroadcast) -> ReductionRow:
        """Return this member's row; needs the lock."""
        state, catching, row = self._state, self._state.catch_up, reduction.row
        if _contributes_zeros(reduction):
            is_caught_up = catching is not None and catching.announce_if_caught_up()
            row = ReductionRow(is_recovering=True, is_caught_up=is_caught_up)
        return replace(row, account=SampleAccount(), restarts_step=True) if state.is_reduction_void else row

    def _apply_commit(self, prepared: _PreparedCommit, reduction: RetainedReduction | FetchOnceBroadcast) -> None:
        """Apply the commit to this member; needs the lock."""
        state, commit = self._state, prepared.commit
        state.restarts_step = state.restarts_step and not isinstance(reduction, RetainedReduction)
        if _contributes_zeros(reduction):
            self._log_for_replay(prepared, reduction)
            return
        state.trainer.unpublish_state()
        state.trainer.apply_commit(commit)
        self._is_delivering = True  # not before: an error above ends training, and the script raises it
        state.reduction = None
        state.status = replace(state.status, committed=state.status.committed + 1, is_prepared=False)
        state.num_progress += 1
        state.num_delivered += 1
        state.is_waiting = False  # the script wakes up when the result is delivered, and not before

    def _log_for_replay(self, prepared: _PreparedCommit, reduction: RetainedReduction) -> None:
        """Log the commit for this member's script; needs the lock."""
        state, commit = self._state, prepared.commit
        assert state.catch_up is not None, "who takes part with nothing follows"
        is_caught_up = state.catch_up.log_reduction(commit, reduction, prepared.buffers)
        state.reduction = None
        state.status = replace(
            state.status,
            committed=state.status.committed + 1,
            is_prepared=False,
            has_state=is_caught_up,
            is_recovering=not is_caught_up,
            at_step_boundary=False,
        )
        state.num_progress += 1
        state.lock.notify_all()

    def _deliver(self, prepared: _PreparedCommit, reduction: RetainedReduction | FetchOnceBroadcast) -> None:
        """Deliver the committed reduction to the script, unless the script replays it later."""
        if _contributes_zeros(reduction):
            return
        try:
            for own, first in prepared.buffers:
                own.copy_(first)
            retained_reductions.synchronize_streams(own.device for own, _ in prepared.buffers)
            if isinstance(reduction, RetainedReduction):
                self._report_own_faults(reduction, prepared.commit.number)
            reduction.deliver(prepared.commit, is_mean=self._is_mean, partial_sums=self._partial_sums)
        except Exception as error:  # such as a device error: the script must raise it instead of waiting
            reduction.fail(member_details.as_ringweave_error(error))
            raise
        finally:
            with self._state.lock:
                self._is_delivering = False
                self._state.lock.notify_all()

    def _report_own_faults(self, reduction: RetainedReduction, number: int) -> None:
        """Name this member in its log if a sum is not finite by its own gradients; once until sums are finite again."""
        num_bad, num_own = reduction.count_own_faults()
        if num_own and not self._has_reported_faults:
            text = explain(
                f"gradients of member {self._state.member}",
                got=f"{num_own} numbers are not finite, and so {num_bad} of the sum",
                expected="finite numbers",
                do="Look at the samples and the loss of this worker, or clip gradients",
                where=f"reduction {number}",
            )
            _LOGGER.warning("ringweave: %s", text)
        self._has_reported_faults = bool(num_own)

    def _sync_buffers(self, buffers: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return (buffer, the first member's value) for all buffers."""
        found = []
        for buffer in buffers:
            first = buffer.detach().clone()
            dist.broadcast(first, self.buffer_source, group=self._state.groups.reduce_group)
            found.append((buffer, first))
        return found


def _contributes_zeros(reduction: RetainedReduction | FetchOnceBroadcast | None) -> TypeGuard[RetainedReduction]:
    """Return whether this member contributes zeros to the reduction."""
    return isinstance(reduction, RetainedReduction) and reduction.contributes_zeros
