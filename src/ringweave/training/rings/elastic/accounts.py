"""What became of the samples of an epoch, by what rings say that met at its end. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ringweave.planning.balancing import Account
from ringweave.training.elastic.books import Books, ElasticAccount

Said = Mapping[str, Any]
"""What a ring says where all meet; see `say`."""


def say(books: Books, *, is_whole: bool) -> dict[str, Any]:
    """What a ring says of its samples of the epoch; `is_whole`: it was there from the epoch's begin."""
    return {"epoch": books.epoch, "books": books.to_words(), "is_whole": is_whole and not books.num_planned}


def testament(books: Books) -> str:
    """What is to be said for the ring if nobody of it is left: its samples that the server has the gradients of."""
    return json.dumps({**say(books, is_whole=False), "is_testament": True})


def speaker(by_ring: Mapping[int, Said]) -> int:
    """The ring that writes down for all: the first of those that speak for themselves."""
    return min(ring for ring, said in by_ring.items() if not said.get("is_testament"))


def add_up(epoch: int, expected: Account, by_ring: Sequence[Said], num_rings: int) -> ElasticAccount:
    """The account of all rings. What a ring had taken and not pushed when nobody of it was left counts as lost.

    Args:
        epoch: Which one.
        expected: The samples that it consists of.
        by_ring: What each ring said that has met the others, and testaments, which may be of epochs before.
        num_rings: How many there were at the begin.
    """
    by_ring = [each for each in by_ring if each["epoch"] == epoch]
    words = [each["books"] for each in by_ring]
    drawn, total, lost = (
        sum((Account(num_samples=each[index][0], fingerprint=each[index][1]) for each in words), Account())
        for index in range(3)
    )
    may_miss = len(by_ring) < num_rings or not all(each["is_whole"] for each in by_ring)
    if may_miss and drawn.num_samples <= expected.num_samples:
        lost += expected - drawn
    return ElasticAccount(epoch=epoch, expected=expected, total=total, lost=lost)
