"""Which programs are kept: those of the latest kinds of messages, the same kinds on all ranks."""

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

_MAX_KINDS = 512

_MIN_KINDS = 64
"""So many are kept whatever they take: a model's buckets come in turn, and each would find its program gone."""

_MAX_PARTS = 2**16
"""Segments times ranks of all kinds together: a program has up to eight instructions of 110 bytes for each.

(The server of `ps` has more; nobody chooses it.)
"""


Made = TypeVar("Made")


class Promises(Generic[Made]):
    """What is made at the first use of a kind, for as many kinds as the memory allowed.

    What comes and goes depends on the calls alone, never on what is made or when: ranks that make the same calls keep
    the same kinds. They have to, for they make a new one together.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[Future[Made], int]] = OrderedDict()
        self._num_parts = 0

    def __len__(self) -> int:
        return len(self._kept)

    def look_up(self, kind: Hashable, num_parts: int) -> tuple[Future[Made], bool]:
        """What is or will be made for this kind, and whether the caller has to see to it: nobody else does.

        Args:
            kind: Equal where the same is to be made.
            num_parts: Segments times ranks; the same on all ranks.
        """
        is_new = kind not in self._kept
        if is_new:
            self._kept[kind] = Future(), num_parts
            self._num_parts += num_parts
        self._kept.move_to_end(kind)
        while len(self._kept) > self._limit():
            _, (_, freed_parts) = self._kept.popitem(last=False)
            self._num_parts -= freed_parts
        return self._kept[kind][0], is_new

    def _limit(self) -> int:
        return _MAX_KINDS if self._num_parts <= _MAX_PARTS else _MIN_KINDS
