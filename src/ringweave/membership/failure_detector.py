"""Failure detector: tracks heartbeats, learns timeouts from arrival gaps, decides which members are suspected. Pure."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, replace

from ringweave.membership import membership_records
from ringweave.membership.membership_records import KEPT_INCARNATIONS, parse_member_name

HEARTBEAT_INTERVAL_S = 0.25
"""Heartbeat interval. Each heartbeat takes a millisecond of a processor that a train step may need; no member is missed
before 0.9 s."""
_GAP_DECAY = 0.997
"""Decay of the longest gap with each gap that follows: half-forgotten after a minute of heartbeats. A busy machine will
be busy again."""
_DELAY_WINDOW_S = 12.0
"""Own delays are remembered for so long."""
_MIN_GAPS = 8
"""Gaps before a timeout is learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutPolicy:
    """Timeout from gaps: the longest of late times a factor, within bounds."""

    factor: float
    min_s: float
    max_s: float


HEARTBEAT_TIMEOUT = TimeoutPolicy(factor=3.0, min_s=0.9, max_s=10.0)
"""Timeout between two heartbeats. They come from a thread of their own, so a long gap is the machine's, not the
model's. A dead member delays the others for that long and for the regrouping: some tenths of a second."""
ANSWER_TIMEOUT = TimeoutPolicy(factor=3.0, min_s=0.8, max_s=3.0)
"""Timeout of the coordinator's answers to heartbeats, after which a member asks the other coordinator. It is below
`HEARTBEAT_TIMEOUT`, so that the member can do so before the coordinator that it left evicts it. A needless question
costs nothing."""
PROGRESS_TIMEOUT = TimeoutPolicy(factor=8.0, min_s=5.0, max_s=3600.0)
"""Timeout between two signs of progress of the training thread, while it computes and others wait for it."""
REDUCTION_TIMEOUT = TimeoutPolicy(factor=8.0, min_s=20.0, max_s=3600.0)
"""Timeout from the start of a wait to a committed reduction: one that usually takes a minute has eight."""


_USUAL_INTERVAL_S = 0.15
"""Time between two observations of a process that gets the processor when it wants to."""
_GRACE_FACTOR = 4.0
_MAX_DELAY_S = 1.0


class SchedulingDelay:
    """Scheduling delay of the observing process itself: on such a busy machine the others' signs are late as well."""

    def __init__(self, now_s: float, usual_interval_s: float = _USUAL_INTERVAL_S) -> None:
        """Set the time between two observations where the process gets the processor when it wants to."""
        self._delays: deque[tuple[float, float]] = deque()
        self._usual_interval_s = usual_interval_s
        self.last_s = now_s
        """Time of the last observation."""

    def observe(self, now_s: float) -> float:
        """Note an observation; return the seconds since the last one."""
        delay_s = max(0.0, now_s - self.last_s)
        self._delays.append((now_s, min(delay_s, _MAX_DELAY_S)))
        while now_s - self._delays[0][0] > _DELAY_WINDOW_S:
            self._delays.popleft()
        self.last_s = now_s
        return delay_s

    def forget(self) -> None:
        """Forget the delays so far, which are not usual."""
        self._delays.clear()

    @property
    def grace_s(self) -> float:
        """Grace that is added to every timeout."""
        longest_s = max((delay_s for _, delay_s in self._delays), default=0.0)
        return _GRACE_FACTOR * max(0.0, longest_s - self._usual_interval_s)


class ArrivalHistory:
    """Gaps between arrivals of one kind from one member, and the timeout learned from them."""

    def __init__(self, policy: TimeoutPolicy, now_s: float, initial_timeout_s: float | None = None) -> None:
        """Until enough gaps are known the timeout is `initial_timeout_s`, within the bounds; None means the maximum."""
        self._policy = policy
        initial_timeout_s = policy.max_s if initial_timeout_s is None else initial_timeout_s
        self._initial_timeout_s = min(policy.max_s, max(policy.min_s, initial_timeout_s))
        self._num_gaps, self._longest_gap_s = 0, 0.0
        self._last_s = now_s

    def observe(self, now_s: float) -> None:
        self._num_gaps += 1
        self._longest_gap_s = max(now_s - self._last_s, _GAP_DECAY * self._longest_gap_s)
        self._last_s = max(now_s, self._last_s)

    def forget(self) -> None:
        """Forget the gaps so far, which are not usual.

        Until enough new gaps are known the timeout stays as it is. So no timeout comes from too few gaps, and no member
        is held to the minimum just when nothing is known.
        """
        self._initial_timeout_s, self._num_gaps, self._longest_gap_s = self.timeout_s, 0, 0.0

    def excuse(self, now_s: float) -> None:
        """Discount the time since the last arrival."""
        self._last_s = max(now_s, self._last_s)

    def shift(self, seconds: float) -> None:
        """Discount so much of the time since the last arrival."""
        self._last_s += seconds

    @property
    def timeout_s(self) -> float:
        """Seconds after the last arrival from which silence is unusual."""
        policy = self._policy
        if self._num_gaps < _MIN_GAPS:
            return self._initial_timeout_s
        return min(policy.max_s, max(policy.min_s, policy.factor * self._longest_gap_s))

    @property
    def due_s(self) -> float:
        """Time at which the next arrival is overdue."""
        return self._last_s + self.timeout_s

    def overdue_s(self, now_s: float, grace_s: float = 0.0) -> float:
        """Return by how much more than the grace the next arrival is overdue."""
        return max(0.0, now_s - self._last_s - self.timeout_s - grace_s)

    def is_overdue(self, now_s: float, grace_s: float = 0.0) -> bool:
        """Return whether the next arrival is overdue by more than the grace."""
        return self.overdue_s(now_s, grace_s) > 0.0


MAY_HAVE_SWITCHED_S = 0.75 * ANSWER_TIMEOUT.min_s
"""After a longer silence on either side a member may be with another coordinator, and its graceful close lost."""
SURE_AFTER_SILENCE_S = 2.5
"""After this time all events of the silence have arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Content of a heartbeat. It includes the member's usual pace, so that any coordinator learns it."""

    number: int = 0
    """Grows with each heartbeat."""
    progress: int = 0
    """Counts all progress of the training thread: batches, buckets, steps."""
    is_waiting: bool = False
    """It waits for the other members, so its lack of progress is not its fault."""
    cpu_s: float = 0.0
    """Seconds that the process has computed, or wanted to. A process that evaluates or saves makes no progress, but
    works."""
    no_progress_s: float = 0.0
    """Seconds that it has waited for the other members without progress."""
    overdue_s: float = 0.0
    """Seconds that its progress is overdue, by its usual pace: it neither computes nor waits."""
    waits_in_vain: bool = False
    """It has waited for far longer than usual."""
    is_reading: bool = False
    """It reads the job's state, or does something else that others may have to wait for."""
    num_reductions: int = 0
    """Reductions whose results it has: the number of successful waits for the others."""
    num_generations: int = 0
    """Generations that it has begun; in each, its waits begin anew."""
    is_starting: bool = False
    """It imports, plans, or recovers: the timing of its signs says nothing about later ones."""


class MemberHealth:
    """Health of one member."""

    def __init__(
        self, now_s: float, policy: TimeoutPolicy = HEARTBEAT_TIMEOUT, initial_timeout_s: float | None = None
    ) -> None:
        """`initial_timeout_s` is the heartbeat timeout until gaps are known; None means a long one."""
        self._arrivals = ArrivalHistory(policy, now_s, initial_timeout_s)
        self._last = Heartbeat()
        self._last_heartbeat_s = self._sure_s = now_s

    @property
    def is_waiting(self) -> bool:
        return self._last.is_waiting

    @property
    def standstill_s(self) -> float:
        """Seconds that it had waited for the others without progress, by its last heartbeat."""
        return self._last.no_progress_s

    @property
    def is_deadlocked(self) -> bool:
        """It had waited for the other members far longer than usual, by its last heartbeat."""
        return self._last.waits_in_vain

    @property
    def is_reading(self) -> bool:
        return self._last.is_reading

    def observe(self, heartbeat: Heartbeat, now_s: float) -> None:
        if now_s - self._last_heartbeat_s > MAY_HAVE_SWITCHED_S:
            self._sure_s = now_s + SURE_AFTER_SILENCE_S
        self._last_heartbeat_s = now_s
        self._arrivals.observe(now_s)
        if self._last.is_starting and not heartbeat.is_starting:
            self._arrivals.forget()
        if heartbeat.number >= self._last.number:
            self._last = heartbeat

    def excuse(self, now_s: float) -> None:
        """Discount the silence so far, because the observing process was stopped itself."""
        self._arrivals.excuse(now_s)

    def may_have_switched(self, now_s: float) -> bool:
        """Return whether it was silent for so long lately that it may have moved to another coordinator.

        Its graceful close may be late or lost, even where an earlier heartbeat has arrived since.
        """
        return now_s - self._last_heartbeat_s > MAY_HAVE_SWITCHED_S or now_s < self._sure_s

    def is_silent(self, now_s: float, grace_s: float = 0.0) -> bool:
        """Return whether a heartbeat is overdue: the process is stopped, cut off or starved."""
        return self._arrivals.is_overdue(now_s, grace_s)

    def is_stuck(self, grace_s: float = 0.0) -> bool:
        """Return whether it sends heartbeats, but neither computes nor waits nor makes progress."""
        return self._last.overdue_s > grace_s


_IDLE_CPU_FRACTION = 0.1
"""Fraction of a processor below which a process only sends heartbeats."""
_LOCAL_STALL_S = 0.5
"""Time between two observations above which this process, and its training, was stopped or starved."""
_FIRST_WAIT_TIMEOUT_S = 600.0
"""Longest wait for the others while the member's usual pace is unknown."""


class StallDetector:
    """Stall detector of one member: learns its usual pace. Another coordinator does not have to learn it anew."""

    def __init__(self, now_s: float) -> None:
        self._steps, self._waits = (
            ArrivalHistory(PROGRESS_TIMEOUT, now_s),
            ArrivalHistory(REDUCTION_TIMEOUT, now_s, _FIRST_WAIT_TIMEOUT_S),
        )
        self._last, self._observed_s = Heartbeat(progress=-1), now_s
        self._still_since_s = now_s

    def observe(self, heartbeat: Heartbeat, now_s: float, grace_s: float) -> Heartbeat:
        """Return the next heartbeat with the stall times; on a busy machine the process gets this grace."""
        passed_s = now_s - self._observed_s
        if passed_s > _LOCAL_STALL_S:
            self._steps.shift(passed_s - HEARTBEAT_INTERVAL_S)
            self._waits.shift(passed_s - HEARTBEAT_INTERVAL_S)
        gets_on = heartbeat.progress != self._last.progress
        computes = heartbeat.cpu_s - self._last.cpu_s > _IDLE_CPU_FRACTION * passed_s
        if gets_on:
            self._steps.observe(now_s)
        elif heartbeat.is_waiting or computes:
            self._steps.excuse(now_s)
        if heartbeat.num_reductions != self._last.num_reductions:
            self._waits.observe(now_s)
        elif gets_on or not heartbeat.is_waiting or heartbeat.num_generations != self._last.num_generations:
            self._waits.excuse(now_s)
        if gets_on or not heartbeat.is_waiting:
            self._still_since_s = now_s
        number = self._last.number + 1
        self._last, self._observed_s = replace(heartbeat, number=number), now_s
        return replace(
            self._last,
            no_progress_s=now_s - self._still_since_s,
            overdue_s=0.0 if heartbeat.is_waiting else self._steps.overdue_s(now_s, grace_s),
            waits_in_vain=heartbeat.is_waiting and self._waits.is_overdue(now_s, grace_s),
        )


class CoordinatorMonitor:
    """Monitor of the coordinator: learns from its answers when the next one is overdue. Discounts own delays."""

    def __init__(self, now_s: float) -> None:
        self._answers, self._scheduling_delay = (
            ArrivalHistory(ANSWER_TIMEOUT, now_s),
            SchedulingDelay(now_s, HEARTBEAT_INTERVAL_S),
        )
        self._stall_detector = StallDetector(now_s)
        self._last_active_s = now_s
        self._is_starting = False

    def observe_self(self, heartbeat: Heartbeat, now_s: float) -> Heartbeat:
        """Note the scheduling delay and progress of this process; return its heartbeat with what follows from that."""
        if self._is_starting and not heartbeat.is_starting:
            self._answers.forget()
            self._scheduling_delay.forget()
        self._scheduling_delay.observe(now_s)  # this delay counts even if older ones are forgotten
        self._is_starting = heartbeat.is_starting
        return self._stall_detector.observe(heartbeat, now_s, self._scheduling_delay.grace_s)

    def await_coordinator(self, now_s: float) -> None:
        """Await answers of another coordinator, or of the same one again."""
        self._answers.excuse(now_s)

    def note_answer(self, now_s: float, *, is_active: bool) -> None:
        """Note an answer of an active coordinator or of a standby."""
        self._answers.observe(now_s)
        if is_active:
            self._last_active_s = now_s

    def since_active_s(self, now_s: float) -> float:
        """Return the seconds since the last answer of an active coordinator."""
        return max(0.0, now_s - self._last_active_s)

    @property
    def answer_timeout_s(self) -> float:
        """Longest time for an answer; more on a busy machine."""
        return self._answers.timeout_s + self._scheduling_delay.grace_s

    def until_lost_s(self, now_s: float) -> float:
        """Return the seconds until the coordinator counts as lost, for unusual silence; 0 if it is lost."""
        return max(0.0, self._answers.due_s + self._scheduling_delay.grace_s - now_s)


_FINISH_SPREAD_S = 3.0
"""All members that end their training with the same step finish within this time."""


class FailureDetector:
    """Failure detector over every process that has come so far."""

    def __init__(self, heartbeat_timeout: TimeoutPolicy = HEARTBEAT_TIMEOUT) -> None:
        """Set how long a member may be silent."""
        self._heartbeat_timeout = heartbeat_timeout
        self.present: dict[str, MemberHealth] = {}
        """Members that are connected and send heartbeats."""
        self._silent: dict[str, MemberHealth | None] = {}
        self.leaving: set[str] = set()
        """Members that want to leave."""
        self._unsure_exits: set[str] = set()
        self._gone: set[str] = set()
        self._finished: dict[str, float] = {}
        self._newest_incarnations: dict[int, int] = {}

    @property
    def silent(self) -> Set[str]:
        """Members that were excluded for silence; they may be alive."""
        return self._silent.keys()

    @property
    def unsure_exits(self) -> Set[str]:
        """Present members whose connection broke as at the end of a process, and that may be elsewhere instead."""
        return self._unsure_exits & self.present.keys()

    def note_unsure_exit(self, member: str) -> None:
        self._unsure_exits.add(member)

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    def knows_member(self, member: str) -> bool:
        return member in self.present or self.is_gone(member) or member in self._finished

    def is_gone(self, member: str) -> bool:
        """Return whether it was here, and has not finished."""
        return member in self._gone or self.is_long_gone(member)

    def is_long_gone(self, member: str) -> bool:
        """Return whether so many later processes of its slot have come that this one is not remembered by itself."""
        slot, _, incarnation = member.partition(".")
        if not (slot.isdecimal() and incarnation.isdecimal()):
            return False  # no member's name
        return int(incarnation) <= self._newest_incarnations.get(int(slot), 0) - KEPT_INCARNATIONS

    def is_missing_any(self, members: Collection[str], now_s: float) -> bool:
        """Return whether one is gone, or has finished so long ago that others may be waiting for it."""
        is_left = any(each in self.present for each in members)
        finished_s = [self._finished[each] for each in members if each in self._finished]
        is_waited_for = is_left and any(now_s - at_s > _FINISH_SPREAD_S for at_s in finished_s)
        return is_waited_for or any(self.is_gone(each) for each in members)

    def members_of_slot(self, slot: int) -> list[str]:
        return [each for each in self.present if parse_member_name(each)[0] == slot]

    def newcomers(self, members: Collection[str], max_members: int) -> list[str]:
        """Return the present non-members that wait to be admitted, up to the maximum number of members."""
        room = max_members - sum(1 for member in members if member in self.present)
        waiting = sorted((each for each in self.present if each not in members), key=parse_member_name)
        return waiting[: max(0, room)]

    def add_member(self, member: str, now_s: float, first_s: float | None = None) -> None:
        """Add a process, at most once. Earlier processes of its slot have ended: only then is another one started.

        They have also not finished: a script that fails in its own way may have said that it had. `first_s` is the
        initial timeout of `MemberHealth`.
        """
        if not self.knows_member(member):
            self.present[member] = MemberHealth(now_s, self._heartbeat_timeout, first_s)
            self._silent = {each: signs for each, signs in self._silent.items() if not _is_replaced(each, [member])}
            failed = [each for each in self._finished if _is_replaced(each, [member])]
            self._gone.update(failed)
            for each in failed:
                del self._finished[each]
            slot, incarnation = parse_member_name(member)
            self._newest_incarnations[slot] = max(incarnation, self._newest_incarnations.get(slot, 0))
            self._gone = {each for each in self._gone if not self.is_long_gone(each)}

    def remove_member(self, member: str) -> None:
        """Remove it as if it had never come."""
        self.present.pop(member, None)

    def record_heartbeat(self, member: str, heartbeat: Heartbeat, now_s: float) -> None:
        self._unsure_exits.discard(member)
        if member in self.present:
            self.present[member].observe(heartbeat, now_s)

    def may_have_gone(self, member: str, now_s: float) -> bool:
        """Return whether a present member may be with another coordinator by now."""
        return member in self.present and self.present[member].may_have_switched(now_s)

    def are_at_standstill(self, members: Collection[str], min_s: float) -> bool:
        """Return whether all present ones have waited for others for so long without progress."""
        present = self._health_of(members)
        return bool(present) and all(signs.standstill_s >= min_s for signs in present)

    def are_deadlocked(self, members: Collection[str]) -> bool:
        """Return whether all present ones wait without progress, far longer than is usual for one of them.

        The usual pace of a new member is still unknown.
        """
        present = self._health_of(members)
        is_reading = any(signs.is_reading for signs in present)
        is_in_vain = self.are_at_standstill(members, REDUCTION_TIMEOUT.min_s) and any(
            signs.is_deadlocked for signs in present
        )
        return is_in_vain and not is_reading

    def _health_of(self, members: Collection[str]) -> list[MemberHealth]:
        return [signs for member, signs in self.present.items() if member in members]

    def excuse_silence(self, now_s: float) -> None:
        """Discount all silence so far."""
        for signs in (*self.present.values(), *self._silent.values()):
            if signs is not None:
                signs.excuse(now_s)

    def is_silent(self, member: str, now_s: float, grace_s: float) -> bool:
        """Return whether a present member is overdue, even with this grace."""
        return member in self.present and self.present[member].is_silent(now_s, grace_s)

    def may_return(self, member: str, now_s: float, grace_s: float) -> bool:
        """Return whether it was excluded for silence, and with this grace would not be overdue yet."""
        signs = self._silent.get(member)
        return signs is not None and not signs.is_silent(now_s, grace_s)

    def overdue(self, now_s: float, grace_s: Callable[[str], float]) -> Iterator[tuple[str, str]]:
        """Yield (member, reason) of overdue members, even with the grace of each."""
        is_any_waiting = any(signs.is_waiting for signs in self.present.values())
        for member, signs in list(self.present.items()):
            if signs.is_silent(now_s, grace_s(member)):
                yield member, membership_records.REASON_SILENT
            elif is_any_waiting and signs.is_stuck(grace_s(member)):
                yield member, "it made no progress while others waited for it"

    def mark_gone(self, member: str, *, is_silent: bool) -> None:
        signs = self.present.pop(member, None)
        self.leaving.discard(member)
        self._unsure_exits.discard(member)
        self._gone.add(member)
        if is_silent and not _is_replaced(member, [*self.present, *self._gone, *self._finished]):
            self._silent[member] = signs

    def readmit(self, member: str, now_s: float, first_s: float | None = None) -> bool:
        """Readmit a silent member that reports again; False if a later process of its slot has come since."""
        if member not in self._silent:
            return False
        self._gone.discard(member)
        self.present[member] = signs = self._silent.pop(member) or MemberHealth(now_s, self._heartbeat_timeout, first_s)
        signs.excuse(now_s)
        return True

    def may_be_alive(self, member: str) -> bool:
        """Return whether it may be alive: it is here, was excluded for silence, or has never come."""
        is_ended = (self.is_gone(member) and member not in self._silent) or member in self._finished
        return not is_ended and not _is_replaced(member, [*self.present, *self._gone, *self._finished])

    def forget_silent(self, others: Collection[str]) -> None:
        """Forget all silent members but these: the others no longer matter to the quorum."""
        self._silent = {each: signs for each, signs in self._silent.items() if each in others}

    def mark_leaving(self, member: str, now_s: float, *, is_finished: bool) -> None:
        """Note that it wants to leave, or has finished and is no longer tracked."""
        if is_finished:
            del self.present[member]
            self.leaving.discard(member)
            self._finished[member] = now_s
        else:
            self.leaving.add(member)


def _is_replaced(member: str, others: Iterable[str]) -> bool:
    """Return whether one of the others is a later incarnation of its slot."""
    slot, incarnation = parse_member_name(member)
    return any(place == slot and later > incarnation for place, later in map(parse_member_name, others))
