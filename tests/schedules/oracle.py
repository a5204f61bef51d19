"""Schedules as lists of single operations, and an independent judge of them: brute force on multisets, no numpy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringweave.schedules import Collective, Round, Schedule
from ringweave.schedules.schedule import CollectiveKind


class Op(NamedTuple):
    """One chunk from one rank to another; `sign` is + or =."""

    src: int
    dst: int
    chunk: int
    sign: str

    def __str__(self) -> str:
        return f"{self.src}>{self.dst}:{self.sign}{self.chunk}"


@dataclass(frozen=True)
class Listing:
    """A schedule as plain lists."""

    num_ranks: int
    num_chunks: int
    rounds: tuple[tuple[Op, ...], ...]
    kind: CollectiveKind = "allreduce"
    owners: tuple[int, ...] | None = None
    root: int | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> "Listing":
        rounds = tuple(
            tuple(
                Op(src, dst, chunk, "+="[how])
                for src, dst, first, count, how in round_.rows()
                for chunk in range(first, first + count)
            )
            for round_ in schedule.rounds
        )
        collective = schedule.collective
        return cls(schedule.num_ranks, schedule.num_chunks, rounds, collective.kind, collective.owners, collective.root)

    @property
    def schedule(self) -> Schedule:
        rounds = []
        for ops in self.rounds:
            columns = zip(*ops, strict=True) if ops else ((),) * 4
            src, dst, chunk, signs = columns
            rounds.append(Round.of(src, dst, chunk, ["+=".index(sign) for sign in signs]))
        collective = Collective(self.kind, self.owners, self.root)
        return Schedule("listing", collective, self.num_ranks, (1,) * self.num_chunks, rounds)

    def with_round(self, index: int, ops: Sequence[Op]) -> "Listing":
        """The same with other operations in one round; the round after the last may be added."""
        rounds = list(self.rounds) + [()] * (index == len(self.rounds))
        rounds[index] = tuple(ops)
        return replace(self, rounds=tuple(rounds))


class Judgement(NamedTuple):
    """What brute force says."""

    clean: bool
    """Every operation makes sense, and the result is right."""
    right: bool
    """The same, but a contribution may be counted twice on the way where that does not reach the result."""


WRONG = Judgement(clean=False, right=False)


def judge(listing: Listing) -> Judgement:
    held = _start(listing)
    counted_twice = False
    for ops in listing.rounds:
        if not _are_possible(listing, ops):
            return WRONG
        before = dict(held)
        for src, dst, chunk, sign in ops:
            mine, arriving = before[dst, chunk], before[src, chunk]
            if not arriving or (sign == "=" and mine == arriving):
                return WRONG
            if sign == "+" and (not mine or listing.kind in ("allgather", "broadcast")):
                return WRONG
            counted_twice |= sign == "+" and bool(mine & arriving)
            held[dst, chunk] = mine + arriving if sign == "+" else arriving
    right = all(held[place] == content for place, content in _goal(listing).items())
    return Judgement(clean=right and not counted_twice, right=right)


def _are_possible(listing: Listing, ops: Sequence[Op]) -> bool:
    numbers_exist = all(
        op.src != op.dst and {op.src, op.dst} <= set(range(listing.num_ranks)) and op.chunk in range(listing.num_chunks)
        for op in ops
    )
    written = [(op.dst, op.chunk) for op in ops]
    read = {(op.src, op.chunk) for op in ops}
    return numbers_exist and len(set(written)) == len(written) and not read & set(written)


def _start(listing: Listing) -> dict[tuple[int, int], Counter[int]]:
    def starts_with(rank: int, chunk: int) -> bool:
        if listing.kind == "allgather":
            assert listing.owners is not None
            return listing.owners[chunk] == rank
        return listing.kind != "broadcast" or listing.root == rank

    ranks, chunks = range(listing.num_ranks), range(listing.num_chunks)
    return {(r, c): Counter([r] if starts_with(r, c) else []) for r in ranks for c in chunks}


def _goal(listing: Listing) -> dict[tuple[int, int], Counter[int]]:
    ranks, chunks = range(listing.num_ranks), range(listing.num_chunks)
    goal = {}
    for r in ranks:
        for c in chunks:
            one = listing.root if listing.owners is None else listing.owners[c]
            if listing.kind in ("allgather", "broadcast"):
                goal[r, c] = Counter([one])
            elif listing.kind == "allreduce" or one == r:
                goal[r, c] = Counter(ranks)
    return goal
