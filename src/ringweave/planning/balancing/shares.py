"""How many samples of a batch each rank computes: whole numbers that minimise the predicted time of the slowest."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringweave.errors import CapacityError, TrainingError, explain
from ringweave.planning.balancing.speeds import Speed

MIN_GAIN = 0.08
"""A change must be predicted to shorten the step by this fraction: measured speeds are good to a few per cent."""

MAX_NOISE = 0.5
"""However noisy the times, a step that can be halved is halved."""

MAX_FACTOR = 4
"""A share becomes at most so many times larger or smaller by one change: times of few samples say little about many,
and those of one sample nothing."""

Shares = tuple[int, ...]
"""Samples of each rank in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """New shares, and why."""

    shares: Shares
    before_s: float
    """Predicted computing time of the slowest rank with the shares that were."""
    after_s: float
    """The same with the new ones."""

    @property
    def gain(self) -> float:
        """The fraction of that time which is predicted to be gained."""
        return 1 - self.after_s / self.before_s


def step_s(shares: Sequence[int], speeds: Sequence[Speed]) -> float:
    """Predicted computing time of the slowest rank."""
    return max(speed.seconds(share) for share, speed in zip(shares, speeds, strict=True))


def slowest(shares: Sequence[int], speeds: Sequence[Speed]) -> int:
    """The rank that is predicted to compute for the longest; the first of them."""
    return max(range(len(speeds)), key=lambda rank: speeds[rank].seconds(shares[rank]))


def held_up_by(change: Change, current: Sequence[int], speeds: Sequence[Speed]) -> frozenset[int]:
    """The ranks that the others wait for: predicted to need more than halfway from the new time to the present one."""
    limit_s = (change.before_s + change.after_s) / 2
    return frozenset(
        rank for rank, (share, speed) in enumerate(zip(current, speeds, strict=True)) if speed.seconds(share) > limit_s
    )


def limits(num_samples: int, caps: Iterable[int | None]) -> tuple[int, ...]:
    """The most samples of a batch that each rank takes: the whole of it where no cap is said."""
    return tuple(num_samples if cap is None else cap for cap in caps)


def apportion(
    num_samples: int, speeds: Sequence[Speed], caps: Sequence[int] | None = None, least: int | Sequence[int] = 1
) -> Shares:
    """Whole shares with the least predicted time of the slowest rank; among those, of the second slowest, and so on.

    The method of largest remainders, generalised to fixed work and caps: everybody gets what fits into the time that
    would do if samples could be divided, and each sample that is left goes where it is done first.

    Args:
        num_samples: Size of the batch over all ranks.
        speeds: Speed of each rank.
        caps: The most that each rank's memory takes; None where there is no limit.
        least: What each rank gets at least, all of them or one by one.

    Returns:
        Shares whose sum is `num_samples`; equals go to the lower rank first.

    Raises:
        TrainingError: The batch is too small for these ranks.
        CapacityError: It is too large for their memory.

    Cost: O(n log n) for n ranks, whatever the size of the batch.
    """
    caps = [num_samples] * len(speeds) if caps is None else caps
    floors = [least] * len(speeds) if isinstance(least, int) else least
    _check(num_samples, caps, floors)
    limit_s = _divisible_s(num_samples, speeds, caps, floors)
    # A hair less than what fits, so that rounding cannot hand out a sample too many: those are added again below.
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
) -> Change | None:
    """Better shares for the same batch; None if they would not be better by at least `min_gain`, or within the noise.

    Args:
        current: The shares that hold now, or are decided already.
        speeds: Speed of each rank by now.
        caps: The most that each rank's memory takes.
        min_gain: Fraction of the predicted time.
    """
    shares = apportion(sum(current), speeds, *_within_reach(current, caps))
    before_s, after_s = step_s(current, speeds), step_s(shares, speeds)
    noise = speeds[slowest(current, speeds)].noise
    if after_s > before_s * (1 - max(min_gain, min(noise, MAX_NOISE))):
        return None
    return Change(shares=shares, before_s=before_s, after_s=after_s)


def scale(shares: Shares, num_samples: int) -> Shares:
    """The shares of a batch of other size, in the same proportions: largest remainders; some may be 0.

    Args:
        shares: Those of a whole batch.
        num_samples: Of the other one.
    """
    total = sum(shares)
    whole = [share * num_samples // total for share in shares]
    remainders = [share * num_samples % total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-remainders[rank], rank))
    for rank in by_remainder[: num_samples - sum(whole)]:
        whole[rank] += 1
    return tuple(whole)


def _within_reach(current: Shares, caps: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """The most and the least that each rank may have after one change."""
    most = [MAX_FACTOR * share for share in current]
    if caps is not None:
        most = [max(share, min(cap, each)) for share, cap, each in zip(current, caps, most, strict=True)]
    return most, [-(-share // MAX_FACTOR) for share in current]


def _divisible_s(num_samples: int, speeds: Sequence[Speed], caps: Sequence[int], floors: Sequence[int]) -> float:
    """The time in which the ranks could compute the batch if samples could be divided.

    What the ranks compute within a time is piecewise linear in it, and bends where a rank begins or meets its cap.
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
    at_begin, at_end = computed(begin), computed(end)
    return end if at_end <= at_begin else begin + (end - begin) * (num_samples - at_begin) / (at_end - at_begin)


def _check(num_samples: int, caps: Sequence[int], floors: Sequence[int]) -> None:
    least = max(floors)
    if num_samples < sum(floors):
        raise TrainingError(
            explain(
                "samples in a batch over all ranks",
                got=num_samples,
                expected=f"at least {least} for each of {len(caps)} ranks",
                do="Raise the batch size of the loader, or use fewer workers",
            )
        )
    if any(cap < floor for cap, floor in zip(caps, floors, strict=True)) or num_samples > sum(caps):
        raise CapacityError(
            explain(
                "samples that fit into the memory of the ranks",
                got=list(caps),
                expected=f"at least {least} each and {num_samples} together",
                do="Raise max_samples, or lower the batch size of the loader",
            )
        )
