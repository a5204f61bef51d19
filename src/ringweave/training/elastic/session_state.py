"""Session state: one lock, and behind it this member's status, membership and present reduction."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ringweave.comm import generation_group
from ringweave.comm.generation_group import GenerationGroups
from ringweave.errors import CapacityError, MembershipError, RingweaveError
from ringweave.membership.client import MembershipClient
from ringweave.membership.membership_records import Membership, MemberStatus, StopTraining
from ringweave.training.elastic import member_details, recovery
from ringweave.training.elastic.recovery import CatchUp
from ringweave.training.elastic.retained_reductions import FetchOnceBroadcast, RetainedReduction
from ringweave.training.elastic.script_collectives import ScriptCollective, StartupLog
from ringweave.training.elastic.trainer import TrainerState

LEFT_EXIT_CODE = 143
"""Exit code of a process that has left on request: 128 + SIGTERM."""


class SessionState:
    """Shared state of all parts of one member's session.

    Any thread may change it with the lock held. The lock is held for moments only; waits for the network and messages
    to others happen without it. An order may come meanwhile, so a thread that takes the lock again first checks whether
    `abort_count` is unchanged.

    Some fields are read without the lock: `membership` and `status` on the session's own thread; `catch_up` and `stop`,
    on which the training thread branches; and fields that only show progress, such as `num_delivered`, which may be a
    moment old. `num_progress` is counted without it too, and may miss one; `client` and `save_final_checkpoint` are set
    once.
    """

    def __init__(self, member: str, groups: GenerationGroups, trainer: TrainerState) -> None:
        self.member, self.groups, self.trainer = member, groups, trainer
        self.lock = threading.Condition()
        self.client: MembershipClient | None = None
        self.membership: Membership | None = None
        """The present membership."""
        self.next_membership: Membership | None = None
        self.newest_membership: Membership | None = None
        """The newest ordered membership, whether it is formed or not."""
        self.stop: StopTraining | None = None
        self.error: RingweaveError | None = None
        self.status = MemberStatus(member=member)
        self.abort_count = 0
        self.is_paused, self.is_generation_pending, self.is_group_up = True, False, False
        self.wants_pause, self.pauses_at_boundary = False, False
        self.reduction: RetainedReduction | FetchOnceBroadcast | None = None
        self.collective: ScriptCollective | None = None
        """Collective that the script waits for. It comes before a reduction that is not complete."""
        self.num_collectives = 0
        """Committed collectives of the script; they are numbered together with the reductions."""
        self.startup_log = StartupLog()
        self.restarts_step = False
        """The next reduction of gradients misses samples of lost members, and all members compute its step anew."""
        self.layout: list[list[object]] = []
        self.catch_up: CatchUp | None = None
        """Present until the script has replayed everything; only the script ends it."""
        self.num_progress, self.is_waiting = 0, False
        self.num_generations = 0
        """Generations that have begun."""
        self.num_delivered = 0
        """Reductions whose results the script received when they were committed."""
        self.save_final_checkpoint: Callable[[], str] | None = None

    # With the lock held.

    @property
    def has_ended(self) -> bool:
        """This member was evicted, or the job is over, or it cannot continue."""
        return self.stop is not None or self.error is not None

    @property
    def num_reductions(self) -> int:
        """Committed reductions since the start of the job: operations that are no collectives of the script."""
        return self.status.committed - self.num_collectives

    @property
    def is_reduction_complete(self) -> bool:
        return self.reduction is not None and self.reduction.is_complete

    @property
    def operation_text(self) -> str:
        """Text of the operation that the script waits for; empty if it waits for none."""
        if self.collective is not None and self.collective.call is not None:
            return self.collective.call.signature
        is_own = not self.status.is_recovering and self.is_reduction_complete
        return "gradients" if is_own and isinstance(self.reduction, RetainedReduction) else ""

    def pause(self) -> None:
        self.is_paused, self.is_group_up = True, False
        self.next_membership, self.is_generation_pending = None, False  # an earlier order is void
        self.abort_count += 1

    def wait_resumed(self) -> None:
        """Wait until a generation is formed; this member waits for the others meanwhile.

        Raises:
            MembershipError: This member was evicted, or the job is over.
            SystemExit: It has left, as it wanted to.
        """
        self.is_waiting = True
        self.lock.wait_for(lambda: not self.is_paused or self.has_ended)
        self.raise_if_stopped()
        self.is_waiting = False

    def current_status(self) -> MemberStatus:
        """Return the status that the others receive."""
        operation = {"collectives": self.num_collectives, "operation": self.operation_text}
        details = {"store": self.groups.store_address, **operation, **self.trainer.status_details()}
        layout = recovery.layout_to_text(self.layout) if self.trainer.supports_replay else ""
        status = self.status
        if status.is_recovering and self.catch_up is not None:
            status = replace(status, at_step_boundary=self.catch_up.is_at_step_boundary)
        num_drawn, shares = self.trainer.drawn_batches()
        status = replace(status, address=self.trainer.state_address, num_drawn=num_drawn, batch_shares=shares)
        return replace(status, note=json.dumps(details), layout=layout)

    def raise_if_stopped(self) -> None:
        """Raise the reason why this member cannot continue, if there is one.

        Raises:
            RingweaveError: Its session has failed, or it was evicted, or the job is over.
            SystemExit: It has left, as it wanted to.
        """
        if self.error is not None:
            raise self.error
        if self.stop is not None:
            if self.status.is_leaving:  # as requested, alone or with all others
                raise SystemExit(LEFT_EXIT_CODE)
            raise member_details.stop_error(self.stop)

    @property
    def is_reduction_void(self) -> bool:
        """The present reduction has no sums, since its step restarts."""
        return self.restarts_step and isinstance(self.reduction, RetainedReduction)

    def start_reduction(self) -> RuntimeError | None:
        """Start to sum the available buckets; return the error if the group is broken."""
        if self.is_group_up and self.reduction is not None and not self.is_reduction_void:
            try:
                with generation_group.direct_collectives():
                    self.reduction.start(self.groups.reduce_group)
            except RuntimeError as error:
                return error
        return None

    # Without it.

    def report_broken_group(
        self, error: Exception | None, abort_count: int, membership: Membership | None = None
    ) -> None:
        """Report the broken group of that abort count to the coordinator, unless it is known already."""
        if error is None:
            return
        with self.lock:
            if abort_count != self.abort_count:
                return
            membership = membership or self.membership
            self.is_group_up = False
            self.abort_count += 1
        if self.client is not None and membership is not None:
            self.client.report_failure(membership.generation_id, member_details.suspected_members(error, membership))

    def fail_script(self, error: Exception) -> None:
        """Fail this member: its script raises, and the others learn that it is gone when its process ends."""
        with self.lock:
            self.error = member_details.as_ringweave_error(error)
            if self.reduction is not None:
                self.reduction.fail(self.error)
            self.lock.notify_all()
        self.groups.abort()

    @contextmanager
    def saves_final_checkpoint(self) -> Iterator[None]:
        """Save the state when the end of the job is raised, if this member owns the final checkpoint."""
        try:
            yield
        except CapacityError as reason:  # all remaining members raise it, in the same generation
            if (
                self.newest_membership is None
                or self.newest_membership.primary != self.member
                or self.save_final_checkpoint is None
            ):
                raise
            raise CapacityError(f"{reason} {self.save_final_checkpoint()}") from None
        except (MembershipError, SystemExit) as reason:
            if (
                self.stop is None
                or self.stop.final_checkpoint_owner != self.member
                or self.save_final_checkpoint is None
            ):
                raise
            outcome = self.save_final_checkpoint()
            if isinstance(reason, SystemExit):
                raise
            raise MembershipError(f"job is over: {self.stop.reason}. {outcome}") from reason
