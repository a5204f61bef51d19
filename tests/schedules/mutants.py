"""Every way to break one operation of a schedule, and what it means that an error points at the break."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.schedules.oracle import Listing, Op


class Place(NamedTuple):
    """An operation and its round."""

    index: int
    op: Op


@dataclass(frozen=True)
class Mutant:
    """A schedule with one mistake, and the operations that are not as they were: before, and after."""

    what: str
    listing: Listing
    culprits: tuple[Place, ...]


def places(listing: Listing) -> list[tuple[int, int]]:
    """(round, number in the round) of each operation."""
    return [(i, j) for i, ops in enumerate(listing.rounds) for j in range(len(ops))]


def drop(listing: Listing, index: int, at: int) -> Iterator[Mutant]:
    op = listing.rounds[index][at]
    yield Mutant(f"drop {op} of round {index}", _replaced(listing, index, at), (Place(index, op),))


def double(listing: Listing, index: int, at: int) -> Iterator[Mutant]:
    op = listing.rounds[index][at]
    for later in (index, index + 1):
        ops = (*listing.rounds[later], op) if later < len(listing.rounds) else (op,)
        culprits = (Place(index, op), Place(later, op))
        yield Mutant(f"double {op} of round {index} in round {later}", listing.with_round(later, ops), culprits)


def retarget(listing: Listing, index: int, at: int) -> Iterator[Mutant]:
    op = listing.rounds[index][at]
    for rank in range(listing.num_ranks):
        for changed in (op._replace(src=rank), op._replace(dst=rank)):
            if changed != op:
                yield _changed(listing, index, at, changed)


def change_chunk(listing: Listing, index: int, at: int) -> Iterator[Mutant]:
    op = listing.rounds[index][at]
    for chunk in set(range(listing.num_chunks)) - {op.chunk}:
        yield _changed(listing, index, at, op._replace(chunk=chunk))


def flip(listing: Listing, index: int, at: int) -> Iterator[Mutant]:
    op = listing.rounds[index][at]
    yield _changed(listing, index, at, op._replace(sign="=" if op.sign == "+" else "+"))


def swap(listing: Listing, index: int, at: int) -> Iterator[Mutant]:
    """Exchange the operation with every one of every later round."""
    op = listing.rounds[index][at]
    for other_index, other_at in places(listing):
        other = listing.rounds[other_index][other_at]
        if other_index > index and other != op:
            swapped = _replaced(_replaced(listing, index, at, other), other_index, other_at, op)
            culprits = tuple(Place(i, o) for i in (index, other_index) for o in (op, other))
            yield Mutant(f"swap {op} of round {index} and {other} of round {other_index}", swapped, culprits)


KINDS: dict[str, Callable[[Listing, int, int], Iterator[Mutant]]] = {
    "drop": drop,
    "double": double,
    "retarget": retarget,
    "change chunk": change_chunk,
    "flip": flip,
    "swap": swap,
}


def points_at(text: str, culprit: Place) -> bool:
    """Whether an error's text leads to this operation.

    It does if it writes the operation out together with its round, or if the place it names at its end is within a
    round of it and one of its two ranks, and the text is about its chunk.
    """
    (index, op), headline = culprit, text.partition("\n")[0]
    if re.search(rf"(?<!\d){re.escape(str(op))} in round {index}(?!\d)", headline):
        return True
    if headline.startswith(f"schedule: {op}, expected") and f"[round {index}, op " in headline:
        return True
    place = re.search(r"\[round (\d+), rank (\d+)\]$", headline)
    about_chunk = re.search(rf"chunk {op.chunk}(?!\d)", headline)
    return bool(place and about_chunk) and abs(int(place[1]) - index) <= 1 and int(place[2]) in (op.src, op.dst)


def _changed(listing: Listing, index: int, at: int, op: Op) -> Mutant:
    was = listing.rounds[index][at]
    culprits = (Place(index, was), Place(index, op))
    return Mutant(f"{was} of round {index} becomes {op}", _replaced(listing, index, at, op), culprits)


def _replaced(listing: Listing, index: int, at: int, *ops: Op) -> Listing:
    before = listing.rounds[index]
    return listing.with_round(index, (*before[:at], *ops, *before[at + 1 :]))
