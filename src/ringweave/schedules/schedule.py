"""Schedule of a collective as frozen data: the chunks that each rank sends in each round; and its text form.

A message is cut into chunks whose relative sizes are the `shares`. A round holds operations that may run at the same
time. It is a block of numpy columns, computed on demand, because a ring of 10,000 ranks has 2e8 transfers. Routes are
not part of a schedule: they come from the topology, so one schedule can be costed on any cluster.

`format_schedule` and `parse` are exact inverses; `render` prints a grid for people.

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
names the rounds from there on; it may be absent. A line `wire int8 0 0 1` says that ranks 0 and 1 are in one zone, rank
2 in another, and that what passes between zones is encoded in int8; without it everything travels exactly.
"""

import enum
import functools
import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules import wire_formats

CollectiveKind = Literal["allreduce", "reduce-scatter", "allgather", "broadcast", "reduce"]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = ("allreduce", "reduce-scatter", "allgather", "broadcast", "reduce")


class ReceiveOp(enum.IntEnum):
    """Operation of the receiver on the chunks that arrive."""

    REDUCE = 0
    """Combine them with its own; the two contributor sets must be disjoint."""
    COPY = 1
    """Overwrite its own."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Precondition and postcondition of a collective.

    Before a reducing collective rank r's chunks hold {r}; before an allgather only a chunk's owner holds it, before a
    broadcast only the root. After it, every rank (allreduce, allgather, broadcast), the chunk's owner (reduce-scatter)
    or the root (reduce) holds each chunk complete.
    """

    kind: CollectiveKind
    owners: tuple[int, ...] | None = None
    """Rank that owns each chunk; only for reduce-scatter and allgather."""
    root: int | None = None
    """Only for broadcast and reduce."""

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVE_KINDS:
            raise ScheduleError(
                "collective", got=self.kind, expected=f"one of {', '.join(COLLECTIVE_KINDS)}", do="Name one of these"
            )
        if (self.owners is not None) != (self.kind in ("reduce-scatter", "allgather")):
            raise ScheduleError(f"{self.kind}: owners belong to reduce-scatter and allgather, and only to them.")
        if (self.root is not None) != (self.kind in ("broadcast", "reduce")):
            raise ScheduleError(f"{self.kind}: a root belongs to broadcast and reduce, and only to them.")
        if self.owners is not None:
            object.__setattr__(self, "owners", _whole_numbers("owners", self.owners))
        if self.root is not None:
            object.__setattr__(self, "root", _whole_numbers("root", (self.root,))[0])

    @property
    def reduces(self) -> bool:
        """True if it combines contributions of all ranks."""
        return self.kind in ("allreduce", "reduce-scatter", "reduce")


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Operations that may run at the same time, in columns of equal length.

    Each operation moves chunks `first_chunk .. first_chunk + num_chunks - 1` from rank `src` to rank `dst`. All of them
    read the contents before the round.
    """

    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    first_chunk: NDArray[np.int32]
    num_chunks: NDArray[np.int32]
    how: NDArray[np.uint8]

    def __post_init__(self) -> None:
        ranks = (self.src, self.dst, self.first_chunk, self.num_chunks)
        if any(column.dtype != np.int32 for column in ranks) or self.how.dtype != np.uint8:
            raise ScheduleError("round: columns of other types, expected int32, for how uint8. Build it by Round.of.")
        shapes = [column.shape for column in (*ranks, self.how)]
        if any(shape != (len(self.src),) for shape in shapes):
            raise ScheduleError(
                f"round: columns of shapes {shapes}, expected five of equal length. Build it by Round.of."
            )

    @classmethod
    def of(
        cls, src: ArrayLike, dst: ArrayLike, first_chunk: ArrayLike, how: ArrayLike, num_chunks: ArrayLike = 1
    ) -> "Round":
        """Build a round from anything that numpy broadcasts to the length of `src`.

        Raises:
            ScheduleError: Numbers that are not whole or do not fit into a column.
        """
        ranks = _checked_column(src, np.int32)

        def column(values: ArrayLike, dtype: type[np.integer[Any]] = np.int32) -> NDArray[Any]:
            given = _checked_column(values, dtype)
            return given if given.shape == ranks.shape else np.broadcast_to(given, ranks.shape)

        return cls(ranks, column(dst), column(first_chunk), column(num_chunks), column(how, np.uint8))

    def __len__(self) -> int:
        return len(self.src)

    def select(self, mask: NDArray[np.bool_] | slice) -> "Round":
        """Return the operations that `mask` selects, in order."""
        return Round(self.src[mask], self.dst[mask], self.first_chunk[mask], self.num_chunks[mask], self.how[mask])

    def rows(self) -> Iterator[tuple[int, int, int, int, ReceiveOp]]:
        """Return (src, dst, first_chunk, num_chunks, how) of each operation: for texts and small groups only."""
        columns = zip(self.src, self.dst, self.first_chunk, self.num_chunks, self.how, strict=True)
        return ((int(s), int(d), int(f), int(n), ReceiveOp(h)) for s, d, f, n, h in columns)


@dataclass(frozen=True, slots=True, eq=False)
class LazyRounds(Sequence[Round]):
    """A sequence of rounds that are computed on demand and never kept."""

    num_rounds: int
    make: Callable[[int], Round]

    def __len__(self) -> int:
        return self.num_rounds

    @overload
    def __getitem__(self, index: int) -> Round: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Round]: ...
    def __getitem__(self, index: int | slice) -> Round | Sequence[Round]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.num_rounds))]
        if not -self.num_rounds <= index < self.num_rounds:
            raise IndexError(f"round {index} of {self.num_rounds}")
        return self.make(index % self.num_rounds)


class WireEncoding(NamedTuple):
    """Format of the transfers of an allreduce that pass a slow link."""

    format: str
    """A name of `wire_formats.FORMATS`."""
    zones: tuple[int, ...]
    """Zone of each rank: transfers between zones are encoded, those inside of a zone are exact."""


class SchedulePhase(NamedTuple):
    """A named range of rounds: from `first_round` to the next phase."""

    first_round: int
    name: str


@dataclass(frozen=True, eq=False)
class Schedule:
    """Ordered operations of one collective. Two schedules are equal if their digests are.

    Raises:
        ScheduleError: The numbers do not fit each other. `verify` checks the operations.
    """

    name: str
    """Name of the generator: `ring`, `direct`, ...; not part of its identity."""
    collective: Collective
    num_ranks: int
    """Size of the group."""
    shares: tuple[int, ...]
    """Relative size of each chunk, as whole numbers; their count is the number of chunks."""
    rounds: Sequence[Round]
    """In order; computed lazily for large groups."""
    phases: tuple[SchedulePhase, ...] = ()
    """Names of its parts, in order, for people; not part of its identity."""
    encoding: WireEncoding | None = None
    """Transfers that are encoded; None if all are exact. An encoded schedule rounds a sum where it is complete, before
    it is first sent, so that all ranks get the same."""

    def __post_init__(self) -> None:
        for what, name in (("schedule", self.name), *(("phase", phase.name) for phase in self.phases)):
            if name.splitlines() != [name.strip()]:
                raise ScheduleError(f"{what} name: {name!r}, expected one line without spaces around it. Shorten it.")
        object.__setattr__(self, "num_ranks", _whole_numbers("num_ranks", (self.num_ranks,))[0])
        object.__setattr__(self, "shares", _whole_numbers("shares", self.shares))
        if self.num_ranks < 1:
            raise ScheduleError("num_ranks", got=self.num_ranks, expected="at least 1", do="Name the ranks")
        if not self.shares or min(self.shares) < 0 or sum(self.shares) < 1:
            raise ScheduleError(
                "shares",
                got=self.shares[:8],
                expected="one whole number per chunk, none negative and not all 0",
                do="Give each chunk its relative size",
            )
        self._check_collective_ranks()
        self._check_phases()
        self._check_encoding()

    def _check_collective_ranks(self) -> None:
        owners, root = self.collective.owners, self.collective.root
        if owners is not None and len(owners) != self.num_chunks:
            raise ScheduleError(f"{self.collective.kind}: {len(owners)} owners for {self.num_chunks} chunks.")
        for word, members in (("owner", owners or ()), ("root", () if root is None else (root,))):
            outside = [member for member in members if not 0 <= member < self.num_ranks]
            if outside:
                expected = f"ranks 0..{self.num_ranks - 1}"
                raise ScheduleError(word, got=outside[0], expected=expected, do="Name a rank of the group")

    def _check_phases(self) -> None:
        starts, num_rounds = [phase.first_round for phase in self.phases], len(self.rounds)
        if starts and (starts != sorted(set(starts)) or starts[0] < 0 or starts[-1] >= num_rounds):
            expected = f"rounds 0..{num_rounds - 1} in ascending order" if num_rounds else "none, for no rounds"
            raise ScheduleError("phases", got=starts, expected=expected, do="Name each by its first round")

    def _check_encoding(self) -> None:
        if self.encoding is None:
            return
        wire_formats.format_named(self.encoding.format)
        got, kind = len(self.encoding.zones), self.collective.kind
        if got != self.num_ranks or kind != "allreduce":
            got_text, expected = f"{got} zones for {kind}", f"{self.num_ranks} zones, one per rank, of an allreduce"
            raise ScheduleError("wire", got=got_text, expected=expected, do="Leave it out for exact transfers")
        zones = _whole_numbers("zones", self.encoding.zones)
        object.__setattr__(self, "encoding", WireEncoding(self.encoding.format, zones))

    def is_encoded(self, src: int, dst: int) -> bool:
        """Return whether what `src` sends to `dst` is encoded."""
        return self.encoding is not None and self.encoding.zones[src] != self.encoding.zones[dst]

    @property
    def num_chunks(self) -> int:
        return len(self.shares)

    def offsets(self, num_elements: int) -> list[int]:
        """Return the first element of each chunk, and the end of the message: num_chunks + 1 indices.

        Integer arithmetic, so that every rank finds the same borders; short messages leave some chunks empty.
        """
        total, cumulative, borders = sum(self.shares), 0, [0]
        for share in self.shares:
            cumulative += share
            borders.append(num_elements * cumulative // total)
        return borders

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all content that decides the messages: ranks agree on it before they run the schedule."""
        collective = self.collective
        header = (collective.kind, collective.owners, collective.root, self.num_ranks, self.shares, len(self.rounds))
        sha = hashlib.sha256(repr(header if self.encoding is None else (*header, *self.encoding)).encode())
        before: tuple[NDArray[Any], ...] = (np.zeros(0),) * 5
        for round_ in self.rounds:
            sha.update(len(round_).to_bytes(8, "little"))
            columns = (round_.src, round_.dst, round_.first_chunk, round_.num_chunks, round_.how)
            for column, last in zip(columns, before, strict=True):
                sha.update(_encode_column(column, last))
            before = columns
        return sha.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        pass

        return format_schedule(self)


def _encode_column(column: NDArray[Any], last: NDArray[Any]) -> bytes:
    """Encode a column uniquely: unchanged since the last round, one value throughout, or written out.

    Hashing is most of a digest's time, and a ring of 10,000 ranks has 3.4 GB of columns, but only 0.8 GB that change.
    """
    if column is last or np.array_equal(column, last):
        return b"="
    if len(column) and (column == column[0]).all():
        return b"1" + column[:1].tobytes()
    return b"*" + column.tobytes()


def _checked_column(values: ArrayLike, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """Return `values` as that type; refuse values that numpy would truncate silently."""
    given = np.asarray(values)
    if given.dtype == dtype or not given.size:
        return given.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    if given.dtype.kind not in "iu" or given.min() < limits.min or given.max() > limits.max:
        got, expected = given.ravel()[:4].tolist(), f"whole numbers from {limits.min} to {limits.max}"
        raise ScheduleError("round", got=got, expected=expected, do="Correct the generator")
    return given.astype(dtype)


def _whole_numbers(what: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return `values` as Python integers, so that equal schedules have equal digests."""
    try:
        return tuple(map(operator.index, values))
    except TypeError as cause:
        got = next(value for value in values if not hasattr(value, "__index__"))
        raise ScheduleError(what, got=got, expected="whole numbers", do="Round them") from cause


_FIELD_KEYWORDS = ("schedule", "collective", "ranks", "root", "owners", "shares", "wire")
_OP_SIGNS = {ReceiveOp.REDUCE: "+", ReceiveOp.COPY: "="}
_OP_PATTERN = re.compile(r"([0-9]{1,9})>([0-9]{1,9}):([+=])([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NUMBER_PATTERN = re.compile(r"-?[0-9]{1,18}")


def op_text(src: int, dst: int, first_chunk: int, num_chunks: int, how: ReceiveOp) -> str:
    """Return an operation as text: `0>1:+4-6`."""
    return f"{src}>{dst}:{_OP_SIGNS[how]}{_chunks_text(first_chunk, num_chunks)}"


def format_schedule(schedule: Schedule) -> str:
    """Return the whole schedule as text for `parse`; for groups whose operations fit into memory."""
    collective = schedule.collective
    lines = [f"schedule {schedule.name}", f"collective {collective.kind}", f"ranks {schedule.num_ranks}"]
    if collective.root is not None:
        lines.append(f"root {collective.root}")
    if collective.owners is not None:
        lines.append("owners " + " ".join(map(str, collective.owners)))
    lines.append("shares " + " ".join(map(str, schedule.shares)))
    if schedule.encoding is not None:
        lines.append(" ".join(["wire", schedule.encoding.format, *map(str, schedule.encoding.zones)]))
    names = dict(schedule.phases)
    for index, round_ in enumerate(schedule.rounds):
        if index in names:
            lines.append(f"phase {names[index]}")
        lines.append(" ".join([f"round {index}:", *(op_text(*row) for row in round_.rows())]))
    return "\n".join(lines) + "\n"


def parse(text: str) -> Schedule:
    """Return the schedule that `text` describes: `parse(str(schedule)) == schedule`.

    Raises:
        ScheduleError: A line that is not understood, with its number.
    """
    fields: dict[str, str] = {}
    rounds: list[Round] = []
    phases: list[SchedulePhase] = []
    for number, line in enumerate(text.splitlines(), start=1):
        keyword, _, rest = line.strip().partition(" ")
        if not keyword or keyword.startswith("#"):
            continue
        if keyword == "round":
            rounds.append(_parse_round(rest, len(rounds), number))
        elif keyword == "phase":
            phases.append(SchedulePhase(len(rounds), rest.strip()))
        elif keyword in _FIELD_KEYWORDS and keyword not in fields:
            fields[keyword] = rest.strip()
        else:
            expected = f"{', '.join(_FIELD_KEYWORDS)} (once each), phase or round"
            raise ScheduleError(
                "schedule text", got=line, expected=expected, do="Correct this line", where=f"line {number}"
            )
    return _schedule_of_fields(fields, rounds, phases)


def render(schedule: Schedule, *, max_rounds: int = 24, max_ranks: int = 12) -> str:
    """Return the schedule as a grid for people, a row per round and a column per rank; large ones are truncated."""
    shown = min(max_rounds, len(schedule.rounds))
    collective = schedule.collective
    head = (
        f"{schedule.name}: {collective.kind} of {schedule.num_ranks} ranks, {schedule.num_chunks} chunks, "
        f"{len(schedule.rounds)} rounds\n"
        "3>1 sends chunk 3 to rank 1; +4<0 adds chunk 4 from rank 0; =4<0 overwrites with it"
    )
    names = dict(schedule.phases)
    ranks_line, *round_lines = grid_lines(schedule, range(shown), max_ranks=max_ranks)
    lines = [head, ranks_line]
    for index, line in enumerate(round_lines):
        lines += [f"{names[index]}:", line] if index in names else [line]
    if shown < len(schedule.rounds):
        lines.append(f"... {len(schedule.rounds) - shown} more rounds")
    if schedule.num_ranks > max_ranks:
        lines.append(f"... {schedule.num_ranks - max_ranks} more ranks to the right")
    return "\n".join(lines) + "\n"


def grid_lines(
    schedule: Schedule, rounds: Iterable[int], *, mark: tuple[int, int] | None = None, max_ranks: int = 16
) -> list[str]:
    """Return rows of the grid. `mark` is (round, rank): the row gets an arrow, the cell brackets."""
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
                cells[dst].append(f"{_OP_SIGNS[how]}{chunks}<{src}")
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
        raise ScheduleError("round", got=rest, expected=expected, do="Number the rounds from 0", where=f"line {number}")
    columns: list[tuple[int, int, int, int, int]] = []
    for word in ops.split():
        match = _OP_PATTERN.fullmatch(word)
        if match is None:
            raise ScheduleError(
                "operation", got=word, expected="like 0>1:+4 or 0>1:=4-6", do="Correct it", where=f"line {number}"
            )
        src, dst, sign, first, last = match.groups()
        how = ReceiveOp.REDUCE if sign == "+" else ReceiveOp.COPY
        columns.append((int(src), int(dst), int(first), int(last or first) - int(first) + 1, how))
    src, dst, first, count, how = zip(*columns, strict=True) if columns else ((), (), (), (), ())
    return Round.of(src, dst, first, how, count)


def _parse_numbers(fields: dict[str, str], keyword: str) -> tuple[int, ...]:
    words = fields[keyword].split()
    if not words or any(_NUMBER_PATTERN.fullmatch(word) is None for word in words):
        raise ScheduleError(keyword, got=fields[keyword], expected="whole numbers", do="Correct that line")
    return tuple(map(int, words))


def _parse_number(fields: dict[str, str], keyword: str) -> int:
    numbers = _parse_numbers(fields, keyword)
    if len(numbers) > 1:
        raise ScheduleError(keyword, got=fields[keyword], expected="one whole number", do="Correct that line")
    return numbers[0]


def _schedule_of_fields(fields: dict[str, str], rounds: Sequence[Round], phases: Sequence[SchedulePhase]) -> Schedule:
    absent = [keyword for keyword in ("schedule", "collective", "ranks", "shares") if keyword not in fields]
    if absent:
        raise ScheduleError(f"schedule text: no line {absent[0]!r}, expected one. Add it.")
    kind = next((k for k in COLLECTIVE_KINDS if k == fields["collective"]), None)
    if kind is None:
        raise ScheduleError(
            "collective", got=fields["collective"], expected=f"one of {', '.join(COLLECTIVE_KINDS)}", do="Name one"
        )
    owners = _parse_numbers(fields, "owners") if "owners" in fields else None
    root = _parse_number(fields, "root") if "root" in fields else None
    ranks, shares = _parse_number(fields, "ranks"), _parse_numbers(fields, "shares")
    encoding = None
    if "wire" in fields:
        name, _, fields["zones"] = fields["wire"].partition(" ")
        encoding = WireEncoding(name, _parse_numbers(fields, "zones"))
    collective = Collective(kind, owners, root)
    return Schedule(fields["schedule"], collective, ranks, shares, rounds, tuple(phases), encoding)
