"""What a pipeline's blocks take, and how a partition of them does under given speeds of devices and rates of links."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ringweave.errors import UsageError, explain
from ringweave.planning.partitioning import Memory, Problem
from ringweave.planning.partitioning.costs import Costs
from ringweave.sim.pipelines import Course, Order, Overheads, StageTimes, generate

FELT = 0.1
"""Of the slowest stage's computing for a microbatch, what a transfer must take for its link to matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """How fast devices and links are at present."""

    speeds: tuple[float, ...]
    """Of each device, in its order: 1 is as profiled, 0.5 takes twice as long."""
    rates: tuple[float, ...] = ()
    """Bytes per second of the link into each device but the first, in each direction; empty: links cost nothing."""


@dataclass(frozen=True, kw_only=True)  # without slots, for the course that is made once
class Workload:
    """A model as blocks, and the schedule that its stages follow. Seconds are those of one microbatch, profiled.

    Raises:
        UsageError: Rows of unequal length, or values that are no numbers of the right sign.
    """

    forward_s: tuple[tuple[float, ...], ...]
    """A row for each kind of device, a number for each block."""
    backward_s: tuple[tuple[float, ...], ...]
    """Likewise."""
    num_devices: int
    """One stage each."""
    num_microbatches: int
    """Of a train step."""
    kinds: tuple[int, ...] = ()
    """Of each device: its row; empty where there is one row."""
    forward_bytes: tuple[float, ...] = ()
    """Of each block: its output, which crosses a cut behind it; the last is not used. Empty: nothing to count."""
    backward_bytes: tuple[float, ...] = ()
    """Of each block: the gradient of its output."""
    state_bytes: tuple[float, ...] = ()
    """Of each block: parameters, buffers and optimizer state, copied before it moves. Empty: nothing to count."""
    gradient_bytes: tuple[float, ...] = ()
    """Of each block: what is sent while training pauses."""
    update_s: tuple[tuple[float, ...], ...] = ()
    """As forward_s: the optimizer's step, once for each train step. Empty: nothing to count."""
    overheads: Overheads = field(default_factory=Overheads)
    """What a step takes beside all that; actions take longer on a slower device as blocks do."""
    latency_s: tuple[float, ...] = ()
    """Of the link into each device but the first: what a transfer takes beside its bytes. Empty: nothing."""
    schedule: str | Order = "1f1b"
    """One of `ringweave.sim.pipelines.NAMES`, or an order itself."""
    transfers: str = "asynchronous"
    """How stages transfer: `asynchronous` or `blocking`."""
    memory: Memory | None = None
    """None: nothing is limited."""

    def __post_init__(self) -> None:
        for what in ("forward_s", "backward_s", "update_s"):
            for row in getattr(self, what):
                _check_row(what, row, self.num_blocks)
        for what in ("forward_bytes", "backward_bytes", "state_bytes", "gradient_bytes"):
            if getattr(self, what):
                _check_row(what, getattr(self, what), self.num_blocks)
        if len(self.forward_s) != len(self.backward_s):
            expected, do = f"{len(self.forward_s)}, as many as of forward_s", "Give a row for each kind of device"
            raise UsageError(explain("backward_s: how many rows", got=len(self.backward_s), expected=expected, do=do))
        self.problem(Conditions(speeds=(1.0,) * self.num_devices))

    @property
    def num_blocks(self) -> int:
        """N."""
        return len(self.forward_s[0]) if self.forward_s else 0

    def problem(self, conditions: Conditions) -> Problem:
        """The partition that is asked for under these conditions.

        Links are full duplex, so that the larger of the two directions counts.
        """
        rows = [
            tuple(f + b for f, b in zip(forward, backward, strict=True))
            for forward, backward in zip(self.forward_s, self.backward_s, strict=True)
        ]
        return Problem(
            work=tuple(rows),
            capability=conditions.speeds,
            kinds=self.kinds,
            activation=self._crossing(),
            bandwidth=conditions.rates,
            memory=self.memory,
        )

    def times(self, splits: Sequence[int], conditions: Conditions) -> StageTimes:
        """Of the stages and links of a partition, for one microbatch."""
        actions_s = self.overheads.action_s or (0.0,) * self.num_devices
        beside = tuple(action_s / speed for action_s, speed in zip(actions_s, conditions.speeds, strict=True))
        times = StageTimes(
            forward_s=self._stage_s(self.forward_s, splits, conditions.speeds),
            backward_s=self._stage_s(self.backward_s, splits, conditions.speeds),
            before_s=self._stage_s(self.update_s, splits, conditions.speeds) if self.update_s else (),
            forward_transfer_s=self._transfers_s(self.forward_bytes, splits, conditions.rates),
            backward_transfer_s=self._transfers_s(self.backward_bytes, splits, conditions.rates),
        )
        return times.beside(replace(self.overheads, action_s=beside))

    def profiled_s(self, splits: Sequence[int]) -> tuple[float, ...]:
        """Of each stage: computing in a whole train step as it was profiled, at speed 1."""
        times = self.times(splits, Conditions(speeds=(1.0,) * self.num_devices))
        return tuple(self.num_microbatches * (f + b) for f, b in zip(times.forward_s, times.backward_s, strict=True))

    def step_s(self, splits: Sequence[int], conditions: Conditions) -> float:
        """Simulated seconds of a train step's schedule.

        Cost: O(stages x microbatches).
        """
        return self._course.step_s(self.times(splits, conditions))

    @functools.cached_property
    def _course(self) -> Course:
        order = self.schedule
        if not isinstance(order, Order):
            order = generate(order, self.num_devices, self.num_microbatches)
        return Course(order, self.transfers)

    def fits(self, splits: Sequence[int]) -> bool:
        """Every stage has a block, and room for what it holds."""
        edges = (0, *splits, self.num_blocks)
        if any(s >= j for s, j in itertools.pairwise(edges)):
            return False
        if self.memory is None:
            return True
        costs = Costs(self.problem(Conditions(speeds=(1.0,) * self.num_devices)))
        return all(costs.fits(device, s, j) for device, (s, j) in enumerate(itertools.pairwise(edges)))

    def _stage_s(
        self, rows: tuple[tuple[float, ...], ...], splits: Sequence[int], speeds: Sequence[float]
    ) -> tuple[float, ...]:
        edges = (0, *splits, self.num_blocks)
        kinds = self.kinds or (0,) * self.num_devices
        spans = itertools.pairwise(edges)
        return tuple(
            math.fsum(rows[kind][s:j]) / speed for (s, j), kind, speed in zip(spans, kinds, speeds, strict=True)
        )

    def _transfers_s(
        self, crossing: Sequence[float], splits: Sequence[int], rates: Sequence[float]
    ) -> tuple[float, ...]:
        if not crossing or not rates:
            return ()
        latency_s = self.latency_s or (0.0,) * len(rates)
        cuts = zip(latency_s, splits, rates, strict=True)
        return tuple(fixed_s + crossing[cut - 1] / rate if cut else fixed_s for fixed_s, cut, rate in cuts)

    def _crossing(self) -> tuple[float, ...]:
        forward, backward = self.forward_bytes, self.backward_bytes
        if forward and backward:
            return tuple(map(max, forward, backward))
        return forward or backward


def _check_row(what: str, row: Sequence[float], num_blocks: int) -> None:
    if len(row) != num_blocks:
        do = "Give one for each block"
        raise UsageError(explain(f"{what}: how many", got=len(row), expected=str(num_blocks), do=do))
    for number, value in enumerate(row, start=1):
        if not (math.isfinite(value) and value >= 0):
            expected, do = "a finite number, 0 or more", "Profile the block again"
            raise UsageError(explain(f"{what} of block {number}", got=value, expected=expected, do=do))
