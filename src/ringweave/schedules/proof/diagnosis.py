"""The texts of a failed proof: what is wrong, at which round, rank and chunk, and the grid around it.

What a proof notices is often far from the mistake: a contribution that took a wrong turn in round 1 is counted twice in
round 7. So the texts tell how the contributions in question got where they are, operation by operation.
"""

from collections.abc import Sequence

from ringweave.schedules.proof.history import Hop, Version, Versions, members, replay
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
        f"time: {_path(hops, chunk)}. Move one of them to another round."
    )
    return _at(schedule, (index, rank), text)


def wrong_chunk(schedule: Schedule, chunk: int) -> str:
    """What goes wrong first with this chunk: a transfer that is wrong in itself, else what is missing at the end."""
    versions, hop = replay(schedule, chunk)
    return _bad_transfer(schedule, chunk, versions, hop) if hop else _incomplete(schedule, chunk, versions)


def _bad_transfer(schedule: Schedule, chunk: int, versions: Versions, hop: Hop) -> str:
    mine, arriving = versions.before(hop.dst, hop.index), versions.before(hop.src, hop.index)
    turn = hop.index, hop.dst
    if not arriving.content:
        fault = f"rank {hop.src} sends chunk {chunk} to rank {hop.dst}, but holds nothing of it yet"
        holders = [r for r in range(schedule.num_ranks) if versions.before(r, hop.index).content]
        expected, why = "somebody who holds it", f"So far {members(holders)} {_verb(holders, 'holds', 'hold')} it"
        mend = "Send it after it has arrived"
    elif hop.how == How.COPY:
        fault = f"rank {hop.dst} receives chunk {chunk} from rank {hop.src} and holds the same already"
        expected = "a copy that brings something"
        why, mend = f"It holds it {_since(mine, chunk)}", "Drop the copy"
        if missing := versions.wanted & ~mine.content:
            why = f"Both lack the contribution of {members(_bits(missing))}"
            mend, turn = _way_of_lost(chunk, versions, missing)
    else:
        twice = _bits(mine.content & arriving.content)
        fault = f"rank {hop.dst} receives chunk {chunk} from rank {hop.src} and would count {members(twice)} twice"
        expected = "disjoint contributor sets"
        why = _two_ways(chunk, versions, hop, twice[-1])
        mend = "Keep one of the two ways"
    return _at(schedule, turn, f"schedule: {fault} in round {hop.index}, expected {expected}. {why}. {mend}.")


def _two_ways(chunk: int, versions: Versions, hop: Hop, contributor: int) -> str:
    here = versions.route(contributor, hop.dst, hop.index)
    coming = [*versions.route(contributor, hop.src, hop.index), hop]
    held = f"holds rank {contributor}'s contribution by {_path(here, chunk)}" if here else "contributes itself"
    return f"Rank {hop.dst} {held}; the same comes again by {_path(coming, chunk)}"


def _incomplete(schedule: Schedule, chunk: int, versions: Versions) -> str:
    rank, missing = next((r, m) for r in range(schedule.num_ranks) if (m := versions.missing(r)))
    copies = versions.copies(rank)
    source = f"What it holds came from rank {copies[0].src} by {_path(copies, chunk)}. " if copies else ""
    way, turn = _way_of_lost(chunk, versions, missing)
    text = (
        f"schedule: rank {rank} ends without the contribution of {members(_bits(missing))} to chunk {chunk}, expected "
        f"{members(_bits(versions.wanted))}. {source}{way}."
    )
    return _at(schedule, turn, text)


def _way_of_lost(chunk: int, versions: Versions, missing: int) -> tuple[str, tuple[int, int]]:
    """Where one of the missing contributions got stuck, in words and as (round, rank).

    The one that nobody has any more, and of several the one that got furthest: there the chain broke.
    """
    lost, holder, arrival = versions.last_arrival(missing & versions.extinct() or missing)
    last, gone = versions.kept(lost, holder, arrival)
    added = f" and what was added up to {_path([last.hop], chunk)}" if last.hop and last is not arrival else ""
    until = f", until {_path([gone], chunk)} overwrote it" if gone else ""
    way = (
        f"The contribution of rank {lost} to chunk {chunk} gets no further than rank {holder}, which holds it "
        f"{_since(arrival, chunk)}{added}{until}: send it on"
    )
    return way, (last.since + 1, holder)


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


def _at(schedule: Schedule, turn: tuple[int, int], text: str) -> str:
    """The text with its place, and in small groups the grid around it."""
    index, rank = min(turn[0], max(0, len(schedule.rounds) - 1)), turn[1]
    text = f"{text} [round {index}, rank {rank}]"
    if schedule.num_ranks > _MAX_GRID_RANKS or not len(schedule.rounds):
        return text
    shown = range(max(0, index - _ROUNDS_BEFORE), min(index + 2, len(schedule.rounds)))
    return "\n".join([text, *grid(schedule, shown, mark=(index, rank))])
