"""Pipeline workload: costs of a pipeline's blocks, and the simulated step of a partition at given speeds and rates."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ringweave.errors import UsageError
from ringweave.planning.partition.problem import PartitionMemory, PartitionProblem
from ringweave.sim.pipeline_schedules import PipelineSchedule, generate_pipeline_schedule
from ringweave.sim.pipeline_simulation import (
    DeviceShare,
    Overheads,
    PipelineTimeline,
    StageDevices,
    StageTimes,
    one_device_each,
)

MIN_TRANSFER_FRACTION = 0.1
"""A link matters if a transfer takes at least this fraction of the slowest stage's computing for a microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConditions:
    """Current speeds of devices and rates of links."""

    speeds: tuple[float, ...]
    """For each device, in order: 1 is as profiled, 0.5 takes twice as long."""
    rates: tuple[float, ...] = ()
    """Bytes per second of the link into each stage but the first, in each direction; empty: links cost nothing. Where
    stages have several devices: of the slowest pair of devices."""
    reduce_rates: tuple[float, ...] = ()
    """For each stage: bytes of gradients per second that its devices reduce with each other; empty: at once."""


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
    num_microbatches: int
    """Microbatches of a train step."""
    kinds: tuple[int, ...] = ()
    """For each device: its row; empty if there is one row."""
    forward_bytes: tuple[float, ...] = ()
    """For each block: bytes of its output, in the format in which it crosses a cut behind it; the last is not used.
    Empty: not counted."""
    backward_bytes: tuple[float, ...] = ()
    """For each block: bytes of the gradient of its output."""
    coding_s: tuple[tuple[float, ...], ...] = ()
    """As forward_s: encoding and decoding a tensor like its output, which a cut behind it costs on both of its sides,
    half in forward and half in backward. Steps count it, `problem` does not. Empty: none."""
    state_bytes: tuple[float, ...] = ()
    """For each block: bytes of parameters, buffers and optimizer state, copied before it moves. Empty: not counted."""
    gradient_bytes: tuple[float, ...] = ()
    """For each block: bytes that are sent while training pauses."""
    update_s: tuple[tuple[float, ...], ...] = ()
    """As forward_s: the optimizer's step, once for each train step. Empty: not counted."""
    overheads: Overheads = field(default_factory=Overheads)
    """Further costs of a step; actions take longer on a slower device as blocks do."""
    latency_s: tuple[float, ...] = ()
    """Latency of the link into each stage but the first. Empty: none."""
    devices: StageDevices | None = None
    """Devices of each stage and their samples of a microbatch; None: one device a stage."""
    fixed_share: tuple[tuple[float, ...], ...] = ()
    """As forward_s: the fraction of a block's time that a device also takes for fewer samples. Empty: none."""
    schedule: str | PipelineSchedule = "1f1b"
    """One of `ringweave.sim.pipeline_schedules.NAMES`, or an order itself."""
    transfers: str = "asynchronous"
    """How stages transfer: `asynchronous` or `blocking`."""
    memory: PartitionMemory | None = None
    """Memory of blocks and devices; None: no limit."""

    def __post_init__(self) -> None:
        for what in ("forward_s", "backward_s", "update_s", "fixed_share", "coding_s"):
            for row in getattr(self, what):
                _check_row(what, row, self.num_blocks)
        for what in ("forward_bytes", "backward_bytes", "state_bytes", "gradient_bytes"):
            if getattr(self, what):
                _check_row(what, getattr(self, what), self.num_blocks)
        if len(self.forward_s) != len(self.backward_s):
            expected, do = f"{len(self.forward_s)}, as many as of forward_s", "Give a row for each kind of device"
            raise UsageError("backward_s: how many rows", got=len(self.backward_s), expected=expected, do=do)
        if self.devices is None:
            self.problem(PipelineConditions(speeds=(1.0,) * self.num_devices), allow_empty=True)

    @property
    def num_blocks(self) -> int:
        return len(self.forward_s[0]) if self.forward_s else 0

    @property
    def num_stages(self) -> int:
        return self.num_devices if self.devices is None else self.devices.num_stages

    @property
    def placed(self) -> StageDevices:
        return self.devices or one_device_each(self.num_devices)

    def problem(self, conditions: PipelineConditions, *, allow_empty: bool = False) -> PartitionProblem:
        """Return the partition problem under these conditions.

        Links are full duplex, so the larger of the two directions counts. A stage of several devices counts as one
        device: each block takes as long as on the slowest of them, with its samples, and the device with the least
        memory counts; `fits` checks all of them.
        """
        if self.devices is not None:
            return self._stage_problem(self.devices, conditions, allow_empty=allow_empty)
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
            allow_empty=allow_empty,
        )

    def times(self, splits: Sequence[int], conditions: PipelineConditions) -> StageTimes:
        """Return the times of a partition's stages and links, for one microbatch."""
        actions_s = self.overheads.action_s or (0.0,) * self.num_devices
        beside = tuple(action_s / speed for action_s, speed in zip(actions_s, conditions.speeds, strict=True))
        coding_s = self._codings_s(splits, conditions.speeds)
        times = StageTimes(
            forward_s=tuple(map(operator.add, self._devices_s(self.forward_s, splits, conditions.speeds), coding_s)),
            backward_s=tuple(map(operator.add, self._devices_s(self.backward_s, splits, conditions.speeds), coding_s)),
            before_s=self._devices_s(self.update_s, splits, conditions.speeds) if self.update_s else (),
            forward_transfer_s=self._transfers_s(self.forward_bytes, splits, conditions.rates),
            backward_transfer_s=self._transfers_s(self.backward_bytes, splits, conditions.rates),
            reduce_s=self._reduces_s(splits, conditions.reduce_rates),
            devices=self.devices,
        )
        return times.with_overheads(replace(self.overheads, action_s=beside))

    def profiled_s(self, splits: Sequence[int]) -> tuple[float, ...]:
        """Return each device's profiled computing time in a whole train step, at speed 1."""
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
            order = generate_pipeline_schedule(order, self.num_stages, self.num_microbatches)
        return PipelineTimeline(order, self.transfers, self.devices)

    def fits(self, splits: Sequence[int]) -> bool:
        """Return True if every stage has a block, and room for its memory."""
        edges = (0, *splits, self.num_blocks)
        if any(s >= j for s, j in itertools.pairwise(edges)):
            return False
        if self.memory is None:
            return True
        placed, memory = self.placed, self.memory
        for device, stage in enumerate(placed.stage_of_device):
            blocks = slice(edges[stage], edges[stage + 1])
            held = math.fsum(memory.state[blocks])
            held += memory.in_flight[device] * math.fsum(memory.stash[blocks]) * placed.fraction(device)
            if held > memory.limit[device]:
                return False
        return True

    def rebalanced(self, splits: Sequence[int], conditions: PipelineConditions) -> StageDevices | None:
        """Return the devices with the samples that make each stage the fastest at these speeds; None: one each.

        Exact: each further sample goes to the device that is done first with it, and has memory for it.
        """
        if self.devices is None:
            return None
        edges, stages = (0, *splits, self.num_blocks), []
        for stage in range(self.devices.num_stages):
            members, blocks = self.devices.members(stage), range(edges[stage], edges[stage + 1])
            costs = {device: self._sample_costs(device, blocks, conditions) for device in members}
            samples = dict.fromkeys(members, 1)
            for _ in range(self.devices.num_samples - len(members)):
                done_s = [
                    (fixed_s + (samples[device] + 1) * each_s if samples[device] + 1 <= most else math.inf, device)
                    for device, (fixed_s, each_s, most) in costs.items()
                ]
                samples[min(done_s)[1]] += 1
            stages.append(tuple(DeviceShare(device, samples[device]) for device in members))
        return StageDevices(tuple(stages))

    def _sample_costs(self, device: int, blocks: range, conditions: PipelineConditions) -> tuple[float, float, float]:
        """Return (fixed seconds, seconds of each sample, samples that the memory takes) of blocks on a device."""
        assert self.devices is not None
        kind, speed = self.kinds[device] if self.kinds else 0, conditions.speeds[device]
        works = [self.forward_s[kind][block] + self.backward_s[kind][block] for block in blocks]
        shares = [self.fixed_share[kind][block] if self.fixed_share else 0.0 for block in blocks]
        fixed_s = math.fsum(map(operator.mul, works, shares)) / speed
        each_s = (math.fsum(works) / speed - fixed_s) / self.devices.num_samples
        if self.memory is None:
            return fixed_s, each_s, math.inf
        spare = self.memory.limit[device] - math.fsum(self.memory.state[block] for block in blocks)
        stash = self.memory.in_flight[device] * math.fsum(self.memory.stash[block] for block in blocks)
        if spare < 0:
            return fixed_s, each_s, 0
        return fixed_s, each_s, self.devices.num_samples * spare / stash if stash else math.inf

    def _part(self, kind: int, block: int, fraction: float) -> float:
        """Return the fraction of a block's time that a fraction of a microbatch takes."""
        fixed = self.fixed_share[kind][block] if self.fixed_share else 0.0
        return fixed + (1 - fixed) * fraction

    def _devices_s(
        self, rows: tuple[tuple[float, ...], ...], splits: Sequence[int], speeds: Sequence[float]
    ) -> tuple[float, ...]:
        """Return for each device the seconds of its stage's blocks, by these rows; updates take no fewer samples."""
        edges, placed, is_update = (0, *splits, self.num_blocks), self.placed, rows is self.update_s
        found = []
        for device, (stage, speed) in enumerate(zip(placed.stage_of_device, speeds, strict=True)):
            kind = self.kinds[device] if self.kinds else 0
            blocks = range(edges[stage], edges[stage + 1])
            fraction = 1.0 if is_update else placed.fraction(device)
            if fraction == 1:
                found.append(math.fsum(rows[kind][blocks.start : blocks.stop]) / speed)
            else:
                found.append(math.fsum(rows[kind][b] * self._part(kind, b, fraction) for b in blocks) / speed)
        return tuple(found)

    def _codings_s(self, splits: Sequence[int], speeds: Sequence[float]) -> tuple[float, ...]:
        """Return for each device the seconds of coding in forward, as many as in backward, at its stage's cuts."""
        if not self.coding_s:
            return (0.0,) * self.num_devices
        edges, placed, found = (0, *splits, self.num_blocks), self.placed, []
        for device, (stage, speed) in enumerate(zip(placed.stage_of_device, speeds, strict=True)):
            row = self.coding_s[self.kinds[device] if self.kinds else 0]
            cuts = math.fsum(row[cut - 1] for cut in edges[stage : stage + 2] if 0 < cut < self.num_blocks)
            found.append(placed.fraction(device) * cuts / 2 / speed)
        return tuple(found)

    def _reduces_s(self, splits: Sequence[int], rates: Sequence[float]) -> tuple[float, ...]:
        if self.devices is None or not rates or not self.gradient_bytes:
            return ()
        edges = (0, *splits, self.num_blocks)
        spans = enumerate(itertools.pairwise(edges))
        return tuple(
            math.fsum(self.gradient_bytes[s:j]) / rates[stage] if len(self.devices.stages[stage]) > 1 else 0.0
            for stage, (s, j) in spans
        )

    def _transfers_s(
        self, crossing: Sequence[float], splits: Sequence[int], rates: Sequence[float]
    ) -> tuple[float, ...]:
        if not crossing or not rates:
            return ()
        latency_s = self.latency_s or (0.0,) * len(rates)
        placed, found = self.placed, []
        for piece in placed.pieces:
            cut, fraction = splits[piece.link], piece.num_samples / placed.num_samples
            bytes_s = crossing[cut - 1] * fraction / rates[piece.link] if cut else 0.0
            found.append(latency_s[piece.link] + bytes_s)
        return tuple(found)

    def _block_times(self, device: int, num_samples: int, conditions: PipelineConditions) -> list[float]:
        """Return seconds of each block for some samples on a device; a long time without memory for it alone."""
        assert self.devices is not None
        kind, speed = self.kinds[device] if self.kinds else 0, conditions.speeds[device]
        fraction = num_samples / self.devices.num_samples
        works = map(operator.add, self.forward_s[kind], self.backward_s[kind])
        shares = self.fixed_share[kind] if self.fixed_share else (0.0,) * self.num_blocks
        found = [work * (fixed + (1 - fixed) * fraction) / speed for work, fixed in zip(works, shares, strict=True)]
        if self.memory is not None:
            depth, limit = self.memory.in_flight[device] * fraction, self.memory.limit[device]
            pairs = enumerate(zip(self.memory.state, self.memory.stash, strict=True))
            for block in [block for block, (state, stash) in pairs if state + depth * stash > limit]:
                found[block] = _NO_ROOM_S
        return found

    def _stage_problem(
        self, devices: StageDevices, conditions: PipelineConditions, *, allow_empty: bool
    ) -> PartitionProblem:
        rows, limits, in_flight = [], [], []
        for shares in devices.stages:
            by_device = [self._block_times(device, samples, conditions) for device, samples in shares]
            rows.append(tuple(map(max, *by_device)) if len(shares) > 1 else tuple(by_device[0]))
            if self.memory is not None:
                tightest, _ = min(shares, key=lambda share: self.memory.limit[share.device])
                limits.append(self.memory.limit[tightest])
                in_flight.append(self.memory.in_flight[tightest] * devices.fraction(tightest))
        memory = None
        if self.memory is not None:
            memory = replace(self.memory, limit=tuple(limits), in_flight=tuple(in_flight))
        return PartitionProblem(
            work=tuple(rows),
            capability=(1.0,) * devices.num_stages,
            kinds=tuple(range(devices.num_stages)),
            activation=self._crossing(),
            bandwidth=conditions.rates,
            memory=memory,
            allow_empty=allow_empty,
        )

    def _crossing(self) -> tuple[float, ...]:
        forward, backward = self.forward_bytes, self.backward_bytes
        if forward and backward:
            return tuple(map(max, forward, backward))
        return forward or backward


_NO_ROOM_S = 1e9
"""Time of a block on a device that has no memory for it: no partition takes it by choice."""


def _check_row(name: str, row: Sequence[float], num_blocks: int) -> None:
    if len(row) != num_blocks:
        do = "Give one for each block"
        raise UsageError(f"{name}: how many", got=len(row), expected=str(num_blocks), do=do)
    for number, value in enumerate(row, start=1):
        if not (math.isfinite(value) and value >= 0):
            expected, do = "a finite number, 0 or more", "Profile the block again"
            raise UsageError(f"{name} of block {number}", got=value, expected=expected, do=do)
