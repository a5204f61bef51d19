"""The linear program of `fractions`, over kinds of vertices; the only user of scipy."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import csr_array

from ringweave.errors import RingweaveError
from ringweave.planning.sharing.hierarchy import Span
from ringweave.planning.sharing.loading import carrying
from ringweave.planning.sharing.orbits import Orbits

_Row = dict[int, float]
_SLACK = 1 + 1e-6
"""More than the solver's tolerance, 1e-7."""
_PRICED = 1e-7
_TIDY = 1e-4
"""How little the loads added up count beside the busiest link."""


def solve(kinds: Orbits) -> list[list[float]]:
    """Z of each kind for the domains above it, from the root down.

    First the busiest link is made least busy. What then decides (the links with a price) keeps that; of the others the
    busiest is made least busy, and all together carry little.

    Raises:
        RingweaveError: The solver gives up.
    """
    program = _Program(kinds)
    first = program.minimise()
    level = float(first.x[-1]) * _SLACK
    prices = np.abs(first.ineqlin.marginals[: len(program.links)])
    return program.unpacked(program.minimise([level if price > _PRICED else None for price in prices], level).x)


def least(kinds: Orbits) -> float:
    """The largest tau of `solve`, in a third of the time.

    Raises:
        RingweaveError: The solver gives up.
    """
    return float(_Program(kinds).minimise().x[-1]) / min(kinds.rates[1:])


class _Program:
    """Variables: z(kind, domain above), one after the other, then tau."""

    def __init__(self, kinds: Orbits) -> None:
        self._kinds = kinds
        self._above: list[list[int]] = [[]]
        for parent in kinds.parents[1:]:
            self._above.append([*self._above[parent], parent])
        starts = itertools.accumulate((len(above) for above in self._above), initial=0)
        self._starts = list(starts)
        self._tau = self._starts[-1]
        self._unit = min(kinds.rates[1:])
        own = (Span(kinds.rates[kind], {kind: 1}) for kind in range(1, len(kinds.parents)))
        self.links = [*own, *kinds.spans]
        self._equal = [*self._sums()]
        self._nested = [*self._nestings()]

    def minimise(self, levels: Sequence[float | None] | None = None, at_most: float | None = None) -> OptimizeResult:
        """Least tau: each link stays below its level, or where that is None below tau."""
        cost = np.zeros(self._tau + 1)
        cost[self._tau] = 1
        rows, limits = [], []
        for link, level in zip(self.links, levels or [None] * len(self.links), strict=True):
            slowness = self._unit / link.rate
            row = {column: factor * slowness for column, factor in self._carried(link.members).items()}
            for column, factor in row.items():
                cost[column] += _TIDY * factor / self._tau if at_most else 0
            if level is None:
                row[self._tau] = -1.0
            rows.append(row)
            limits.append((level or 0) - sum(link.members.values()) * slowness)
        rows += self._nested
        result = linprog(
            cost,
            A_ub=self._matrix(rows),
            b_ub=limits + [0.0] * len(self._nested),
            A_eq=self._matrix([row for row, _ in self._equal]),
            b_eq=[value for _, value in self._equal],
            bounds=[(0, 1)] * self._tau + [(0, at_most)],
            method="highs",
        )
        if not result.success:
            raise RingweaveError(f"shares: {result.message}, expected a solution. Force --schedule ring and report it.")
        return result

    def unpacked(self, values: np.ndarray) -> list[list[float]]:
        """Z of each kind."""
        z = np.clip(values[: self._tau], 0, 1).tolist()
        return [z[start : start + len(above)] for start, above in zip(self._starts, self._above, strict=False)]

    def _carried(self, members: Mapping[int, int]) -> _Row:
        """What passes the link above some members of a domain, less the number of these."""
        row: _Row = {}
        above = self._above[next(iter(members))]
        for place, factor in enumerate(carrying([self._kinds.num_members[d] for d in above], sum(members.values()))):
            row.update({self._starts[kind] + place: factor * count for kind, count in members.items()})
        return row

    def _sums(self) -> Iterator[tuple[_Row, float]]:
        """What the members lead is what their domain leads."""
        for domain, members in enumerate(self._kinds.children):
            for place in range(len(self._above[domain]) + 1 if members else 0):
                row = {self._starts[kind] + place: float(self._kinds.counts[kind]) for kind in members}
                if place < len(self._above[domain]):
                    row[self._starts[domain] + place] = -1.0
                    yield row, 0.0
                else:
                    yield row, 1.0

    def _nestings(self) -> Iterator[_Row]:
        """Who leads a domain leads the domains below that it is in."""
        for start, above in zip(self._starts, self._above, strict=False):
            for place in range(len(above) - 1):
                yield {start + place: 1.0, start + place + 1: -1.0}

    def _matrix(self, rows: list[_Row]) -> csr_array:
        at = [index for index, row in enumerate(rows) for _ in row]
        columns = [column for row in rows for column in row]
        values = [value for row in rows for value in row.values()]
        return csr_array((values, (at, columns)), shape=(len(rows), self._tau + 1))
