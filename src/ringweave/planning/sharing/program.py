"""The linear program of `fractions`, over kinds of vertices; the only user of scipy."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import csr_array

from ringweave.errors import RingweaveError
from ringweave.planning.sharing.loading import carrying
from ringweave.planning.sharing.orbits import Orbits

_Row = dict[int, float]
_SLACK = 1 + 1e-6
"""More than the solver's tolerance, 1e-7."""
_PRICED = 1e-7
_TIDY = 1e-4
"""How little the loads added up count beside the busiest link."""
_NOTHING = 1e-6
"""A part of the message this small is none."""

Solution = list[tuple[float, list[list[float]]]]
"""For each tree the fraction of the message that goes through it, and z of each kind for the domains above it, from the
root down, as fractions of that part."""


def solve(trees: Sequence[Orbits]) -> Solution:
    """Who leads how much, and which part of the message goes through which tree.

    First the busiest link is made least busy. What then decides (the links with a price) keeps that; of the others the
    busiest is made least busy, and all together carry little.

    Args:
        trees: The whole tree, or it without some domains.

    Raises:
        RingweaveError: The solver gives up.
    """
    program = _Program(trees)
    first = program.minimise()
    level = float(first.x[-1]) * _SLACK
    prices = np.abs(first.ineqlin.marginals[: len(program.slowness)])
    return program.unpacked(program.minimise([level if price > _PRICED else None for price in prices], level).x)


def least(trees: Sequence[Orbits]) -> tuple[float, list[float]]:
    """The largest tau of `solve`, in a third of the time, and the fraction of the message for each tree.

    Raises:
        RingweaveError: The solver gives up.
    """
    program = _Program(trees)
    found = program.minimise().x
    return float(found[-1]) / program.unit, [float(found[block.weight]) for block in program.blocks]


class _Block:
    """The variables of one tree: z(kind, domain above), one after the other, then the weight of the tree."""

    def __init__(self, kinds: Orbits, first: int) -> None:
        self._kinds = kinds
        self._above: list[list[int]] = [[]]
        for parent in kinds.parents[1:]:
            self._above.append([*self._above[parent], parent])
        self._starts = []
        for above in self._above:
            self._starts.append(first)
            first += len(above)
        self.weight = first

    def loads(self) -> Iterator[tuple[int, _Row]]:
        """For each link of the whole tree what passes it here."""
        for link in self._kinds.links():
            yield link.vertex, {**self._carried(link.members), self.weight: float(sum(link.members.values()))}

    def _carried(self, members: Mapping[int, int]) -> _Row:
        """What passes the link above some members of a domain, less the number of these."""
        row: _Row = {}
        above = self._above[next(iter(members))]
        for place, factor in enumerate(carrying([self._kinds.num_members[d] for d in above], sum(members.values()))):
            row.update({self._starts[kind] + place: factor * count for kind, count in members.items()})
        return row

    def sums(self) -> Iterator[_Row]:
        """What the members lead is what their domain leads, and among themselves all of the part."""
        for domain, members in enumerate(self._kinds.children):
            for place in range(len(self._above[domain]) + 1 if members else 0):
                row = {self._starts[kind] + place: float(self._kinds.counts[kind]) for kind in members}
                whole = self._starts[domain] + place if place < len(self._above[domain]) else self.weight
                yield {**row, whole: -1.0}

    def nestings(self) -> Iterator[_Row]:
        """Who leads a domain leads the domains below that it is in."""
        for start, above in zip(self._starts, self._above, strict=True):
            for place in range(len(above) - 1):
                yield {start + place: 1.0, start + place + 1: -1.0}

    def unpacked(self, values: list[float]) -> tuple[float, list[list[float]]]:
        """The weight, and z of each kind."""
        weight = values[self.weight]
        z = [values[start : start + len(above)] for start, above in zip(self._starts, self._above, strict=True)]
        return weight, [[min(1.0, value / weight) if weight else 0.0 for value in each] for each in z]


class _Program:
    """The variables of the trees, then tau."""

    def __init__(self, trees: Sequence[Orbits]) -> None:
        self.blocks: list[_Block] = []
        for kinds in trees:
            self.blocks.append(_Block(kinds, self.blocks[-1].weight + 1 if self.blocks else 0))
        self._tau = self.blocks[-1].weight + 1
        rates = {link.vertex: link.rate for link in trees[0].links()}
        self.unit = min(rates.values())
        self.slowness = {vertex: self.unit / rates[vertex] for vertex in sorted(rates)}
        self._loads: defaultdict[int, _Row] = defaultdict(dict)
        for block in self.blocks:
            for vertex, row in block.loads():
                slowness = self.slowness[vertex]
                self._loads[vertex].update({column: factor * slowness for column, factor in row.items()})
        self._sums = [row for block in self.blocks for row in block.sums()]
        self._nested = [row for block in self.blocks for row in block.nestings()]

    def minimise(self, levels: Sequence[float | None] | None = None, at_most: float | None = None) -> OptimizeResult:
        """Least tau: each link stays below its level, or where that is None below tau."""
        cost = np.zeros(self._tau + 1)
        cost[self._tau] = 1
        rows, limits = [], []
        for vertex, level in zip(self.slowness, levels or [None] * len(self.slowness), strict=True):
            row = dict(self._loads[vertex])
            if at_most:
                for column, factor in row.items():
                    cost[column] += _TIDY * factor / self._tau
            if level is None:
                row[self._tau] = -1.0
            rows.append(row)
            limits.append(level or 0.0)
        whole = {block.weight: 1.0 for block in self.blocks}
        result = linprog(
            cost,
            A_ub=self._matrix([*rows, *self._nested]),
            b_ub=limits + [0.0] * len(self._nested),
            A_eq=self._matrix([*self._sums, whole]),
            b_eq=[0.0] * len(self._sums) + [1.0],
            bounds=[(0, 1)] * self._tau + [(0, at_most)],
            method="highs",
        )
        if not result.success:
            raise RingweaveError(f"shares: {result.message}, expected a solution. Force --schedule ring and report it.")
        return result

    def unpacked(self, values: np.ndarray) -> Solution:
        """What each tree is for."""
        found = np.clip(values, 0, 1)
        found[[block.weight for block in self.blocks if found[block.weight] < _NOTHING]] = 0
        solution = [block.unpacked(found.tolist()) for block in self.blocks]
        total = sum(weight for weight, _ in solution)
        return [(weight / total, z) for weight, z in solution]

    def _matrix(self, rows: list[_Row]) -> csr_array:
        at = [index for index, row in enumerate(rows) for _ in row]
        columns = [column for row in rows for column in row]
        values = [value for row in rows for value in row.values()]
        return csr_array((values, (at, columns)), shape=(len(rows), self._tau + 1))
