"""Who comes in with an epoch, who gives them the state, and whether the others wait for them. Pure."""

from dataclasses import dataclass
from typing import Any

from ringweave.membership.rules.records import Decree
from ringweave.training.elastic.joining import layouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrance:
    """Who comes in with an epoch; the same on all members, since it follows from what the decree holds."""

    holders: tuple[int, ...]
    """Ranks of those who have the state; the first rank where nobody has."""
    newcomers: tuple[int, ...]
    """Ranks of those who have to read it."""
    followers: frozenset[str]
    """Members that take part with nothing: newcomers whom nobody waits for, now and from epochs before."""
    layout: list[list[Any]] | None
    """Of the buckets; None where no reduction was done yet: then the others wait until newcomers have the state."""
    hurried: str | None
    """The first that follows, where one member alone has the state: it reads that as fast as it can."""

    @classmethod
    def of(cls, decree: Decree) -> "Entrance":
        """That of a decree."""
        standings = list(enumerate(decree.standings))
        known = tuple(rank for rank, each in standings if each.has_state)
        newcomers = tuple(
            rank for rank, each in standings if not (each.has_state or each.is_following) and (known or rank > 0)
        )
        layout = layouts.of_text(decree.standings[known[0]].layout) if known else []
        following = {each.member for each in decree.standings if each.is_following}
        if layout:
            following |= {decree.members[rank] for rank in newcomers}
        return cls(
            holders=known or (0,),
            newcomers=newcomers,
            followers=frozenset(following),
            layout=layout or None,
            hurried=next((each for each in decree.members if each in following), None) if len(known) == 1 else None,
        )

    def donor(self, newcomer: int) -> int:
        """Rank of the one that it reads the state of."""
        return self.holders[self.newcomers.index(newcomer) % len(self.holders)]

    def gives(self, rank: int) -> bool:
        """Whether somebody reads the state of that rank."""
        return any(self.donor(each) == rank for each in self.newcomers)
