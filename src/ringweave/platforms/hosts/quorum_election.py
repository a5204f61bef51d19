"""Leadership of a run's hosts: terms, votes, and the lease of the leader. Pure; times are monotonic seconds.

The rules are Raft's for elections, with one replicated value (the run's entry) in the place of a log. A leader acts
only while it has heard from a quorum within `LEASE_S`, and a follower votes only when it has not heard from a leader
for longer than that. The quorum of an even number of voters may be exactly half of them if the first voter is among
them, so that of two hosts the first one can go on alone.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ringweave.errors import NotLeaderError

LEASE_S = 2.0
"""Time for which a contact with a quorum counts."""
ELECTION_TIMEOUT_S = 2.4
"""Silence of the leader after which the first other voter stands for election."""
ELECTION_STAGGER_S = 0.4
"""Additional silence for each further voter, so that they do not stand at the same time."""
GONE_TIMEOUT_S = 0.3
"""The same where the leader's process is known to be gone."""

EntryVersion = tuple[int, int]
"""Version of the run's entry: term of the leader that wrote it, and a number that grows with each change."""


class LeadershipRole(enum.StrEnum):
    """Role of a host service."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ballot:
    """Promise of a voter; saved before it is given, so that a restarted voter does not vote twice in a term."""

    term: int = 0
    voted_for: int | None = None


def is_quorum(present: Collection[int], voters: Sequence[int]) -> bool:
    """Return whether these hosts are a quorum of the voters; two quorums always have a host in common."""
    count = len(set(present) & set(voters))
    return 2 * count > len(voters) or (2 * count == len(voters) and voters[0] in present)


def no_leader_error() -> NotLeaderError:
    """Return the error of a request that only the leader of the run can answer."""
    do = "Repeat the command in a few seconds"
    return NotLeaderError("leader of the run", got="none at the moment", expected="one", do=do)


class Leadership:
    """View of one host service: its role, its term and its leader."""

    def __init__(self, index: int, voters: Sequence[int], ballot: Ballot, now_s: float, leader: int | None) -> None:
        """Begin as a follower, or as the leader of the first term.

        Args:
            index: Index of this host.
            voters: Indices of the voters, in order.
            ballot: Last saved promise.
            now_s: Current time.
            leader: Leader of the ballot's term; None if it is not known.
        """
        self.index, self.voters, self.ballot = index, tuple(voters), ballot
        self.leader = leader
        self.role = LeadershipRole.LEADER if leader == index else LeadershipRole.FOLLOWER
        self._votes: set[int] = set()
        self._contact_s = dict.fromkeys(self.voters, now_s)
        self._leader_s = self._heard_s = now_s
        self._leader_is_gone = False

    @property
    def is_leader(self) -> bool:
        return self.role is LeadershipRole.LEADER

    def accept_leader(self, term: int, leader: int, now_s: float) -> bool:
        """Return whether this host follows that leader from now on; False if it knows a newer term."""
        if term < self.ballot.term:
            return False
        if term > self.ballot.term:
            self.ballot = Ballot(term=term)
        self.role, self.leader, self._leader_is_gone = LeadershipRole.FOLLOWER, leader, False
        self._leader_s = self._heard_s = now_s
        return True

    def would_vote(
        self, term: int, candidate: int, version: EntryVersion, own_version: EntryVersion, now_s: float
    ) -> bool:
        """Return whether this host would vote for the candidate in that term; promises nothing."""
        if term <= self.ballot.term and (term, candidate) != (self.ballot.term, self.ballot.voted_for):
            return False
        return version >= own_version and not self._hears_leader(now_s)

    def grant_vote(
        self, term: int, candidate: int, version: EntryVersion, own_version: EntryVersion, now_s: float
    ) -> bool:
        """Return whether this host votes for the candidate. The caller saves the ballot before it answers."""
        if not self.would_vote(term, candidate, version, own_version, now_s):
            return False
        self.ballot = Ballot(term=term, voted_for=candidate)
        self.role, self.leader, self._leader_s = LeadershipRole.FOLLOWER, None, now_s
        return True

    def mark_leader_gone(self, leader: int) -> None:
        """Note that the process of a leader has ended, so that its silence need not be waited for."""
        self._leader_is_gone = self._leader_is_gone or leader == self.leader

    def should_stand(self, now_s: float) -> bool:
        """Return whether this host should stand for election now."""
        if self.is_leader or self.index not in self.voters:
            return False
        others = [each for each in self.voters if each != self.leader]
        position = others.index(self.index) if self.index in others else 0
        patience_s = GONE_TIMEOUT_S if self._leader_is_gone else ELECTION_TIMEOUT_S
        return now_s - self._leader_s >= patience_s + position * ELECTION_STAGGER_S

    def postpone_election(self, now_s: float) -> None:
        """Wait for the timeout again, since a quorum would not vote for this host now."""
        self._leader_s, self._leader_is_gone = now_s, False

    def stand(self, now_s: float) -> int:
        """Begin an election; return its term. The caller saves the ballot, then asks the other voters.

        Before it, the caller asks the voters whether they would vote for this host: otherwise a host that was cut off
        would come back with a greater term than the others' leader, and depose it.
        """
        self.ballot = Ballot(term=self.ballot.term + 1, voted_for=self.index)
        self.role, self.leader, self._votes = LeadershipRole.CANDIDATE, None, {self.index}
        self._leader_s = now_s
        return self.ballot.term

    def count_vote(self, term: int, voter: int, now_s: float) -> bool:
        """Count a granted vote; return whether it decides the election for this host."""
        if self.role is not LeadershipRole.CANDIDATE or term != self.ballot.term:
            return False
        self._votes.add(voter)
        return self.finish_election(now_s)

    def finish_election(self, now_s: float) -> bool:
        """Become the leader if the votes suffice; return whether they do."""
        if self.role is not LeadershipRole.CANDIDATE or not is_quorum(self._votes, self.voters):
            return False
        self.role, self.leader = LeadershipRole.LEADER, self.index
        self._contact_s = dict.fromkeys(self._votes, now_s)
        return True

    def note_contact(self, host: int, sent_s: float) -> None:
        """Note that a host has answered a call of this leader that was sent at that time."""
        self._contact_s[host] = max(sent_s, self._contact_s.get(host, sent_s))

    def step_down(self, term: int) -> None:
        """Follow again, since another host knows a newer term."""
        if term > self.ballot.term:
            self.ballot = Ballot(term=term)
        if self.role is not LeadershipRole.FOLLOWER:
            self.role, self.leader = LeadershipRole.FOLLOWER, None

    def holds_lease(self, now_s: float) -> bool:
        """Return whether this leader may act: it has heard from a quorum lately."""
        return self.is_leader and is_quorum({self.index, *self.hosts_heard(now_s, LEASE_S)}, self.voters)

    def hosts_heard(self, now_s: float, within_s: float) -> set[int]:
        """Return the hosts that this leader has heard from within that time."""
        return {host for host, contact_s in self._contact_s.items() if now_s - contact_s < within_s}

    def silence_s(self, now_s: float) -> float:
        """Return the seconds since this host last followed a leader; 0 on a leader."""
        return 0.0 if self.is_leader else now_s - self._heard_s

    def set_voters(self, voters: Sequence[int]) -> None:
        """Use other voters from now on; the caller has saved them in the entry."""
        self.voters = tuple(voters)

    def _hears_leader(self, now_s: float) -> bool:
        """Return whether this host has a live leader, for which it keeps its promise not to vote."""
        if self.is_leader:
            return self.holds_lease(now_s)
        return self.leader is not None and not self._leader_is_gone and now_s - self._leader_s < LEASE_S
