"""Planned stages of several devices against all ways, splits and samples, each simulated."""

import itertools
import random
from dataclasses import replace

import pytest

from ringweave.errors import UsageError
from ringweave.planning.partition.problem import PartitionMemory
from ringweave.planning.repartition.pipeline_workload import PipelineWorkload
from ringweave.planning.stage_planner import DeviceConditions, all_groups, plan_stages
from ringweave.sim import pipeline_schedules
from ringweave.sim.pipeline_simulation import DeviceShare, StageDevices
from tests import effort

NUM_PARTS, OF_BRUTE_FORCE = 4, 1.05
CLUSTERS_OF_A_PART = max(6, effort.share_of(50))
"""Twenty-four clusters every day, two hundred in the thorough run."""


def compositions(total, parts):
    """All ways to share samples, one or more each."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def draw(seed):
    """A small model on two to four devices, some alike; with slow or no links; some with little memory."""
    rng = random.Random(seed)
    num_devices, num_blocks = rng.choice((2, 3, 3, 3, 4)), rng.randint(2, 4)
    num_samples = rng.randint(max(2, num_devices - 1), 5)
    forward = tuple(rng.choice((1.0, 1.0, 3.0, 6.0)) * rng.uniform(0.8, 1.2) for _ in range(num_blocks))
    speeds = tuple(rng.choice((1.0, 1.0, 2.0, 4.0)) for _ in range(num_devices))
    memory = None
    if rng.random() < 0.3:
        memory = PartitionMemory(
            limit=tuple(rng.choice((6.0, 12.0, 20.0)) for _ in range(num_devices)),
            state=tuple(rng.uniform(0.5, 3) for _ in range(num_blocks)),
            stash=tuple(rng.uniform(0.1, 1) for _ in range(num_blocks)),
            in_flight=(1,) * num_devices,
        )
    workload = PipelineWorkload(
        forward_s=(forward,),
        backward_s=(tuple(2 * each for each in forward),),
        update_s=(tuple(0.1 for _ in forward),),
        num_devices=num_devices,
        num_microbatches=rng.choice((2, 4, 8)),
        forward_bytes=tuple(rng.uniform(0.2, 3) for _ in forward),
        backward_bytes=tuple(rng.uniform(0.2, 3) for _ in forward),
        gradient_bytes=tuple(rng.uniform(0.2, 3) for _ in forward),
        schedule=rng.choice(("1f1b", "1f1b-overlap", "gpipe")) if memory is None else "1f1b-overlap",
        fixed_share=(tuple(rng.choice((0.0, 0.2)) for _ in forward),),
        memory=memory,
    )
    rates = tuple(rng.choice((0.5, 2.0, 10.0)) for _ in speeds) if rng.random() < 0.7 else ()
    return workload, DeviceConditions(speeds=speeds, rates=rates), num_samples


def brute_force(workload, conditions, num_samples):
    """The shortest simulated step of everything that fits."""
    best = float("inf")
    for groups in all_groups(range(workload.num_devices)):
        if len(groups) > workload.num_blocks or max(map(len, groups)) > num_samples:
            continue
        memory = workload.memory
        for samples in itertools.product(*(compositions(num_samples, len(members)) for members in groups)):
            pairs = zip(groups, samples, strict=True)
            devices = StageDevices(tuple(tuple(map(DeviceShare, *pair)) for pair in pairs))
            if memory is not None:
                depths = [
                    pipeline_schedules.num_warmup_forwards(
                        workload.schedule, stage, len(groups), workload.num_microbatches
                    )
                    for stage in devices.stage_of_device
                ]
                memory = replace(memory, in_flight=tuple(depths))
            load = replace(workload, devices=devices, memory=memory)
            for splits in itertools.combinations(range(1, workload.num_blocks), len(groups) - 1):
                if load.fits(splits):
                    best = min(best, load.step_s(splits, conditions.of_stages(devices)))
    return best


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_planned_stages_are_nearly_the_best_of_all(part):
    ratios = []
    for seed in range(part, NUM_PARTS * CLUSTERS_OF_A_PART, NUM_PARTS):
        workload, conditions, num_samples = draw(seed)
        best_s = brute_force(workload, conditions, num_samples)
        if best_s == float("inf"):
            with pytest.raises(UsageError, match="stages"):
                plan_stages(workload, conditions, num_samples)
            continue
        plan = plan_stages(workload, conditions, num_samples)
        assert plan.workload.fits(plan.splits)
        assert plan.step_s == pytest.approx(plan.workload.step_s(plan.splits, plan.conditions))
        ratios.append((plan.step_s / best_s, seed))
    assert len(ratios) > 0.6 * CLUSTERS_OF_A_PART
    assert max(ratios)[0] <= OF_BRUTE_FORCE, sorted(ratios)[-3:]
    assert min(ratios)[0] >= 1 - 1e-9


def coarse(num_microbatches=16):
    """Three blocks of which two are large; no device has memory for both."""
    forward = (6.0, 5.0, 1.0)
    return PipelineWorkload(
        forward_s=(forward,),
        backward_s=(tuple(2 * each for each in forward),),
        num_devices=3,
        num_microbatches=num_microbatches,
        schedule="1f1b-overlap",
        memory=PartitionMemory(limit=(10.0,) * 3, state=(6.0, 5.0, 1.0), stash=(0.0,) * 3, in_flight=(1,) * 3),
    )


def test_two_slow_devices_share_the_samples_of_a_stage_beside_a_fast_one():
    conditions = DeviceConditions(speeds=(1.0, 2.0, 1.0))
    plan = plan_stages(coarse(), conditions, 8)
    assert str(plan.devices) == "0:4+2:4 1:8"
    assert plan.splits == (1,)
    alone = plan_stages(coarse(), conditions, 8, max_width=1)
    assert not alone.devices.is_wide
    assert alone.step_s / plan.step_s > 1.5


def test_samples_follow_speeds_and_fixed_times():
    conditions = DeviceConditions(speeds=(3.0, 1.0))
    one_block = replace(coarse(), memory=None, forward_s=((1.0,),), backward_s=((2.0,),), num_devices=2)
    assert str(plan_stages(one_block, conditions, 8).devices) == "0:6+1:2"
    fixed = replace(one_block, fixed_share=((0.5,),))
    assert str(plan_stages(fixed, conditions, 8).devices) == "0:7+1:1"


def test_many_devices_are_planned_by_a_climb():
    """Eight devices: at least as good as one device a stage, and as every pair of equal ones."""
    rng = random.Random(1)
    forward = tuple(rng.choice((1.0, 6.0)) for _ in range(10))
    load = PipelineWorkload(
        forward_s=(forward,),
        backward_s=(tuple(2 * each for each in forward),),
        num_devices=8,
        num_microbatches=16,
        schedule="1f1b-overlap",
    )
    conditions = DeviceConditions(speeds=(1.0,) * 5 + (4.0,) * 3)
    plan, alone = plan_stages(load, conditions, 8), plan_stages(load, conditions, 8, max_width=1)
    bound_s = 3 * sum(forward) * load.num_microbatches / sum(conditions.speeds)
    assert plan.devices.num_devices == 8
    assert bound_s <= plan.step_s <= alone.step_s
    assert plan.step_s < 1.5 * bound_s


def test_stages_that_do_not_fit_are_an_error():
    one_block = replace(coarse(), memory=None, forward_s=((1.0,),), backward_s=((2.0,),))
    text = r"stages: '1 blocks, 1 samples a microbatch', expected a block for each stage"
    with pytest.raises(UsageError, match=text):
        plan_stages(one_block, DeviceConditions(speeds=(1.0, 2.0, 1.0)), 1)
