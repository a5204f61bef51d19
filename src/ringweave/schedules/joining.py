"""Schedules and runs of rounds one after the other, or side by side, still made when asked for."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate

import numpy as np

from ringweave.errors import ScheduleError
from ringweave.schedules.schedule import Collective, Phase, Round, Rounds, Schedule

_AFTER = {"reduce-scatter": "allgather", "reduce": "broadcast"}
"""What completes what to an allreduce."""


def then(name: str, first: Schedule, second: Schedule) -> Schedule:
    """The allreduce that `first` and `second` make together.

    Args:
        name: Name of the whole.
        first: A reduce-scatter or a reduce.
        second: The allgather of the same owners, or the broadcast of the same root.

    Raises:
        ScheduleError: They do not fit: another collective, group, root, other owners or shares.
    """
    ours, theirs = first.collective, second.collective
    fits = (
        _AFTER.get(ours.kind) == theirs.kind
        and (ours.owners, ours.root) == (theirs.owners, theirs.root)
        and (first.num_ranks, first.shares) == (second.num_ranks, second.shares)
    )
    if not fits:
        raise ScheduleError(
            f"allreduce {name}: {_what(first)}, then {_what(second)}, expected a reduce-scatter and the allgather of "
            "the same owners, or a reduce and the broadcast of the same root, of the same group and shares. Make both "
            "from the same arguments."
        )
    rounds, phases = one_after_the_other(*(part for schedule in (first, second) for part in _parts(schedule)))
    return Schedule(name, Collective("allreduce"), first.num_ranks, first.shares, rounds, phases)


def beside(first: Schedule, *others: Schedule) -> Schedule:
    """The same collective on several parts of a message, which follow each other in the message, at the same time.

    Phases of the same name run together.

    Args:
        first: Names the whole.
        others: Of the same kind, group and root. Their shares are in the unit of the first one's.

    Raises:
        ScheduleError: They do not fit.
    """
    together = (first, *others)
    phased = [_parts(schedule) for schedule in together]
    after: dict[str, dict[str, None]] = {name: {} for parts in phased for name, _ in parts}
    for parts in phased:
        for (name, _), (later, _) in itertools.pairwise(parts):
            after[later][name] = None  # no set: the order has to be the same on every rank
    for other in others:
        if _of_what(other) != _of_what(first):
            raise _unfit(first, other, "the same collective of the same group and root")
    try:
        names = list(TopologicalSorter(after).static_order())
    except CycleError as cause:
        raise _unfit(first, others[0], "phases of the same names in the same order") from cause
    before = [0, *accumulate(schedule.num_chunks for schedule in together)]
    at_once: dict[str, list[tuple[Sequence[Round], int]]] = {name: [] for name in names}
    for parts, chunks in zip(phased, before, strict=False):
        for name, rounds in parts:
            at_once[name].append((rounds, chunks))
    rounds, phases = one_after_the_other(*((name, _merged(parts)) for name, parts in at_once.items()))
    owners = [owner for schedule in together for owner in schedule.collective.owners or ()]
    collective = replace(first.collective, owners=tuple(owners) if first.collective.owners else None)
    shares = tuple(share for schedule in together for share in schedule.shares)
    return Schedule(first.name, collective, first.num_ranks, shares, rounds, phases)


def _unfit(first: Schedule, other: Schedule, expected: str) -> ScheduleError:
    what = f"{first.name}: {_what(first)}, beside {_what(other)}"
    return ScheduleError(f"{what}, expected {expected}. Make all parts by the same generator.")


def _of_what(schedule: Schedule) -> tuple[str, int | None, bool, int]:
    collective = schedule.collective
    return collective.kind, collective.root, collective.owners is None, schedule.num_ranks


def _merged(parts: Sequence[tuple[Sequence[Round], int]]) -> Rounds:
    """Rounds side by side, each with the number of chunks before its own."""

    def make(index: int) -> Round:
        now = [(rounds[index], before) for rounds, before in parts if index < len(rounds)]
        return Round(
            np.concatenate([each.src for each, _ in now]),
            np.concatenate([each.dst for each, _ in now]),
            np.concatenate([each.first_chunk + np.int32(before) for each, before in now]),
            np.concatenate([each.num_chunks for each, _ in now]),
            np.concatenate([each.how for each, _ in now]),
        )

    return Rounds(max(len(rounds) for rounds, _ in parts), make)


def one_after_the_other(*parts: tuple[str, Sequence[Round]]) -> tuple[Sequence[Round], tuple[Phase, ...]]:
    """The rounds of all parts in order, none of them made yet, and where each part that has any begins."""
    kept = [(name, rounds) for name, rounds in parts if len(rounds)]
    starts = [0, *accumulate(len(rounds) for _, rounds in kept)]

    def make(index: int) -> Round:
        at = bisect_right(starts, index) - 1
        return kept[at][1][index - starts[at]]

    phases = tuple(Phase(start, name) for start, (name, _) in zip(starts, kept, strict=False))
    return Rounds(starts[-1], make), phases


def _parts(schedule: Schedule) -> list[tuple[str, Sequence[Round]]]:
    """Its phases as parts; the whole is one, named after the collective, where it names none."""
    if not schedule.phases:
        return [(schedule.collective.kind, schedule.rounds)]
    starts = [phase.first_round for phase in schedule.phases]
    ends = [*starts[1:], len(schedule.rounds)]
    return [
        (phase.name, _part(schedule.rounds, start, end))
        for phase, start, end in zip(schedule.phases, starts, ends, strict=True)
    ]


def _part(rounds: Sequence[Round], start: int, end: int) -> Rounds:
    return Rounds(end - start, lambda index: rounds[start + index])


def _what(schedule: Schedule) -> str:
    return f"{schedule.collective.kind} of {schedule.num_ranks} ranks and {schedule.num_chunks} chunks"
