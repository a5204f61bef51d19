"""The texts of a failed proof: what is wrong, at which round, rank and chunk, and the grid around it."""

from ringweave.schedules.schedule import How, Round, Schedule
from ringweave.schedules.text import grid, op_text

_MAX_GRID_RANKS = 16
_ROUNDS_BEFORE = 2


def bad_numbers(index: int, round_: Round, at: int, expected: str) -> str:
    """An operation names ranks or chunks that do not exist."""
    op = list(round_.rows())[at] if round_.how[at] <= How.COPY else (int(round_.src[at]), int(round_.dst[at]))
    shown = op_text(*op) if len(op) > 2 else f"{op[0]}>{op[1]} with how={int(round_.how[at])}"
    return f"schedule: {shown}, expected {expected}. Mend the generator. [round {index}, op {at}]"


def race(schedule: Schedule, index: int, rank: int, chunk: int, what: str) -> str:
    """Two operations of one round touch the same chunk of the same rank."""
    text = (
        f"schedule: chunk {chunk} of rank {rank} {what} in round {index}, expected operations that may run at the same "
        f"time. Move one of them to another round. [round {index}, rank {rank}]"
    )
    return text + _around(schedule, index, rank)


def bad_transfer(schedule: Schedule, index: int, op: tuple[int, int, int, How], mine: int, arriving: int) -> str:
    """A transfer that is wrong in itself; contents are contributor sets as bits."""
    src, dst, chunk, how = op
    if arriving == 0:
        fault = f"rank {src} sends chunk {chunk} to rank {dst}, but holds nothing of it yet"
        mend = "Send it after it has arrived"
    else:
        twice = _members(mine & arriving)
        fault = f"rank {dst} receives chunk {chunk} from rank {src} and would count {twice} twice"
        mend = "Reduce disjoint contributions only" if how == How.REDUCE else "Mend the generator"
    text = (
        f"schedule: {fault} in round {index}, expected disjoint contributor sets. {mend}. [round {index}, rank {dst}]"
    )
    return text + _around(schedule, index, dst)


def incomplete(schedule: Schedule, rank: int, chunk: int) -> str:
    """The postcondition does not hold: follow the chunk back to where it went wrong, by replaying it alone."""
    if schedule.num_ranks > 64:
        return (
            f"schedule: rank {rank} ends with a wrong value of chunk {chunk}, expected every contribution once. "
            f"Render a smaller group to see where it is lost. [rank {rank}, chunk {chunk}]"
        )
    history = _replay(schedule, chunk)
    origin, origin_round = _origin(history, rank)
    wanted = _wanted(schedule, chunk)
    missing = wanted & ~history.final[rank]
    lost = (missing & -missing).bit_length() - 1
    holder, holder_round = _last_reached(history, lost)
    back = f"It comes from rank {origin} in round {origin_round}. " if origin != rank else ""
    text = (
        f"schedule: rank {rank} ends without the contribution of {_members(missing)} to chunk {chunk}, expected "
        f"{_members(wanted)}. {back}The contribution of rank {lost} to chunk {chunk} gets no further than rank "
        f"{holder}, which held it from round {holder_round} on: send it on. [round {holder_round + 1}, rank {holder}]"
    )
    return text + _around(schedule, min(holder_round + 1, len(schedule.rounds) - 1), holder)


class _History:
    """What every rank held of one chunk, round by round."""

    def __init__(self, start: list[int]) -> None:
        self.final = start
        self.sources: list[dict[int, tuple[int, How]]] = []
        self.reached: dict[int, list[tuple[int, int]]] = {}
        """For each contributor the (round, rank) at which its contribution arrived somewhere, in order."""


def _replay(schedule: Schedule, chunk: int) -> _History:
    collective = schedule.collective
    if collective.reduces:
        start = [1 << r for r in range(schedule.num_ranks)]
    else:
        holder = collective.root if collective.owners is None else collective.owners[chunk]
        start = [(1 << r) if r == holder else 0 for r in range(schedule.num_ranks)]
    history = _History(start)
    for r, content in enumerate(start):
        history.reached[r] = [(-1, r)] if content else []
    for index, round_ in enumerate(schedule.rounds):
        before = list(history.final)
        sources: dict[int, tuple[int, How]] = {}
        for src, dst, first, count, how in round_.rows():
            if first <= chunk < first + count:
                sources[dst] = (src, how)
                history.final[dst] = before[src] | (before[dst] if how == How.REDUCE else 0)
        for dst in sources:
            for contributor, places in history.reached.items():
                if (history.final[dst] & ~before[dst]) >> contributor & 1:
                    places.append((index, dst))
        history.sources.append(sources)
    return history


def _origin(history: _History, rank: int) -> tuple[int, int]:
    """Back through overwriting copies to the rank where a wrong content arose, and the round after which it stood."""
    index = len(history.sources)
    while index > 0:
        index -= 1
        source = history.sources[index].get(rank)
        if source is None:
            continue
        if source[1] == How.REDUCE:
            return rank, index
        rank = source[0]
    return rank, 0


def _last_reached(history: _History, contributor: int) -> tuple[int, int]:
    places = history.reached.get(contributor) or [(-1, contributor)]
    index, rank = places[-1]
    return rank, index


def _wanted(schedule: Schedule, chunk: int) -> int:
    collective = schedule.collective
    if collective.reduces:
        return (1 << schedule.num_ranks) - 1
    holder = collective.root if collective.owners is None else collective.owners[chunk]
    assert holder is not None
    return 1 << holder


def _members(bits: int) -> str:
    ranks = [r for r in range(bits.bit_length()) if bits >> r & 1]
    shown = ", ".join(str(r) for r in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _around(schedule: Schedule, index: int, rank: int) -> str:
    if schedule.num_ranks > _MAX_GRID_RANKS or not len(schedule.rounds):
        return ""
    first = max(0, index - _ROUNDS_BEFORE)
    lines = grid(schedule, range(first, min(index + 2, len(schedule.rounds))), mark=(index, rank))
    return "\n" + "\n".join(lines)
