"""Whether the operations of one round may run at the same time."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations of one round touch the same chunk of the same rank."""

    rank: int
    chunk: int
    what: str


class RaceDetector:
    """Finds a rank's chunk that is written twice in a round, or read where it is written."""

    def __init__(self, num_ranks: int) -> None:
        self._writer = np.zeros(num_ranks, np.intp)  # which operation of a round writes to each rank; else stale

    def find(self, src: _Ints, dst: _Ints, chunk: _Ints) -> Race | None:
        """The first race between operations on one chunk each, if there is one."""
        if not len(dst):
            return None
        numbers = np.arange(len(dst))
        self._writer[dst] = numbers
        if (self._writer[dst] == numbers).all():
            return self._find_by_rank(src, dst, chunk)
        return _find_by_sorting(src, dst, chunk)

    def _find_by_rank(self, src: _Ints, dst: _Ints, chunk: _Ints) -> Race | None:
        """No rank receives twice: ask for each read what is written to its rank. Stays within the caches."""
        writer = np.minimum(self._writer[src], len(dst) - 1)
        conflict = (chunk[writer] == chunk) & (dst[writer] == src)
        if not conflict.any():
            return None
        at = int(np.argmax(conflict))
        return Race(int(src[at]), int(chunk[at]), "is read and written")


def _find_by_sorting(src: _Ints, dst: _Ints, chunk: _Ints) -> Race | None:
    width = int(chunk.max()) + 1
    written = np.sort(dst.astype(np.int64) * width + chunk)
    double = written[1:] == written[:-1]
    if double.any():
        rank, at_chunk = divmod(int(written[np.argmax(double)]), width)
        return Race(rank, at_chunk, "is written twice")
    read = src.astype(np.int64) * width + chunk
    conflict = written[np.minimum(np.searchsorted(written, read), len(written) - 1)] == read
    if conflict.any():
        rank, at_chunk = divmod(int(read[np.argmax(conflict)]), width)
        return Race(rank, at_chunk, "is read and written")
    return None
