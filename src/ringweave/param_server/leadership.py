"""Rules of leadership and failover of two servers: the order of leadership records, the lease, reachability. Pure.

*Leadership records*, numbered from 0, settle which server leads. Each names the leader and the *members*: the
servers that have everything that was acknowledged. Of several records with one number, the first one appended
counts. A member may append the next record, to go on alone when the other server is silent, or to add the other
one. So of two servers that cannot reach each other at most one goes on, and it has everything.

A leader with a standby answers only while it can replicate everything to it and has heard from it lately (its
*lease*). Otherwise it appends a record to go on alone before it answers again, or finds that the other server has
taken over.

Of two servers that cannot reach each other either may win. The rings that each one hears (`Reachability`) indicate
which one should: a server whose node is cut off hears no ring, and leaves the lead to the other one. Reachability
only makes the better choice likely. The safety of the data rests on the records alone.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto


class Reachability(Enum):
    """Share of the rings that a server hears."""

    NONE = auto()
    """No ring: none needs the server, or its node is cut off."""
    SOME = auto()
    """Few rings, or only those of its own node, which it would hear without any network."""
    MOST = auto()
    """More than half of the known rings, and at least one from another node."""


class RingReachability:
    """Times at which the rings were last heard."""

    def __init__(self, fresh_s: float) -> None:
        """A ring counts as heard for `fresh_s` seconds; rings send several times in that."""
        self._fresh_s = fresh_s
        self._last_heard_s: dict[int, float] = {}
        self._last_heard_remote_s: float | None = None

    def note_heard(self, ring: int, at_s: float, *, is_remote: bool) -> None:
        """Note that a worker of the ring has sent something; any number stands for an unknown ring."""
        self._last_heard_s[ring] = at_s
        if is_remote:
            self._last_heard_remote_s = at_s

    def recently_heard(self, now_s: float) -> set[int]:
        """Return the rings that were heard lately."""
        return {ring for ring, at_s in self._last_heard_s.items() if now_s - at_s < self._fresh_s}

    def reachability(self, rings: Collection[int], now_s: float) -> Reachability:
        """Return which of these rings are heard; as long as no rings are known, any of them counts."""
        fresh = self.recently_heard(now_s)
        if not fresh:
            return Reachability.NONE
        if self._last_heard_remote_s is None or now_s - self._last_heard_remote_s >= self._fresh_s:
            return Reachability.SOME
        return Reachability.MOST if not rings or 2 * len(fresh.intersection(rings)) > len(rings) else Reachability.SOME


LEASE_S = 1.0
"""Silence of the standby after which the leader goes on alone. The standby waits longer, and rings have to find it
then: together this stays below two seconds."""
_STANDBY_FACTOR = 1.25
"""Factor on the standby's wait: of two servers that hear the rings, but not each other, the leader should stay."""
_FEW_RINGS_FACTOR = 3.0
"""Factor on the wait of a server that hears few rings, or none from another node: its node may be cut off, and the
other's not. Rings that lost their representative to the cut have chosen another one by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeadershipRecord:
    """Leader from here on, and the servers that have all its state."""

    number: int
    term: int
    """Counts leaders: it grows if another server leads than in the record before."""
    leader: int
    members: tuple[int, ...]


class FailoverRules:
    """Failover rules of one server; not thread-safe."""

    def __init__(self, own: int, *, lease_s: float = LEASE_S) -> None:
        """Start with nothing: it leads only once it has appended a record."""
        self.own = own
        self.record: LeadershipRecord | None = None
        """Newest record that this server has appended or follows."""
        self._lease_s = lease_s
        self._last_heard_s: float | None = None
        self._last_checked_s = 0.0
        self._has_lost_standby = False
        self._is_record_pending = False

    @property
    def leads(self) -> bool:
        """True if its own record is the newest that it knows of."""
        return self.record is not None and self.record.leader == self.own

    @property
    def term(self) -> int:
        """Term of the newest record that it knows of."""
        return self.record.term if self.record else 0

    def first_record(self) -> LeadershipRecord:
        """Return the record of the first server, where there is none at all."""
        return LeadershipRecord(number=0, term=0, leader=self.own, members=(self.own,))

    def record_without_other(self, newest: LeadershipRecord) -> LeadershipRecord | None:
        """Return the record to go on without the other; None if this server lacks some state."""
        if self.record is None or self.own not in newest.members:
            return None
        term = newest.term + (newest.leader != self.own)
        return LeadershipRecord(number=newest.number + 1, term=term, leader=self.own, members=(self.own,))

    def record_with_standby(self, other: int) -> LeadershipRecord:
        """Return the leader's record that the other server has all state, too."""
        assert self.record is not None, "only who leads takes others in"
        assert self.leads, "only who leads takes others in"
        return replace(self.record, number=self.record.number + 1, members=(self.own, other))

    def adopt(self, record: LeadershipRecord, now_s: float) -> None:
        """Adopt a record that this server has appended, or whose leader's state it has."""
        self.record, self._last_heard_s, self._last_checked_s = record, now_s, now_s
        self._has_lost_standby = self._is_record_pending = False

    def note_record_pending(self) -> None:
        """Note that an append is pending: until `adopt` its outcome is unknown."""
        self._is_record_pending = True

    def note_standby_lost(self) -> None:
        """Note that the standby is lost: nothing may be acknowledged before another record is adopted."""
        self._has_lost_standby = True

    def note_heard(self, at_s: float) -> None:
        """Note that the other server has answered a question of that time, or has sent something."""
        self._last_heard_s = at_s if self._last_heard_s is None else max(at_s, self._last_heard_s)

    def has_lease(self, now_s: float) -> bool:
        """Return whether no other server can have taken over: there is none, or it is up to date and was just heard."""
        if self.record is None or not self.leads or self._last_heard_s is None or self._is_record_pending:
            return False
        return len(self.record.members) == 1 or (
            not self._has_lost_standby and now_s - self._last_heard_s < self._lease_s
        )

    def is_silent(self, now_s: float) -> bool:
        """Return whether the other server is silent for too long; time that this one slept does not count."""
        since_check_s, self._last_checked_s = now_s - self._last_checked_s, now_s
        if self._last_heard_s is None or self.record is None:
            return False
        if since_check_s > self._lease_s / 2 and not self.leads:
            self._last_heard_s = now_s
        return now_s - self._last_heard_s > self._silence_limit_s

    def should_go_on(self, now_s: float, reachability: Reachability, *, is_other_gone: bool) -> bool:
        """Return whether to go on without the other server: it has closed or is silent, and rings are heard.

        `is_other_gone`: its connection has ended, so it need not be awaited.
        """
        silent_s = now_s - self._last_heard_s if self._last_heard_s is not None else 0.0
        match reachability:
            case Reachability.NONE:
                return False
            case Reachability.SOME:
                return is_other_gone or silent_s > self._silence_limit_s * _FEW_RINGS_FACTOR
            case Reachability.MOST:
                return is_other_gone or silent_s >= self._silence_limit_s

    @property
    def _silence_limit_s(self) -> float:
        return self._lease_s * (1.0 if self.leads else _STANDBY_FACTOR)
