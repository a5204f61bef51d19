"""Restart policies of workers, services and whole runs, and the membership history by which elastic ones decide."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ringweave.errors import LaunchError
from ringweave.launcher.outcome import WorkerFailure
from ringweave.membership import membership_records
from ringweave.membership.membership_records import REASON_FINISHED, REASON_LEFT
from ringweave.telemetry import Event, EventTail

_SHELL_SIGNAL_BASE = 128
"""A shell exits with this plus the signal's number when a signal has ended its program."""


def backoff_s(num_failures: int, *, first_s: float, max_s: float) -> float:
    """Return the delay after so many failures in a row: the first one's, doubled with each further one, up to a limit.

    Without failures it is the first delay too.
    """
    return min(max_s, first_s * 2.0 ** min(max(0, num_failures - 1), 20))


class RestartPolicy:
    """Restart policy of one process: counts its early deaths in a row; the delay doubles with each."""

    def __init__(
        self,
        *,
        max_early_deaths: int = 10,
        early_s: float = 60.0,
        early_if_killed_s: float = 10.0,
        max_delay_s: float = 30.0,
    ) -> None:
        """Begin without any deaths.

        Args:
            max_early_deaths: After this many early deaths in a row it is given up. That takes two to three minutes with
                these delays, as for a worker (`WorkerRestartPolicy`): a longer shortage on the machine needs a person.
            early_s: A process that lived longer was useful, and its earlier deaths are forgotten.
            early_if_killed_s: The same after a death by a signal: it says nothing about the next process, and while
                that one waits, members that come or go may find no coordinator.
            max_delay_s: Upper limit of the delay after repeated early deaths. The first restart has no delay.
        """
        self._max_early_deaths, self._early_s, self._early_if_killed_s = max_early_deaths, early_s, early_if_killed_s
        self._max_delay_s = max_delay_s
        self._num_early_deaths = 0
        self._started_s: float | None = None
        self._due_s: float | None = None

    @property
    def has_given_up(self) -> bool:
        """True if it is not restarted any more."""
        return self._num_early_deaths >= self._max_early_deaths

    @property
    def num_early_deaths(self) -> int:
        """Number of early deaths in a row."""
        return self._num_early_deaths

    def record_start(self, now_s: float) -> None:
        self._started_s = now_s

    def record_exit(self, now_s: float, exit_code: int) -> bool:
        """Record an observed end; return True once for each start, and count a death.

        `exit_code` is negative, or above 128 as in shells, after a death by a signal.
        """
        if self._started_s is None:
            return False
        started_s, self._started_s = self._started_s, None
        self.record_death(now_s - started_s, now_s, was_killed=exit_code < 0 or exit_code > _SHELL_SIGNAL_BASE)
        return True

    def record_death(self, lived_s: float, now_s: float, *, was_killed: bool = False) -> None:
        """Record a death or a failed start; called once for each."""
        is_early = lived_s < (self._early_if_killed_s if was_killed else self._early_s)
        self._num_early_deaths = self._num_early_deaths + 1 if is_early else 0
        num_delayed = self._num_early_deaths - 1
        self._due_s = now_s + (backoff_s(num_delayed, first_s=1.0, max_s=self._max_delay_s) if num_delayed > 0 else 0.0)

    def take_due(self, now_s: float) -> bool:
        """Return whether to start it now; True once for each death."""
        if self._due_s is None or now_s < self._due_s or self.has_given_up:
            return False
        self._due_s = None
        return True


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

_EARLY_DEATH_DELAY_S = 1.0
"""Delay that doubles with each early death in a row."""
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


class WorkerRestartPolicy:
    """Restart policy of the workers: counts the failures of each slot and decides what comes next."""

    def __init__(
        self,
        *,
        first_delay_s: float = 1.0,
        max_own_failures: int = 3,
        max_failed_starts: int = 10,
        max_delay_s: float = 30.0,
        reset_failures_after_s: float = 60.0,
        reset_delay_after_s: float = 20.0,
        ends_without_services: bool = False,
    ) -> None:
        """Begin without any failures.

        Args:
            first_delay_s: Delay before a worker is restarted, unless it died early twice in a row; 0 where a spare
                waits.
            max_own_failures: A worker that fails by itself this often in a row is given up: probably its device is
                broken, since an error in the script ends the others as well.
            max_failed_starts: A worker that dies this often in a row before it is a member is given up, and the others
                go on. That takes two to three minutes with these delays: a longer shortage on the machine needs a
                person. A worker that is killed when it was a member is restarted without limit.
            max_delay_s: Upper limit of the delay after repeated early deaths.
            reset_failures_after_s: A worker that trained and lived this long resets its slot's count of failures in a
                row.
            reset_delay_after_s: A worker that trained and lived this long has not died early: the next one waits no
                longer than the first time.
            ends_without_services: A worker that finds no coordinator, or no parameter server, ends the restarts, as if
                the job were over: a job's nodes with them may be lost, and only another round of all nodes helps then.
        """
        self._ends_without_services = ends_without_services
        self._first_delay_s, self._max_delay_s = first_delay_s, max_delay_s
        self._reset_failures_after_s, self._reset_delay_after_s = reset_failures_after_s, reset_delay_after_s
        self._max_own_failures, self._max_failed_starts = max_own_failures, max_failed_starts
        self._own_failures: dict[int, int] = {}
        self._failed_starts: dict[int, int] = {}
        self._stopped_slots: set[int] = set()
        self._early_deaths: dict[int, int] = {}
        self._due_s: dict[int, float] = {}
        self._is_over = False

    @property
    def pending(self) -> Mapping[int, float]:
        """Slot -> time of its next start."""
        return self._due_s

    def decide(
        self, slot: int, slot_exit: SlotExit, now_s: float, other_slots: Mapping[int, bool] = _NO_OTHER_WORKERS
    ) -> RestartDecision:
        """Decide about a slot whose worker has ended.

        Args:
            slot: Number of the slot.
            slot_exit: End of its worker.
            now_s: Time on the clock of `take_due`.
            other_slots: Each other slot -> a worker trains there, so it has not met the script's error yet.

        Returns:
            `again`: restart it. `rest`: leave the slot empty. `give up`: the others go on without it. `fail`: the run
            fails.
        """
        if slot_exit.is_finished:
            self._is_over = True  # the training has ended: a worker that starts now is too late
            self._due_s.clear()
            return "rest"
        assert slot_exit.death is not None
        exception = slot_exit.death.exception or ""
        is_without_services = NO_COORDINATOR in exception or NO_SERVER in exception
        if JOB_OVER in exception or (self._ends_without_services and is_without_services):
            self._is_over = True  # for all: no new worker is admitted
            self._due_s.clear()
        if slot_exit.has_left or self._is_over:
            self._stopped_slots.add(slot)
            return "rest"
        is_own_failure = self._is_own_failure(slot_exit.death, exception)
        previous_failures = (
            0
            if slot_exit.has_trained and slot_exit.lifetime_s >= self._reset_failures_after_s
            else self._own_failures.get(slot, 0)
        )
        self._own_failures[slot] = previous_failures + 1 if is_own_failure else 0
        if is_own_failure and self._all_have_failed(other_slots):
            return "fail"
        self._failed_starts[slot] = 0 if slot_exit.was_member else self._failed_starts.get(slot, 0) + 1
        early_s = self._reset_delay_after_s if slot_exit.has_trained else 2 * self._max_delay_s
        return self._schedule_restart(slot, now_s, is_early=slot_exit.lifetime_s < early_s)

    def record_start_failure(self, slot: int, now_s: float) -> RestartDecision:
        """Record that a due slot could not be started; used instead of `decide`, with the same return values.

        It counts as a worker that died at once: the machine's shortage may pass soon, or never.
        """
        self._failed_starts[slot] = self._failed_starts.get(slot, 0) + 1
        return self._schedule_restart(slot, now_s, is_early=True)

    def _schedule_restart(self, slot: int, now_s: float, *, is_early: bool) -> RestartDecision:
        if (
            self._own_failures.get(slot, 0) >= self._max_own_failures
            or self._failed_starts[slot] >= self._max_failed_starts
        ):
            self._stopped_slots.add(slot)
            return "give up"
        self._early_deaths[slot] = self._early_deaths.get(slot, 0) + 1 if is_early else 0
        num_early = self._early_deaths[slot]
        delay_s = backoff_s(num_early, first_s=_EARLY_DEATH_DELAY_S, max_s=self._max_delay_s)
        self._due_s[slot] = now_s + (delay_s if num_early > 1 else self._first_delay_s)
        return "again"

    def _all_have_failed(self, other_slots: Mapping[int, bool]) -> bool:
        """Return whether no worker trains any more, and every worker that may come back has failed by itself too."""
        return not any(other_slots.values()) and all(
            self._own_failures.get(each) or each in self._stopped_slots for each in other_slots
        )

    def give_up_reason(self, slot: int) -> str:
        """Return the reason why a slot was given up, in words."""
        num_own = self._own_failures.get(slot, 0)
        if num_own >= self._max_own_failures:
            return f"it failed by itself {num_own} times in a row"
        return "it died before it joined the others too often"

    @property
    def is_over(self) -> bool:
        """True if no worker is started any more."""
        return self._is_over

    def reset_slot(self, slot: int) -> None:
        """Forget all failures of a slot, and cancel its next start."""
        for kept in (self._own_failures, self._failed_starts, self._early_deaths, self._due_s):
            kept.pop(slot, None)
        self._stopped_slots.discard(slot)

    def start_now(self, slot: int, now_s: float) -> None:
        """Start a slot at once, as if it had never failed."""
        self.reset_slot(slot)
        self._due_s[slot] = now_s

    def take_due(self, now_s: float) -> Sequence[int]:
        """Return the slots to start now; each once."""
        due = sorted(slot for slot, at_s in self._due_s.items() if at_s <= now_s)
        for slot in due:
            del self._due_s[slot]
        return due

    @staticmethod
    def _is_own_failure(failure: WorkerFailure, exception: str) -> bool:
        return failure.exit.signal_name is None and _NOT_A_MEMBER not in exception


class RunRestartPolicy:
    """Restart policy of all workers together, for a run in which one fails before any is a member."""

    def __init__(self, *, max_own_failures: int = 3, max_early_ends: int = 10, early_s: float = 60.0) -> None:
        """Begin without any attempts.

        Args:
            max_own_failures: After this many attempts that ended with the script's own exception, the next would too.
            max_early_ends: After this many attempts in a row that lasted less than `early_s`, the next would too.
            early_s: A longer attempt counts as useful; a script without `prepare` does not say what it has done.
        """
        self._max_own_failures, self._early_s = max_own_failures, early_s
        self._ends = RestartPolicy(max_early_deaths=max_early_ends, early_s=early_s)
        self._own_failures = 0

    def stop_reason(self, first: WorkerFailure, lifetime_s: float) -> str:
        """Return the reason against another attempt, in words; empty if there should be one.

        Args:
            first: First cause of the end of the last attempt.
            lifetime_s: Duration of that attempt.
        """
        self._own_failures += first.exit.signal_name is None
        self._ends.record_death(lifetime_s, now_s=0.0)
        if self._own_failures >= self._max_own_failures:
            return f"{self._own_failures} attempts ended with an exception of the script"
        if self._ends.has_given_up:
            return f"{self._ends.num_early_deaths} attempts in a row ended within {self._early_s:g} s each"
        return ""


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
        """Create the object; queries no coordinator yet.

        Args:
            path: Path of the event log.
            query_coordinators: Queries the coordinators for the current members, in particular for these names.
        """
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
