"""What members say of themselves, what the coordinator says to them: frozen, ordered by term and number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

Ballot = tuple[int, int]
"""(term, number) of a proposal or an epoch: later ones compare as greater. No number is used twice in a term."""

BEFORE_ALL: Ballot = (0, 0)
"""What a member has that has never been in an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a member stands while it waits for an epoch to begin; it stays so until it is told how to go on."""

    member: str
    """Its name: `SLOT.INCARNATION`, such as `3.0`; a process that is started again is another member."""
    has_state: bool = False
    """Its parameters are those of the job; not so before a newcomer has read them and is level with the others."""
    is_following: bool = False
    """It has joined, takes part in every reduction with nothing of its own, and keeps what it will be level by. Until
    then it has not the state, but misses nothing: it goes on through changes of members that newcomers wait for."""
    committed: int = 0
    """Number of the last reduction of gradients whose result it has taken over."""
    is_prepared: bool = False
    """It has every result of the next reduction too, and every member's row, but has not heard that all have them."""
    at_border: bool = True
    """It is between two train steps; else it keeps gradients that are not reduced yet."""
    is_leaving: bool = False
    """It wants to go."""
    place: str = ""
    """`HOST PORT` where it listens for other members; empty if it does not."""
    note: str = ""
    """What the other members have to know of it and the coordinator does not: passed on as it is."""
    layout: str = ""
    """What newcomers have to know to take part; all who have the state say the same; only the first's is passed on."""
    num_drawn: int = 0
    """Batches that its script has drawn."""
    sharing: str = ""
    """Who computes what of those of them that do not count yet. All who have drawn a batch say the same of it, and the
    others are to draw it so: they may not have been in the epoch that it was drawn in. Only one's is passed on that has
    drawn the most, and be it one that follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decree:
    """An epoch: who is in it, and where each of them stood when it began."""

    ballot: Ballot
    standings: tuple[Standing, ...]
    """Of each member; their order is that of the ranks."""
    finished: tuple[Standing, ...] = ()
    """Where those stood that had done all there was to do: what they have taken over counts."""
    forerunners: tuple[tuple[str, ...], ...] = ()
    """Of each epoch before that members may still be in who know nothing of this one: those that may live.

    A member of this one may never hear of it, and go on from an earlier one with others. So until all members are known
    to have been in this one whoever goes on from it has to outnumber the rest of each of these too."""

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members, by rank."""
        return tuple(standing.member for standing in self.standings)

    @property
    def holders(self) -> tuple[str, ...]:
        """Those that have the job's state; at the begin of a job nobody has, and the first member's becomes it."""
        return tuple(standing.member for standing in self.standings if standing.has_state)

    @property
    def teller(self) -> str:
        """Who tells for all: the first with the job's state. Who follows comes to what counts later, or never."""
        return next(iter(self.holders), self.members[0])

    @property
    def committed(self) -> int:
        """The last reduction that counts: one of them has taken it over, or all who take part in it have its results.

        Somebody who is not among them may have taken it over then, and nobody who could not have it: a member does so
        only after all have said that they have every result.
        """
        most = max(standing.committed for standing in (*self.standings, *self.finished))
        keepers = [standing for standing in self.standings if standing.has_state or standing.is_following]
        is_agreed = keepers and all(each.is_prepared and each.committed == most for each in keepers)
        return most + 1 if is_agreed else most


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """An epoch that is being formed."""

    ballot: Ballot
    is_urgent: bool
    """Break off what is under way and say where you stand; else all stop together at the next border."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What holds for a member now. Not a message but a state: it may be told any number of times, or only the last."""

    ballot: Ballot = BEFORE_ALL
    """The greatest one in it."""
    decree: Decree | None = None
    """The newest epoch with this member in it."""
    proposal: Proposal | None = None
    """What it has to stand still for."""
    is_out: bool = False
    """It is no member any more: it changes nothing and ends."""
    is_end: bool = False
    """The job is over."""
    reason: str = ""
    """Why it is out, or the job over, in words."""
    heir: str = ""
    """Of a job that is over: the member that is to save the state; empty if nobody who is left has it."""


def as_passed_on(standings: Sequence[Standing]) -> tuple[Standing, ...]:
    """What several say alike, and grows with the model or the job, is left of one of them."""
    first = next((each for each in standings if each.has_state), None)
    furthest = furthest_of(standings)
    return tuple(
        replace(each, layout=each.layout if each is first else "", sharing=each.sharing if each is furthest else "")
        for each in standings
    )


def furthest_of(standings: Sequence[Standing]) -> Standing:
    """One that has drawn the most batches, of those that do what the job does; of all, where none does so yet.

    Who follows may be waiting for a step whose batch those who have the state have not drawn; of several that have
    drawn as many it is one with the state.
    """
    training = [each for each in standings if each.has_state or each.is_following]
    return max(training or standings, key=lambda each: (each.num_drawn, each.has_state))


def slot_of(member: str) -> tuple[int, int]:
    """(slot, incarnation) of a member's name, by which members are put in order."""
    slot, _, incarnation = member.partition(".")
    return int(slot), int(incarnation)
