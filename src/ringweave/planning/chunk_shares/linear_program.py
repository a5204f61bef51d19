"""Linear program of the leader fractions, over symmetry classes of vertices; the only user of HiGHS."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

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
    level = float(first.values[-1]) * _LEVEL_SLACK
    prices = np.abs(first.prices[: len(program.slowness)])
    return program.unpack(program.minimise([level if price > _MIN_PRICE else None for price in prices], level).values)


def min_busiest(trees: Sequence[SymmetryClasses]) -> tuple[float, list[float]]:
    """Return the largest tau of `solve_shares`, in a third of the time, and the fraction of the message for each tree.

    Raises:
        RingweaveError: The solver fails.
    """
    program = _LinearProgram(trees)
    found = program.minimise().values
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
    result = _solve(
        cost,
        at_most=[(row, 0.0) for row in (*rows, *nestings)],
        equal=[*((row, 0.0) for row in sums), *zip(deviations, itertools.chain.from_iterable(even), strict=True)],
        lower=[0.0] * count + [1.0] + [0.0] * 2 * count + [least_s_per_byte * unit],
        upper=[1.0] * tau + [highspy.kHighsInf],
    )
    return block.unpack(result.values.tolist())[1]


class _SilentSolver(highspy.Highs):
    """HiGHS without callbacks: enabling them prints a banner to the standard output before it can be turned off."""

    def enableCallbacks(self) -> None:  # noqa: N802 - highspy's name
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Solution:
    """Values of the variables, and price of each row: what a looser limit would take from the cost."""

    values: np.ndarray
    prices: np.ndarray


def _solve(
    cost: np.ndarray,
    *,
    at_most: Sequence[tuple[_SparseRow, float]],
    equal: Sequence[tuple[_SparseRow, float]],
    lower: list[float],
    upper: list[float],
) -> _Solution:
    """Return the least cost, where rows are at most, or equal to, the numbers beside them."""
    program, rows = highspy.HighsLp(), [row for row, _ in (*at_most, *equal)]
    program.num_col_, program.num_row_ = len(cost), len(rows)
    program.col_cost_, program.col_lower_, program.col_upper_ = cost, lower, upper
    limits = [limit for _, limit in (*at_most, *equal)]
    program.row_lower_, program.row_upper_ = [-highspy.kHighsInf] * len(at_most) + limits[len(at_most) :], limits
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.cumsum([0, *map(len, rows)])
    matrix.index_ = [column for row in rows for column in row]
    matrix.value_ = [value for row in rows for value in row.values()]
    solver = _SilentSolver()
    solver.silent()
    solver.setOptionValue("threads", 1)
    solver.passModel(program)
    solver.run()
    status = solver.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        text = solver.modelStatusToString(status)
        raise RingweaveError(f"shares: {text}, expected a solution. Force --schedule ring and report it.")
    solution = solver.getSolution()
    return _Solution(np.array(solution.col_value), np.array(solution.row_dual))


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

    def minimise(self, levels: Sequence[float | None] | None = None, at_most: float | None = None) -> _Solution:
        """Find the least tau: each link stays below its level, or, where that is None, below tau."""
        cost = np.zeros(self._tau + 1)
        cost[self._tau] = 1
        rows: list[tuple[_SparseRow, float]] = []
        for vertex, level in zip(self.slowness, levels or [None] * len(self.slowness), strict=True):
            row = dict(self._loads[vertex])
            if at_most:
                for column, factor in row.items():
                    cost[column] += _TOTAL_LOAD_WEIGHT * factor / self._tau
            if level is None:
                row[self._tau] = -1.0
            rows.append((row, level or 0.0))
        whole = {block.weight: 1.0 for block in self.blocks}
        return _solve(
            cost,
            at_most=[*rows, *((row, 0.0) for row in self._nestings)],
            equal=[*((row, 0.0) for row in self._sums), (whole, 1.0)],
            lower=[0.0] * (self._tau + 1),
            upper=[1.0] * self._tau + [highspy.kHighsInf if at_most is None else at_most],
        )

    def unpack(self, values: np.ndarray) -> TreeSolutions:
        found = np.clip(values, 0, 1)
        found[[block.weight for block in self.blocks if found[block.weight] < _MIN_WEIGHT]] = 0
        solution = [block.unpack(found.tolist()) for block in self.blocks]
        total = sum(weight for weight, _ in solution)
        return [(weight / total, z) for weight, z in solution]
