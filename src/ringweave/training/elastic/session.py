"""Elastic session of one member: its reductions are retained until they are committed, through all generations.

Three threads meet here. The training thread hands in buckets and pauses at step boundaries. The membership client's
thread brings orders. The session's own thread sums, forms groups and decides nothing. The lock is held for moments
only, never while a thread waits for the network.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ringweave.comm import default_group, generation_group
from ringweave.comm.generation_group import GenerationGroups
from ringweave.environment import WIRES
from ringweave.errors import MembershipError, RingweaveError, RpcError, TrainingError
from ringweave.membership import membership_records
from ringweave.membership.client import MembershipClient
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus, StopTraining
from ringweave.training.elastic import member_details, recovery, script_collectives
from ringweave.training.elastic.commit import CommitProtocol
from ringweave.training.elastic.recovery import CatchUp, GenerationStart, RecoveryPlan, ReplayLog
from ringweave.training.elastic.retained_reductions import FetchedJson, PartialSums
from ringweave.training.elastic.script_collectives import (
    CollectiveCall,
    CollectiveInterceptor,
    CollectiveResult,
    StartupLog,
)
from ringweave.training.elastic.session_state import SessionState
from ringweave.training.elastic.trainer import TrainerState
from ringweave.training.elastic.training_state import StateRead

_MAX_READ_FAILURES = 5
"""Limit of failed state reads of a joining member; each time it starts again, perhaps from another member."""


class MemberRecovery:
    """Recovery of one member; does nothing on a member that is not recovering."""

    def __init__(self, state: SessionState, *, is_mean: bool, partial_sums: PartialSums | None = None) -> None:
        self._state, self._is_mean, self._partial_sums = state, is_mean, partial_sums
        self._num_failures = 0
        self._source_member = ""
        """Member that the state is, or was, read from."""
        self._state_read: StateRead | None = None

    # The training thread.

    def replay_next(self, catch_up: CatchUp) -> None:
        """Replay the next logged reduction in the script; wait for one if the log is empty.

        Raises:
            MembershipError: There will be none: this member was evicted, or the job is over.
        """
        state = self._state
        with state.saves_final_checkpoint(), state.lock:
            state.lock.wait_for(lambda: catch_up.is_behind() or state.has_ended)
            if not catch_up.is_behind() or state.status.is_leaving:
                state.raise_if_stopped()
            backward, logged, is_last = catch_up.take_reduction()
            if is_last:
                state.catch_up = None
            state.is_waiting = False
            state.lock.notify_all()
        recovery.replay_reduction(backward, logged, is_mean=self._is_mean, partial_sums=self._partial_sums)
        with state.lock:
            catch_up.log.recycle_sums(logged)

    def replay_collective(self, catch_up: CatchUp, call: CollectiveCall) -> CollectiveResult:
        """Return the logged result of the script's collective; wait for it if the log is empty.

        Raises:
            MembershipError: There will be none: this member was evicted, or the job is over.
            TrainingError: The others' scripts did something else there.
        """
        state = self._state
        with state.saves_final_checkpoint(), state.lock:
            state.num_progress += 1
            catch_up.waiting_call, state.is_waiting = call, True
            state.lock.notify_all()  # the others may wait for its input
            state.lock.wait_for(lambda: catch_up.is_behind() or state.has_ended)
            if not catch_up.is_behind() or state.status.is_leaving:
                state.raise_if_stopped()
            result = catch_up.take_collective(call)
            state.is_waiting = False
            state.lock.notify_all()
        return result

    def pass_step_boundary(self, catch_up: CatchUp, draw: Callable[[], object]) -> None:
        """Pass a step boundary of a recovering member: its own script's, unless it has replayed everything.

        Raises:
            MembershipError: This member was evicted, or the job is over.
            SystemExit: It has left, as requested.
        """
        state = self._state
        with state.saves_final_checkpoint(), state.lock:
            state.num_progress += 1
            state.is_waiting = True
            state.lock.wait_for(lambda: catch_up.is_behind() or not state.is_paused or state.has_ended)
            if not catch_up.is_behind() or state.status.is_leaving:
                state.raise_if_stopped()
            state.is_waiting = False
            draw()

    # The session's own thread; with the lock held, except for the last.

    def is_zero_reduction_due(self) -> bool:
        """The next reduction is due, with zeros from this member."""
        state = self._state
        is_due = state.is_group_up and state.status.is_recovering and state.reduction is None
        return is_due and state.catch_up is not None and state.catch_up.has_room()

    def start_zero_reduction(self) -> RuntimeError | None:
        """Start the zero reduction; return the error if the group is broken."""
        state = self._state
        assert state.catch_up is not None, "it is due"
        state.reduction = state.catch_up.log.zero_reduction(state.num_reductions + 1)
        return state.start_reduction()

    def begin_generation(self, start: GenerationStart, plan: RecoveryPlan) -> None:
        """Begin a generation: now, or in the replay log."""
        state = self._state
        if self._state_read is not None:
            if self._source_member in start.membership.members:
                self._state_read.limit_wait()
            else:
                self._state_read.cancel()
        committed = max(start.membership.last_committed, state.status.committed)
        if start.is_joining:
            state.num_collectives = start.details[plan.owner_ranks[0]]["collectives"]
        if start.is_joining and plan.layout:
            num_reductions = committed - state.num_collectives
            state.catch_up = CatchUp(
                state.member, state.trainer, ReplayLog(plan.layout, num_reductions, wires=state.trainer.wires)
            )
            state.status = replace(state.status, is_recovering=True)
        has_state = not state.status.is_recovering
        state.status = replace(state.status, has_state=has_state, committed=committed)
        if state.catch_up is not None:
            state.catch_up.begin_generation(start)
        else:
            recovery.enter_generation(state.trainer, start)

    def start_read(self, start: GenerationStart, source_rank: int, name: str) -> None:
        """Start to read the state of that rank as it was when this generation was formed."""
        source, trainer, state_read = start.membership.statuses[source_rank], self._state.trainer, StateRead()
        with self._state.lock:
            catch_up = self._state.catch_up
            self._source_member, self._state_read = source.member, state_read
        if catch_up is not None:
            catch_up.start_read(
                lambda throttle: state_read.run(
                    lambda: trainer.fetch_state(source.address, name, state_read, throttle)
                ),
                lambda error: (
                    self._begin_replay(catch_up) if error is None else self._restart_recovery(catch_up, error)
                ),
            )

    # The reading thread.

    def _begin_replay(self, catch_up: CatchUp) -> None:
        state = self._state
        with state.lock:
            catch_up.is_loaded = True
            state.num_progress += 1
            state.lock.notify_all()

    def _restart_recovery(self, catch_up: CatchUp, error: Exception) -> None:
        """Drop the log after a failed state read: this member is a joining member again."""
        state = self._state
        with state.lock:
            if state.catch_up is not catch_up or state.stop is not None:
                return
            self._num_failures += 1
            is_temporary = isinstance(error, RpcError | OSError) and self._num_failures <= _MAX_READ_FAILURES
            membership = state.newest_membership
            if is_temporary:
                state.pause()
                state.catch_up = None
                state.status = MemberStatus(member=state.member, is_leaving=state.status.is_leaving)
        if not is_temporary:
            state.fail_script(error)
        elif state.client is not None and membership is not None:
            state.client.report_failure(membership.generation_id, [])

    # The thread that ends the session; with the lock held.

    def stop_read(self) -> None:
        if self._state.catch_up is not None:
            self._state.catch_up.stop_read()


class SessionThread:
    """Session's own thread: forms ordered generations and commits operations, until this member stops."""

    def __init__(self, state: SessionState, commits: CommitProtocol, recovery: MemberRecovery) -> None:
        self._state, self._commits, self._recovery = state, commits, recovery
        self._gpus: list[torch.device] = []
        self._thread = threading.Thread(target=self._run, name="ringweave elastic", daemon=True)

    def start(self) -> None:
        """Start it on the current GPU of the calling thread, which `prepare` has set."""
        if torch.cuda.is_initialized():
            self._gpus = [torch.device("cuda", torch.cuda.current_device())]
        self._thread.start()

    def wait_stopped(self, timeout_s: float) -> None:
        """Wait until the thread has ended, if it ever started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        default_group.use_gpu_of(self._gpus)  # the members' layouts tell the type of a device, and not its index
        try:
            with generation_group.direct_collectives():
                while self._run_once():
                    pass
        except Exception as error:  # any error: only the script can report it
            self._state.fail_script(error)

    def _run_once(self) -> bool:
        """Wait for an order or an operation that is due, and process it; return False at the end."""
        state, recovery = self._state, self._recovery
        with state.lock:
            state.lock.wait_for(
                lambda: state.stop or state.next_membership or self._is_ready() or recovery.is_zero_reduction_due()
            )
            if state.stop is not None:
                return False
            error = (
                recovery.start_zero_reduction()
                if state.next_membership is None and recovery.is_zero_reduction_due()
                else None
            )
            membership, state.next_membership = state.next_membership, None
            operation = state.collective or state.reduction
            abort_count, num_aborts = state.abort_count, state.groups.num_aborts
        with torch.inference_mode(mode=False), torch.no_grad():
            if error is not None:
                state.report_broken_group(error, abort_count)
            elif membership is not None:
                self._form_generation(membership, abort_count, num_aborts)
            elif operation is not None:
                self._commits.commit_next(operation, abort_count)
        return True

    def _is_ready(self) -> bool:
        state = self._state
        has_room = state.catch_up is None or not state.status.is_recovering or state.catch_up.has_room_for_collectives()
        return state.is_group_up and (state.collective is not None or (state.is_reduction_complete and has_room))

    def _form_generation(self, membership: Membership, abort_count: int, num_aborts: int) -> None:
        """Form the next generation, and settle the unfinished reduction of the one before.

        The order matters: when one member commits the reduction, all have heard of this generation. So a coordinator
        that some of them ask next cannot let others of the generation before repeat it.
        """
        state = self._state
        details = [member_details.parse_details(each.member, each.note) for each in membership.statuses]
        rank = membership.members.index(state.member)
        state.trainer.check_membership(membership, details)
        operations = [each["operation"] for each in details]
        script_collectives.check_reported_operations(membership.statuses, operations)
        if membership.statuses[rank].is_recovering and not state.status.is_recovering:
            error = MembershipError("it starts again: the state could not be read")
            state.report_broken_group(error, abort_count, membership)
            return
        plan = RecoveryPlan.of_membership(membership)
        start = GenerationStart(membership=membership, details=details, is_joining=rank in plan.joining_ranks)
        try:
            if plan.is_recovery_source(rank):
                state.trainer.capture_state()
            is_resumed = self._resume_at_boundary(start, plan, abort_count)
            if is_resumed:
                self._publish_state(start, plan)
            self._form_groups(start, plan, abort_count, num_aborts)
        except TrainingError:
            raise  # this member's own: another generation would not fix it
        except (RuntimeError, RingweaveError, OSError) as error:
            state.report_broken_group(error, abort_count, membership)
            return
        if (
            self._commits.settle_unfinished(membership, abort_count)
            and self._choose_wire_later(start, plan, abort_count)
            and self._begin_generation(start, plan, abort_count)
        ):
            if not is_resumed:
                self._publish_state(start, plan)
            if start.is_joining and plan.layout:
                self._recovery.start_read(start, plan.recovery_source(rank), _generation_name(membership))

    def _form_groups(self, start: GenerationStart, plan: RecoveryPlan, abort_count: int, num_aborts: int) -> None:
        """Form the groups, and read the state if the others wait for that."""
        trainer, membership, details = self._state.trainer, start.membership, start.details
        name, rank = _generation_name(membership), membership.members.index(self._state.member)
        place, is_apart = details[0]["store"], bool(plan.recovering)
        self._state.groups.form_group(place, name, rank, len(membership.members), num_aborts, has_reduce_group=is_apart)
        if not plan.reads_later:  # before the first reduction, so nothing is left to settle
            self._choose_wire(start, plan, abort_count)
        if start.is_joining and not plan.layout:
            source_address = membership.statuses[plan.recovery_source(rank)].address
            state_read = StateRead(lambda: num_aborts != self._state.groups.num_aborts)
            state_read.run(lambda: trainer.fetch_state(source_address, name, state_read))

    def _choose_wire(self, start: GenerationStart, plan: RecoveryPlan, abort_count: int) -> None:
        """Choose the wire format of this generation, if it is open: that of the first member with the state.

        All members call it alike, once the last reduction before this generation is settled.
        """
        state, owner = self._state, plan.owner_ranks[0]
        wires = state.trainer.wires
        if not wires.is_open:
            return
        wire = wires.propose(state.groups.plan(), start.details)
        row = torch.tensor([WIRES.index(wire), state.num_reductions])
        index, committed = state.groups.allgather_small(row)[owner].tolist()
        with state.lock:
            if abort_count != state.abort_count:
                return
            if start.is_joining:
                wires.adopt(start.details[owner])
            # The next reduction may have begun on members that were in the generation before.
            state.trainer.change_wire(committed + 2, WIRES[index], start.membership.members)

    def _choose_wire_later(self, start: GenerationStart, plan: RecoveryPlan, abort_count: int) -> bool:
        """Choose the wire format if that was not done before joining members read the state; False if that failed."""
        if plan.reads_later:
            try:
                self._choose_wire(start, plan, abort_count)
            except RuntimeError as error:
                self._state.report_broken_group(error, abort_count, start.membership)
                return False
        return True

    def _resume_at_boundary(self, start: GenerationStart, plan: RecoveryPlan, abort_count: int) -> bool:
        """Let a script that waits at a step boundary compute its next gradients while the groups form, if it may.

        They are retained, as after a death. Nothing of an earlier step is left to decide. If the others give this
        generation up, those that have not drawn the batch draw it as this member did (rule G7). A script that calls
        collectives of its own may need its new rank for them, so it waits; and so do rings, and members that read the
        state while the others wait.
        """
        state = self._state
        with state.lock:
            is_idle = state.reduction is None and state.num_collectives == 0
            is_at_boundary = state.status.at_step_boundary and state.status.has_state and state.catch_up is None
            is_settled = abort_count == state.abort_count and state.status.committed == start.membership.last_committed
            resumes = is_idle and is_at_boundary and is_settled and plan.reads_later and state.trainer.supports_replay
            if resumes:
                self._enter_generation(start, plan)
        return resumes

    def _enter_generation(self, start: GenerationStart, plan: RecoveryPlan) -> None:
        """Let the script go on as a member of the generation; needs the lock."""
        state = self._state
        state.membership, self._commits.buffer_source = start.membership, plan.owner_ranks[0]
        self._recovery.begin_generation(start, plan)
        state.is_paused = state.pauses_at_boundary = False
        state.lock.notify_all()

    def _begin_generation(self, start: GenerationStart, plan: RecoveryPlan, abort_count: int) -> bool:
        """Begin the generation, unless another order came first; return whether it began."""
        state = self._state
        with state.lock:
            if abort_count != state.abort_count:
                return False
            if state.membership is not start.membership:
                self._enter_generation(start, plan)
            state.is_generation_pending, state.is_group_up = False, True
            state.num_generations += 1
            may_restart = self._commits.recomputes and state.trainer.ring is None
            state.restarts_step = may_restart and recovery.restarts_step(start, plan.recovering)
            error = state.start_reduction()
            state.lock.notify_all()
        state.report_broken_group(error, abort_count)
        return True

    def _publish_state(self, start: GenerationStart, plan: RecoveryPlan) -> None:
        """Publish the captured state for joining members, while the script continues."""
        if plan.is_recovery_source(start.membership.members.index(self._state.member)):
            self._state.trainer.publish_state(_generation_name(start.membership), is_lasting=bool(plan.layout))


def _generation_name(membership: Membership) -> str:
    return "{}.{}".format(*membership.generation_id)


_CLOSE_TIMEOUT_S = 5.0
_NUM_WARMUP_REDUCTIONS = 4
"""Reductions after which a member has imported, planned and allocated everything its training needs."""


class ElasticSession:
    """Session of one member of an elastic job; the listener of its membership client."""

    def __init__(
        self,
        member: str,
        groups: GenerationGroups,
        trainer: TrainerState,
        *,
        buffers: Callable[[], list[Tensor]],
        is_mean: bool,
        num_parameters: int = 0,
        recomputes: bool = False,
    ) -> None:
        """Create a session; every reduction sets the tensors `buffers` to the first member's values.

        With `recomputes`, sums that miss samples of lost members are kept for the reduction of these samples.
        """
        self._state = SessionState(member, groups, trainer)
        partial_sums = PartialSums() if recomputes else None
        self.commits = CommitProtocol(
            self._state, buffers, is_mean=is_mean, num_parameters=num_parameters, partial_sums=partial_sums
        )
        self._recovery = MemberRecovery(self._state, is_mean=is_mean, partial_sums=partial_sums)
        self._thread = SessionThread(self._state, self.commits, self._recovery)

    # The training thread.

    def start(self, membership_client: MembershipClient) -> Membership:
        """Join the job; return the first membership once this member has the job's state.

        From here to its first step boundary the script prepares its training. No member joins then: it would miss what
        the others do together meanwhile, and read a state that changes.

        Raises:
            MembershipError: This member was not admitted, or the job is over.
        """
        state = self._state
        state.client = membership_client
        self._thread.start()
        membership_client.start()
        with state.lock:
            state.lock.wait_for(self._can_start)
            state.raise_if_stopped()
            if state.catch_up is not None:
                state.catch_up.is_behind()
            assert state.membership is not None
            state.status = replace(state.status, at_step_boundary=False)
            return state.membership

    def _can_start(self) -> bool:
        state = self._state
        if state.has_ended:
            return True
        return state.catch_up.is_loaded if state.catch_up else not state.is_paused

    def revokes(self, member: str) -> bool:
        """Return whether the certificate of that process of the job counts no more."""
        newest = self._state.newest_membership
        return newest is not None and newest.revokes(member)

    @property
    def membership(self) -> Membership:
        assert self._state.membership is not None, "after start"
        return self._state.membership

    @property
    def is_primary(self) -> bool:
        """This member writes events for all: it is the first member with the state in the newest ordered generation.

        The unfinished reduction of a generation is settled before the next one is formed, and the old primary may be
        gone.
        """
        newest = self._state.newest_membership
        return newest is not None and newest.primary == self._state.member

    def register_final_save(self, save: Callable[[], str]) -> None:
        """Save the state so at the job's end if this member owns the final checkpoint; `save` returns the outcome."""
        self._state.save_final_checkpoint = save

    def broadcast_from_first(self, fetch: Callable[[], FetchedJson], tensors: Sequence[Tensor] = ()) -> FetchedJson:
        """Fetch on the first member, for all members; `tensors` are filled as `fetch` fills the first member's.

        All members call it at the same place of their script. It is committed and numbered like a reduction.

        Raises:
            MembershipError: This member was evicted, or the job is over.
            RingweaveError: The fetch has failed.
        """
        spread = self.commits.begin_broadcast(fetch, tensors)
        self.wait_committed()
        return spread.fetched

    def change_atomically(self, change: Callable[[], None]) -> None:
        """Change something that this member's status depends on, while no status is requested.

        Raises:
            MembershipError: This member was evicted, or the job is over.
        """
        state = self._state
        with state.saves_final_checkpoint(), state.lock:
            state.wait_resumed()
            change()

    @property
    def num_committed(self) -> int:
        """Committed reductions since the start of the job that the script has applied."""
        state = self._state
        return state.catch_up.log.last_replayed if state.catch_up else state.num_reductions

    def repeat_collectives(self, startup_log: StartupLog) -> None:
        """Repeat the script's small collectives of each default group when a member is lost in them.

        Args:
            startup_log: Results before the first step boundary; part of the state that joining members read.
        """
        self._state.startup_log = startup_log
        interceptor = CollectiveInterceptor(self._run_collective, lambda: self.membership.members)
        self._state.groups.prepare_default_group = interceptor.attach

    def _run_collective(self, call: CollectiveCall) -> None:
        """Run a collective of the script; on a member that has joined late, give it the result that the others had."""
        state = self._state
        if state.startup_log.is_replaying:
            result = state.startup_log.take(call, state.member)
        elif state.catch_up is not None:
            result = self._recovery.replay_collective(state.catch_up, call)
        else:
            result = self.commits.run_collective(call)
        call.finish(result)

    def wait_committed(self) -> None:
        """Wait until the reduction is committed; called at the end of a backward pass, before DDP reads the sums.

        Raises:
            MembershipError: It never will be: this member was evicted, or the job is over.
        """
        if self._state.catch_up is not None:
            self._recovery.replay_next(self._state.catch_up)
            return
        self.commits.wait_committed()

    def pass_step_boundary(self, draw: Callable[[], object]) -> None:
        """Pass a step boundary, where members join and leave. `draw` records that the next batch is taken.

        Raises:
            MembershipError: This member was evicted, or the job is over.
            SystemExit: It has left, as requested.
        """
        state, status = self._state, None
        state.startup_log.end()
        membership_client = state.client
        if state.catch_up is not None:
            self._recovery.pass_step_boundary(state.catch_up, draw)
            return
        with state.lock:
            state.num_progress += 1
            is_step_boundary = state.reduction is None and state.trainer.is_between_steps
            state.status = replace(state.status, at_step_boundary=is_step_boundary)
            if (
                state.pauses_at_boundary and is_step_boundary and not state.is_paused
            ):  # else no member could join or leave yet
                state.pause()
                status = state.current_status()
        if membership_client is not None and status is not None:
            membership_client.report_status(status)
        with state.saves_final_checkpoint(), state.lock:
            state.wait_resumed()
            state.status = replace(state.status, at_step_boundary=False)
            draw()

    def record_progress(self) -> None:
        """Record progress of the training thread."""
        self._state.num_progress += 1

    def leave_at_next_boundary(self) -> None:
        """Leave at the next step boundary; at once if this member is recovering and the others do not rely on it."""
        state = self._state
        with state.lock:
            state.status = replace(state.status, is_leaving=True)
            catching = state.catch_up
            is_recovering = catching is not None and state.status.is_recovering and not catching.has_announced
        if state.client is not None:
            state.client.leave_membership(is_finished=False)
        if is_recovering:
            self.stop_training(StopTraining(reason=membership_records.REASON_LEFT, is_end=False))

    def leave_nowait(self) -> None:
        """Like `leave_at_next_boundary`, but return at once, also in a signal handler of a thread with the lock."""
        threading.Thread(target=self.leave_at_next_boundary, name="ringweave leaving", daemon=True).start()

    @property
    def is_paused(self) -> bool:
        """This member is paused until the next generation begins."""
        return self._state.is_paused and self._state.membership is not None

    @property
    def has_stopped(self) -> bool:
        """This member changes nothing any more: it was evicted, or the job is over."""
        return self._state.stop is not None

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """End the session's thread, so that it is not in native code when the interpreter ends."""
        state = self._state
        with state.lock:
            state.stop = state.stop or StopTraining(reason="it has ended", is_end=True)
            self._recovery.stop_read()
            state.lock.notify_all()
        state.groups.abort()
        self._thread.wait_stopped(timeout_s)
        state.groups.wait_aborted(timeout_s)
        if state.catch_up is not None:
            state.catch_up.wait_stopped(timeout_s)

    def heartbeat(self, cpu_s: float) -> Heartbeat:
        """Return a heartbeat. A member that reads the state waits for its source, and is not stuck."""
        state = self._state
        is_loading_state = state.catch_up is not None and not state.catch_up.is_loaded
        return Heartbeat(
            progress=state.num_progress,
            is_waiting=state.is_waiting or is_loading_state,
            cpu_s=cpu_s,
            is_starting=state.catch_up is not None or state.num_delivered < _NUM_WARMUP_REDUCTIONS,
            is_reading=is_loading_state,
            num_reductions=state.num_delivered,
            num_generations=state.num_generations,
        )

    # The membership client's thread.

    def pause_training(self, *, is_urgent: bool) -> MemberStatus | None:
        """Pause; see `MembershipListener`.

        A generation that was ordered and not formed yet is formed first, and its step completed. If members gave it up
        for the next one, in which they pause at a step boundary, they would repeat that forever.
        """
        state = self._state
        with state.lock:
            if not is_urgent and (state.is_generation_pending or not state.is_paused):
                state.wants_pause = True
                return None
            state.pause()
        state.groups.abort()
        with state.lock:
            return state.current_status()  # after the abort: the store of an aborted group is not reported

    def current_status(self) -> MemberStatus:
        with self._state.lock:
            return self._state.current_status()

    def begin_generation(self, membership: Membership) -> None:
        state = self._state
        with state.lock:
            state.next_membership = state.newest_membership = membership
            state.is_generation_pending, state.wants_pause = True, False
            state.lock.notify_all()

    def stop_training(self, stop: StopTraining) -> None:
        """Stop: change nothing any more."""
        state = self._state
        with state.lock:
            state.stop = stop
            state.pause()
            self._recovery.stop_read()
            if state.reduction is not None:
                state.reduction.fail(member_details.stop_error(stop))
            state.lock.notify_all()
        state.groups.abort()
