"""Who has pushed what, how old it was, and who may go on: the server's books, pure.

A ring takes parameters (a *grant*), computes a round, pushes it, takes the next. A push is applied when it comes, never
held back; it is the next grant that waits where it would let the fastest rings run away from the slowest. A grant to f
is given if for every other ring s that is computing

    version + (pushes that granted rings may still make, f's included, s's left out) - base of s <= bound.

A grant allows one push, so the left side never grows but by grants, and no push can be older than the bound.

A ring that is *paused*, since it has lost a member and forms anew (in elastic jobs alone), holds nobody up: it keeps
its grants, and the push that it comes back with is applied however old it is, for what its age leaves of it. It alone
may pass the bound; a ring whose connection has broken, and that lives, is not paused.

Without overlap a ring that waits has nothing under way, so somebody is always computing and his push frees the others.
With overlap a ring waits while it holds a computed round; so the oldest ring is always granted, and the others keep
`reserve_versions` below the bound to leave room for that.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringweave.errors import TrainingError, explain
from ringweave.params.rules.staleness import StalenessPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What became of a push."""

    ring: int
    sequence: int
    """Number of the push among its ring's, from 1."""
    version: int
    """Version of the parameters that it made."""
    staleness_versions: int
    damping: float
    is_repeat: bool = False
    """It had been applied before and was not applied again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a ring holds that computes."""

    grants: tuple[int, ...]
    """Versions that it has and has not pushed for yet, oldest first."""
    num_since: int
    """Pushes since it came."""
    is_paused: bool = False


@dataclass(slots=True)
class _Ring:
    last: Receipt | None = None
    grants: deque[int] = field(default_factory=deque)
    """Versions that it has and that it has not pushed for yet, oldest first."""
    num_since: int = 0
    """Pushes since it came."""
    is_paused: bool = False

    @property
    def num_pushed(self) -> int:
        return self.last.sequence if self.last else 0


class Ledger:
    """The books of one job; one thread at a time."""

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        version: int = 0,
        pushed: Mapping[int, Receipt] | None = None,
        holdings: Sequence[Holding] | None = None,
    ) -> None:
        """`version` and `pushed` (the last receipt of each ring) are those of a snapshot, to go on from there.

        `holdings` are those of each ring, where books are taken over while rings compute; None means that none does.
        """
        self.policy = policy
        self.version = version
        self._rings = [_Ring(last=(pushed or {}).get(ring)) for ring in range(policy.num_rings)]
        for ring, holding in zip(self._rings, holdings or (), strict=False):
            ring.grants.extend(holding.grants)
            ring.num_since, ring.is_paused = holding.num_since, holding.is_paused

    @property
    def pushed(self) -> dict[int, Receipt]:
        """The last receipt of each ring that has pushed."""
        return {ring: each.last for ring, each in enumerate(self._rings) if each.last}

    @property
    def holdings(self) -> list[Holding]:
        """What each ring holds."""
        return [
            Holding(grants=tuple(each.grants), num_since=each.num_since, is_paused=each.is_paused)
            for each in self._rings
        ]

    def base(self, ring: int) -> int | None:
        """Version that the ring's next push was computed on; None if it holds none."""
        grants = self._find(ring).grants
        return grants[0] if grants else None

    def may_push(self, ring: int) -> bool:
        """Whether the ring has been granted its next push."""
        return self._may_push(self._find(ring))

    def receipt(self, ring: int, sequence: int) -> Receipt | None:
        """The receipt of a push that was applied before; None if it is the ring's next one.

        Raises:
            TrainingError: It is neither: a push before it is missing, or it is long past.
        """
        last = self._find(ring).last
        if last is not None and last.sequence == sequence:
            return _again(last)
        if sequence != self._rings[ring].num_pushed + 1:
            raise TrainingError(
                explain(
                    f"push {sequence} of ring {ring}",
                    got=sequence,
                    expected=f"{self._rings[ring].num_pushed + 1}, the next one, or the one before it again",
                    do="Take the parameters and the place of the ring anew",
                )
            )
        return None

    def push(self, ring: int, sequence: int, base_version: int) -> Receipt:
        """A push has come whole: apply it if this says so, by a new version.

        Args:
            ring: Who pushes.
            sequence: Number of the push among the ring's; a number that was applied before is not applied again.
            base_version: Version that it was computed on.

        Raises:
            TrainingError: Out of its order, not granted, or computed on other parameters than were granted.
        """
        if known := self.receipt(ring, sequence):
            return known
        staleness = self.check(ring, sequence, base_version)
        state = self._rings[ring]
        self.version += 1
        damping = self.policy.damping(staleness)
        state.last = Receipt(
            ring=ring, sequence=sequence, version=self.version, staleness_versions=staleness, damping=damping
        )
        state.num_since += 1
        if len(state.grants) > self._depth:
            state.grants.popleft()
        state.is_paused = False
        return state.last

    def check(self, ring: int, sequence: int, base_version: int) -> int:
        """How many versions old the ring's next push is; nothing is booked.

        Raises:
            TrainingError: As `push` says.
        """
        self.receipt(ring, sequence)
        state = self._rings[ring]
        if not self._may_push(state) or state.grants[0] != base_version:
            raise TrainingError(
                explain(
                    f"base version of push {sequence} of ring {ring}",
                    got=base_version,
                    expected=f"{state.grants[0] if self._may_push(state) else 'a version that the ring was given'}",
                    do="Take the parameters first, and push what was computed on them",
                )
            )
        return self.version - base_version  # bounded by grants, but for what a ring held while it was paused

    def can_grant(self, ring: int) -> bool:
        """Whether the ring may have the parameters as they are now, and push once more."""
        self._find(ring)
        if self._may_push(self._rings[ring]):
            return True  # other parameters in the place of those that it has allow it no further push
        holding = {each: state for each, state in enumerate(self._rings) if each != ring and state.grants}
        others = {each: state for each, state in holding.items() if not state.is_paused}
        if self.policy.overlaps and self._is_oldest(ring, others):
            return True
        pushing = {each for each, state in holding.items() if self._may_push(state)} | {ring}  # paused ones come back
        bound = self.policy.most_versions - self.policy.reserve_versions
        return all(self.version + len(pushing - {each}) - state.grants[0] <= bound for each, state in others.items())

    def grant(self, ring: int, version: int | None = None) -> int:
        """The ring takes the parameters as they are now; the version. A grant that it has already is replaced.

        A version that is given is that of a grant which another server has made, and these books follow.
        """
        state = self._find(ring)
        if self._may_push(state):
            state.grants.pop()
        state.grants.append(self.version if version is None else version)
        state.is_paused = False
        return state.grants[-1]

    def leave(self, ring: int) -> None:
        """The ring computes nothing and holds nobody up any more, until it is granted parameters again."""
        state = self._find(ring)
        state.grants.clear()
        state.num_since = 0

    def pause(self, ring: int) -> None:
        """The ring holds nobody up until it pushes, or is granted parameters."""
        self._find(ring).is_paused = True

    def go_on(self, ring: int) -> None:
        """The ring holds others up again: it has been heard of."""
        self._find(ring).is_paused = False

    def is_paused(self, ring: int) -> bool:
        """Whether nobody waits for it."""
        return self._find(ring).is_paused

    @property
    def computing(self) -> tuple[int, ...]:
        """Rings that hold parameters which they have not pushed for."""
        return tuple(ring for ring, state in enumerate(self._rings) if state.grants)

    @property
    def _depth(self) -> int:
        return 1 if self.policy.overlaps else 0

    def _may_push(self, state: _Ring) -> bool:
        """With overlap the first two rounds are computed on the first grant."""
        return len(state.grants) > (self._depth if state.num_since else 0)

    def _is_oldest(self, ring: int, others: dict[int, _Ring]) -> bool:
        own = self._rings[ring].grants
        return bool(own) and all((own[0], ring) < (state.grants[0], each) for each, state in others.items())

    def _find(self, ring: int) -> _Ring:
        if not 0 <= ring < len(self._rings):
            raise TrainingError(
                explain("ring", got=ring, expected=f"0 to {len(self._rings) - 1}", do="Join a ring that there is")
            )
        return self._rings[ring]


def _again(receipt: Receipt) -> Receipt:
    return Receipt(
        ring=receipt.ring,
        sequence=receipt.sequence,
        version=receipt.version,
        staleness_versions=receipt.staleness_versions,
        damping=receipt.damping,
        is_repeat=True,
    )
