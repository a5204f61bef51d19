"""Version ledger of the server: pushes, staleness bound, damping, train steps, and which rings may continue. Pure.

A ring takes parameters (a *grant*), computes a round, pushes it, takes the next. A push is applied when it arrives,
never held back. Only the next grant waits, if it would let the fastest rings get too far ahead of the slowest. A
grant to f is given if for every other ring s that is computing

    version + (pushes that granted rings may still make, f's included, s's left out) - base of s <= bound.

A grant allows one push, so the left side grows only by grants, and no push can be older than the bound.

A ring is *paused* while it regroups after the loss of a member (only in elastic jobs). It delays no other ring and
keeps its grants. Its next push is applied however old it is, damped by its age. Only such a push may exceed the
bound; a ring that only lost its connection is not paused.

Without overlap a waiting ring has nothing in flight, so some ring is always computing, and its push releases the
others. With overlap a ring waits while it holds a computed round; so the oldest ring is always granted, and the
others stay `reserve_versions` below the bound to leave room for that.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringweave.errors import ExpiredGrantError, RefusedError, TrainingError, explain

_LATENESS_DECAY = 0.5
"""Weight of the past beside the last round: a stall is forgotten in a few rounds."""


class WeightPrediction:
    """Predicts for each ring by how many train steps its pushes will be late.

    A gradient that is computed on the newest parameters is old when it arrives, since others have pushed meanwhile. Its
    lateness is nearly the same in each round, so the ring can be given what the parameters will probably be by then.

    Where all rings take turns, none is late by more than a *turn*: what the others of the ring with the smallest part
    push in one train step. Momentum predicts that much. It does not predict the lateness of a ring that has become
    slow: where curvature is high, parameters swing to and fro within a few train steps, and a gradient computed far
    ahead makes them diverge. So beyond a turn the prediction gets shorter as the lateness grows (decision 0018).

    Source: weight prediction of pipelines with stale gradients (Chen et al., "Efficient and Robust Parallel DNN
    Training through Model Parallelism on Multi-GPU Platform", 2018; Kosson et al., "Pipelined Backpropagation at
    Scale", 2021), where the delay is fixed; here it is measured.
    """

    def __init__(self) -> None:
        self._granted_at: dict[int, float] = {}
        self._usual_lateness: dict[int, float] = {}
        self._shares: dict[int, float] = {}
        self._computing: set[int] = set()

    def steps_ahead(self, ring: int, train_steps: float) -> float:
        """Note that the ring takes parameters after so many train steps; return how many ahead they should be."""
        self._granted_at[ring] = train_steps
        if ring not in self._computing:
            return 0.0
        usual, turn = self._usual_lateness[ring], max(0.0, 1.0 - min(self._shares.values()))
        return usual if usual <= turn else turn * turn / usual

    def note_push(self, ring: int, train_steps: float, share: float) -> None:
        """Note the push for those parameters, after so many train steps; `share` is its own part of a train step."""
        lateness = train_steps - self._granted_at.get(ring, train_steps)
        self._usual_lateness[ring] = (
            _LATENESS_DECAY * self._usual_lateness.get(ring, lateness) + (1 - _LATENESS_DECAY) * lateness
        )
        self._shares[ring] = share
        self._computing.add(ring)

    def note_idle(self, ring: int) -> None:
        """Note that the ring is idle until its next grant."""
        self._computing.discard(ring)


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessPolicy:
    """Staleness rules of one job, in versions: the pushes applied since the parameters were taken.

    Source: damping by Zhang et al., arXiv 1511.05950; the bound is that of stale synchronous parallel training;
    compensation by Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (2017).
    """

    num_rings: int
    overlaps: bool = False
    """Rings compute while their push is in flight, so that each round begins one push of all rings earlier."""
    compensation: float = 0.0
    """Lambda in g + lambda g g (theta_now - theta_base). 0 switches it off, and saves the server a copy of the
    parameters for each ring. Off, since 0.04 changed no loss in decision 0017."""

    def __post_init__(self) -> None:
        if self.num_rings < 1 or not self.compensation >= 0:
            raise TrainingError(
                "staleness policy",
                got=(self.num_rings, self.compensation),
                expected="at least one ring, and a compensation of 0 or more",
                do="Choose others",
            )

    @property
    def steady_versions(self) -> int:
        """Staleness when all rings take turns."""
        return 2 * self.num_rings - 1 if self.overlaps else self.num_rings - 1

    @property
    def max_versions(self) -> int:
        """Hard bound: no older push is applied."""
        return max(4, 4 * self.num_rings)

    @property
    def reserve_versions(self) -> int:
        """Distance to the bound of all rings but the oldest, so that the oldest can always continue."""
        return 2 * (self.num_rings - 1) if self.overlaps else 0

    def damping(self, staleness_versions: int) -> float:
        """Return the weight of a push of that age: 1 up to twice the usual age, then falling as 1 / sqrt(1 + age)."""
        undamped = 2 * self.steady_versions
        return min(1.0, ((1.0 + undamped) / (1.0 + staleness_versions)) ** 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReceipt:
    """Receipt of a push."""

    ring: int
    sequence: int
    """Number of the push among its ring's, from 1."""
    version: int
    """Version of the parameters that the push made."""
    staleness_versions: int
    damping: float
    is_repeat: bool = False
    """The push had been applied before and was not applied again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingGrants:
    """Grants of a ring that computes."""

    grants: tuple[int, ...]
    """Versions granted and not yet pushed for, oldest first."""
    num_since: int
    """Pushes since the ring started computing."""
    is_paused: bool = False


@dataclass(slots=True)
class _RingLedger:
    last: PushReceipt | None = None
    grants: deque[int] = field(default_factory=deque)
    """Versions granted and not yet pushed for, oldest first."""
    num_since: int = 0
    """Pushes since the ring started computing."""
    is_paused: bool = False

    @property
    def num_pushed(self) -> int:
        return self.last.sequence if self.last else 0


class Ledger:
    """Ledger of versions, grants and pushes of one job; not thread-safe."""

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        version: int = 0,
        pushed: Mapping[int, PushReceipt] | None = None,
        ring_grants: Sequence[RingGrants] | None = None,
    ) -> None:
        """Start empty, or from a snapshot's `version` and `pushed`, the last receipt of each ring.

        `ring_grants` are the grants of each ring, for a server that takes over while rings compute; None means that no
        ring does.
        """
        self.policy = policy
        self.version = version
        self._rings = [_RingLedger(last=(pushed or {}).get(ring)) for ring in range(policy.num_rings)]
        for ring, holding in zip(self._rings, ring_grants or (), strict=False):
            ring.grants.extend(holding.grants)
            ring.num_since, ring.is_paused = holding.num_since, holding.is_paused

    @property
    def pushed(self) -> dict[int, PushReceipt]:
        """Last receipt of each ring that has pushed."""
        return {ring: each.last for ring, each in enumerate(self._rings) if each.last}

    @property
    def ring_grants(self) -> list[RingGrants]:
        return [
            RingGrants(grants=tuple(each.grants), num_since=each.num_since, is_paused=each.is_paused)
            for each in self._rings
        ]

    def base_version(self, ring: int) -> int | None:
        """Return the base version of the ring's next push; None if it has no grant."""
        grants = self._find(ring).grants
        return grants[0] if grants else None

    def receipt(self, ring: int, sequence: int) -> PushReceipt | None:
        """Return the receipt of a push that was applied before; None if it is the ring's next one.

        Raises:
            TrainingError: It is neither: a push before it is missing, or it is long past.
        """
        last = self._find(ring).last
        if last is not None and last.sequence == sequence:
            return _as_repeat(last)
        if sequence != self._rings[ring].num_pushed + 1:
            raise TrainingError(
                f"push {sequence} of ring {ring}",
                got=sequence,
                expected=f"{self._rings[ring].num_pushed + 1}, the next one, or the one before it again",
                do="Take the parameters and the place of the ring anew",
            )
        return None

    def push(self, ring: int, sequence: int, base_version: int) -> PushReceipt:
        """Record a complete push by a new version, unless it was recorded before.

        `sequence`: number of the push among the ring's; a number that was applied before is not applied again.

        Raises:
            TrainingError: It is out of order, not granted, or computed on other parameters than were granted.
        """
        if known := self.receipt(ring, sequence):
            return known
        staleness = self.check(ring, sequence, base_version)
        state = self._rings[ring]
        self.version += 1
        damping = self.policy.damping(staleness)
        state.last = PushReceipt(
            ring=ring, sequence=sequence, version=self.version, staleness_versions=staleness, damping=damping
        )
        state.num_since += 1
        if len(state.grants) > self._overlap_depth:
            state.grants.popleft()
        state.is_paused = False
        return state.last

    def check(self, ring: int, sequence: int, base_version: int) -> int:
        """Return the staleness of the ring's next push in versions; record nothing.

        Raises:
            ExpiredGrantError: The ring has no grant: it is idle, or was passed over.
            TrainingError: As in `push`.
        """
        self.receipt(ring, sequence)
        state = self._rings[ring]
        if not state.grants:
            do = "Take the parameters again; the samples of this push count as lost"
            text = explain(f"push {sequence} of ring {ring}", got="no grant", expected="one", do=do)
            raise ExpiredGrantError(text)
        if not self._may_push(state) or state.grants[0] != base_version:
            raise TrainingError(
                f"base version of push {sequence} of ring {ring}",
                got=base_version,
                expected=f"{state.grants[0] if self._may_push(state) else 'a version that the ring was given'}",
                do="Take the parameters first, and push what was computed on them",
            )
        return self.version - base_version  # bounded by grants, except for grants from before a pause

    def can_grant(self, ring: int) -> bool:
        """Return whether the ring may have the present parameters, and push once more."""
        self._find(ring)
        if self._may_push(self._rings[ring]):
            return True  # replacing its parameters allows no further push
        with_grants = {each: state for each, state in enumerate(self._rings) if each != ring and state.grants}
        others = {each: state for each, state in with_grants.items() if not state.is_paused}
        if self.policy.overlaps and self._is_oldest(ring, others):
            return True
        pushing = {each for each, state in with_grants.items() if self._may_push(state)} | {
            ring
        }  # paused ones come back
        bound = self.policy.max_versions - self.policy.reserve_versions
        return all(self.version + len(pushing - {each}) - state.grants[0] <= bound for each, state in others.items())

    def grant(self, ring: int, version: int | None = None) -> int:
        """Grant the ring the present parameters; return their version. An unused grant is replaced.

        A given version is that of a grant by another server, which this ledger follows.
        """
        state = self._find(ring)
        if self._may_push(state):
            state.grants.pop()
        state.grants.append(self.version if version is None else version)
        state.is_paused = False
        return state.grants[-1]

    def leave(self, ring: int) -> None:
        """End the ring's grants: it is idle and delays no other ring until its next grant."""
        state = self._find(ring)
        state.grants.clear()
        state.num_since = 0

    def pause(self, ring: int) -> None:
        """Pause the ring: it delays no other ring until it pushes or gets a grant."""
        self._find(ring).is_paused = True

    def go_on(self, ring: int) -> None:
        """Resume the ring, which has been heard from: it delays others again."""
        self._find(ring).is_paused = False

    def is_paused(self, ring: int) -> bool:
        """Return whether no other ring waits for it."""
        return self._find(ring).is_paused

    @property
    def computing(self) -> tuple[int, ...]:
        """Rings that have unused grants."""
        return tuple(ring for ring, state in enumerate(self._rings) if state.grants)

    @property
    def _overlap_depth(self) -> int:
        return 1 if self.policy.overlaps else 0

    def _may_push(self, state: _RingLedger) -> bool:
        """Return whether the next push is granted. With overlap the first grant allows two rounds."""
        return len(state.grants) > (self._overlap_depth if state.num_since else 0)

    def _is_oldest(self, ring: int, others: dict[int, _RingLedger]) -> bool:
        own = self._rings[ring].grants
        return bool(own) and all((own[0], ring) < (state.grants[0], each) for each, state in others.items())

    def _find(self, ring: int) -> _RingLedger:
        if not 0 <= ring < len(self._rings):
            raise TrainingError(
                "ring", got=ring, expected=f"0 to {len(self._rings) - 1}", do="Join a ring that there is"
            )
        return self._rings[ring]


def _as_repeat(receipt: PushReceipt) -> PushReceipt:
    return PushReceipt(
        ring=receipt.ring,
        sequence=receipt.sequence,
        version=receipt.version,
        staleness_versions=receipt.staleness_versions,
        damping=receipt.damping,
        is_repeat=True,
    )


_WHOLE_STEP_TOLERANCE = 1e-9
"""Tolerance for a whole number of train steps: the shares of rings are rounded fractions."""


@dataclass(kw_only=True, slots=True)
class TrainStepProgress:
    """Present train step, and the number of earlier ones.

    A train step is full when all shares so far make one more whole step. Where shares do not add up to 1, one train
    step is longer and the next one shorter, and there are as many of them as in synchronous training.
    """

    total: float = 0.0
    """Train steps whose samples have been pushed, including a part of the present one."""
    num_finished: int = 0
    length: float = 0.0
    """Sum of the shares in the present train step."""
    weight: float = 0.0
    """Sum of the weights of its gradients: shares times damping."""
    present: set[int] = field(default_factory=set)
    """Indices of the parameters that have a gradient in it."""

    @property
    def num_done(self) -> int:
        """Whole train steps whose samples have been pushed."""
        return int(self.total + _WHOLE_STEP_TOLERANCE)

    @property
    def is_full(self) -> bool:
        """True if the present train step is complete; never without any weight."""
        return self.weight > 0 and self.total >= self.num_finished + 1 - _WHOLE_STEP_TOLERANCE

    def add(self, share: float, weight: float, present: set[int]) -> None:
        self.total += share
        self.length += share
        self.weight += weight
        self.present |= present

    def clear(self) -> None:
        """Finish the present train step and begin the next."""
        self.num_finished = max(self.num_finished + 1, int(self.total + _WHOLE_STEP_TOLERANCE))
        self.length, self.weight, self.present = 0.0, 0.0, set()


RingGenerationId = tuple[int, int]
"""Id of a generation of a ring's membership, as in its coordinator: greater ones are later."""


class RingLeaderFence:
    """Fence for representatives of all rings: refuses those of an earlier generation of the ring.

    Rings that lose no members never register, and all of their ranks are accepted.
    """

    def __init__(self) -> None:
        self._by_ring: dict[int, tuple[RingGenerationId, str]] = {}

    def register_leader(self, ring: int, generation_id: RingGenerationId, name: str) -> None:
        """Register the process as the ring's representative in that generation.

        Raises:
            RefusedError: A later one is registered.
        """
        known = self._by_ring.get(ring)
        if known is not None and generation_id < known[0]:
            raise self._fenced_error(ring, name)
        self._by_ring[ring] = (generation_id, name)

    def is_current_leader(self, ring: int, name: str) -> bool:
        """Return whether no process of a later generation has registered for the ring."""
        return ring not in self._by_ring or self._by_ring[ring][1] == name

    def check_leader(self, ring: int, name: str) -> None:
        """Refuse a process that is not the ring's current representative.

        Raises:
            RefusedError: Another process has registered.
        """
        if not self.is_current_leader(ring, name):
            raise self._fenced_error(ring, name)

    def clear_ring(self, ring: int) -> None:
        """Clear the registration of a ring that restarts: its generations may be counted from the beginning again."""
        self._by_ring.pop(ring, None)

    def _fenced_error(self, ring: int, name: str) -> RefusedError:
        return RefusedError(
            f"representative of ring {ring}",
            got=name,
            expected=f"{self._by_ring[ring][1]}, which the ring has gone on with",
            do="It is no member any more: it ends, and is started again",
        )
