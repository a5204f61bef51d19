"""The texts of a failed proof: what is wrong, at which round, rank and chunk, and the grid around it.

What a proof notices is often far from the mistake: a contribution that took a wrong turn in round 1 is counted twice in
round 7. So the texts tell how the contributions in question got where they are, operation by operation.
"""

from collections.abc import Sequence

from ringweave.schedules.history import Hop, Version, Versions, members, replay
from ringweave.schedules.schedule import How, Round, Schedule
from ringweave.schedules.text import grid, op_text

_MAX_GRID_RANKS = 16
_ROUNDS_BEFORE = 2
_MAX_HOPS = 8


def bad_numbers(index: int, round_: Round, at: int, expected: str) -> str:
    """An operation names ranks or chunks that do not exist."""
    src, dst, first, count, how = (
        int(column[at]) for column in (round_.src, round_.dst, round_.first_chunk, round_.num_chunks, round_.how)
    )
    shown = op_text(src, dst, first, count, How(how)) if how <= How.COPY else f"{src}>{dst} with how={how}"
    return f"schedule: {shown}, expected {expected}. Mend the generator. [round {index}, op {at}]"


def race(schedule: Schedule, index: int, rank: int, chunk: int, what: str) -> str:
    """Two operations of one round touch the same chunk of the same rank."""
    hops = [Hop(index, *row[:2], row[4]) for row in schedule.rounds[index].rows() if _touches(row, rank, chunk)]
    text = (
        f"schedule: chunk {chunk} of rank {rank} {what} in round {index}, expected operations that may run at the same "
        f"time: {_path(hops, chunk)}. Move one of them to another round. [round {index}, rank {rank}]"
    )
    return text + _around(schedule, index, rank)


def wrong_chunk(schedule: Schedule, chunk: int) -> str:
    """What goes wrong first with this chunk: a transfer that is wrong in itself, else what is missing at the end."""
    versions, hop = replay(schedule, chunk)
    return _bad_transfer(schedule, chunk, versions, hop) if hop else _incomplete(schedule, chunk, versions)


def _bad_transfer(schedule: Schedule, chunk: int, versions: Versions, hop: Hop) -> str:
    mine, arriving = versions.before(hop.dst, hop.index), versions.before(hop.src, hop.index)
    if not arriving.content:
        fault = f"rank {hop.src} sends chunk {chunk} to rank {hop.dst}, but holds nothing of it yet"
        holders = [r for r in range(schedule.num_ranks) if versions.before(r, hop.index).content]
        expected, why = "somebody who holds it", f"So far {members(holders)} {_verb(holders, 'holds', 'hold')} it"
        mend = "Send it after it has arrived"
    elif hop.how == How.COPY:
        fault = f"rank {hop.dst} receives chunk {chunk} from rank {hop.src} and holds the same already"
        expected = "a copy that brings something"
        why = f"It has it {_since(mine, chunk)}"
        mend = "Drop the copy"
    else:
        twice = _bits(mine.content & arriving.content)
        fault = f"rank {hop.dst} receives chunk {chunk} from rank {hop.src} and would count {members(twice)} twice"
        expected = "disjoint contributor sets"
        why = _two_ways(chunk, versions, hop, twice[-1])
        mend = "Keep one of the two ways"
    place = f"[round {hop.index}, rank {hop.dst}]"
    text = f"schedule: {fault} in round {hop.index}, expected {expected}. {why}. {mend}. {place}"
    return text + _around(schedule, hop.index, hop.dst)


def _two_ways(chunk: int, versions: Versions, hop: Hop, contributor: int) -> str:
    here = versions.route(contributor, hop.dst, hop.index)
    coming = [*versions.route(contributor, hop.src, hop.index), hop]
    held = f"holds rank {contributor}'s contribution by {_path(here, chunk)}" if here else "contributes itself"
    return f"Rank {hop.dst} {held}; the same comes again by {_path(coming, chunk)}"


def _incomplete(schedule: Schedule, chunk: int, versions: Versions) -> str:
    """The contribution that got furthest is where the chain broke: follow that one."""
    rank, missing = next((r, m) for r in range(schedule.num_ranks) if (m := versions.missing(r)))
    lost, holder, version = versions.last_arrival(missing)
    origin, from_origin = versions.origin(rank)
    copied = ""
    if origin != rank:
        copied = f"It was copied from rank {origin}, which has had it {_since(from_origin, chunk)}. "
    gone = versions.overwritten(lost, holder, version)
    until = f" until {_path([gone], chunk)} overwrote it" if gone else ""
    turn = min(version.since + 1, len(schedule.rounds) - 1)
    text = (
        f"schedule: rank {rank} ends without the contribution of {members(_bits(missing))} to chunk {chunk}, expected "
        f"{members(_bits(versions.wanted))}. {copied}The contribution of rank {lost} to chunk {chunk} gets no further "
        f"than rank {holder}, which holds it {_since(version, chunk)}{until}: send it on. [round {turn}, rank {holder}]"
    )
    return text + _around(schedule, turn, holder)


def _since(version: Version, chunk: int) -> str:
    return f"since {_path([version.hop], chunk)}" if version.hop else "from the beginning"


def _path(hops: Sequence[Hop], chunk: int) -> str:
    texts = [f"{op_text(hop.src, hop.dst, chunk, 1, hop.how)} in round {hop.index}" for hop in hops]
    if len(texts) > _MAX_HOPS:
        half = _MAX_HOPS // 2
        texts[half:-half] = [f"... {len(texts) - 2 * half} more ..."]
    return ", ".join(texts)


def _touches(row: tuple[int, int, int, int, How], rank: int, chunk: int) -> bool:
    src, dst, first, count, _ = row
    return rank in (src, dst) and first <= chunk < first + count


def _bits(content: int) -> list[int]:
    return [r for r in range(content.bit_length()) if content >> r & 1]


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _around(schedule: Schedule, index: int, rank: int) -> str:
    if schedule.num_ranks > _MAX_GRID_RANKS or not len(schedule.rounds):
        return ""
    first = max(0, index - _ROUNDS_BEFORE)
    lines = grid(schedule, range(first, min(index + 2, len(schedule.rounds))), mark=(index, rank))
    return "\n" + "\n".join(lines)
