"""Groups of ranks, and one cut of the message that serves several rings of different sizes."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError, explain

_GRID_UNITS = 2**16


def check_groups(what: str, groups: Sequence[Sequence[int]]) -> int:
    """The number of ranks in all groups together.

    Raises:
        ScheduleError: There is no group, one is empty, or the groups do not name every rank once.
    """
    empty = [index for index, group in enumerate(groups) if not len(group)]
    if empty or not groups:
        got = f"group {empty[0]} of {len(groups)} is empty" if empty else "no group"
        raise ScheduleError(f"{what}: {got}, expected at least one rank in each. Leave empty groups out.")
    ranks = [rank for group in groups for rank in group]
    if sorted(ranks) != list(range(len(ranks))):
        expected = f"every rank from 0 to {len(ranks) - 1} in one group"
        raise ScheduleError(explain(what, got=list(map(list, groups)), expected=expected, do="List each rank once"))
    return len(ranks)


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks of a message that is cut into equal pieces in several ways at once."""

    shares: tuple[int, ...]
    """Relative size of each chunk."""
    borders: dict[int, NDArray[np.int32]]
    """For each number of pieces n: the chunks at which the pieces begin, and the number of chunks; n + 1 numbers."""


def cut(counts: Collection[int]) -> Cut:
    """The coarsest cut in which the message falls into n equal pieces for each n of `counts`.

    The borders of the pieces are points of a grid: of the least common multiple of the counts, where that is at most
    2^16; else of the first multiple of the largest count from 2^16 up, to whose points the borders of the others are
    rounded down, so that pieces differ by less than their 65536th of the message. There is one chunk between any two
    neighbouring borders, so there are at most as many chunks as the different counts together.
    """
    units = math.lcm(*counts)
    if units > _GRID_UNITS:
        largest = max(counts)
        units = -(-_GRID_UNITS // largest) * largest
    points = {count: [units * piece // count for piece in range(count + 1)] for count in sorted(set(counts))}
    places = sorted({point for column in points.values() for point in column})
    shares = tuple(end - begin for begin, end in itertools.pairwise(places))
    borders = {count: np.searchsorted(places, column).astype(np.int32) for count, column in points.items()}
    return Cut(shares, borders)
