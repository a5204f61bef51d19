"""What is measured at a time: flows between nodes that run together, and the rounds that let every pair meet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Flow:
    """One TCP stream, as fast as it goes."""

    src: int
    """Index of the node that sends."""
    dst: int
    """Index of the node that receives."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Flows that run at the same time."""

    flows: tuple[Flow, ...]
    purpose: str
    """Why, in a few words for a log."""


def meetings(num_nodes: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Rounds of disjoint pairs in which everybody meets everybody once (the circle method); in odd numbers one waits.

    Cost: num_nodes - 1 rounds, or num_nodes where that is odd.
    """
    seats = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        yield tuple((one, other) for one, other in facing if one is not None and other is not None)
        seats.insert(1, seats.pop())


def tournament(num_nodes: int) -> Iterator[Batch]:
    """Every pair in both directions, one after the other; no node sends and receives in the same batch."""
    for number, pairs in enumerate(meetings(num_nodes), 1):
        # Who sends first alternates along the row, or the first half would always send to the second.
        turned = [(b, a) if index % 2 else (a, b) for index, (a, b) in enumerate(pairs)]
        for ends in (turned, [(b, a) for a, b in turned]):
            yield Batch(tuple(Flow(*each) for each in ends), f"pairs, round {number}")


def crowd(order: Sequence[int], shift: int) -> Batch:
    """Every node sends to one and receives from one: all NICs at once, which fills what they share."""
    receivers = np.roll(np.asarray(order), -shift).tolist()
    return Batch(tuple(map(Flow, order, receivers)), f"all at once, shift {shift}")
