"""Pipeline workload: costs of a pipeline's blocks, and the simulated step of a partition at given speeds and rates."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ringweave.errors import UsageError, explain
from ringweave.planning.partition.problem import PartitionCosts, PartitionMemory, PartitionProblem
from ringweave.sim.pipeline_schedules import PipelineSchedule, generate_pipeline_schedule
from ringweave.sim.pipeline_simulation import Overheads, PipelineTimeline, StageTimes

MIN_TRANSFER_FRACTION = 0.1
"""A link matters if a transfer takes at least this fraction of the slowest stage's computing for a microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConditions:
    """Current speeds of devices and rates of links."""

    speeds: tuple[float, ...]
    """For each device, in order: 1 is as profiled, 0.5 takes twice as long."""
    rates: tuple[float, ...] = ()
    """Bytes per second of the link into each device but the first, in each direction; empty: links cost nothing."""


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached property
class PipelineWorkload:
    """Blocks of a model, and the schedule of its stages. Seconds are those of one microbatch, profiled.

    Raises:
        UsageError: Rows of unequal length, or values that are no numbers of the right sign.
    """

    forward_s: tuple[tuple[float, ...], ...]
    """A row for each kind of device, a number for each block."""
    backward_s: tuple[tuple[float, ...], ...]
    """A row for each kind of device, a number for each block."""
    num_devices: int
    """Number of devices, one stage each."""
    num_microbatches: int
    """Microbatches of a train step."""
    kinds: tuple[int, ...] = ()
    """For each device: its row; empty if there is one row."""
    forward_bytes: tuple[float, ...] = ()
    """For each block: bytes of its output, which crosses a cut behind it; the last is not used. Empty: not counted."""
    backward_bytes: tuple[float, ...] = ()
    """For each block: bytes of the gradient of its output."""
    state_bytes: tuple[float, ...] = ()
    """For each block: bytes of parameters, buffers and optimizer state, copied before it moves. Empty: not counted."""
    gradient_bytes: tuple[float, ...] = ()
    """For each block: bytes that are sent while training pauses."""
    update_s: tuple[tuple[float, ...], ...] = ()
    """As forward_s: the optimizer's step, once for each train step. Empty: not counted."""
    overheads: Overheads = field(default_factory=Overheads)
    """Further costs of a step; actions take longer on a slower device as blocks do."""
    latency_s: tuple[float, ...] = ()
    """Latency of the link into each device but the first. Empty: none."""
    schedule: str | PipelineSchedule = "1f1b"
    """One of `ringweave.sim.pipeline_schedules.NAMES`, or an order itself."""
    transfers: str = "asynchronous"
    """How stages transfer: `asynchronous` or `blocking`."""
    memory: PartitionMemory | None = None
    """Memory of blocks and devices; None: no limit."""

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
        self.problem(PipelineConditions(speeds=(1.0,) * self.num_devices))

    @property
    def num_blocks(self) -> int:
        return len(self.forward_s[0]) if self.forward_s else 0

    def problem(self, conditions: PipelineConditions) -> PartitionProblem:
        """Return the partition problem under these conditions.

        Links are full duplex, so the larger of the two directions counts.
        """
        rows = [
            tuple(f + b for f, b in zip(forward, backward, strict=True))
            for forward, backward in zip(self.forward_s, self.backward_s, strict=True)
        ]
        return PartitionProblem(
            work=tuple(rows),
            capability=conditions.speeds,
            kinds=self.kinds,
            activation=self._crossing(),
            bandwidth=conditions.rates,
            memory=self.memory,
        )

    def times(self, splits: Sequence[int], conditions: PipelineConditions) -> StageTimes:
        """Return the times of a partition's stages and links, for one microbatch."""
        actions_s = self.overheads.action_s or (0.0,) * self.num_devices
        beside = tuple(action_s / speed for action_s, speed in zip(actions_s, conditions.speeds, strict=True))
        times = StageTimes(
            forward_s=self._stage_s(self.forward_s, splits, conditions.speeds),
            backward_s=self._stage_s(self.backward_s, splits, conditions.speeds),
            before_s=self._stage_s(self.update_s, splits, conditions.speeds) if self.update_s else (),
            forward_transfer_s=self._transfers_s(self.forward_bytes, splits, conditions.rates),
            backward_transfer_s=self._transfers_s(self.backward_bytes, splits, conditions.rates),
        )
        return times.with_overheads(replace(self.overheads, action_s=beside))

    def profiled_s(self, splits: Sequence[int]) -> tuple[float, ...]:
        """Return each stage's profiled computing time in a whole train step, at speed 1."""
        times = self.times(splits, PipelineConditions(speeds=(1.0,) * self.num_devices))
        return tuple(self.num_microbatches * (f + b) for f, b in zip(times.forward_s, times.backward_s, strict=True))

    def step_s(self, splits: Sequence[int], conditions: PipelineConditions) -> float:
        """Return the simulated seconds of a train step's schedule.

        Cost: O(stages x microbatches).
        """
        return self._course.step_s(self.times(splits, conditions))

    @functools.cached_property
    def _course(self) -> PipelineTimeline:
        order = self.schedule
        if not isinstance(order, PipelineSchedule):
            order = generate_pipeline_schedule(order, self.num_devices, self.num_microbatches)
        return PipelineTimeline(order, self.transfers)

    def fits(self, splits: Sequence[int]) -> bool:
        """Return True if every stage has a block, and room for its memory."""
        edges = (0, *splits, self.num_blocks)
        if any(s >= j for s, j in itertools.pairwise(edges)):
            return False
        if self.memory is None:
            return True
        costs = PartitionCosts(self.problem(PipelineConditions(speeds=(1.0,) * self.num_devices)))
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


def _check_row(name: str, row: Sequence[float], num_blocks: int) -> None:
    if len(row) != num_blocks:
        do = "Give one for each block"
        raise UsageError(explain(f"{name}: how many", got=len(row), expected=str(num_blocks), do=do))
    for number, value in enumerate(row, start=1):
        if not (math.isfinite(value) and value >= 0):
            expected, do = "a finite number, 0 or more", "Profile the block again"
            raise UsageError(explain(f"{name} of block {number}", got=value, expected=expected, do=do))
