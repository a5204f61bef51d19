"""Linear program of the leader fractions, over symmetry classes of vertices; the only user of scipy."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import csr_array

from ringweave.errors import RingweaveError
from ringweave.planning.chunk_shares.share_tree import SymmetryClasses, load_factors

_SparseRow = dict[int, float]
_LEVEL_SLACK = 1 + 1e-6
"""Slack of a level: more than the solver's tolerance, 1e-7."""
_MIN_PRICE = 1e-7
_TOTAL_LOAD_WEIGHT = 1e-4
"""Weight of the sum of all loads relative to the busiest link."""
_DEVIATION_WEIGHT = 1e-4
"""Weight of the deviation from even fractions relative to the busiest link."""
_MIN_WEIGHT = 1e-6
"""Parts of the message below this weight are dropped."""

TreeSolutions = list[tuple[float, list[list[float]]]]
"""For each tree: its fraction of the message, and for each class z for the domains above it, from the root down, as
fractions of that part."""


def solve_shares(trees: Sequence[SymmetryClasses]) -> TreeSolutions:
    """Solve the leader fractions of each tree, and the part of the message that goes through it.

    The first program makes the busiest link least busy. The links that limit it (those with a price) keep that load.
    Then the busiest of the others is made least busy, and their total load small.

    Args:
        trees: The whole tree, or it without some domains.

    Raises:
        RingweaveError: The solver fails.
    """
    program = _LinearProgram(trees)
    first = program.minimise()
    level = float(first.x[-1]) * _LEVEL_SLACK
    prices = np.abs(first.ineqlin.marginals[: len(program.slowness)])
    return program.unpack(program.minimise([level if price > _MIN_PRICE else None for price in prices], level).x)


def min_busiest(trees: Sequence[SymmetryClasses]) -> tuple[float, list[float]]:
    """Return the largest tau of `solve_shares`, in a third of the time, and the fraction of the message for each tree.

    Raises:
        RingweaveError: The solver fails.
    """
    program = _LinearProgram(trees)
    found = program.minimise().x
    return float(found[-1]) / program.unit, [float(found[block.weight]) for block in program.blocks]


def solve_blocks(
    kinds: SymmetryClasses, owned: Sequence[float], even: Sequence[Sequence[float]], least_s_per_byte: float
) -> list[list[float]]:
    """Solve the leader fractions of an allgather (`block_routes`): the least busy links, near even fractions.

    Args:
        kinds: The tree; no domain is removed.
        owned: For each class, the fraction of the message that the ranks below one of its vertices own.
        even: For each class, even fractions for the domains above it.
        least_s_per_byte: Time that no fractions go below.

    Returns:
        For each class, z for the domains above it, from the root down.

    Raises:
        RingweaveError: The solver fails.
    """
    block = _TreeVariables(kinds, 0)
    unit, count = min(kinds.rates[1:]), block.weight
    tau = 1 + 3 * count  # z, the weight, what each z has more and less than even, tau
    rows: list[_SparseRow] = []
    for kind, row in enumerate(block.carried_by_kind(), start=1):
        slowness = unit / kinds.rates[kind]
        weighted = {column: factor * slowness for column, factor in row.items()}
        rows.append({**weighted, block.weight: owned[kind] * slowness, tau: -1.0})
    deviations: list[_SparseRow] = [
        {column: 1.0, count + 1 + column: -1.0, 2 * count + 1 + column: 1.0} for column in range(count)
    ]
    sums, nestings = list(block.sum_constraints()), list(block.nesting_constraints())
    cost = np.full(tau + 1, _DEVIATION_WEIGHT / max(1, count))
    cost[: count + 1], cost[tau] = 0.0, 1.0
    result = linprog(
        cost,
        A_ub=_sparse_matrix([*rows, *nestings], tau + 1),
        b_ub=[0.0] * (len(rows) + len(nestings)),
        A_eq=_sparse_matrix([*sums, *deviations], tau + 1),
        b_eq=[0.0] * len(sums) + [z for each in even for z in each],
        bounds=[(0, 1)] * count + [(1, 1)] + [(0, 1)] * 2 * count + [(least_s_per_byte * unit, None)],
        method="highs",
    )
    return block.unpack(_checked(result).x.tolist())[1]


def _checked(result: OptimizeResult) -> OptimizeResult:
    if not result.success:
        raise RingweaveError(f"shares: {result.message}, expected a solution. Force --schedule ring and report it.")
    return result


def _sparse_matrix(rows: Sequence[_SparseRow], num_columns: int) -> csr_array:
    at = [index for index, row in enumerate(rows) for _ in row]
    columns = [column for row in rows for column in row]
    values = [value for row in rows for value in row.values()]
    return csr_array((values, (at, columns)), shape=(len(rows), num_columns))


class _TreeVariables:
    """Variables of one tree: z(class, domain above), one after the other, then the weight of the tree."""

    def __init__(self, kinds: SymmetryClasses, first: int) -> None:
        self._kinds = kinds
        self._above: list[list[int]] = [[]]
        for parent in kinds.parents[1:]:
            self._above.append([*self._above[parent], parent])
        self._starts = []
        for above in self._above:
            self._starts.append(first)
            first += len(above)
        self.weight = first

    def link_loads(self) -> Iterator[tuple[int, _SparseRow]]:
        """Yield the load of each link of the whole tree."""
        for link in self._kinds.links():
            yield link.vertex, {**self._carried(link.members), self.weight: float(sum(link.members.values()))}

    def carried_by_kind(self) -> Iterator[_SparseRow]:
        """Yield what the link of each class but the root's carries because its vertices lead."""
        return (self._carried({kind: 1}) for kind in range(1, len(self._kinds.parents)))

    def _carried(self, members: Mapping[int, int]) -> _SparseRow:
        """Return the load of the link above some members of a domain, minus the number of these."""
        row: _SparseRow = {}
        above = self._above[next(iter(members))]
        for place, factor in enumerate(
            load_factors([self._kinds.num_members[d] for d in above], sum(members.values()))
        ):
            row.update({self._starts[kind] + place: factor * count for kind, count in members.items()})
        return row

    def sum_constraints(self) -> Iterator[_SparseRow]:
        """Yield constraints: members together lead what their domain leads, and all of the part among themselves."""
        for domain, members in enumerate(self._kinds.children):
            for place in range(len(self._above[domain]) + 1 if members else 0):
                row = {self._starts[kind] + place: float(self._kinds.counts[kind]) for kind in members}
                whole = self._starts[domain] + place if place < len(self._above[domain]) else self.weight
                yield {**row, whole: -1.0}

    def nesting_constraints(self) -> Iterator[_SparseRow]:
        """Yield constraints: the leader of a domain also leads the domains below that contain it."""
        for start, above in zip(self._starts, self._above, strict=True):
            for place in range(len(above) - 1):
                yield {start + place: 1.0, start + place + 1: -1.0}

    def unpack(self, values: list[float]) -> tuple[float, list[list[float]]]:
        """Return the weight, and z of each class."""
        weight = values[self.weight]
        z = [values[start : start + len(above)] for start, above in zip(self._starts, self._above, strict=True)]
        return weight, [[min(1.0, value / weight) if weight else 0.0 for value in each] for each in z]


class _LinearProgram:
    """Variables of the trees, then tau."""

    def __init__(self, trees: Sequence[SymmetryClasses]) -> None:
        self.blocks: list[_TreeVariables] = []
        for kinds in trees:
            self.blocks.append(_TreeVariables(kinds, self.blocks[-1].weight + 1 if self.blocks else 0))
        self._tau = self.blocks[-1].weight + 1
        rates = {link.vertex: link.rate for link in trees[0].links()}
        self.unit = min(rates.values())
        self.slowness = {vertex: self.unit / rates[vertex] for vertex in sorted(rates)}
        self._loads: defaultdict[int, _SparseRow] = defaultdict(dict)
        for block in self.blocks:
            for vertex, row in block.link_loads():
                slowness = self.slowness[vertex]
                self._loads[vertex].update({column: factor * slowness for column, factor in row.items()})
        self._sums = [row for block in self.blocks for row in block.sum_constraints()]
        self._nestings = [row for block in self.blocks for row in block.nesting_constraints()]

    def minimise(self, levels: Sequence[float | None] | None = None, at_most: float | None = None) -> OptimizeResult:
        """Find the least tau: each link stays below its level, or, where that is None, below tau."""
        cost = np.zeros(self._tau + 1)
        cost[self._tau] = 1
        rows, limits = [], []
        for vertex, level in zip(self.slowness, levels or [None] * len(self.slowness), strict=True):
            row = dict(self._loads[vertex])
            if at_most:
                for column, factor in row.items():
                    cost[column] += _TOTAL_LOAD_WEIGHT * factor / self._tau
            if level is None:
                row[self._tau] = -1.0
            rows.append(row)
            limits.append(level or 0.0)
        whole = {block.weight: 1.0 for block in self.blocks}
        result = linprog(
            cost,
            A_ub=_sparse_matrix([*rows, *self._nestings], self._tau + 1),
            b_ub=limits + [0.0] * len(self._nestings),
            A_eq=_sparse_matrix([*self._sums, whole], self._tau + 1),
            b_eq=[0.0] * len(self._sums) + [1.0],
            bounds=[(0, 1)] * self._tau + [(0, at_most)],
            method="highs",
        )
        return _checked(result)

    def unpack(self, values: np.ndarray) -> TreeSolutions:
        found = np.clip(values, 0, 1)
        found[[block.weight for block in self.blocks if found[block.weight] < _MIN_WEIGHT]] = 0
        solution = [block.unpack(found.tolist()) for block in self.blocks]
        total = sum(weight for weight, _ in solution)
        return [(weight / total, z) for weight, z in solution]
