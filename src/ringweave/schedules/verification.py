"""Proof that a schedule computes its collective, before a byte moves.

Small groups are proved on exact contributor sets (one bit per rank). In large groups every rank contributes a random
number below 2^61 - 1 and sums are taken modulo that prime: a contribution that is missing or counted twice leaves the
sum right with a chance of one in 2^61. Chunks are independent, so large schedules are verified in blocks of chunks.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules import diagnosis
from ringweave.schedules.schedule import Collective, How, Round, Schedule

MAX_EXACT_RANKS = 64
"""Groups up to this size fit one bit per rank into a 64-bit word."""

_PRIME = np.uint64(2**61 - 1)


class _Algebra(Protocol):
    """What a chunk's content is, symbolically: an array of uint64 per (rank, chunk)."""

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Contents before the first round, (num_ranks, len(chunks))."""
        ...

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Contents that the postcondition wants, (len(chunks),)."""
        ...

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Contents after a reduce; raises nothing, `conflicts` is asked first."""
        ...

    def conflicts(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Which transfers are wrong in themselves, as far as this algebra can see."""
        ...


class _ExactSets:
    """Contributor sets as bits: nothing escapes, up to 64 ranks."""

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        own = np.uint64(1) << np.arange(num_ranks, dtype=np.uint64)
        return _held_at_start(collective, own, np.zeros((num_ranks, len(chunks)), np.uint64), chunks)

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        own = np.uint64(1) << np.arange(num_ranks, dtype=np.uint64)
        return _wanted_at_end(collective, own, np.bitwise_or.reduce(own), chunks)

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return mine | arriving

    def conflicts(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        return (arriving == 0) | ((how == How.REDUCE) & ((mine & arriving) != 0))


class _RandomSums:
    """Random numbers modulo 2^61 - 1, one per rank; what nobody holds yet is random too."""

    def __init__(self, rng: np.random.Generator, num_ranks: int) -> None:
        self._rng = rng
        self._own = rng.integers(1, int(_PRIME), num_ranks, dtype=np.uint64)

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        if collective.reduces:
            garbage = np.zeros((num_ranks, len(chunks)), np.uint64)
        else:
            garbage = self._rng.integers(1, int(_PRIME), (num_ranks, len(chunks)), dtype=np.uint64)
        return _held_at_start(collective, self._own, garbage, chunks)

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        total = np.uint64(sum(int(value) for value in self._own) % int(_PRIME))
        return _wanted_at_end(collective, self._own, total, chunks)

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        total = mine + arriving  # both below 2^61, so 64 bits hold the sum
        return np.where(total >= _PRIME, total - _PRIME, total)

    def conflicts(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        return np.zeros(len(how), np.bool_)  # a double count shows in the sum at the end


def verify(
    schedule: Schedule,
    *,
    rng: np.random.Generator | None = None,
    exact: bool | None = None,
    memory_bytes: int = 256 * 2**20,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Return if the schedule computes its collective, raise otherwise.

    Args:
        schedule: What to prove.
        rng: Source of the random numbers for large groups; None draws a fresh one, so that no schedule can be made to
            fit a known draw.
        exact: Exact sets or random sums; None takes exact sets up to 64 ranks.
        memory_bytes: Bound on the symbolic contents held at a time.
        progress: Called with the fraction done, for large groups.

    Raises:
        ScheduleError: What is wrong, at which round, rank and chunk; small groups with the grid around it.

    Cost:
        One pass over the rounds per block of chunks: 2e8 transfers of a ring of 10,000 in about half a minute.
    """
    ranks = schedule.num_ranks
    if exact is None:
        exact = ranks <= MAX_EXACT_RANKS
    if exact and ranks > MAX_EXACT_RANKS:
        raise ValueError(f"exact sets hold at most {MAX_EXACT_RANKS} ranks, the schedule has {ranks}")
    algebra: _Algebra = _ExactSets() if exact else _RandomSums(rng or np.random.default_rng(), ranks)
    block = max(1, min(schedule.num_chunks, memory_bytes // (8 * ranks)))
    starts = range(0, schedule.num_chunks, block)
    for start in starts:
        chunks = range(start, min(start + block, schedule.num_chunks))
        _verify_block(schedule, algebra, chunks, whole=len(starts) == 1, first=start == 0)
        if progress is not None:
            progress(chunks.stop / schedule.num_chunks)


def _verify_block(schedule: Schedule, algebra: _Algebra, chunks: range, *, whole: bool, first: bool) -> None:
    held = algebra.initial(schedule.collective, schedule.num_ranks, chunks)
    width = len(chunks)
    flat = held.reshape(-1)
    touched = np.full(flat.shape, -1, np.int32)  # last round in which a (rank, chunk) was read or written
    for index, round_ in enumerate(schedule.rounds):
        if first:
            _check_numbers(schedule, index, round_)
        ops = round_ if whole else _within(round_, chunks)
        src, dst, chunk, how = _one_chunk_each(ops)
        column = chunk - chunks.start
        read, write = src.astype(np.int64) * width + column, dst.astype(np.int64) * width + column
        _check_races(schedule, index, (read, write), touched, chunks)
        mine, arriving = flat[write], flat[read]
        bad = algebra.conflicts(mine, arriving, how)
        if bad.any():
            at = int(np.argmax(bad))
            op = (int(src[at]), int(dst[at]), int(chunk[at]), How(int(how[at])))
            raise ScheduleError(diagnosis.bad_transfer(schedule, index, op, int(mine[at]), int(arriving[at])))
        flat[write] = np.where(how == How.REDUCE, algebra.combine(mine, arriving), arriving)
    _check_result(schedule, algebra, held, chunks)


def _check_numbers(schedule: Schedule, index: int, round_: Round) -> None:
    ranks, chunks = schedule.num_ranks, schedule.num_chunks
    checks = (
        ((round_.src < 0) | (round_.src >= ranks) | (round_.dst < 0) | (round_.dst >= ranks), f"ranks 0..{ranks - 1}"),
        (round_.src == round_.dst, "two different ranks"),
        (
            (round_.first_chunk < 0) | (round_.num_chunks < 1) | (round_.first_chunk + round_.num_chunks > chunks),
            f"chunks 0..{chunks - 1}",
        ),
        (round_.how > How.COPY, "reduce (0) or copy (1)"),
    )
    for bad, expected in checks:
        if bad.any():
            raise ScheduleError(diagnosis.bad_numbers(index, round_, int(np.argmax(bad)), expected))


def _check_races(
    schedule: Schedule,
    index: int,
    places: tuple[NDArray[np.int64], NDArray[np.int64]],
    touched: NDArray[np.int32],
    chunks: range,
) -> None:
    """Within a round a rank's chunk is written at most once, and not read where it is written."""
    read, write = places
    touched[write] = index
    conflict = touched[read] == index
    if conflict.any():
        rank, column = divmod(int(read[np.argmax(conflict)]), len(chunks))
        raise ScheduleError(diagnosis.race(schedule, index, rank, chunks[column], "is read and written"))
    if len(write) > 1:
        ordered = np.sort(write)
        double = ordered[1:] == ordered[:-1]
        if double.any():
            rank, column = divmod(int(ordered[np.argmax(double)]), len(chunks))
            raise ScheduleError(diagnosis.race(schedule, index, rank, chunks[column], "is written twice"))


def _check_result(schedule: Schedule, algebra: _Algebra, held: NDArray[np.uint64], chunks: range) -> None:
    wanted = algebra.expected(schedule.collective, schedule.num_ranks, chunks)
    kind, columns = schedule.collective.kind, np.arange(len(chunks))
    if kind == "reduce-scatter":
        assert schedule.collective.owners is not None
        rows = np.asarray(schedule.collective.owners)[chunks.start : chunks.stop]
        wrong_columns = columns[held[rows, columns] != wanted]
        wrong = [(int(rows[c]), int(c)) for c in wrong_columns[:1]]
    elif kind == "reduce":
        root = schedule.collective.root
        assert root is not None
        wrong = [(root, int(c)) for c in columns[held[root] != wanted][:1]]
    else:
        wrong = [(int(r), int(c)) for r, c in np.argwhere(held != wanted)[:1]]
    if wrong:
        rank, column = wrong[0]
        raise ScheduleError(diagnosis.incomplete(schedule, rank, chunks[column]))


def _within(round_: Round, chunks: range) -> Round:
    """The part of a round that touches a block of chunks, cut to the block."""
    end = round_.first_chunk + round_.num_chunks
    ops = round_.where((round_.first_chunk < chunks.stop) & (end > chunks.start))
    first = np.maximum(ops.first_chunk, chunks.start)
    stop = np.minimum(ops.first_chunk + ops.num_chunks, chunks.stop)
    return Round(ops.src, ops.dst, first, stop - first, ops.how)


def _one_chunk_each(
    ops: Round,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]:
    """(src, dst, chunk, how) with operations on several chunks written out."""
    counts = ops.num_chunks
    if (counts == 1).all():
        return ops.src, ops.dst, ops.first_chunk, ops.how
    repeated = np.repeat(np.arange(len(ops)), counts)
    within = np.arange(len(repeated)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk = (ops.first_chunk[repeated] + within).astype(np.int32)
    return ops.src[repeated], ops.dst[repeated], chunk, ops.how[repeated]


def _held_at_start(
    collective: Collective, own: NDArray[np.uint64], garbage: NDArray[np.uint64], chunks: range
) -> NDArray[np.uint64]:
    if collective.reduces:
        return np.repeat(own[:, None], len(chunks), axis=1)
    if collective.kind == "broadcast":
        garbage[collective.root] = own[collective.root]
    else:
        owners = np.asarray(collective.owners)[chunks.start : chunks.stop]
        garbage[owners, np.arange(len(chunks))] = own[owners]
    return garbage


def _wanted_at_end(
    collective: Collective, own: NDArray[np.uint64], total: np.uint64, chunks: range
) -> NDArray[np.uint64]:
    if collective.reduces:
        return np.full(len(chunks), total)
    if collective.kind == "broadcast":
        return np.full(len(chunks), own[collective.root])
    return own[np.asarray(collective.owners)[chunks.start : chunks.stop]]
