"""Roundings of an encoded schedule: the proof that all ranks get the same sum, and a bound of the sum's error."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules import wire_formats
from ringweave.schedules.schedule import ReceiveOp, Round, Schedule

_Cells = NDArray[np.int64]
"""Indices of chunks of ranks: rank times the number of chunks, plus the chunk."""


@dataclass(frozen=True, slots=True)
class RoundingBound:
    """Bound of the error that encoding adds to a sum; additions round as they always do."""

    num_roundings: int
    """Largest number of roundings that a contribution passes on its way into any rank's result; 0 if all is exact."""
    format: str

    @property
    def relative_error(self) -> float:
        """Largest error of a sum without error feedback, relative to the largest values of its blocks.

        The block's largest absolute values of all ranks are added up. Each rounding errs by at most the format's error
        times the largest value of a partial sum, which earlier roundings have enlarged as much.
        """
        return (1 + wire_formats.format_named(self.format).relative_error) ** self.num_roundings - 1


class RoundingCounts:
    """Which sum each rank holds of each chunk, and the roundings that its contributions have passed."""

    def __init__(self, schedule: Schedule, chunks: range) -> None:
        """`schedule` is an encoded one."""
        assert schedule.encoding is not None
        self._num_ranks, self._chunks = schedule.num_ranks, chunks
        self._zones = np.asarray(schedule.encoding.zones)
        num_cells = schedule.num_ranks * len(chunks)
        self._sums = np.arange(num_cells, dtype=np.int64)
        """Number of each cell's sum: copies have the number of their original."""
        self._num_sums = num_cells
        self._counts = np.zeros(num_cells, np.int32)
        self._is_rounded = np.zeros(num_cells, np.bool_)

    def apply(self, ops: Round, sources: _Cells, places: _Cells) -> None:
        """Apply operations of a round: a sum is rounded where it is first copied, a contribution where it is encoded.

        Args:
            ops: The operations.
            sources: Cells that they send, operation by operation.
            places: Cells that they write.
        """
        num_chunks = ops.num_chunks if len(ops) != len(places) else np.ones(len(ops), np.int32)
        copies = np.repeat(ops.how == ReceiveOp.COPY, num_chunks)
        encoded = np.repeat(self._zones[ops.src] != self._zones[ops.dst], num_chunks)
        first = np.unique(sources[copies & ~self._is_rounded[sources]])
        self._counts[first] += 1
        self._is_rounded[first] = True
        arriving = self._counts[sources] + (encoded & ~copies)
        self._counts[places] = np.where(copies, arriving, np.maximum(self._counts[places], arriving))
        self._sums[places] = np.where(copies, self._sums[sources], self._num_sums + np.arange(len(places)))
        self._num_sums += len(places)
        self._is_rounded[places] = copies

    def largest(self) -> int:
        """Return the largest number of roundings.

        Raises:
            ScheduleError: Two ranks end up with sums of their own, which are rounded differently.
        """
        sums = self._sums.reshape(self._num_ranks, len(self._chunks))
        differ = sums != sums[0]
        if differ.any():
            rank, column = (int(each[0]) for each in np.nonzero(differ))
            chunk = self._chunks[column]
            raise ScheduleError(
                f"encoded schedule: ranks 0 and {rank} each compute their own sum of chunk {chunk}, expected copies of "
                "one sum on all ranks, since each sum is rounded differently. Send it to all from the rank that "
                f"completes it, or send exactly. [rank {rank}, chunk {chunk}]"
            )
        return int(self._counts.max(initial=0))
