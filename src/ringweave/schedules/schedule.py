"""The schedule of a collective as frozen data: who sends which chunks to whom, in which round.

A message is cut into chunks whose relative sizes are the `shares`. A round holds operations that may run at the same
time; it is a block of numpy columns, made when asked for, because a ring of 10,000 ranks has 2e8 transfers.
Routes are not part of a schedule: they come from the topology, so that one schedule can be costed on any cluster.
"""

import enum
import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringweave.errors import ScheduleError, explain

Kind = Literal["allreduce", "reduce-scatter", "allgather", "broadcast", "reduce"]
KINDS: tuple[Kind, ...] = ("allreduce", "reduce-scatter", "allgather", "broadcast", "reduce")


class How(enum.IntEnum):
    """What the receiver does with the chunks that arrive."""

    REDUCE = 0
    """Combine them with its own; the two contributor sets must be disjoint."""
    COPY = 1
    """Overwrite its own."""


@dataclass(frozen=True, slots=True)
class Collective:
    """What must hold before and after.

    Before a reducing collective rank r's chunks hold {r}; before an allgather only a chunk's owner holds it, before a
    broadcast only the root. After: everybody (allreduce, allgather, broadcast), the chunk's owner (reduce-scatter) or
    the root (reduce) holds each chunk complete.
    """

    kind: Kind
    """Name of the collective."""
    owners: tuple[int, ...] | None = None
    """Rank that owns each chunk; for reduce-scatter and allgather alone."""
    root: int | None = None
    """For broadcast and reduce alone."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(
                explain("collective", got=self.kind, expected=f"one of {', '.join(KINDS)}", do="Name one of these")
            )
        if (self.owners is not None) != (self.kind in ("reduce-scatter", "allgather")):
            raise ScheduleError(f"{self.kind}: owners belong to reduce-scatter and allgather, and only to them.")
        if (self.root is not None) != (self.kind in ("broadcast", "reduce")):
            raise ScheduleError(f"{self.kind}: a root belongs to broadcast and reduce, and only to them.")
        if self.owners is not None:
            object.__setattr__(self, "owners", _whole("owners", self.owners))
        if self.root is not None:
            object.__setattr__(self, "root", _whole("root", (self.root,))[0])

    @property
    def reduces(self) -> bool:
        """Whether contributions of all ranks are combined."""
        return self.kind in ("allreduce", "reduce-scatter", "reduce")


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Operations that may run at the same time, in columns of equal length.

    Each operation moves chunks `first_chunk .. first_chunk + num_chunks - 1` from rank `src` to rank `dst`. All of them
    read what was there before the round.
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
        ranks = _column(src, np.int32)

        def column(values: ArrayLike, dtype: type[np.integer[Any]] = np.int32) -> NDArray[Any]:
            given = _column(values, dtype)
            return given if given.shape == ranks.shape else np.broadcast_to(given, ranks.shape)

        return cls(ranks, column(dst), column(first_chunk), column(num_chunks), column(how, np.uint8))

    def __len__(self) -> int:
        return len(self.src)

    def where(self, mask: NDArray[np.bool_] | slice) -> "Round":
        """The operations that `mask` selects, order kept."""
        return Round(self.src[mask], self.dst[mask], self.first_chunk[mask], self.num_chunks[mask], self.how[mask])

    def rows(self) -> Iterator[tuple[int, int, int, int, How]]:
        """(src, dst, first_chunk, num_chunks, how) of each operation: for texts and small groups only."""
        columns = zip(self.src, self.dst, self.first_chunk, self.num_chunks, self.how, strict=True)
        return ((int(s), int(d), int(f), int(n), How(h)) for s, d, f, n, h in columns)


@dataclass(frozen=True, slots=True, eq=False)
class Rounds(Sequence[Round]):
    """A sequence of rounds that are computed when asked for and never kept."""

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


class Phase(NamedTuple):
    """Rounds that people think of as one: from `first_round` to the next phase."""

    first_round: int
    name: str


@dataclass(frozen=True, eq=False)
class Schedule:
    """Ordered operations of one collective. Two schedules are equal when their digests are.

    Raises:
        ScheduleError: Numbers that cannot belong together. What the operations compute is `verify`'s business.
    """

    name: str
    """Who made it: `ring`, `direct`, ...; not part of its identity."""
    collective: Collective
    """What it computes."""
    num_ranks: int
    """Size of the group."""
    shares: tuple[int, ...]
    """Relative size of each chunk, as whole numbers; their count is the number of chunks."""
    rounds: Sequence[Round]
    """In order; computed lazily for large groups."""
    phases: tuple[Phase, ...] = ()
    """What its parts are called, in order, for people; not part of its identity."""

    def __post_init__(self) -> None:
        for what, name in (("schedule", self.name), *(("phase", phase.name) for phase in self.phases)):
            if name.splitlines() != [name.strip()]:
                raise ScheduleError(f"{what} name: {name!r}, expected one line without spaces around it. Shorten it.")
        object.__setattr__(self, "num_ranks", _whole("num_ranks", (self.num_ranks,))[0])
        object.__setattr__(self, "shares", _whole("shares", self.shares))
        if self.num_ranks < 1:
            raise ScheduleError(explain("num_ranks", got=self.num_ranks, expected="at least 1", do="Name the ranks"))
        if not self.shares or min(self.shares) < 0 or sum(self.shares) < 1:
            raise ScheduleError(
                explain(
                    "shares",
                    got=self.shares[:8],
                    expected="one whole number per chunk, none negative and not all 0",
                    do="Give each chunk its relative size",
                )
            )
        self._check_members()
        self._check_phases()

    def _check_members(self) -> None:
        """The ranks that the collective names are there."""
        owners, root = self.collective.owners, self.collective.root
        if owners is not None and len(owners) != self.num_chunks:
            raise ScheduleError(f"{self.collective.kind}: {len(owners)} owners for {self.num_chunks} chunks.")
        for word, members in (("owner", owners or ()), ("root", () if root is None else (root,))):
            outside = [member for member in members if not 0 <= member < self.num_ranks]
            if outside:
                expected = f"ranks 0..{self.num_ranks - 1}"
                raise ScheduleError(explain(word, got=outside[0], expected=expected, do="Name a rank of the group"))

    def _check_phases(self) -> None:
        starts, num_rounds = [phase.first_round for phase in self.phases], len(self.rounds)
        if starts and (starts != sorted(set(starts)) or starts[0] < 0 or starts[-1] >= num_rounds):
            expected = f"rounds 0..{num_rounds - 1} in ascending order" if num_rounds else "none, for no rounds"
            raise ScheduleError(explain("phases", got=starts, expected=expected, do="Name each by its first round"))

    @property
    def num_chunks(self) -> int:
        """Number of chunks that a message is cut into."""
        return len(self.shares)

    def offsets(self, num_elements: int) -> list[int]:
        """Where chunks begin in a message, and its end: num_chunks + 1 element indices.

        Whole-number arithmetic, so that every rank finds the same borders; short messages leave some chunks empty.
        """
        total, cumulative, borders = sum(self.shares), 0, [0]
        for share in self.shares:
            cumulative += share
            borders.append(num_elements * cumulative // total)
        return borders

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over everything that decides what is sent: ranks agree on it before they run the schedule."""
        collective = self.collective
        header = (collective.kind, collective.owners, collective.root, self.num_ranks, self.shares, len(self.rounds))
        sha = hashlib.sha256(repr(header).encode())
        before: tuple[NDArray[Any], ...] = (np.zeros(0),) * 5
        for round_ in self.rounds:
            sha.update(len(round_).to_bytes(8, "little"))
            columns = (round_.src, round_.dst, round_.first_chunk, round_.num_chunks, round_.how)
            for column, last in zip(columns, before, strict=True):
                sha.update(_encoded(column, last))
            before = columns
        return sha.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        from ringweave.schedules.text import write

        return write(self)


def _encoded(column: NDArray[Any], last: NDArray[Any]) -> bytes:
    """A column so that it can be read back: unchanged since the last round, one value throughout, or written out.

    Hashing is most of a digest's time, and a ring of 10,000 ranks has 3.4 GB of columns, but only 0.8 GB that change.
    """
    if column is last or np.array_equal(column, last):
        return b"="
    if len(column) and (column == column[0]).all():
        return b"1" + column[:1].tobytes()
    return b"*" + column.tobytes()


def _column(values: ArrayLike, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """`values` as that type, refusing what numpy would cut off in silence."""
    given = np.asarray(values)
    if given.dtype == dtype or not given.size:
        return given.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    if given.dtype.kind not in "iu" or given.min() < limits.min or given.max() > limits.max:
        got, expected = given.ravel()[:4].tolist(), f"whole numbers from {limits.min} to {limits.max}"
        raise ScheduleError(explain("round", got=got, expected=expected, do="Mend the generator"))
    return given.astype(dtype)


def _whole(what: str, values: Sequence[int]) -> tuple[int, ...]:
    """`values` as Python's own whole numbers, so that equal schedules have equal digests."""
    try:
        return tuple(map(operator.index, values))
    except TypeError as cause:
        got = next(value for value in values if not hasattr(value, "__index__"))
        raise ScheduleError(explain(what, got=got, expected="whole numbers", do="Round them")) from cause
