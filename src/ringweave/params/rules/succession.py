"""Which of two servers leads, and which may after it. Pure.

Who leads is settled by *claims*, numbered from 0. Each names the leader and the *members*: the servers that have all
that was acknowledged. Of several claims with one number the first to be registered counts. A member may make the next
claim: to go on alone when the other is silent, or to take the other one in. So of two servers that do not hear each
other at most one goes on, and it has everything.

A leader with a standby answers only as long as it can tell it everything and heard from it lately (its *lease*). Else
it claims to go on alone before it answers again, or finds that the other has taken over.

Of two that do not hear each other either may win. Which one should is told by the rings that they hear (`Reach`): one
whose node is cut off hears none, and leaves it to the other. That makes only the better choice likely. That nothing is
lost rests on the claims alone.
"""

from dataclasses import dataclass, replace

from ringweave.params.rules.audience import Reach

LEASE_S = 1.5
"""Silence of the standby for so long, and the leader goes on alone. The standby waits longer, and rings have to find it
then: together it stays below three seconds."""
_LATER = 1.25
"""The standby waits so much longer: of two that hear the rings, but not each other, the leader had better stay."""
_DOUBT = 3.0
"""Who hears but few rings, or none from elsewhere, waits so many times as long: its node may be cut off, and the other
one's not. Rings that lost their representative to the cut have chosen another one by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Who leads from here on, and who has all that it has."""

    number: int
    term: int
    """Counts leaders: it is another one's, if another server leads than by the claim before."""
    leader: int
    members: tuple[int, ...]


class Succession:
    """What one of the servers may do; one thread at a time."""

    def __init__(self, own: int, *, lease_s: float = LEASE_S) -> None:
        """A server that knows nothing: it leads only once it has made a claim."""
        self.own = own
        self.claim: Claim | None = None
        """The newest that this server has made or follows."""
        self._lease_s = lease_s
        self._heard_s: float | None = None
        self._looked_s = 0.0
        self._has_lost = False
        self._is_unsure = False

    @property
    def leads(self) -> bool:
        """Whether its own claim is the newest that it knows of."""
        return self.claim is not None and self.claim.leader == self.own

    @property
    def term(self) -> int:
        """Of the newest claim that it knows of."""
        return self.claim.term if self.claim else 0

    def first(self) -> Claim:
        """What the first server claims, where there is no claim at all."""
        return Claim(number=0, term=0, leader=self.own, members=(self.own,))

    def alone(self, newest: Claim) -> Claim | None:
        """The claim to go on without the other; None if this server may not, since it does not have everything."""
        if self.claim is None or self.own not in newest.members:
            return None
        term = newest.term + (newest.leader != self.own)
        return Claim(number=newest.number + 1, term=term, leader=self.own, members=(self.own,))

    def joined(self, other: int) -> Claim:
        """The leader's claim that the other one has everything, too."""
        assert self.claim is not None, "only who leads takes others in"
        assert self.leads, "only who leads takes others in"
        return replace(self.claim, number=self.claim.number + 1, members=(self.own, other))

    def hold(self, claim: Claim, now_s: float) -> None:
        """That claim counts; this server has made it, or has all that its leader has."""
        self.claim, self._heard_s, self._looked_s = claim, now_s, now_s
        self._has_lost = self._is_unsure = False

    def claiming(self) -> None:
        """A claim is being registered: until it is held, who knows whether it is, and whether it will be."""
        self._is_unsure = True

    def lost(self) -> None:
        """The other one cannot be told any more what is acknowledged: nothing is, before another claim is held."""
        self._has_lost = True

    def heard(self, at_s: float) -> None:
        """The other one has answered what was asked at that time, or has spoken."""
        self._heard_s = at_s if self._heard_s is None else max(at_s, self._heard_s)

    def has_lease(self, now_s: float) -> bool:
        """Whether nobody else can have taken over: there is no other, or it is told all and was heard of just now."""
        if self.claim is None or not self.leads or self._heard_s is None or self._is_unsure:
            return False
        return len(self.claim.members) == 1 or (not self._has_lost and now_s - self._heard_s < self._lease_s)

    def is_silent(self, now_s: float) -> bool:
        """Whether the other one has not been heard of for too long. What this one slept through does not count."""
        slept_s, self._looked_s = now_s - self._looked_s, now_s
        if self._heard_s is None or self.claim is None:
            return False
        if slept_s > self._lease_s / 2 and not self.leads:
            self._heard_s = now_s
        return now_s - self._heard_s > self._patience_s

    def should_go_on(self, now_s: float, reach: Reach, *, is_other_gone: bool) -> bool:
        """Whether to claim without the other one: it has hung up or is silent, and rings are heard.

        Args:
            now_s: The time.
            reach: Which rings are heard.
            is_other_gone: Its connection has ended: so it need not be waited for.
        """
        silent_s = now_s - self._heard_s if self._heard_s is not None else 0.0
        match reach:
            case Reach.NOBODY:
                return False
            case Reach.SOME:
                return is_other_gone or silent_s > self._patience_s * _DOUBT
            case Reach.MOST:
                return is_other_gone or silent_s >= self._patience_s

    @property
    def _patience_s(self) -> float:
        return self._lease_s * (1.0 if self.leads else _LATER)
