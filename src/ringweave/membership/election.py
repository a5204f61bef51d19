"""Election of a standby coordinator: a majority of the members of the newest generation has to vote for it. Pure."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import (
    NO_GENERATION,
    GenerationId,
    Membership,
    MemberStatus,
    parse_member_name,
)

_VOTE_SPREAD_FACTOR = 3.0
_MAX_VOTER_WAIT_S = 15.0
"""Longest wait for members that have not voted yet, beyond the spread of the votes so far."""

_NEWCOMER_FRESH_S = 2.0
"""A newcomer that found no active coordinator asks again far sooner than this, unless it is a member by now."""

_BOTH_ASKED_S = 12.0
"""Time in which a member that looks for a coordinator has contacted both."""

_OTHER_IDLE_FRESH_S = 5.0
"""Gap between two reports of the other coordinator above which it may have been active and admitted members."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejoin:
    """Request of a member that lost its coordinator. After it, the member follows no directive of an earlier term."""

    status: MemberStatus
    membership: Membership | None
    """Its generation; None if it waits for its first."""
    promised: GenerationId = NO_GENERATION
    """Greatest id that it knows of."""
    is_settled: bool = True
    """It was not about to change generations, and knows of no failure in its own."""
    lost_s: float = 0.0
    """Seconds since it last heard from an active coordinator."""
    patience_s: float = 0.0
    """Seconds of silence after which it counted the coordinator as lost, or would have; more on a busy machine."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Its heartbeat at the time of the request."""


class Election:
    """Votes of members for a standby coordinator, and their knowledge of generations."""

    def __init__(self) -> None:
        self._voters: dict[str, Rejoin] = {}
        self._uncounted: list[Rejoin] = []
        self._missing: set[str] = set()
        self._unreachable: set[str] = set()
        self._ended: set[str] = set()
        self._announced: dict[int, int] = {}
        self._newest_incarnations: dict[int, int] = {}
        self._newcomer_asked_s: dict[int, float] = {}
        self._newcomers_since_s = math.inf
        self._other_idle_s = 0.0
        self._first_vote_s: float | None = None
        self._last_vote_s = self._coordinator_lost_s = 0.0

    @property
    def membership(self) -> Membership | None:
        """Newest generation of any voter."""
        memberships = [each.membership for each in self._voters.values() if each.membership is not None]
        return max(memberships, key=lambda each: each.generation_id, default=None)

    @property
    def highest_generation_id(self) -> GenerationId:
        """Greatest id that any voter knows of."""
        return max((each.promised for each in self._voters.values()), default=NO_GENERATION)

    @property
    def is_won(self) -> bool:
        """A majority of the newest generation has voted, or the half that includes the first member."""
        membership = self.membership
        if membership is None:
            return False
        votes = [member for member in membership.members if member in self._voters]
        if 2 * len(votes) == len(membership.members):
            return membership.members[0] in votes
        return 2 * len(votes) > len(membership.members)

    def accounts_for(self, num_slots: int, now_s: float) -> bool:
        """Return whether every possible process of so many slots voted, asks to join, or is about to start."""
        membership, asking = self.membership, self._asking_slots(now_s)

        def is_known(member: str) -> bool:
            slot, incarnation = parse_member_name(member)
            # A member that asks now does not know of the generation that it is in.
            asks_now = slot in asking and self._newest_incarnations[slot] == incarnation
            return member in self._voters or asks_now or self.is_replaced(member)

        if membership is None or not all(map(is_known, membership.members)):
            return False
        return len({parse_member_name(each)[0] for each in self._voters} | self._announced.keys() | asking) >= num_slots

    def note_only_newcomers(self, num_slots: int, now_s: float) -> bool:
        """Return whether every possible process of a job with so many slots asks to join, and none was in a generation.

        True only after this held long enough for any member that looks for a coordinator to have voted.
        """
        if self._voters or len(self._asking_slots(now_s)) < num_slots:
            self._newcomers_since_s = math.inf
            return False
        self._newcomers_since_s = min(now_s, self._newcomers_since_s)
        return now_s - self._newcomers_since_s >= _BOTH_ASKED_S

    @property
    def has_replacements(self) -> bool:
        """Some of the processes that ask to join replace others."""
        return any(self._newest_incarnations.values())

    def _asking_slots(self, now_s: float) -> set[int]:
        return {slot for slot, asked_s in self._newcomer_asked_s.items() if now_s - asked_s <= _NEWCOMER_FRESH_S}

    def note_newcomer(self, newcomer: str, now_s: float) -> None:
        """Note that a process asks to join, still unadmitted: earlier processes of its slot have ended."""
        slot, incarnation = parse_member_name(newcomer)
        self._newest_incarnations[slot] = max(incarnation, self._newest_incarnations.get(slot, 0))
        self._newcomer_asked_s[slot] = now_s

    def announce_start(self, newcomer: str, now_s: float) -> None:
        """Note that a process is about to get a slot: earlier processes of the slot have ended."""
        slot, incarnation = parse_member_name(newcomer)
        self._announced[slot], self._other_idle_s = incarnation, now_s

    def note_other_idle(self, now_s: float) -> None:
        """Note that the other coordinator is not active now."""
        if now_s - self._other_idle_s > _OTHER_IDLE_FRESH_S:
            self.forget_announced()
        self._other_idle_s = now_s

    def forget_announced(self) -> None:
        """Forget announced processes, which may have joined elsewhere."""
        self._announced.clear()
        self._newcomers_since_s = math.inf

    def is_replaced(self, member: str) -> bool:
        """Return whether its slot has been given to another process, or is about to be."""
        slot, incarnation = parse_member_name(member)
        return max(self._announced.get(slot, 0), self._newest_incarnations.get(slot, 0)) > incarnation

    def record_vote(self, rejoin: Rejoin, now_s: float) -> None:
        if self._first_vote_s is None:
            self._first_vote_s, self._coordinator_lost_s = now_s, 0.0
        self._last_vote_s = now_s
        self._coordinator_lost_s = max(self._coordinator_lost_s, now_s - rejoin.lost_s)
        self._voters[rejoin.status.member] = rejoin
        self._uncounted.append(rejoin)

    def withdraw_vote(self, member: str) -> None:
        """Withdraw the vote of a member that went to ask another coordinator."""
        self._voters.pop(member, None)
        if not self._voters:
            self._first_vote_s = None

    def await_voters(self, missing: set[str]) -> None:
        """Give the members that have not voted a moment to do so, after the election is won."""
        self._missing = missing

    def remaining_voters(self, present: Collection[str]) -> set[str]:
        """Return members that have not voted and may still come: no later process of their slot is known."""
        latest = dict(sorted(map(parse_member_name, present)))

        def may_come(member: str) -> bool:
            slot, incarnation = parse_member_name(member)
            return latest.get(slot, -1) < incarnation and not self.is_replaced(member)

        return set(filter(may_come, self._missing - set(present)))

    def awaits_voters(self, now_s: float, min_wait_s: float, present: Collection[str]) -> bool:
        """Return whether members may still come: for a minimum time, and longer if earlier votes came far apart."""
        if self._first_vote_s is None or not self.remaining_voters(present):
            return False
        return now_s - self._last_vote_s <= min(
            _MAX_VOTER_WAIT_S, max(min_wait_s, _VOTE_SPREAD_FACTOR * self._vote_spread_s)
        )

    def note_unreachable(self, member: str, *, has_ended: bool) -> None:
        """Note that nothing answers at its address, or that its process has ended."""
        self._unreachable.add(member)
        if has_ended:
            self._ended.add(member)

    def are_rest_unreachable(self, present: Collection[str]) -> bool:
        """Return whether all members that have not voted are unreachable, and so will not come."""
        return self.remaining_voters(present) <= self._unreachable

    def awaited_voters(self, present: Collection[str]) -> set[str]:
        """Return members that have not voted, may still come, and have not ended as far as known."""
        return self.remaining_voters(present) - self._ended

    def have_rest_ended(self, present: Collection[str]) -> bool:
        """Return whether the processes of all members that have not voted have ended."""
        return not self.awaited_voters(present)

    def coordinator_lost_s(self, now_s: float) -> float:
        """Return the seconds since any voter heard from an active coordinator."""
        return now_s - self._coordinator_lost_s

    @property
    def longest_answer_timeout_s(self) -> float:
        return max((each.patience_s for each in self._voters.values()), default=0.0)

    def is_settled(self, now_s: float) -> bool:
        """Return whether the time since the last vote exceeds the spread of all votes, so that no other is imminent."""
        return now_s - self._last_vote_s > min(_MAX_VOTER_WAIT_S, self._vote_spread_s)

    @property
    def _vote_spread_s(self) -> float:
        return self._last_vote_s - (self._last_vote_s if self._first_vote_s is None else self._first_vote_s)

    def take_replaced(self) -> set[str]:
        """Return the awaited members that cannot come, because their slot is given to another process; each once."""
        replaced = {each for each in self._missing if self.is_replaced(each)}
        self._missing -= replaced
        return replaced

    def take_missing(self, present: Collection[str]) -> set[str]:
        """Return the members that have not come in time; once."""
        absent, self._missing = self._missing - set(present), set()
        return absent

    def take_unsettled(self) -> bool:
        """Return whether a voter is outside the newest generation, or was about to leave it; once for each vote."""
        newest, unread = self.membership, self._uncounted
        self._uncounted = []
        return any(not each.is_settled or each.membership != newest for each in unread)
