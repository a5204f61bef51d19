"""In which order the devices of a cluster get ranks: good placements, and bad ones to compare with. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringweave.errors import UsageError, explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An order; prints as `parse` reads it."""

    kind: Literal["block", "round-robin", "shuffled"] = "block"
    """`block`: all devices of a node, then those of the next. `round-robin`: the first device of every node, then the
    second of every node that has one. `shuffled`: at random."""
    seed: int = 0
    """Of `shuffled`; the same seed gives the same order."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}" if self.kind == "shuffled" else self.kind


BLOCK = Order()


def parse(text: str) -> Order:
    """The order that a text means: `block`, `round-robin`, `shuffled` or `shuffled:7`.

    Raises:
        UsageError: It means none.
    """
    kind, has_seed, seed = text.partition(":")
    if kind == "shuffled" and (not has_seed or (seed.isascii() and seed.isdigit() and len(seed) < 19)):
        return Order(kind="shuffled", seed=int(seed or 0))
    if text in ("block", "round-robin"):
        return Order(kind=text)
    raise UsageError(
        explain(
            "--order",
            got=text,
            expected="block, round-robin, shuffled or shuffled:SEED with a whole number",
            do="Leave it out for block, which fits nearly all schedules",
        )
    )


def deal(counts: Sequence[int], order: Order) -> list[tuple[int, int]]:
    """(node index, local rank) of every global rank.

    Args:
        counts: Number of devices of each node.
        order: The order in which they get ranks.
    """
    places = [(node_index, local_rank) for node_index, count in enumerate(counts) for local_rank in range(count)]
    if order.kind == "round-robin":
        places.sort(key=lambda place: (place[1], place[0]))
    elif order.kind == "shuffled":
        random.Random(order.seed).shuffle(places)
    return places
