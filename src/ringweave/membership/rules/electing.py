"""How a standby comes to decide: the members of the newest epoch ask it to, and most of them have to."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ringweave.membership.rules.records import BEFORE_ALL, Ballot, Decree, Standing, slot_of
from ringweave.membership.rules.signs import Beat

_FACTOR = 3.0
_MOST_S = 15.0
"""How long those who have not voted yet are waited for, beside the time that it took the others."""

_ASKED_S = 2.0
"""After it has asked a newcomer that found nobody who decides asks again in far less, unless it is a member by now."""

_FOUND_S = 12.0
"""In it whoever looks for a coordinator has asked both."""

_SURE_S = 5.0
"""Between two words of the other coordinator: more means that it may have decided, and members have come to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejoining:
    """A member that has lost its coordinator. Once it has asked, it follows no order of an earlier term."""

    standing: Standing
    decree: Decree | None
    """The epoch that it is in; None if it waits for its first."""
    promised: Ballot = BEFORE_ALL
    """The greatest ballot that it knows of."""
    is_settled: bool = True
    """It was not about to change epochs, and does not know that its epoch is broken."""
    lost_s: float = 0.0
    """Seconds since it last heard of a coordinator that decides."""
    patience_s: float = 0.0
    """Seconds after which it took the coordinator for lost, or would have: longer on a busy machine."""
    beat: Beat = field(default_factory=Beat)
    """Its sign of life, as it asks."""


class Election:
    """Votes of members, and what they know."""

    def __init__(self) -> None:
        self._voters: dict[str, Rejoining] = {}
        self._unread: list[Rejoining] = []
        self._missing: set[str] = set()
        self._unreachable: set[str] = set()
        self._starting: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        self._asked_s: dict[int, float] = {}
        self._newcomers_since_s = math.inf
        self._sure_s = 0.0
        self._first_s: float | None = None
        self._last_s = self._lost_at_s = 0.0

    @property
    def decree(self) -> Decree | None:
        """The newest epoch that any voter is in."""
        decrees = [each.decree for each in self._voters.values() if each.decree is not None]
        return max(decrees, key=lambda decree: decree.ballot, default=None)

    @property
    def highest_ballot(self) -> Ballot:
        """The greatest that any voter knows of."""
        return max((each.promised for each in self._voters.values()), default=BEFORE_ALL)

    @property
    def is_won(self) -> bool:
        """Most members of the newest epoch have voted; of two halves, the one with the first member."""
        decree = self.decree
        if decree is None:
            return False
        votes = [member for member in decree.members if member in self._voters]
        if 2 * len(votes) == len(decree.members):
            return decree.members[0] in votes
        return 2 * len(votes) > len(decree.members)

    def accounts_for(self, num_slots: int, now_s: float) -> bool:
        """Every process that a job of so many slots can have has voted, asks to be let in, or is about to start."""
        decree, asking = self.decree, self._asking(now_s)

        def is_known(member: str) -> bool:
            slot, incarnation = slot_of(member)
            asks_now = (
                slot in asking and self._newest[slot] == incarnation
            )  # it has not heard of the epoch that it is in
            return member in self._voters or asks_now or self.is_followed(member)

        if decree is None or not all(map(is_known, decree.members)):
            return False
        return len({slot_of(each)[0] for each in self._voters} | self._starting.keys() | asking) >= num_slots

    def note_who_asks(self, num_slots: int, now_s: float) -> bool:
        """Whether every process that a job of so many slots can have asks to be let in, and none was ever in an epoch.

        Only once that has been so for so long that any member would have voted that looks for a coordinator.
        """
        if self._voters or len(self._asking(now_s)) < num_slots:
            self._newcomers_since_s = math.inf
            return False
        self._newcomers_since_s = min(now_s, self._newcomers_since_s)
        return now_s - self._newcomers_since_s >= _FOUND_S

    @property
    def has_lost(self) -> bool:
        """Of those that ask to be let in some are in the place of others."""
        return any(self._newest.values())

    def _asking(self, now_s: float) -> set[int]:
        return {slot for slot, asked_s in self._asked_s.items() if now_s - asked_s <= _ASKED_S}

    def ask(self, newcomer: str, now_s: float) -> None:
        """This process asks to be let in, by nobody yet: those that had its slot before have ended."""
        slot, incarnation = slot_of(newcomer)
        self._newest[slot] = max(incarnation, self._newest.get(slot, 0))
        self._asked_s[slot] = now_s

    def announce(self, newcomer: str, now_s: float) -> None:
        """This process is about to be given a slot: those that had it before have ended."""
        slot, incarnation = slot_of(newcomer)
        self._starting[slot], self._sure_s = incarnation, now_s

    def hear_idle(self, now_s: float) -> None:
        """The other coordinator decides nothing now."""
        if now_s - self._sure_s > _SURE_S:
            self.forget_announced()
        self._sure_s = now_s

    def forget_announced(self) -> None:
        """They may have become members elsewhere."""
        self._starting.clear()
        self._newcomers_since_s = math.inf

    def is_followed(self, member: str) -> bool:
        """Its slot has been given to another process, or is about to be."""
        slot, incarnation = slot_of(member)
        return max(self._starting.get(slot, 0), self._newest.get(slot, 0)) > incarnation

    def vote(self, rejoining: Rejoining, now_s: float) -> None:
        """A member asks."""
        if self._first_s is None:
            self._first_s, self._lost_at_s = now_s, 0.0
        self._last_s = now_s
        self._lost_at_s = max(self._lost_at_s, now_s - rejoining.lost_s)
        self._voters[rejoining.standing.member] = rejoining
        self._unread.append(rejoining)

    def withdraw(self, member: str) -> None:
        """It has gone to ask another one."""
        self._voters.pop(member, None)
        if not self._voters:
            self._first_s = None

    def await_rest(self, missing: set[str]) -> None:
        """The election is won; those who have not voted get a moment to do so."""
        self._missing = missing

    def rest(self, present: Collection[str]) -> set[str]:
        """Who has not voted yet, and may still come: no later process of its slot is here, or about to be."""
        latest = dict(sorted(map(slot_of, present)))

        def may_come(member: str) -> bool:
            slot, incarnation = slot_of(member)
            return latest.get(slot, -1) < incarnation and not self.is_followed(member)

        return set(filter(may_come, self._missing - set(present)))

    def is_waiting(self, now_s: float, least_s: float, present: Collection[str]) -> bool:
        """Whether members of the epoch may still come: for so long, and longer where those before came far apart."""
        if self._first_s is None or not self.rest(present):
            return False
        return now_s - self._last_s <= min(_MOST_S, max(least_s, _FACTOR * self._spread_s))

    def hear_unreachable(self, member: str) -> None:
        """Nothing answers where it listens."""
        self._unreachable.add(member)

    def is_hopeless(self, present: Collection[str]) -> bool:
        """Nobody who has not voted yet can be reached: they are not on their way."""
        return self.rest(present) <= self._unreachable

    def lost_s(self, now_s: float) -> float:
        """Seconds since any voter heard of a coordinator that decides."""
        return now_s - self._lost_at_s

    @property
    def patience_s(self) -> float:
        """Of the most patient voter."""
        return max((each.patience_s for each in self._voters.values()), default=0.0)

    def has_rested(self, now_s: float) -> bool:
        """The last vote came longer ago than it took all of them, so that no other is about to."""
        return now_s - self._last_s > min(_MOST_S, self._spread_s)

    @property
    def _spread_s(self) -> float:
        return self._last_s - (self._last_s if self._first_s is None else self._first_s)

    def take_followed(self) -> set[str]:
        """Who is waited for, and cannot come: its slot is about to be given to another process; each once."""
        followed = {each for each in self._missing if self.is_followed(each)}
        self._missing -= followed
        return followed

    def take_absent(self, present: Collection[str]) -> set[str]:
        """Who has not come though there was time; once."""
        absent, self._missing = self._missing - set(present), set()
        return absent

    def take_unsettled(self) -> bool:
        """Whether a voter is not in the newest epoch, or was about to leave it; once for each vote."""
        newest, unread = self.decree, self._unread
        self._unread = []
        return any(not each.is_settled or each.decree != newest for each in unread)
