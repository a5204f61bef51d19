"""Several rings, or chains, of ranks that work at the same time."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ringweave.schedules.schedule import How, Round, Rounds

Half = Literal["reduce-scatter", "allgather"]


def turning(
    rings: Sequence[Sequence[int]], borders: Sequence[NDArray[np.int32]], half: Half | None = None
) -> Sequence[Round]:
    """The rounds of allreduces, each round a ring and on a part of the message of its own cut.

    The rank at place p of a ring of n first sends piece p to the right, then what it merged last; after n-1 rounds it
    holds piece (p+1) mod n complete, and the pieces travel on in the same direction and overwrite. A smaller ring is
    done earlier. Several rings may share a rank or a piece, but not both.

    Args:
        rings: The ranks of each ring in order; a ring of one does nothing.
        borders: For each ring of n ranks n + 1 chunks: where its pieces begin, and where the last one ends.
        half: The first or the second half alone; None is both.
    """
    sizes = np.array([len(ring) for ring in rings], np.int32)
    first_turns = sizes - 1 if half == "allgather" else 0 * sizes
    num_turns = sizes - 1 if half else 2 * (sizes - 1)
    size, base = np.repeat(sizes, sizes), np.repeat(np.cumsum(sizes, dtype=np.int32) - sizes, sizes)
    at = np.arange(len(size), dtype=np.int32)
    src = np.concatenate([np.asarray(ring, np.int32) for ring in rings])
    right = src[base + (at - base + 1) % size]
    begins = np.concatenate([border[:-1] for border in borders])
    widths = np.concatenate([np.diff(border) for border in borders])

    def make(index: int) -> Round:
        turns = first_turns + np.int32(index)  # of each ring, as all that is divided or compared below
        piece = at - np.repeat(turns % sizes, sizes)
        piece += np.where(piece < base, size, 0)
        how = np.where(turns < sizes - 1, np.uint8(How.REDUCE), np.uint8(How.COPY))
        ops = Round(src, right, begins[piece], widths[piece], np.repeat(how, sizes))
        is_turning = index < num_turns
        return ops if is_turning.all() else ops.where(np.repeat(is_turning, sizes))

    return Rounds(int(num_turns.max()), make)


def passing_on(chains: Sequence[Sequence[int]], num_chunks: int) -> Sequence[Round]:
    """The rounds of broadcasts along chains: in round t the rank at place t sends all chunks to place t+1."""

    def make(index: int) -> Round:
        links = [chain[index : index + 2] for chain in chains if len(chain) > index + 1]
        src, dst = np.array(links, np.int32).T
        return Round.of(src, dst, 0, How.COPY, num_chunks)

    return Rounds(max(map(len, chains)) - 1, make)
