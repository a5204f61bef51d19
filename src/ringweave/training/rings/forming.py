"""Which ranks form a ring, by their speeds."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave.planning import grouping, modes
from ringweave.planning.balancing import Speed

_DIFFERENT = 1.25
"""Workers whose speeds differ by less are of one kind."""

_MOST_NOISE = 0.5
"""However noisy the times, rings whose throughput can be raised by half are formed anew."""

_ALONE = grouping.Model(exchange_s=lambda _size, _count: 0.0, efficiency=lambda _count: 1.0)
"""Borders follow speeds alone: what a round takes beside computing is not known before the first one."""

_WRONG = 2.0
"""Trials this far from what the cluster file says are believed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """The rings at the start, and what becomes of them."""

    rings: tuple[tuple[int, ...], ...]
    follows: bool
    """They are formed anew when speeds drift."""
    num_rings: int | None
    """As many there are then; None leaves it to the speeds."""


def rings_of(
    speeds: Sequence[float],
    mode: str,
    num_rings: int | None,
    different: float = _DIFFERENT,
    queue: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Ranks of each ring, the fastest ring first: rings of one in mode `ps`, else of ranks that are equally fast.

    Args:
        speeds: Relative speed of each rank.
        mode: `ps-hra` or `ps`.
        num_rings: How many; None means as many as there are kinds of workers, two at least.
        different: How many times as fast a worker of another kind is at least.
        queue: Ranks in the order in which they have finished the speed test; None if there was none: then by speed.

    Raises:
        TrainingError: There are not that many ranks.
    """
    if mode == modes.PS:
        return tuple((rank,) for rank in range(len(speeds)))
    line = sorted(speeds, reverse=True)
    kinds = 1 + sum(fast / slow >= different for fast, slow in itertools.pairwise(line))
    wanted = num_rings or min(max(kinds, 2), len(speeds))
    if wanted > kinds:  # there are no borders to be found for all of them: rings of equal sizes, by algorithm 1
        by_speed = sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank))
        completions = grouping.CompletionQueue(len(speeds), wanted)
        for rank in by_speed if queue is None else queue:
            completions.report(rank)
        return completions.rings
    return grouping.split([1 / speed for speed in speeds], _ALONE, wanted).rings


def better_rings(
    rings: Sequence[Sequence[int]], speeds: Sequence[Speed], num_rings: int | None
) -> tuple[tuple[int, ...], ...] | None:
    """Other rings, if workers are no longer in rings of their speed; None if the present ones may stay.

    Shares follow speeds in any rings, but only at the ends of epochs: in rings of equal speed those who slow down
    together wait for nobody meanwhile. So what counts is the throughput if every worker computed as many samples.

    Args:
        rings: The present ones.
        speeds: Of each rank, measured.
        num_rings: How many are asked for; None leaves it to the speeds.
    """
    round_s = [speed.s_per_sample for speed in speeds]
    noise = min(max(speed.noise for speed in speeds), _MOST_NOISE)
    found = rings_of([1 / each_s for each_s in round_s], modes.PS_HRA, num_rings, max(_DIFFERENT, 1 + 2 * noise))
    before, after = (grouping.throughput(each, round_s, _ALONE) for each in (rings, found))
    return found if after >= before * (1 + max(grouping.MIN_GAIN, noise)) else None


def queue_of(said: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Ranks in the order in which they have finished the speed test; None if not all were tried out."""
    places: list[int | None] = [each.get("arrival") for each in said]
    arrived = sorted((place, rank) for rank, place in enumerate(places) if place is not None)
    return [rank for _, rank in arrived] if len(arrived) == len(said) else None


def speeds_of(said: Sequence[Mapping[str, Any]]) -> list[float]:
    """Relative speeds: those of the cluster file, unless trials on all ranks contradict them.

    A trial is short, and on a busy machine wrong by a third; so a rank must be twice as fast or slow as it should.
    """
    assumed = [each["speed"] for each in said]
    if not all(each["trial_s"] for each in said):
        return assumed
    tried = [1 / statistics.median(each["trial_s"]) for each in said]
    ratios = [own / expected for own, expected in zip(tried, assumed, strict=True)]
    middle = statistics.median(ratios)
    return assumed if all(middle / _WRONG < ratio < middle * _WRONG for ratio in ratios) else tried
