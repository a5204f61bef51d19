"""Layers put together to blocks, so that the search is short and layers that belong together stay together.

Rule: layers that must stay together are merged first. Then, while there are too many blocks, the two neighbours whose
work together is least are merged; of several such pairs the first. A block's work, memory and stash are the sums of its
layers', its activation is that of its last layer. No layer is ever dropped: blocks carry their layers' range, and
`check_whole` compares the layers of blocks with those of the model by count and checksum.

Source: S1 of the patent.
"""

import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ringweave.errors import UsageError, explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """What was measured of one layer."""

    name: str
    """Its name in the model; no two layers share one."""
    work: float
    """Forward and backward of one microbatch."""
    activation: float = 0.0
    """All that crosses a cut behind it."""
    state: float = 0.0
    """Memory of parameters, gradients and optimizer state."""
    stash: float = 0.0
    """Memory of what it keeps for backward of one microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive layers, from `first` up to but not including `end`, counted from 0."""

    first: int
    end: int
    work: float
    activation: float
    state: float
    stash: float


def merge(layers: Sequence[Layer], max_blocks: int, joined: Collection[int] = ()) -> tuple[Block, ...]:
    """At most that many blocks of consecutive layers, by the rule above.

    Args:
        layers: In the model's order.
        max_blocks: 1 or more.
        joined: Layers, from 0, behind which no cut is allowed.

    Raises:
        UsageError: No layers, a number below 1, names that occur twice, or a layer in `joined` that has none after it.

    Cost: O(layers x merges).
    """
    _check(layers, max_blocks, joined)
    bounds = [0, *(end for end in range(1, len(layers)) if end - 1 not in joined), len(layers)]
    work = [math.fsum(layer.work for layer in layers[a:b]) for a, b in itertools.pairwise(bounds)]
    while len(work) > max_blocks:
        at = min(range(len(work) - 1), key=lambda pair: work[pair] + work[pair + 1])
        work[at : at + 2] = [work[at] + work[at + 1]]
        del bounds[at + 1]
    return tuple(_block(layers, first, end) for first, end in itertools.pairwise(bounds))


def check_whole(names: Sequence[str], held: Iterable[Sequence[str]]) -> None:
    """Refuse stages that together are not the model: every layer once, in its order.

    Args:
        names: Of the model's layers.
        held: The names of the layers of each block or stage, in order.

    Raises:
        UsageError: Another count, or another checksum.
    """
    found = [name for part in held for name in part]
    do = "Build the blocks from the model's list of layers again"
    if len(found) != len(names):
        odd = sorted(set(names) ^ set(found)) or sorted({name for name in found if found.count(name) > 1})
        expected = f"{len(names)}, as the model has; look at {', '.join(odd[:3])}"
        raise UsageError(explain("layers in all blocks", got=len(found), expected=expected, do=do))
    if checksum(found) != checksum(names):
        at = next(index for index, pair in enumerate(zip(found, names, strict=True)) if pair[0] != pair[1])
        expected = f"{names[at]!r}, as in the model"
        raise UsageError(explain(f"layer {at + 1} of all blocks", got=found[at], expected=expected, do=do))


def checksum(names: Iterable[str]) -> str:
    """The same for the same names in the same order only."""
    return hashlib.sha256("\n".join(map(repr, names)).encode()).hexdigest()


def _check(layers: Sequence[Layer], max_blocks: int, joined: Collection[int]) -> None:
    if not layers:
        raise UsageError(explain("layers", got=0, expected="1 or more", do="Give the model's layers in their order"))
    if max_blocks < 1:
        raise UsageError(explain("blocks", got=max_blocks, expected="1 or more", do="Say how many at most"))
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise UsageError(
            explain("name of a layer", got=twice, expected="a name of its own", do="Rename one of the two")
        )
    for index in joined:
        if not 0 <= index < len(layers) - 1:
            expected = f"the index of a layer that has one after it, 0 to {len(layers) - 2}"
            raise UsageError(explain("joined layer", got=index, expected=expected, do="Leave it out"))


def _block(layers: Sequence[Layer], first: int, end: int) -> Block:
    part = layers[first:end]
    return Block(
        first=first,
        end=end,
        work=math.fsum(layer.work for layer in part),
        activation=part[-1].activation,
        state=math.fsum(layer.state for layer in part),
        stash=math.fsum(layer.stash for layer in part),
    )
