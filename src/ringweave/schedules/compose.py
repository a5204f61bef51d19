"""Composition of schedules, one after the other, side by side or backwards; rounds are still computed on demand."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate

import numpy as np

from ringweave.errors import ScheduleError
from ringweave.schedules.schedule import (
    Collective,
    CollectiveKind,
    LazyRounds,
    ReceiveOp,
    Round,
    Schedule,
    SchedulePhase,
)

_SECOND_HALF = {"reduce-scatter": "allgather", "reduce": "broadcast"}
"""First half of an allreduce -> its second half."""
_MIRRORED: dict[str, CollectiveKind] = {"allgather": "reduce-scatter", "broadcast": "reduce"}


def mirror(schedule: Schedule) -> Schedule:
    """Run an allgather backwards as the reduce-scatter of the same owners, or a broadcast as the reduce to its root.

    Each operation goes the other way, in the reverse order of the rounds, and combines. In an allgather each chunk
    reaches each rank once, along a tree from its owner; so each rank adds up what comes from its branches and passes
    the sum on once.

    Raises:
        ScheduleError: The schedule reduces.
    """
    kind = schedule.collective.kind
    if kind not in _MIRRORED:
        expected = "an allgather or a broadcast"
        raise ScheduleError("schedule to mirror", got=kind, expected=expected, do="Mirror its other half")
    mirrored, rounds = _MIRRORED[kind], schedule.rounds
    count = len(rounds)

    def make(index: int) -> Round:
        ops = rounds[count - 1 - index]
        return Round(ops.dst, ops.src, ops.first_chunk, ops.num_chunks, np.full_like(ops.how, ReceiveOp.REDUCE))

    ends = [*(phase.first_round for phase in schedule.phases[1:]), count]
    phases = tuple(
        SchedulePhase(count - end, phase.name.replace(kind, mirrored))
        for phase, end in reversed(list(zip(schedule.phases, ends, strict=False)))
    )
    collective = replace(schedule.collective, kind=mirrored)
    name = schedule.name.replace(kind, mirrored)
    return Schedule(name, collective, schedule.num_ranks, schedule.shares, LazyRounds(count, make), phases)


def compose_allreduce(name: str, first: Schedule, second: Schedule) -> Schedule:
    """Compose the allreduce that consists of `first` and `second`.

    `second`: the allgather of the same owners, or the broadcast of the same root.

    Raises:
        ScheduleError: They do not fit: another collective, group, root, other owners or shares.
    """
    first_collective, second_collective = first.collective, second.collective
    fits = (
        _SECOND_HALF.get(first_collective.kind) == second_collective.kind
        and (first_collective.owners, first_collective.root) == (second_collective.owners, second_collective.root)
        and (first.num_ranks, first.shares) == (second.num_ranks, second.shares)
    )
    if not fits:
        raise ScheduleError(
            f"allreduce {name}: {_schedule_summary(first)}, then {_schedule_summary(second)}, "
            "expected a reduce-scatter and the allgather of the same owners, or a reduce and the broadcast of the same "
            "root, of the same group and shares. Make both from the same arguments."
        )
    rounds, phases = concatenate_rounds(*(part for schedule in (first, second) for part in _phase_parts(schedule)))
    return Schedule(name, Collective("allreduce"), first.num_ranks, first.shares, rounds, phases)


def compose_side_by_side(first: Schedule, *others: Schedule) -> Schedule:
    """Run the same collective on several consecutive parts of a message, at the same time.

    Phases of the same name run together.

    `others`: schedules of the same kind, group and root. Their shares are in the unit of the first one's.

    Raises:
        ScheduleError: They do not fit.
    """
    parts_of_message = (first, *others)
    phased = [_phase_parts(schedule) for schedule in parts_of_message]
    after: dict[str, dict[str, None]] = {name: {} for parts in phased for name, _ in parts}
    for parts in phased:
        for (name, _), (later, _) in itertools.pairwise(parts):
            after[later][name] = None  # not a set: the order has to be the same on every rank
    for other in others:
        if _collective_key(other) != _collective_key(first):
            raise _mismatch_error(first, other, "the same collective of the same group and root")
    try:
        names = list(TopologicalSorter(after).static_order())
    except CycleError as cause:
        raise _mismatch_error(first, others[0], "phases of the same names in the same order") from cause
    before = [0, *accumulate(schedule.num_chunks for schedule in parts_of_message)]
    at_once: dict[str, list[tuple[Sequence[Round], int]]] = {name: [] for name in names}
    for parts, chunks in zip(phased, before, strict=False):
        for name, rounds in parts:
            at_once[name].append((rounds, chunks))
    rounds, phases = concatenate_rounds(*((name, _merge_rounds(parts)) for name, parts in at_once.items()))
    owners = [owner for schedule in parts_of_message for owner in schedule.collective.owners or ()]
    collective = replace(first.collective, owners=tuple(owners) if first.collective.owners else None)
    shares = tuple(share for schedule in parts_of_message for share in schedule.shares)
    return Schedule(first.name, collective, first.num_ranks, shares, rounds, phases)


def _mismatch_error(first: Schedule, other: Schedule, expected: str) -> ScheduleError:
    what = f"{first.name}: {_schedule_summary(first)}, beside {_schedule_summary(other)}"
    return ScheduleError(f"{what}, expected {expected}. Make all parts by the same generator.")


def _collective_key(schedule: Schedule) -> tuple[str, int | None, bool, int]:
    collective = schedule.collective
    return collective.kind, collective.root, collective.owners is None, schedule.num_ranks


def _merge_rounds(parts: Sequence[tuple[Sequence[Round], int]]) -> LazyRounds:
    """Return rounds side by side; each part comes with the number of chunks before its own."""

    def make(index: int) -> Round:
        now = [(rounds[index], before) for rounds, before in parts if index < len(rounds)]
        return Round(
            np.concatenate([each.src for each, _ in now]),
            np.concatenate([each.dst for each, _ in now]),
            np.concatenate([each.first_chunk + np.int32(before) for each, before in now]),
            np.concatenate([each.num_chunks for each, _ in now]),
            np.concatenate([each.how for each, _ in now]),
        )

    return LazyRounds(max(len(rounds) for rounds, _ in parts), make)


def concatenate_rounds(*parts: tuple[str, Sequence[Round]]) -> tuple[Sequence[Round], tuple[SchedulePhase, ...]]:
    """Concatenate the rounds of all parts, still computed on demand, and return the start of each non-empty part."""
    kept = [(name, rounds) for name, rounds in parts if len(rounds)]
    starts = [0, *accumulate(len(rounds) for _, rounds in kept)]

    def make(index: int) -> Round:
        at = bisect_right(starts, index) - 1
        return kept[at][1][index - starts[at]]

    phases = tuple(SchedulePhase(start, name) for start, (name, _) in zip(starts, kept, strict=False))
    return LazyRounds(starts[-1], make), phases


def _phase_parts(schedule: Schedule) -> list[tuple[str, Sequence[Round]]]:
    """Return its phases as parts; a schedule without phases is one part, named after the collective."""
    if not schedule.phases:
        return [(schedule.collective.kind, schedule.rounds)]
    starts = [phase.first_round for phase in schedule.phases]
    ends = [*starts[1:], len(schedule.rounds)]
    return [
        (phase.name, _round_slice(schedule.rounds, start, end))
        for phase, start, end in zip(schedule.phases, starts, ends, strict=True)
    ]


def _round_slice(rounds: Sequence[Round], start: int, end: int) -> LazyRounds:
    return LazyRounds(end - start, lambda index: rounds[start + index])


def _schedule_summary(schedule: Schedule) -> str:
    return f"{schedule.collective.kind} of {schedule.num_ranks} ranks and {schedule.num_chunks} chunks"
