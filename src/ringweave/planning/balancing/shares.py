"""Shares: whole samples per rank that minimise the predicted time of the slowest, and when they change."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringweave.errors import CapacityError, TrainingError
from ringweave.planning.balancing.memory import MemoryLimit
from ringweave.planning.balancing.speed import Speed

MIN_GAIN = 0.08
"""Fraction of the step that a change must be predicted to save: measured speeds are accurate to a few per cent."""

MAX_NOISE = 0.5
"""Upper limit of the noise: a step that can be halved is halved."""

MAX_CHANGE_FACTOR = 4
"""Limit on the factor by which one change grows or shrinks a share: times of few samples say little about many."""

_NUM_BISECTIONS = 60
"""Halvings of a time interval, after which it is as exact as its numbers."""

Shares = tuple[int, ...]
"""Samples of each rank in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareChange:
    """New shares, and their predicted times."""

    shares: Shares
    before_s: float
    """Predicted computing time of the slowest rank with the old shares."""
    after_s: float
    """The same with the new shares."""

    @property
    def gain(self) -> float:
        """Return the fraction of that time that is predicted to be saved."""
        return 1 - self.after_s / self.before_s


def slowest_compute_s(shares: Sequence[int], speeds: Sequence[Speed]) -> float:
    """Predicted computing time of the slowest rank."""
    return max(speed.seconds(share) for share, speed in zip(shares, speeds, strict=True))


def slowest_rank(shares: Sequence[int], speeds: Sequence[Speed]) -> int:
    """Return the first rank with the longest predicted computing time."""
    return max(range(len(speeds)), key=lambda rank: speeds[rank].seconds(shares[rank]))


def bottleneck_ranks(change: ShareChange, current: Sequence[int], speeds: Sequence[Speed]) -> frozenset[int]:
    """Return the ranks that the others wait for: predicted above the midpoint of the new and the present time."""
    limit_s = (change.before_s + change.after_s) / 2
    return frozenset(
        rank for rank, (share, speed) in enumerate(zip(current, speeds, strict=True)) if speed.seconds(share) > limit_s
    )


def share_limits(num_samples: int, caps: Iterable[int | None]) -> tuple[int, ...]:
    """Return the most samples of a batch for each rank: the whole batch where there is no cap."""
    return tuple(num_samples if cap is None else cap for cap in caps)


def apportion(
    num_samples: int, speeds: Sequence[Speed], caps: Sequence[int] | None = None, min_samples: int | Sequence[int] = 1
) -> Shares:
    """Return whole shares with the least predicted time of the slowest rank; then of the second slowest, and so on.

    The method of largest remainders, generalised to fixed work and caps: each rank gets the samples that fit into
    the time for divisible samples, and each remaining sample goes to the rank that finishes it first.

    Args:
        num_samples: Size of the batch over all ranks.
        speeds: Speed of each rank.
        caps: The most that each rank's memory takes; None where there is no limit.
        min_samples: Least share, of all ranks or one by one.

    Returns:
        Shares whose sum is `num_samples`; equals go to the lower rank first.

    Raises:
        TrainingError: The batch is too small for these ranks.
        CapacityError: It is too large for their memory.

    Cost: O(n log n) for n ranks, whatever the size of the batch.
    """
    caps = [num_samples] * len(speeds) if caps is None else caps
    floors = [min_samples] * len(speeds) if isinstance(min_samples, int) else min_samples
    _check_capacity(num_samples, caps, floors)
    limit_s = _fractional_limit_s(num_samples, speeds, caps, floors)
    # Slightly less than fits, so that rounding cannot assign a sample too many; the rest is added below.
    fitting = [math.floor(speed.samples_within(limit_s) - 1e-9) for speed in speeds]
    shares = [max(floor, min(cap, each)) for floor, cap, each in zip(floors, caps, fitting, strict=True)]
    queue = [
        (speed.seconds(share + 1), rank)
        for rank, (speed, share) in enumerate(zip(speeds, shares, strict=True))
        if share < caps[rank]
    ]
    heapq.heapify(queue)
    for _ in range(num_samples - sum(shares)):
        _, rank = heapq.heappop(queue)
        shares[rank] += 1
        if shares[rank] < caps[rank]:
            heapq.heappush(queue, (speeds[rank].seconds(shares[rank] + 1), rank))
    return tuple(shares)


def rebalance(
    current: Shares, speeds: Sequence[Speed], caps: Sequence[int] | None = None, min_gain: float = MIN_GAIN
) -> ShareChange | None:
    """Return better shares for the same batch; None if they save less than `min_gain`, or are within the noise.

    Args:
        current: The shares that hold now, or are decided.
        speeds: Current speed of each rank.
        caps: The most that each rank's memory takes.
        min_gain: Fraction of the predicted time.
    """
    shares = apportion(sum(current), speeds, *_reachable_limits(current, caps))
    before_s, after_s = slowest_compute_s(current, speeds), slowest_compute_s(shares, speeds)
    noise = speeds[slowest_rank(current, speeds)].noise
    if after_s > before_s * (1 - max(min_gain, min(noise, MAX_NOISE))):
        return None
    return ShareChange(shares=shares, before_s=before_s, after_s=after_s)


def scale_shares(shares: Shares, num_samples: int) -> Shares:
    """Return the shares of a batch of another size, in the same proportions: largest remainders; some may be 0."""
    total = sum(shares)
    whole = [share * num_samples // total for share in shares]
    remainders = [share * num_samples % total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-remainders[rank], rank))
    for rank in by_remainder[: num_samples - sum(whole)]:
        whole[rank] += 1
    return tuple(whole)


def _reachable_limits(current: Shares, caps: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Return the most and the least that each rank may have after one change."""
    most = [MAX_CHANGE_FACTOR * share for share in current]
    if caps is not None:
        most = [max(share, min(cap, each)) for share, cap, each in zip(current, caps, most, strict=True)]
    return most, [-(-share // MAX_CHANGE_FACTOR) for share in current]


def _fractional_limit_s(num_samples: int, speeds: Sequence[Speed], caps: Sequence[int], floors: Sequence[int]) -> float:
    """Return the time in which the ranks could compute the batch if samples could be divided.

    The number of samples that ranks compute within a time is piecewise linear; it bends where a rank begins or reaches
    its cap. Ranks whose memory may not hold their samples at once are not linear in between, so time is bisected there.
    """

    def computed(limit_s: float) -> float:
        ranks = zip(speeds, floors, caps, strict=True)
        return sum(max(floor, min(cap, speed.samples_within(limit_s))) for speed, floor, cap in ranks)

    ranks = zip(speeds, floors, caps, strict=True)
    bends = sorted(speed.seconds(at) for speed, floor, cap in ranks for at in (floor, cap))
    low, high = 0, len(bends) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if computed(bends[middle]) >= num_samples else (middle + 1, high)
    if low == 0:
        return bends[0]
    begin, end = bends[low - 1], bends[low]
    if any(speed.memory and speed.memory.whole_samples < cap for speed, cap in zip(speeds, caps, strict=True)):
        for _ in range(_NUM_BISECTIONS):
            middle_s = (begin + end) / 2
            begin, end = (begin, middle_s) if computed(middle_s) >= num_samples else (middle_s, end)
        return begin
    at_begin, at_end = computed(begin), computed(end)
    return end if at_end <= at_begin else begin + (end - begin) * (num_samples - at_begin) / (at_end - at_begin)


def _check_capacity(num_samples: int, caps: Sequence[int], floors: Sequence[int]) -> None:
    least = max(floors)
    if num_samples < sum(floors):
        raise TrainingError(
            "samples in a batch over all ranks",
            got=num_samples,
            expected=f"at least {least} for each of {len(caps)} ranks",
            do="Raise the batch size of the loader, or use fewer workers",
        )
    if any(cap < floor for cap, floor in zip(caps, floors, strict=True)) or num_samples > sum(caps):
        raise CapacityError(
            "samples that fit into the memory of the ranks",
            got=list(caps),
            expected=f"at least {least} each and {num_samples} together",
            do="Raise max_samples, or lower the batch size of the loader",
        )


_DECAY_PER_LOOK = 0.985
"""Fraction of doubts and recent moves that remains at the next look: half after 46 looks, about a hundred train
steps."""

_CONFIRMATION_STEPS = 2.0
"""Train steps during which a gain of a half must persist. A smaller gain loses less by waiting, and is more likely
noise."""
_FIRST_CONFIRMATION_STEPS = 0.5
"""The same while the first shares are unconfirmed guesses from a cluster file's speeds."""
_LARGE_GAIN = 1 / 3
_SETTLING_STEPS = 24
"""Train steps after a large gain during which further changes need not wait: speeds are being learnt anew."""


class Rebalancer:
    """Decides on changes one after the other, and learns from their outcomes.

    Noise that lasts for some steps (a neighbour on the machine) looks like another speed. Shares that follow it come
    too late: a later change gives back what one change took from a rank. So returned samples count as a doubt, and each
    doubt doubles the gain that the next change has to promise, up to `MAX_NOISE`.

    While the same ranks seem to delay the others, promised gains add up by their third power until they suffice: a half
    for two train steps, a quarter for 16, a tenth for 250. First shares that are a guess need a quarter of that. A
    large change suspends the waiting for a time.
    """

    def __init__(self, *, begins_with_guess: bool = False) -> None:
        """`begins_with_guess`: the first shares are not from measured speeds."""
        self._reversals = 0.0
        self._recent_moves: tuple[float, ...] = ()
        """Samples by which each rank's share grew or shrank; the latest changes weigh most."""
        self._slow_ranks = frozenset[int]()
        """Ranks that delayed the others at every look since a gain was first promised."""
        self._confirmed_steps = 0.0
        """Time for which relieving them has seemed worth it, in steps that could be halved."""
        self._settling_steps = 0
        self._limits: tuple[MemoryLimit | None, ...] | None = None
        """Limits of memory at the last look; others are no noise, so a change by them need not wait."""
        self._confirmation_steps = _FIRST_CONFIRMATION_STEPS if begins_with_guess else _CONFIRMATION_STEPS

    def record_other_change(self, gain: float) -> None:
        """Record another change of the shares, with its promised gain; if large, speeds are being learnt anew."""
        if gain > _LARGE_GAIN:
            self._settling_steps = _SETTLING_STEPS

    @property
    def min_gain(self) -> float:
        """Return the gain that a change has to promise now, as a fraction of the predicted time."""
        return min(MAX_NOISE, MIN_GAIN * 2**self._reversals)

    def propose_change(
        self, current: Shares, speeds: Sequence[Speed], caps: Sequence[int] | None = None, num_steps: int = 1
    ) -> ShareChange | None:
        """Return better shares if they are worth it; ranks that see the same speeds decide alike.

        Args:
            current: The shares that hold now, or are decided.
            speeds: Current speed of each rank.
            caps: The most that each rank's memory takes.
            num_steps: Train steps since the last look.
        """
        if len(self._recent_moves) != len(current):
            self._recent_moves = (0.0,) * len(current)
        self._reversals *= _DECAY_PER_LOOK
        self._recent_moves = tuple(moved * _DECAY_PER_LOOK for moved in self._recent_moves)
        self._settling_steps = max(0, self._settling_steps - num_steps)
        limits = tuple(speed.memory for speed in speeds)
        if limits != self._limits:
            self._settling_steps = _SETTLING_STEPS if any(limits) else self._settling_steps
            self._limits = limits
        change = rebalance(current, speeds, caps, self.min_gain)
        if change is None:
            self._slow_ranks = frozenset()
            return None
        if not self._is_confirmed(change, bottleneck_ranks(change, current, speeds), num_steps):
            return None
        moves = [after - before for before, after in zip(current, change.shares, strict=True)]
        self._reversals += _reversed_fraction(self._recent_moves, moves)
        self._recent_moves = tuple(moved + move for moved, move in zip(self._recent_moves, moves, strict=True))
        return change

    def _is_confirmed(self, change: ShareChange, slow: frozenset[int], num_steps: int) -> bool:
        """Return True if the gain was promised for long enough; the count then restarts."""
        self._slow_ranks &= slow
        if not self._slow_ranks:
            self._slow_ranks, self._confirmed_steps = slow, 0.0
        self._confirmed_steps += num_steps * (2 * change.gain) ** 3
        if self._confirmed_steps < self._confirmation_steps and not self._settling_steps:
            return False
        self._confirmed_steps, self._confirmation_steps = 0.0, _CONFIRMATION_STEPS
        self.record_other_change(change.gain)
        return True


def _reversed_fraction(moved: Sequence[float], moves: Sequence[float]) -> float:
    """Return the fraction of these moves that only takes earlier moves back."""
    pairs = zip(moved, moves, strict=True)
    back = sum(min(abs(before), abs(now)) for before, now in pairs if before * now < 0)
    return back / sum(map(abs, moves))
