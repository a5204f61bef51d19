"""Restarts of elastic workers, and the history of members that they need."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ringweave.errors import LaunchError
from ringweave.jobs.restart_policy import MAX_OWN_FAILURES, RestartPolicy
from ringweave.launcher.outcome import WorkerFailure
from ringweave.membership import membership_records
from ringweave.membership.membership_records import REASON_FINISHED, REASON_LEFT
from ringweave.telemetry import Event, EventTail


class NoRestartError(LaunchError):
    """No further process of a slot can be started in this round: the workers end as if all had failed."""


LEFT_EXIT_CODE = 143
"""128 + SIGTERM: exit code of a worker that has left on request."""
MEMBERSHIP_ERROR = "MembershipError: "
"""Prefix of the exceptions that a script gets from its membership."""
JOB_OVER = f"{MEMBERSHIP_ERROR}job is over"
JOB_FINISHED = f"{JOB_OVER}: {membership_records.REASON_ALL_DONE}"
"""Error of a worker that joins when the others have finished."""
NO_COORDINATOR = f"{MEMBERSHIP_ERROR}this worker is no member any more: no coordinator within"
NO_SERVER = f"{MEMBERSHIP_ERROR}this worker is no member: no parameter server answers"
_NOT_A_MEMBER = f"{MEMBERSHIP_ERROR}this worker is no member"

RestartDecision = Literal["again", "rest", "fail", "give up"]
_NO_OTHER_WORKERS: Mapping[int, bool] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotExit:
    """End of the worker in a slot, as far as the restart policy needs it."""

    death: WorkerFailure | None
    """None after a good end."""
    lifetime_s: float
    was_member: bool = True
    """It became a member of its job, if only for a moment."""
    has_trained: bool = True
    """It took part in a train step of its job."""

    @property
    def is_finished(self) -> bool:
        """True if the worker has finished its training."""
        return self.death is None

    @property
    def has_left(self) -> bool:
        """True if the worker has left on request."""
        return self.death is not None and self.death.exit.exit_code == LEFT_EXIT_CODE


class WorkerRestarts:
    """Decides about the slots of elastic workers, each of which has its `RestartPolicy`."""

    def __init__(self, *, first_delay_s: float = 1.0, ends_without_services: bool = False) -> None:
        """Begin without any failures.

        Args:
            first_delay_s: Delay before a worker is restarted, unless it died early twice in a row; 0 where a spare
                waits.
            ends_without_services: A worker that finds no coordinator, or no parameter server, ends the restarts, as if
                the job were over: a job's nodes with them may be lost, and only another round of all nodes helps then.
        """
        self._first_delay_s, self._ends_without_services = first_delay_s, ends_without_services
        self._policies: dict[int, RestartPolicy] = {}
        self._stopped_slots: set[int] = set()
        self._is_over = False

    @property
    def pending(self) -> Mapping[int, float]:
        """Slot -> time of its next start."""
        return {slot: policy.due_s for slot, policy in self._policies.items() if policy.due_s is not None}

    def decide(
        self, slot: int, slot_exit: SlotExit, now_s: float, other_slots: Mapping[int, bool] = _NO_OTHER_WORKERS
    ) -> RestartDecision:
        """Decide about a slot whose worker has ended.

        `other_slots`: each other slot -> a worker trains there, so it has not met the script's error yet.

        Returns:
            `again`: restart it. `rest`: leave the slot empty. `give up`: the others go on without it. `fail`: the run
            fails.
        """
        if slot_exit.death is None:
            self._end_restarts()  # the training has ended: a worker that starts now is too late
            return "rest"
        exception = slot_exit.death.exception or ""
        is_without_services = NO_COORDINATOR in exception or NO_SERVER in exception
        if JOB_OVER in exception or (self._ends_without_services and is_without_services):
            self._end_restarts()  # for all: no new worker is admitted
        if slot_exit.has_left or self._is_over:
            self._stopped_slots.add(slot)
            return "rest"
        is_own_failure = slot_exit.death.exit.signal_name is None and _NOT_A_MEMBER not in exception
        self._policies[slot] = self._policy(slot).after_end(
            slot_exit.lifetime_s,
            now_s,
            is_useful=slot_exit.has_trained,
            has_joined=slot_exit.was_member,
            is_own_failure=is_own_failure,
        )
        if is_own_failure and self._all_have_failed(other_slots):
            self._start_at(slot, None)
            return "fail"
        return self._decide_by_counts(slot)

    def record_start_failure(self, slot: int, now_s: float) -> RestartDecision:
        """Record that a due slot could not be started; used instead of `decide`, with the same return values.

        It counts as a worker that died at once: the machine's shortage may pass soon, or never.
        """
        self._policies[slot] = self._policy(slot).after_end(0.0, now_s, has_joined=False)
        return self._decide_by_counts(slot)

    def _decide_by_counts(self, slot: int) -> RestartDecision:
        if not self._policy(slot).has_given_up:
            return "again"
        self._stopped_slots.add(slot)
        return "give up"

    def _policy(self, slot: int) -> RestartPolicy:
        return self._policies.get(slot, RestartPolicy(first_delay_s=self._first_delay_s))

    def _start_at(self, slot: int, due_s: float | None) -> None:
        self._policies[slot] = self._policy(slot).starting_at(due_s)

    def _end_restarts(self) -> None:
        self._is_over = True
        for slot in self._policies:
            self._start_at(slot, None)

    def _all_have_failed(self, other_slots: Mapping[int, bool]) -> bool:
        """Return whether no worker trains any more, and every worker that may come back has failed by itself too."""
        return not any(other_slots.values()) and all(
            self._policy(each).num_own_failures or each in self._stopped_slots for each in other_slots
        )

    def give_up_reason(self, slot: int) -> str:
        """Return the reason why a slot was given up, in words."""
        num_own = self._policy(slot).num_own_failures
        if num_own >= MAX_OWN_FAILURES:
            return f"it failed by itself {num_own} times in a row"
        return "it died before it joined the others too often"

    @property
    def is_over(self) -> bool:
        """True if no worker is started any more."""
        return self._is_over

    def reset_slot(self, slot: int) -> None:
        """Forget all failures of a slot, and cancel its next start."""
        self._policies.pop(slot, None)
        self._stopped_slots.discard(slot)

    def start_now(self, slot: int, now_s: float) -> None:
        """Start a slot at once, as if it had never failed."""
        self.reset_slot(slot)
        self._start_at(slot, now_s)

    def take_due(self, now_s: float) -> Sequence[int]:
        """Return the slots to start now; each once."""
        found = sorted(slot for slot, policy in self._policies.items() if policy.is_due(now_s))
        for slot in found:
            self._start_at(slot, None)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PastMembers:
    """Names of past members, `SLOT.INCARNATION`; of each slot the newest."""

    members: frozenset[str] = frozenset()
    """Processes that have been members."""
    trained: frozenset[str] = frozenset()
    """Members that took part in a train step, or began with the state of one that did."""


def read_past_members(events: Iterable[Event], earlier: PastMembers = PastMembers()) -> PastMembers:
    """Return the past members of the last attempt in these events, which come after those of `earlier`.

    The first generation of a job or a ring has only newcomers, which start it.
    """
    members, trained = set(earlier.members), set(earlier.trained)
    for event in events:
        if event["kind"] == "run_started":
            members.clear()
            trained.clear()
        elif event["kind"] == "generation_begun":
            members_of_event, new = set(event["members"]), set(event["newcomers"])
            members |= members_of_event
            trained |= members_of_event if members_of_event == new else members_of_event - new
        elif event["kind"] == "members_caught_up":
            trained |= set(event["members"])
    kept = membership_records.newest_of_slots(members | trained)
    return PastMembers(members=kept & members, trained=kept & trained)


class MembershipHistory:
    """Past members of one attempt, from the event log; the coordinators are queried about names that it lacks.

    A full disk takes no events. Without them the first failure would look like one before any worker has called
    `prepare`, and end the others.
    """

    def __init__(self, path: Path, query_coordinators: Callable[[Collection[str]], Collection[str]]) -> None:
        """Create the object; queries no coordinator yet."""
        self._tail, self._query_coordinators = EventTail(path), query_coordinators
        self._from_events, self._from_coordinators = PastMembers(), set[str]()

    def read(self, names: Collection[str] = ()) -> PastMembers:
        """Return the past members; the coordinators are queried if the event log lacks one of these names.

        The coordinators do not say which members are newcomers: members that only they know count as having trained.
        """
        with contextlib.suppress(OSError):  # of the log; earlier events still hold
            self._from_events = read_past_members(self._tail.read_new(), self._from_events)
        found = self._from_events
        if not found.members.union(self._from_coordinators).issuperset(names):
            known = self._from_coordinators.union(self._query_coordinators(names))
            self._from_coordinators = {*membership_records.newest_of_slots(known)}
        return PastMembers(
            members=found.members | self._from_coordinators,
            trained=found.trained | (self._from_coordinators - found.members),
        )


class EvictionWatcher:
    """Reads from the event log which members were evicted.

    A live evicted process hears of it and ends by itself.
    """

    def __init__(self, path: Path) -> None:
        """Skip the present content of the log, which belongs to earlier attempts."""
        self._tail, self._names = EventTail(path), set[str]()
        self._terms: dict[str, int] = {}
        """Member -> newest term of a coordinator whose generation it was in."""
        self._tail.read_new()

    def evicted_members(self) -> frozenset[str]:
        """Return the names of evicted members without waiting."""
        with contextlib.suppress(OSError):  # of the log: its events are read later
            self._apply_events(self._tail.read_new())
        return frozenset(self._names)

    def _apply_events(self, events: Iterable[Event]) -> None:
        for event in events:
            if event["kind"] in {"member_lost", "member_returned"}:
                member = event["member"]
                if event["term"] < self._terms.get(member, 0):  # from a superseded coordinator
                    continue
                if event["kind"] == "member_returned":
                    self._names.discard(member)
                elif event["reason"] not in {REASON_FINISHED, REASON_LEFT}:
                    self._names.add(member)
            elif event["kind"] == "generation_begun":  # of a coordinator that did not know of the loss
                self._names -= set(event["members"])
                self._terms |= {
                    each: max(event["reported_in_term"], self._terms.get(each, 0)) for each in event["members"]
                }
                known = membership_records.newest_of_slots({*self._terms, *self._names})
                self._terms = {each: term for each, term in self._terms.items() if each in known}
                self._names &= known
