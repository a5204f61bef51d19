"""Whether the operations of one round may run at the same time."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.schedules.schedule import Round

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations of one round touch the same chunk of the same rank."""

    rank: int
    chunk: int
    what: str


class RaceDetector:
    """Finds a rank's chunk that is written twice in a round, or read where it is written.

    Works on stretches of chunks as they are. Remembers who sends to whom: many schedules keep that from round to round.
    """

    def __init__(self, num_ranks: int) -> None:
        self._operation_to = np.zeros(num_ranks, np.intp)  # the operation that writes to a rank; else stale
        self._src = self._dst = np.zeros(0, np.int32)
        self._is_written_once = True
        self._reads_written_rank = np.zeros(0, np.bool_)
        self._writer_of_read = np.zeros(0, np.intp)
        self._written, self._read = _Stretches(), _Stretches()

    def find(self, ops: Round) -> Race | None:
        """The first race between operations on chunks and ranks that exist, if there is one."""
        if not (np.array_equal(ops.src, self._src) and np.array_equal(ops.dst, self._dst)):
            self._look_at(ops.src, ops.dst)
        if not self._is_written_once:
            return _find_overlaps(self._written, self._read, ops)
        first, count = ops.first_chunk, ops.num_chunks
        written_first, written_count = first.take(self._writer_of_read), count.take(self._writer_of_read)
        conflict = (first < written_first + written_count) & (written_first < first + count) & self._reads_written_rank
        if not conflict.any():
            return None
        at = int(np.argmax(conflict))
        return Race(int(ops.src[at]), int(max(first[at], written_first[at])), "is read and written")

    def _look_at(self, src: _Ints, dst: _Ints) -> None:
        """If no rank receives twice, all that can collide with a read is the one write to its rank."""
        self._src, self._dst = src.copy(), dst.copy()
        numbers = np.arange(len(dst))
        self._operation_to[dst] = numbers
        self._is_written_once = bool((self._operation_to[dst] == numbers).all())
        self._writer_of_read = np.minimum(self._operation_to[src], len(dst) - 1)
        self._reads_written_rank = dst[self._writer_of_read] == src


def _find_overlaps(written: "_Stretches", read: "_Stretches", ops: Round) -> Race | None:
    width = int((ops.first_chunk + ops.num_chunks).max())
    begin, end = written.sorted(ops.dst, ops, width)
    double = begin[1:] < end[:-1]
    if double.any():
        rank, chunk = divmod(int(begin[1:][np.argmax(double)]), width)
        return Race(rank, chunk, "is written twice")
    read_begin, read_end = read.sorted(ops.src, ops, width)
    before = np.searchsorted(begin, read_end) - 1  # the last write that begins before the read ends
    conflict = (before >= 0) & (end[before] > read_begin)
    if conflict.any():
        at = int(np.argmax(conflict))
        rank, chunk = divmod(int(max(read_begin[at], begin[before[at]])), width)
        return Race(rank, chunk, "is read and written")
    return None


class _Stretches:
    """Chunks of ranks as stretches of one long line, one rank after the other; neighbours show what overlaps.

    Remembers the last ones, because sorting is what takes long.
    """

    def __init__(self) -> None:
        self._begin = self._sorted_begin = self._sorted_end = np.zeros(0, np.int64)
        self._count = np.zeros(0, np.int32)

    def sorted(self, ranks: _Ints, ops: Round, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(begin, end) by begin, of the operations' chunks at these ranks; ends are in order if none overlap."""
        begin, count = ranks * np.int64(width) + ops.first_chunk, ops.num_chunks
        if not (np.array_equal(begin, self._begin) and np.array_equal(count, self._count)):
            self._begin, self._count = begin, count.copy()
            order = np.argsort(begin) if (count != count[0]).any() else None
            self._sorted_begin = np.sort(begin) if order is None else begin[order]
            self._sorted_end = self._sorted_begin + (count[0] if order is None else count[order])
        return self._sorted_begin, self._sorted_end
