"""Schedules and runs of rounds one after the other, still made when asked for."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

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
