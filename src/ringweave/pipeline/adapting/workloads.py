"""What was measured of a pipeline, as what the controller decides on; and the one call that begins it all."""

import os
import time
from collections.abc import Callable, Sequence

from ringweave.environment import WorkerEnvironment
from ringweave.pipeline import profiling
from ringweave.pipeline.adapting.balancer import Balancer
from ringweave.pipeline.optimizing.optimizer import MakeOptimizer
from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.profiling import Link, Profile
from ringweave.pipeline.profiling.predicting import transfers_of
from ringweave.planning.partitioning import Memory
from ringweave.planning.repartitioning import Conditions, Policy, Workload
from ringweave.sim.pipelines import Overheads
from ringweave.telemetry import EventLog

_FASTEST_BYTES_PER_S = 1e12
"""A link whose bytes take no measurable time has this rate."""


def adapt(
    pipeline: Pipeline,
    make_optimizer: MakeOptimizer,
    policy: Policy | None = None,
    *,
    memory_bytes: Sequence[float] | None = None,
    profile_rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Balancer:
    """From now on the pipeline's blocks move to where the step is shortest; all ranks call it at the same time.

    Blocks and links are profiled first, and the schedule is rehearsed. Under `ringweave run` rank 0 writes what happens
    to the event log.

    Args:
        pipeline: It trains as before.
        make_optimizer: As given to the pipeline.
        policy: When blocks move; None: the defaults.
        memory_bytes: Of each stage's device; None: nothing is limited.
        profile_rounds: Forwards and backwards that are measured of each kind of block.
        clock: In seconds.

    Raises:
        UsageError: Fewer blocks than stages.
    """
    found = profiling.profile(pipeline, make_optimizer, rounds=profile_rounds, clock=clock)
    largest = max(boundary.forward_bytes for boundary in pipeline.boundaries[1:])
    links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, largest, clock=clock)
    run_dir = WorkerEnvironment.from_environ(os.environ).run_dir
    log = EventLog(run_dir / "events.jsonl") if run_dir and pipeline.rank == 0 else None
    overheads = profiling.rehearse(pipeline, links, rounds=profile_rounds, clock=clock)
    workload = workload_of(pipeline, found, links, overheads, memory_bytes=memory_bytes)
    return Balancer(pipeline, workload, conditions_of(found, links), policy or Policy(), log=log, clock=clock)


def workload_of(
    pipeline: Pipeline,
    profile: Profile,
    links: tuple[Sequence[Link], Sequence[Link]],
    overheads: Overheads | None = None,
    *,
    memory_bytes: Sequence[float] | None = None,
) -> Workload:
    """The pipeline's blocks and schedule, as profiled and rehearsed."""
    costs, devices = profile.blocks, range(profile.num_devices)
    gradients = [_gradient_bytes(pipeline, block) for block in range(len(costs))]
    memory = None
    if memory_bytes is not None:
        memory = Memory(
            limit=tuple(memory_bytes),
            state=tuple(float(cost.state_bytes) for cost in costs),
            stash=tuple(float(cost.stash_bytes) for cost in costs),
            in_flight=pipeline.order.peak_in_flight,
        )
    settings = pipeline.settings
    return Workload(
        forward_s=tuple(tuple(cost.forward_s[device] for cost in costs) for device in devices),
        backward_s=tuple(tuple(cost.backward_s[device] for cost in costs) for device in devices),
        kinds=tuple(devices),
        update_s=tuple(tuple(cost.update_s[device] for cost in costs) for device in devices),
        overheads=overheads or Overheads(),
        num_devices=profile.num_devices,
        num_microbatches=settings.num_microbatches,
        forward_bytes=tuple(float(cost.forward_bytes) for cost in costs),
        backward_bytes=tuple(float(cost.backward_bytes) for cost in costs),
        state_bytes=tuple(float(cost.state_bytes - own) for cost, own in zip(costs, gradients, strict=True)),
        gradient_bytes=tuple(map(float, gradients)),
        latency_s=tuple(max(f.latency_s, b.latency_s) for f, b in zip(*links, strict=True)),
        schedule=settings.schedule,
        transfers=transfers_of(settings.schedule),
        memory=memory,
    )


def conditions_of(profile: Profile, links: tuple[Sequence[Link], Sequence[Link]]) -> Conditions:
    """Devices as they were when they were profiled, and the slower direction of each link."""
    pairs = zip(*links, strict=True)
    rates = (1 / max(f.s_per_byte, b.s_per_byte, 1 / _FASTEST_BYTES_PER_S) for f, b in pairs)
    return Conditions(speeds=(1.0,) * profile.num_devices, rates=tuple(rates))


def _gradient_bytes(pipeline: Pipeline, block: int) -> int:
    return sum(each.nbytes for each in pipeline.blocks[block].parameters() if each.requires_grad)
