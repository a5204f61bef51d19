"""What a rank shows to the other ranks of its node, and where in its shared memory.

Content that goes to several ranks of the node is shown once. Only the segments of a window have places of their own:
segment s uses those of segment s - window again, so that the memory stays small and in the caches.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_ALIGNMENT_ELEMENTS = 64

NO_STAGE = -1


@dataclass(frozen=True, slots=True)
class Stage:
    """One content that ranks of this node read."""

    offset: int
    """Where it is shown, in elements."""
    num_readers: int
    """Ranks that read it."""
    after: int
    """Stage that was there before: its readers must be through; NO_STAGE if the place is fresh."""
    is_awaited: bool
    """Another stage of the program comes to the same place."""


@dataclass(frozen=True, slots=True)
class Layout:
    """All stages of a program."""

    stages: tuple[Stage, ...] = ()
    num_elements: int = 0
    """Of the memory that they need."""


class Content(NamedTuple):
    """What is shown; equal contents are shown once."""

    segment: int
    start: int
    stop: int
    made_by: tuple[int, ...]
    """The pieces that wrote it last; with the region it tells contents apart."""


def lay_out(
    showings: Iterable[tuple[Content, int]], num_segments: int, lag: int
) -> tuple[Layout, Mapping[Content, int]]:
    """Where content is shown.

    The window of segments is as narrow as it can be without a deadlock: whoever reads what segment s - window shows in
    a place reads it, in the order of the keys, before anybody needs what segment s shows there.

    Args:
        showings: Content and round of each send to a rank of this node, in the order of the keys.
        num_segments: Segments of the message.
        lag: Rounds by which a segment trails the one before it in that order.

    Returns:
        The layout, and the stage of each content.
    """
    rounds: dict[Content, list[int]] = {}
    for content, round_index in showings:
        rounds.setdefault(content, []).append(round_index)
    places, counts = dict[Content, int](), dict[int, int]()
    for content in rounds:
        places[content] = counts.get(content.segment, 0)
        counts[content.segment] = places[content] + 1
    window = _window(rounds, places, num_segments, lag)
    offsets, slot_elements = _offsets(places)
    stages, last_at = list[Stage](), dict[tuple[int, int], int]()
    for number, content in enumerate(rounds):
        slot, place = content.segment % window, places[content]
        before = last_at.get((slot, place), NO_STAGE)
        if before != NO_STAGE:
            stages[before] = dataclasses.replace(stages[before], is_awaited=True)
        offset = slot * slot_elements + offsets[place]
        stages.append(Stage(offset, len(rounds[content]), before, is_awaited=False))
        last_at[slot, place] = number
    numbers = {content: number for number, content in enumerate(rounds)}
    return Layout(tuple(stages), window * slot_elements), numbers


def _window(rounds: Mapping[Content, list[int]], places: Mapping[Content, int], num_segments: int, lag: int) -> int:
    first, last = dict[int, int](), dict[int, int]()
    for content, when in rounds.items():
        place = places[content]
        first[place] = min(first.get(place, when[0]), when[0])
        last[place] = max(last.get(place, when[-1]), when[-1])
    span = max((last[place] - first[place] for place in first), default=0)
    return min(num_segments, max(2, span // lag + 1)) if lag else num_segments


def _offsets(places: Mapping[Content, int]) -> tuple[list[int], int]:
    """Where the places of one segment begin, each as large as its largest content, and how much they take."""
    sizes: list[int] = []
    for content, place in places.items():
        if place == len(sizes):
            sizes.append(0)
        sizes[place] = max(sizes[place], -(-(content.stop - content.start) // _ALIGNMENT_ELEMENTS))
    ends = list(itertools.accumulate((size * _ALIGNMENT_ELEMENTS for size in sizes), initial=0))
    return ends[:-1], ends[-1]
