"""What a rank's chunk holds during the proof: exact contributor sets, or random sums that stand for them."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ringweave.schedules.schedule import Collective, How

MAX_EXACT_RANKS = 64
"""Groups up to this size fit one bit per rank into a 64-bit word."""

_PRIME = np.uint64(2**61 - 1)


class Algebra(Protocol):
    """Contents as one 64-bit word per (rank, chunk)."""

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Contents before the first round, (num_ranks, len(chunks))."""
        ...

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Contents that the postcondition wants, (len(chunks),)."""
        ...

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Contents after a reduce; raises nothing, `faults` is asked first."""
        ...

    def faults(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Which transfers are wrong in themselves, as far as this algebra can see."""
        ...


class ExactSets:
    """Contributor sets as bits: nothing escapes, up to 64 ranks."""

    _NOTHING = np.uint64(0)

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Each contributor's own bit."""
        return _held_at_start(collective, self._own(num_ranks), self._NOTHING, chunks)

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """All bits, or the owner's."""
        own = self._own(num_ranks)
        return _wanted_at_end(collective, own, np.bitwise_or.reduce(own), chunks)

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Their union."""
        return mine | arriving

    def faults(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Nothing sent, somebody counted twice, a copy of what is there already."""
        wrong = np.where(how == How.REDUCE, (mine & arriving) != 0, mine == arriving)
        return wrong | (arriving == self._NOTHING)

    def _own(self, num_ranks: int) -> NDArray[np.uint64]:
        return np.uint64(1) << np.arange(num_ranks, dtype=np.uint64)


class RandomSums:
    """Random numbers modulo 2^61 - 1, one per rank: sums are equal only if they count the same ranks as often.

    A contribution that is counted twice shows in the result, not in the transfer; where the double count is
    overwritten before anybody uses it, only exact sets see it.
    """

    _NOTHING = np.uint64(2**64 - 1)  # no sum is as large

    def __init__(self, rng: np.random.Generator, num_ranks: int) -> None:
        self._own = rng.integers(1, int(_PRIME), num_ranks, dtype=np.uint64)

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Each contributor's own number."""
        return _held_at_start(collective, self._own, self._NOTHING, chunks)

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """The sum of all numbers, or the owner's."""
        total = np.uint64(sum(int(value) for value in self._own) % int(_PRIME))
        return _wanted_at_end(collective, self._own, total, chunks)

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Their sum modulo the prime."""
        total = mine + arriving  # both below 2^61, so 64 bits hold the sum
        return np.minimum(total, total - _PRIME)  # what is below the prime wraps round to something huge

    def faults(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Nothing sent, a copy of what is there already."""
        return ((how == How.COPY) & (mine == arriving)) | (arriving == self._NOTHING)


def _held_at_start(
    collective: Collective, own: NDArray[np.uint64], nothing: np.uint64, chunks: range
) -> NDArray[np.uint64]:
    if collective.reduces:
        return np.repeat(own[:, None], len(chunks), axis=1)
    held = np.full((len(own), len(chunks)), nothing)
    if collective.kind == "broadcast":
        held[collective.root] = own[collective.root]
    else:
        owners = np.asarray(collective.owners)[chunks.start : chunks.stop]
        held[owners, np.arange(len(chunks))] = own[owners]
    return held


def _wanted_at_end(
    collective: Collective, own: NDArray[np.uint64], total: np.uint64, chunks: range
) -> NDArray[np.uint64]:
    if collective.reduces:
        return np.full(len(chunks), total)
    if collective.kind == "broadcast":
        return np.full(len(chunks), own[collective.root])
    return own[np.asarray(collective.owners)[chunks.start : chunks.stop]]
