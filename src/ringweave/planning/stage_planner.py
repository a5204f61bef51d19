"""Planner of pipeline stages of several devices: devices of each stage, their samples of a microbatch, and the splits.

A stage of several slow devices is as fast as their speeds together, whatever the sizes of the blocks; it needs one copy
of the stage's blocks on each device, and an allreduce of their gradients in each train step. Few devices are put into
stages in all ways and orders, many by a climb from some ways that are good guesses: devices are moved, stages are
joined and divided. Each way is judged by the formula of the partition solver, and the most promising are simulated.

Source: docs/decisions/0041-stages-of-several-devices.md.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ringweave.errors import UsageError
from ringweave.planning.partition.solve import solve_partition
from ringweave.planning.repartition.pipeline_workload import PipelineConditions, PipelineWorkload
from ringweave.planning.repartition.search import Splits, search_partitions, search_stages
from ringweave.sim import pipeline_schedules
from ringweave.sim.pipeline_simulation import StageDevices, even_samples

Groups = tuple[tuple[int, ...], ...]
"""Devices of each stage."""

_MAX_ALL_WAYS = 5
"""Devices that are put into stages in all ways: 541 for five, 4,683 for six."""
_MAX_ESTIMATES = 1500
_NUM_SIMULATED, _NUM_POLISHED = 40, 12
_MAX_SIMULATIONS = 200
_MAX_PAIRED = 6
"""Ways to move one sample up to which two are moved at once as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConditions:
    """Speeds and NICs of devices, in any order of the pipeline."""

    speeds: tuple[float, ...]
    """For each device: 1 is as the workload tells."""
    rates: tuple[float, ...] = ()
    """For each device: bytes per second of its NIC in each direction; empty: transfers take no time."""

    def of_stages(self, devices: StageDevices) -> PipelineConditions:
        """Return the conditions of a pipeline: a link has the rate of its slowest device, a ring allreduce too."""
        if not self.rates:
            return PipelineConditions(speeds=self.speeds)
        slowest = [min(self.rates[device] for device in devices.members(stage)) for stage in range(devices.num_stages)]
        widths = map(len, devices.stages)
        return PipelineConditions(
            speeds=self.speeds,
            rates=tuple(min(pair) for pair in itertools.pairwise(slowest)),
            reduce_rates=tuple(
                rate * width / (2 * (width - 1)) if width > 1 else rate
                for rate, width in zip(slowest, widths, strict=True)
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Stages, their devices and splits, with the simulated step."""

    splits: Splits
    """Last blocks, from 1, of all stages but the last."""
    devices: StageDevices
    step_s: float
    """Simulated seconds of a train step."""
    workload: PipelineWorkload
    """The blocks, with these devices."""
    conditions: PipelineConditions
    """Of these stages."""


def plan_stages(
    workload: PipelineWorkload, conditions: DeviceConditions, num_samples: int, *, max_width: int | None = None
) -> StagePlan:
    """Return the stages with the shortest simulated step; every device gets a place.

    Args:
        workload: Blocks, schedule and memory; its devices have no order. `memory.in_flight` is set by the schedule.
        conditions: Speeds and NICs of its devices.
        num_samples: Samples of a microbatch, which the devices of a stage share.
        max_width: Devices of a stage, at most; 1: the best order of one device a stage.

    Raises:
        UsageError: No stages fit: too few blocks or samples, or too little memory.

    Cost: measured, less than a second of a processor for four devices, five seconds for twelve.
    """
    planner = _StagePlanner(workload, conditions, num_samples, max_width or workload.num_devices)
    if workload.num_devices <= _MAX_ALL_WAYS:
        planner.estimate(all_groups(range(workload.num_devices)))
    else:
        planner.climb()
    return planner.best()


def place_devices(workload: PipelineWorkload, devices: StageDevices) -> PipelineWorkload:
    """Return the workload with these stages; `memory.in_flight` follows from the schedule, links are equally late."""
    memory, num_stages = workload.memory, devices.num_stages
    if memory is not None:
        name = workload.schedule if isinstance(workload.schedule, str) else "gpipe"
        depths = [
            pipeline_schedules.num_warmup_forwards(name, stage, num_stages, workload.num_microbatches)
            for stage in range(num_stages)
        ]
        memory = replace(memory, in_flight=tuple(depths[stage] for stage in devices.stage_of_device))
    latency_s = (max(workload.latency_s),) * (num_stages - 1) if workload.latency_s else ()
    return replace(workload, devices=devices, memory=memory, latency_s=latency_s)


def all_groups(devices: Sequence[int]) -> Iterator[Groups]:
    """Yield all ways to put devices into ordered stages."""
    if not devices:
        yield ()
        return
    for size in range(1, len(devices) + 1):
        for members in itertools.combinations(devices, size):
            rest = [device for device in devices if device not in members]
            for behind in all_groups(rest):
                yield (members, *behind)


class _StagePlanner:
    """Estimates ways to put devices into stages, each kind of way once."""

    def __init__(
        self, workload: PipelineWorkload, conditions: DeviceConditions, num_samples: int, max_width: int
    ) -> None:
        self._workload, self._conditions, self._num_samples = workload, conditions, num_samples
        self._max_width = max_width
        kinds = workload.kinds or (0,) * workload.num_devices
        rates = conditions.rates or (0.0,) * workload.num_devices
        limits = workload.memory.limit if workload.memory else (0.0,) * workload.num_devices
        self._alike = list(zip(kinds, conditions.speeds, rates, limits, strict=True))
        """Devices with the same entry are interchangeable."""
        self._estimates: dict[tuple, tuple[float, Groups]] = {}

    def estimate(self, ways: Iterable[Groups]) -> list[tuple[float, Groups]]:
        """Return each way with its step by formula; infinite where it does not fit."""
        found = []
        for groups in ways:
            key = tuple(tuple(sorted(self._alike[device] for device in members)) for members in groups)
            if key not in self._estimates:
                prepared = self._prepare(groups)
                self._estimates[key] = (prepared[0] if prepared else math.inf, groups)
            found.append(self._estimates[key])
        return found

    def climb(self) -> None:
        """Estimate neighbours of the best way so far, from each start, until none is better."""
        for start in self._starts():
            best = self.estimate([start])[0]
            while len(self._estimates) < _MAX_ESTIMATES:
                better = min(self.estimate(_neighbours(best[1])), default=best)
                if better[0] >= best[0]:
                    break
                best = better

    def best(self) -> StagePlan:
        """Return the best of the most promising ways, simulated.

        Raises:
            UsageError: No way fits.
        """
        promising = sorted(each for each in self._estimates.values() if each[0] < math.inf)[:_NUM_SIMULATED]
        plans = [self._simulate(groups) for _, groups in promising]
        fitting = [plan for plan in plans if plan is not None]
        if not fitting:
            got = f"{self._workload.num_blocks} blocks, {self._num_samples} samples a microbatch"
            expected = (
                f"a block for each stage and a sample for each of {self._workload.num_devices} devices, and memory"
            )
            do = "Leave devices out, cut the model finer, or give microbatches more samples"
            raise UsageError("stages", got=got, expected=expected, do=do)
        best = sorted(fitting, key=lambda plan: plan.step_s)[:_NUM_POLISHED]
        return min(map(_polish, best), key=lambda plan: plan.step_s)

    def _prepare(self, groups: Groups) -> tuple[float, PipelineWorkload, PipelineConditions, Splits] | None:
        """Return (step by formula, workload and conditions with samples, splits); None if the way does not fit."""
        if max(map(len, groups)) > min(self._max_width, self._num_samples) or len(groups) > self._workload.num_blocks:
            return None
        devices = even_samples(groups, self._num_samples)
        load, conditions = place_devices(self._workload, devices), self._conditions.of_stages(devices)
        splits = tuple(self._workload.num_blocks * stage // len(groups) for stage in range(1, len(groups)))
        for _ in range(2):
            load = replace(load, devices=load.rebalanced(splits, conditions))
            try:
                found = solve_partition(load.problem(conditions), load.num_microbatches)
            except UsageError:
                return None
            splits = found.splits
        reduces_s = load.times(splits, conditions).reduce_s
        return found.predicted_step_s + max(reduces_s, default=0.0), load, conditions, splits

    def _simulate(self, groups: Groups) -> StagePlan | None:
        prepared = self._prepare(groups)
        assert prepared is not None
        _, load, conditions, splits = prepared
        if not load.fits(splits):
            return None
        best = search_stages(load, conditions, splits, max_simulations=_MAX_SIMULATIONS)
        assert best.devices is not None
        load = replace(load, devices=best.devices)
        return StagePlan(
            splits=best.splits, devices=best.devices, step_s=best.step_s, workload=load, conditions=conditions
        )

    def _starts(self) -> Iterator[Groups]:
        """Yield one stage for each device and neighbours in pairs, threes and so on, in some orders."""
        devices = range(self._workload.num_devices)
        by_speed = sorted(devices, key=lambda device: (self._conditions.speeds[device], device))
        for order in (tuple(devices), tuple(by_speed), tuple(reversed(by_speed))):
            for width in range(1, min(self._max_width, len(order)) + 1):
                yield tuple(order[first : first + width] for first in range(0, len(order), width))


def _polish(plan: StagePlan) -> StagePlan:
    """Move samples between the devices of a stage, and cuts, as long as the simulated step becomes shorter.

    The formula balances computing alone; a device with a slow link, or before a stage that waits, may better do less.
    """
    while True:
        near = list(_with_a_sample_moved(plan.devices))
        if len(near) <= _MAX_PAIRED:
            near = list(dict.fromkeys([*near, *(each for one in near for each in _with_a_sample_moved(one))]))
        others = [replace(plan.workload, devices=devices) for devices in near]
        steps = [
            (load.step_s(plan.splits, plan.conditions), at) for at, load in enumerate(others) if load.fits(plan.splits)
        ]
        load = others[min(steps)[1]] if steps and min(steps)[0] < plan.step_s else plan.workload
        found = search_partitions(load, plan.conditions, plan.splits, max_simulations=_MAX_SIMULATIONS)
        if found.step_s >= plan.step_s:
            return plan
        assert load.devices is not None
        plan = replace(plan, splits=found.splits, devices=load.devices, step_s=found.step_s, workload=load)


def _with_a_sample_moved(devices: StageDevices) -> Iterator[StageDevices]:
    """Yield devices of which one has a sample more and one of the same stage a sample less."""
    for stage, shares in enumerate(devices.stages):
        for giver, taker in itertools.permutations(range(len(shares)), 2):
            if shares[giver].num_samples > 1:
                changed = list(shares)
                changed[giver] = shares[giver]._replace(num_samples=shares[giver].num_samples - 1)
                changed[taker] = shares[taker]._replace(num_samples=shares[taker].num_samples + 1)
                yield StageDevices((*devices.stages[:stage], tuple(changed), *devices.stages[stage + 1 :]))


def _neighbours(groups: Groups) -> Iterator[Groups]:
    """Yield ways with two stages joined or exchanged, one divided, or a device in another stage."""
    for stage in range(len(groups) - 1):
        joined = tuple(sorted(groups[stage] + groups[stage + 1]))
        yield (*groups[:stage], joined, *groups[stage + 2 :])
        yield (*groups[:stage], groups[stage + 1], groups[stage], *groups[stage + 2 :])
    for stage, members in enumerate(groups):
        for device in members if len(members) > 1 else ():
            rest = tuple(each for each in members if each != device)
            yield (*groups[:stage], (device,), rest, *groups[stage + 1 :])
            yield (*groups[:stage], rest, (device,), *groups[stage + 1 :])
        for device in members:
            yield from _moved(groups, stage, device)


def _moved(groups: Groups, stage: int, device: int) -> Iterator[Groups]:
    """Yield ways with a device in another stage."""
    rest = tuple(each for each in groups[stage] if each != device)
    for other in range(len(groups)):
        if other != stage:
            changed = list(groups)
            changed[stage], changed[other] = rest, tuple(sorted((*groups[other], device)))
            yield tuple(members for members in changed if members)
