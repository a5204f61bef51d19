"""A plan: everything that was chosen for a group of ranks, as data."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ringweave import schedules
from ringweave.cost import Demand
from ringweave.errors import UsageError, explain
from ringweave.planning.choices import Choice, pipelined
from ringweave.schedules import HOST, Schedule, Stripe

_AS_GOOD = 1.02
_PREFERRED = ("ring", "direct", "multi-level", "leader-matrix", "hierarchical", "halving-doubling", "ps")
"""Among equals: on a network a ring, where only one stream meets another at a link at a time."""
_PREFERRED_INSIDE = ("direct", *(name for name in _PREFERRED if name != "direct"))
"""Inside a node the direct one, which copies least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one group runs on its part of the cluster. One rank makes it and sends its text to the others.

    All that follows is computed from these numbers alone, so every rank that has the same text chooses the same.
    """

    nodes: tuple[str, ...]
    """Name of the node of each rank."""
    ring_order: tuple[int, ...]
    """Ranks in the order of the ring."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each node (or NIC), the leader first, in the order of the matrix, row by row."""
    num_columns: int
    """Columns of the matrix of leaders."""
    tiers: tuple[tuple[int, ...], ...]
    """Groups of the hierarchical schedule: of nodes, or of racks, whichever is predicted to be faster."""
    root: int
    """Rank that serves as parameter server."""
    direct_shares: tuple[int, ...]
    """What each rank owns in the direct schedule."""
    stripes: tuple[Stripe, ...]
    """Parts of the message with the leaders on every level, for the multi-level schedule; none if that was left out."""
    demands: tuple[tuple[str, Demand], ...]
    """For each schedule that was considered what its predicted times follow from."""
    left_out: tuple[tuple[str, str], ...]
    """For each schedule that was not considered why not."""
    bound_s_per_byte: float
    """Least time of any allreduce of this group, per byte of the message."""
    binding: str
    """The cut or partition that says so."""

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each group."""
        return tuple(group[0] for group in self.groups)

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """The leaders in rows."""
        return schedules.matrix(self.leaders, self.num_columns)

    def demand(self, name: str) -> Demand:
        """What a schedule that was considered asks of the links.

        Raises:
            KeyError: It was not considered.
        """
        return dict(self.demands)[name]

    def bound_s(self, num_bytes: int) -> float:
        """The least time of any allreduce of that size: a bound, not a prediction."""
        return self.bound_s_per_byte * num_bytes

    def generate(self, name: str) -> Schedule:
        """The schedule of that name on this group's part of the cluster.

        Raises:
            UsageError: No such schedule, or `host`, which is none.
        """
        schedules.check_name(name)
        if name == HOST:
            do = "'host' names the library underneath, which plans its messages itself"
            raise UsageError(explain("schedule", got=name, expected="one that is planned here", do=do))
        return self._generators()[name]()

    def _multi_level(self) -> Schedule:
        if not self.stripes:
            reason = dict(self.left_out).get("multi-level", "no reason is given")
            do = f"Name another one; it was left out: {reason}"
            raise UsageError(explain("schedule", got="multi-level", expected="one that was considered", do=do))
        return schedules.multi_level_striped(self.stripes)

    def choices(self, num_bytes: int) -> list[Choice]:
        """Every schedule that was considered, at its best pipelining, by predicted time."""
        found = [pipelined(name, asked, num_bytes) for name, asked in self.demands]
        return sorted(found, key=lambda choice: choice.predicted_s)

    def choose(self, num_bytes: int, forced: str | None = None) -> Choice:
        """The fastest by prediction, or the one that is forced.

        Those that are predicted to be within 2 % of the fastest count as equals (the model is not better than that).

        A forced schedule that was left out, and `host`, are run without pipelining, with an infinite predicted time.

        Raises:
            UsageError: No schedule has the forced name.
        """
        if forced is None:
            by_name = {choice.schedule: choice for choice in self.choices(num_bytes)}
            return by_name[self.fastest({name: choice.predicted_s for name, choice in by_name.items()})]
        name = schedules.check_name(forced)
        for candidate, asked in self.demands:
            if candidate == name:
                return pipelined(name, asked, num_bytes)
        return Choice(schedule=name, num_segments=1, lag=0, window=2, predicted_s=math.inf)

    def fastest(self, seconds: Mapping[str, float]) -> str:
        """The schedule of the least time, predicted or simulated; those within 2 % of it count as equals.

        Args:
            seconds: By name of schedule; at least one.
        """
        near = [name for name in seconds if seconds[name] <= min(seconds.values()) * _AS_GOOD]
        return min(near, key=(_PREFERRED if len(set(self.nodes)) > 1 else _PREFERRED_INSIDE).index)

    def _generators(self) -> dict[str, Callable[[], Schedule]]:
        count = len(self.nodes)
        return {
            "ring": lambda: schedules.ring(count, self.ring_order),
            "leader-matrix": lambda: schedules.leader_matrix(self.groups, self.num_columns),
            "hierarchical": lambda: schedules.hierarchical(self.tiers),
            "ps": lambda: schedules.parameter_server(count, self.root),
            "direct": lambda: schedules.direct(count, self.direct_shares),
            "multi-level": self._multi_level,
            "halving-doubling": lambda: schedules.halving_doubling(count),
        }

    def __str__(self) -> str:
        from ringweave.planning.plan_text import write

        return write(self)

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan of a text; `Plan.parse(str(plan)) == plan`.

        Raises:
            ScheduleError: The text is no plan.
        """
        from ringweave.planning.plan_text import read

        return read(text)
