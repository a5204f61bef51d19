"""Proof that a schedule computes its collective, before a byte moves.

Small groups are proved on exact contributor sets (one bit per rank). In large groups every rank contributes a random
number below 2^61 - 1 and sums are taken modulo that prime: a contribution that is missing from the result, or counted
twice in it, leaves the sum right with a chance of one in 2^61. Chunks are independent, so large schedules are verified
in blocks of chunks.

Refused, too, is what cannot be meant even where the result comes out right: operations of one round that race, sending
what one does not hold, counting somebody twice (exact sets alone see it where the double count is overwritten unused),
and copying to a rank what it holds already.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules.proof import diagnosis
from ringweave.schedules.proof.contents import MAX_EXACT_RANKS, Algebra, ExactSets, RandomSums
from ringweave.schedules.proof.races import RaceDetector
from ringweave.schedules.schedule import How, Round, Schedule

_MAX_CELLS = 2**18
"""Chunks of ranks that are computed on at a time, in megabytes rather than gigabytes of intermediate columns."""


def verify(
    schedule: Schedule,
    *,
    rng: np.random.Generator | None = None,
    exact: bool | None = None,
    memory_bytes: int = 2**30,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Return if the schedule computes its collective, raise otherwise.

    Args:
        schedule: What to prove.
        rng: Source of the random numbers for large groups; None draws a fresh one, so that no schedule can be made to
            fit a known draw.
        exact: Exact sets or random sums; None takes exact sets up to 64 ranks.
        memory_bytes: Bound on the symbolic contents held at a time; a smaller one costs more passes over the rounds.
        progress: Called with the fraction done, about a hundred times.

    Raises:
        ScheduleError: What is wrong, at which round, rank and chunk; small groups with the grid around it.

    Cost:
        One pass over the rounds per block of chunks: see `bench/verify_10000.py`.
    """
    ranks = schedule.num_ranks
    if exact is None:
        exact = ranks <= MAX_EXACT_RANKS
    if exact and ranks > MAX_EXACT_RANKS:
        raise ValueError(f"exact sets hold at most {MAX_EXACT_RANKS} ranks, the schedule has {ranks}")
    algebra: Algebra = ExactSets() if exact else RandomSums(rng or np.random.default_rng(), ranks)
    width = max(1, min(schedule.num_chunks, memory_bytes // (8 * ranks)))
    starts = range(0, schedule.num_chunks, width)
    for number, start in enumerate(starts):
        chunks = range(start, min(start + width, schedule.num_chunks))
        _verify_block(schedule, algebra, chunks, _Steps(progress, number, len(starts), len(schedule.rounds)))
    if progress is not None:
        progress(1.0)


class _Steps:
    """Turns (block, round) into the fraction that is done."""

    def __init__(self, progress: Callable[[float], None] | None, block: int, num_blocks: int, num_rounds: int) -> None:
        self._progress = progress
        self._done = block * num_rounds
        self._total = num_blocks * num_rounds
        self._every = max(1, self._total // 100)

    def begin(self, index: int) -> None:
        if self._progress is not None and (self._done + index) % self._every == 0:
            self._progress((self._done + index) / self._total)


def _verify_block(schedule: Schedule, algebra: Algebra, chunks: range, steps: _Steps) -> None:
    held = algebra.initial(schedule.collective, schedule.num_ranks, chunks)
    races = RaceDetector(schedule.num_ranks)
    for index, round_ in enumerate(schedule.rounds):
        steps.begin(index)
        if chunks.start == 0 and len(round_):
            _check_numbers(schedule, index, round_)
            race = races.find(round_)
            if race is not None:
                raise ScheduleError(diagnosis.race(schedule, index, race.rank, race.chunk, race.what))
        ops = round_ if len(chunks) == schedule.num_chunks else _within(round_, chunks)
        for some in _slices(ops):
            _run(schedule, algebra, held, chunks, some)
    _check_result(schedule, algebra, held, chunks)


def _run(schedule: Schedule, algebra: Algebra, held: NDArray[np.uint64], chunks: range, ops: Round) -> None:
    """Some operations of a round; as none reads or writes what another one writes, their order does not matter."""
    sources, places = _cells(ops, chunks)
    flat = held.reshape(-1)
    arriving, mine = flat.take(sources), flat.take(places)
    how = ops.how if len(ops) == len(places) else np.repeat(ops.how, ops.num_chunks)
    faults = algebra.faults(mine, arriving, how)
    if faults.any():
        chunk = chunks[int(places[np.argmax(faults)]) % len(chunks)]
        raise ScheduleError(diagnosis.wrong_chunk(schedule, chunk))
    reduces = how == How.REDUCE
    if reduces.all():
        arriving = algebra.combine(mine, arriving)
    elif reduces.any():
        arriving = np.where(reduces, algebra.combine(mine, arriving), arriving)
    flat[places] = arriving


def _check_numbers(schedule: Schedule, index: int, round_: Round) -> None:
    """Ranks and chunks that do not exist; the slow look follows only where a quick one is not sure."""
    ranks, chunks, reduces = schedule.num_ranks, schedule.num_chunks, schedule.collective.reduces
    src, dst, first, count = round_.src, round_.dst, round_.first_chunk, round_.num_chunks
    fine = (
        min(src.min(), dst.min(), first.min()) >= 0
        and max(src.max(), dst.max()) < ranks
        and count.min() >= 1
        and int(first.max()) + int(count.max()) <= chunks
        and round_.how.max() <= How.COPY
        and (reduces or round_.how.min() == How.COPY)
        and not (src == dst).any()
    )
    if fine:
        return
    checks = (
        ((src < 0) | (src >= ranks) | (dst < 0) | (dst >= ranks), f"ranks 0..{ranks - 1}"),
        (src == dst, "two different ranks"),
        ((first < 0) | (count < 1) | (first > chunks - count.astype(np.int64)), f"chunks 0..{chunks - 1}"),
        (round_.how > How.COPY, "reduce (0) or copy (1)"),
        (
            (round_.how == How.REDUCE) & (not reduces),
            f"copies (=) only, as {schedule.collective.kind} combines nothing",
        ),
    )
    for bad, expected in checks:
        if bad.any():
            raise ScheduleError(diagnosis.bad_numbers(index, round_, int(np.argmax(bad)), expected))


def _check_result(schedule: Schedule, algebra: Algebra, held: NDArray[np.uint64], chunks: range) -> None:
    wanted = algebra.expected(schedule.collective, schedule.num_ranks, chunks)
    kind, columns = schedule.collective.kind, np.arange(len(chunks))
    if kind == "reduce-scatter":
        owners = np.asarray(schedule.collective.owners)[chunks.start : chunks.stop]
        wrong = held[owners, columns] != wanted
    elif kind == "reduce":
        wrong = held[schedule.collective.root] != wanted
    else:
        wrong = np.zeros(len(chunks), np.bool_)
        for content in held:
            wrong |= content != wanted
    if wrong.any():
        raise ScheduleError(diagnosis.wrong_chunk(schedule, chunks[int(np.argmax(wrong))]))


def _within(round_: Round, chunks: range) -> Round:
    """The part of a round that touches a block of chunks, cut to the block."""
    end = round_.first_chunk + round_.num_chunks
    ops = round_.where((round_.first_chunk < chunks.stop) & (end > chunks.start))
    first = np.maximum(ops.first_chunk, chunks.start)
    stop = np.minimum(ops.first_chunk + ops.num_chunks, chunks.stop)
    return Round(ops.src, ops.dst, first, stop - first, ops.how)


def _slices(ops: Round) -> Iterator[Round]:
    """The operations in order, in parts of bounded numbers of chunks, so that what is computed on them stays small."""
    if int(ops.num_chunks.sum(dtype=np.int64)) <= _MAX_CELLS:
        if len(ops):
            yield ops
        return
    part = np.cumsum(ops.num_chunks, dtype=np.int64) // _MAX_CELLS
    borders = np.flatnonzero(np.diff(part, prepend=-1, append=-1))
    for begin, end in itertools.pairwise(borders.tolist()):
        yield ops.where(np.s_[begin:end])


def _cells(ops: Round, chunks: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the chunks that are sent are held at the senders and at the receivers, operation by operation."""
    counts, width = ops.num_chunks, np.int64(len(chunks))
    column = ops.first_chunk - np.int64(chunks.start)
    sources, places = ops.src * width + column, ops.dst * width + column
    if (counts == 1).all():
        return sources, places
    if (counts == counts[0]).all():
        within = np.arange(counts[0])
        return (sources[:, None] + within).reshape(-1), (places[:, None] + within).reshape(-1)
    begins = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(begins, counts)
    return np.repeat(sources, counts) + within, np.repeat(places, counts) + within
