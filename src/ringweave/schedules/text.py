"""Schedules as text: `write` and `parse` are exact inverses, `render` is for people.

```text
schedule ring
collective allreduce
ranks 3
shares 1 1 1
phase reduce-scatter
round 0: 0>1:+0 1>2:+1 2>0:+2
round 1: ...
```
`0>1:+0` is rank 0 sending chunk 0 to rank 1, which adds it; `=` overwrites; `4-6` are chunks 4, 5 and 6. A line `phase`
names the rounds from there on; it may be absent.
"""

import re
from collections.abc import Iterable, Sequence

from ringweave.errors import ScheduleError, explain
from ringweave.schedules.schedule import KINDS, Collective, How, Phase, Round, Schedule

_SIGNS = {How.REDUCE: "+", How.COPY: "="}
_OP = re.compile(r"([0-9]{1,9})>([0-9]{1,9}):([+=])([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NUMBER = re.compile(r"-?[0-9]{1,18}")


def op_text(src: int, dst: int, first_chunk: int, num_chunks: int, how: How) -> str:
    """`0>1:+4-6`."""
    return f"{src}>{dst}:{_SIGNS[how]}{_chunks_text(first_chunk, num_chunks)}"


def write(schedule: Schedule) -> str:
    """The whole schedule as text that `parse` reads back; for groups whose operations fit into memory."""
    collective = schedule.collective
    lines = [f"schedule {schedule.name}", f"collective {collective.kind}", f"ranks {schedule.num_ranks}"]
    if collective.root is not None:
        lines.append(f"root {collective.root}")
    if collective.owners is not None:
        lines.append("owners " + " ".join(map(str, collective.owners)))
    lines.append("shares " + " ".join(map(str, schedule.shares)))
    names = dict(schedule.phases)
    for index, round_ in enumerate(schedule.rounds):
        if index in names:
            lines.append(f"phase {names[index]}")
        lines.append(" ".join([f"round {index}:", *(op_text(*row) for row in round_.rows())]))
    return "\n".join(lines) + "\n"


def parse(text: str) -> Schedule:
    """The schedule that `text` describes: `parse(str(schedule)) == schedule`.

    Raises:
        ScheduleError: A line that is not understood, with its number.
    """
    fields: dict[str, str] = {}
    rounds: list[Round] = []
    phases: list[Phase] = []
    for number, line in enumerate(text.splitlines(), start=1):
        keyword, _, rest = line.strip().partition(" ")
        if not keyword or keyword.startswith("#"):
            continue
        if keyword == "round":
            rounds.append(_parse_round(rest, len(rounds), number))
        elif keyword == "phase":
            phases.append(Phase(len(rounds), rest.strip()))
        elif keyword in ("schedule", "collective", "ranks", "root", "owners", "shares") and keyword not in fields:
            fields[keyword] = rest.strip()
        else:
            expected = "schedule, collective, ranks, root, owners, shares (once each), phase or round"
            raise ScheduleError(
                explain("schedule text", got=line, expected=expected, do="Mend this line", where=f"line {number}")
            )
    return _assemble(fields, rounds, phases)


def render(schedule: Schedule, *, max_rounds: int = 24, max_ranks: int = 12) -> str:
    """The schedule as a grid for people: a row per round, a column per rank; cut, and saying so, when it is large."""
    shown = min(max_rounds, len(schedule.rounds))
    collective = schedule.collective
    head = (
        f"{schedule.name}: {collective.kind} of {schedule.num_ranks} ranks, {schedule.num_chunks} chunks, "
        f"{len(schedule.rounds)} rounds\n"
        "3>1 sends chunk 3 to rank 1; +4<0 adds chunk 4 from rank 0; =4<0 overwrites with it"
    )
    names = dict(schedule.phases)
    ranks_line, *round_lines = grid(schedule, range(shown), max_ranks=max_ranks)
    lines = [head, ranks_line]
    for index, line in enumerate(round_lines):
        lines += [f"{names[index]}:", line] if index in names else [line]
    if shown < len(schedule.rounds):
        lines.append(f"... {len(schedule.rounds) - shown} more rounds")
    if schedule.num_ranks > max_ranks:
        lines.append(f"... {schedule.num_ranks - max_ranks} more ranks to the right")
    return "\n".join(lines) + "\n"


def grid(
    schedule: Schedule, rounds: Iterable[int], *, mark: tuple[int, int] | None = None, max_ranks: int = 16
) -> list[str]:
    """Rows of the grid. `mark` is (round, rank): the row gets an arrow, the cell brackets."""
    ranks = range(min(schedule.num_ranks, max_ranks))
    rows = [["", *(f"rank{r}" for r in ranks)]]
    marked = None
    for index in rounds:
        cells: list[list[str]] = [[] for _ in ranks]
        for src, dst, first, count, how in schedule.rounds[index].rows():
            chunks = _chunks_text(first, count)
            if src in ranks:
                cells[src].append(f"{chunks}>{dst}")
            if dst in ranks:
                cells[dst].append(f"{_SIGNS[how]}{chunks}<{src}")
        texts = [" ".join(cell) or "-" for cell in cells]
        if mark is not None and mark[0] == index:
            marked = len(rows)
            if mark[1] in ranks:
                texts[mark[1]] = f"[{texts[mark[1]]}]"
        rows.append([f"round {index}:", *texts])
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if marked is not None:
        lines[marked] += "    <-- here"
    return lines


def _chunks_text(first_chunk: int, num_chunks: int) -> str:
    return str(first_chunk) if num_chunks == 1 else f"{first_chunk}-{first_chunk + num_chunks - 1}"


def _parse_round(rest: str, index: int, number: int) -> Round:
    label, colon, ops = rest.partition(":")
    if label.strip() != str(index) or not colon:
        expected = f"'{index}:' and operations"
        raise ScheduleError(
            explain("round", got=rest, expected=expected, do="Number the rounds from 0", where=f"line {number}")
        )
    columns: list[tuple[int, int, int, int, int]] = []
    for word in ops.split():
        match = _OP.fullmatch(word)
        if match is None:
            raise ScheduleError(
                explain("operation", got=word, expected="like 0>1:+4 or 0>1:=4-6", do="Mend it", where=f"line {number}")
            )
        src, dst, sign, first, last = match.groups()
        how = How.REDUCE if sign == "+" else How.COPY
        columns.append((int(src), int(dst), int(first), int(last or first) - int(first) + 1, how))
    src, dst, first, count, how = zip(*columns, strict=True) if columns else ((), (), (), (), ())
    return Round.of(src, dst, first, how, count)


def _numbers(fields: dict[str, str], keyword: str) -> tuple[int, ...]:
    words = fields[keyword].split()
    if not words or any(_NUMBER.fullmatch(word) is None for word in words):
        raise ScheduleError(explain(keyword, got=fields[keyword], expected="whole numbers", do="Mend that line"))
    return tuple(map(int, words))


def _number(fields: dict[str, str], keyword: str) -> int:
    numbers = _numbers(fields, keyword)
    if len(numbers) > 1:
        raise ScheduleError(explain(keyword, got=fields[keyword], expected="one whole number", do="Mend that line"))
    return numbers[0]


def _assemble(fields: dict[str, str], rounds: Sequence[Round], phases: Sequence[Phase]) -> Schedule:
    absent = [keyword for keyword in ("schedule", "collective", "ranks", "shares") if keyword not in fields]
    if absent:
        raise ScheduleError(f"schedule text: no line {absent[0]!r}, expected one. Add it.")
    kind = next((k for k in KINDS if k == fields["collective"]), None)
    if kind is None:
        raise ScheduleError(
            explain("collective", got=fields["collective"], expected=f"one of {', '.join(KINDS)}", do="Name one")
        )
    owners = _numbers(fields, "owners") if "owners" in fields else None
    root = _number(fields, "root") if "root" in fields else None
    ranks, shares = _number(fields, "ranks"), _numbers(fields, "shares")
    return Schedule(fields["schedule"], Collective(kind, owners, root), ranks, shares, rounds, tuple(phases))
