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
    """Finds a rank's chunk that is written twice in a round, or read where it is written.

    Remembers who sends to whom: many schedules keep that from round to round.
    """

    def __init__(self, num_ranks: int) -> None:
        self._operation_to = np.zeros(num_ranks, np.intp)  # the operation that writes to a rank; else stale
        self._src = self._dst = np.zeros(0, np.int32)
        self._is_written_once = True
        self._reads_written_rank = np.zeros(0, np.bool_)
        self._writer_of_read = np.zeros(0, np.intp)

    def find(self, src: _Ints, dst: _Ints, chunk: _Ints) -> Race | None:
        """The first race between operations on one chunk each, if there is one."""
        if not (np.array_equal(src, self._src) and np.array_equal(dst, self._dst)):
            self._look_at(src, dst)
        if not self._is_written_once:
            return _find_by_sorting(src, dst, chunk)
        conflict = self._reads_written_rank & (chunk.take(self._writer_of_read) == chunk)
        if not conflict.any():
            return None
        at = int(np.argmax(conflict))
        return Race(int(src[at]), int(chunk[at]), "is read and written")

    def _look_at(self, src: _Ints, dst: _Ints) -> None:
        """If no rank receives twice, all that can collide with a read is the one write to its rank."""
        self._src, self._dst = src.copy(), dst.copy()
        numbers = np.arange(len(dst))
        self._operation_to[dst] = numbers
        self._is_written_once = bool((self._operation_to[dst] == numbers).all())
        self._writer_of_read = np.minimum(self._operation_to[src], len(dst) - 1)
        self._reads_written_rank = dst[self._writer_of_read] == src


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
