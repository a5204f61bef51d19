"""`ringweave partition`: assigns consecutive blocks of a model to the devices of a pipeline, one or more a stage."""

import json
from typing import Any

import click

from ringweave import topology
from ringweave.errors import UsageError, explain
from ringweave.planning import stage_planner
from ringweave.planning.partition.problem import PartitionMemory, PartitionProblem
from ringweave.planning.partition.solve import Partition, solve_partition
from ringweave.planning.repartition import PipelineWorkload
from ringweave.planning.stage_planner import DeviceConditions, StagePlan
from ringweave.sim import pipeline_schedules

_WIRE_RATIOS = {"exact": 1.0, "bf16": 0.5, "int8": 0.25}
"""Bytes of a value beside those of float32; int8 has 8 more for each channel."""


@click.command
@click.option("--work", metavar="w1,..,wn", required=True, help="Of each block: forward and backward of a microbatch.")
@click.option("--capability", metavar="c1,..,cM", help="Of each device: work per second.")
@click.option("--activation", metavar="a1,..,an", help="All that crosses the cut behind a block; the last is not used.")
@click.option(
    "--wire",
    type=click.Choice(tuple(_WIRE_RATIOS)),
    default="exact",
    show_default=True,
    help="Count half or a quarter of --activation, as between stages that send float32 so.",
)
@click.option("--bandwidth", metavar="B2,..,BM", help="Of the link into each device but the first.")
@click.option("--samples", type=int, metavar="b", help="Stages of several devices share b samples of a microbatch.")
@click.option("--nic", metavar="N1,..,NM", help="With --samples: of each device, instead of --bandwidth.")
@click.option("--cluster", metavar="FILE", help="With --samples: a cluster file that tells speeds and NICs.")
@click.option("--block-gradients", metavar="g1,..,gn", help="With --samples: all that the devices of a stage reduce.")
@click.option("--memory", metavar="L1,..,LM", help="Of each device; with --block-memory or --block-stash.")
@click.option("--block-memory", metavar="p1,..,pn", help="Of each block: parameters, gradients, optimizer state.")
@click.option("--block-stash", metavar="k1,..,kn", help="Of each block: activations held for a microbatch in flight.")
@click.option(
    "--schedule",
    metavar="NAME",
    default="1f1b",
    show_default=True,
    help=f"Says how many microbatches are in flight: {', '.join(pipeline_schedules.PIPELINE_SCHEDULES)}.",
)
@click.option("--microbatches", type=int, metavar="m", help="Least step of m microbatches, not least bottleneck.")
@click.option("--allow-empty", is_flag=True, help="A device may get no block; data passes through it.")
@click.option("--picture", metavar="FILE", help="Draw the stages, as PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    work: str,
    capability: str | None,
    activation: str | None,
    wire: str,
    bandwidth: str | None,
    samples: int | None,
    nic: str | None,
    cluster: str | None,
    block_gradients: str | None,
    memory: str | None,
    block_memory: str | None,
    block_stash: str | None,
    schedule: str,
    microbatches: int | None,
    allow_empty: bool,
    picture: str | None,
    as_json: bool,
) -> int:
    """Cut a model's blocks into stages for unequal devices and links, with the least bottleneck.

    Plain numbers in consistent units: a block takes w/c, a cut a/B, and a device that computes while it transfers the
    larger of both. All times are predicted. With --samples, slow devices may form a stage together, in any order of
    devices; steps are then simulated, a third of the work in forward.
    """
    row = _parse_numbers("--work", work)
    crossing = tuple(each * _WIRE_RATIOS[wire] for each in _parse_numbers("--activation", activation))
    _check_samples_options(samples, capability, bandwidth, nic, cluster, block_gradients, picture)
    if samples is not None:
        devices, rates = _devices_and_rates(capability, nic, cluster)
        load = _workload(
            row,
            len(devices),
            (schedule, microbatches or 2 * len(devices)),
            crossing,
            _parse_numbers("--block-gradients", block_gradients),
            _parse_memory(memory, block_memory, block_stash, (1,) * len(devices), len(row)),
        )
        _print_stages(load, DeviceConditions(speeds=devices, rates=rates), samples, as_json=as_json)
        return 0
    devices = _parse_numbers("--capability", capability)
    depths = tuple(
        pipeline_schedules.num_warmup_forwards(schedule, i, len(devices), microbatches)
        for i in range(_num_depths(memory, devices))
    )
    problem = PartitionProblem(
        work=(row,),
        capability=devices,
        activation=crossing,
        bandwidth=_parse_numbers("--bandwidth", bandwidth),
        memory=_parse_memory(memory, block_memory, block_stash, depths, len(row)),
        allow_empty=allow_empty,
    )
    path = _check_picture_path(picture)
    found = solve_partition(problem, microbatches)
    if path is not None:
        from ringweave.plots import partition_chart

        partition_chart.draw_partition(found, path)
    click.echo(
        json.dumps(_partition_document(found, microbatches))
        if as_json
        else "\n".join(_partition_lines(found, microbatches))
    )
    return 0


def _check_samples_options(samples: int | None, capability: str | None, *others: str | None) -> None:
    """Raise unless the options fit together: those of stages of several devices need --samples."""
    bandwidth, nic, cluster, gradients, picture = others
    if samples is None:
        named = (("--nic", nic), ("--cluster", cluster), ("--block-gradients", gradients))
        given = [name for name, value in named if value]
        if given or capability is None:
            got, expected = ", ".join(given) or "no --capability", "--capability, or --samples with --cluster"
            raise UsageError(explain("devices", got=got, expected=expected, do="Add what is missing"))
        return
    if samples < 1:
        raise UsageError(explain("--samples", got=samples, expected="1 or more", do="Give those of a microbatch"))
    unfit = [name for name, value in (("--bandwidth", bandwidth), ("--picture", picture)) if value]
    if unfit or (cluster is None) == (capability is None) or (cluster and nic):
        got = ", ".join(unfit) or "both or none of --capability and --cluster, or --nic beside a cluster"
        do = "Leave out what the other one tells"
        raise UsageError(
            explain("options of --samples", got=got, expected="--capability and --nic, or --cluster", do=do)
        )


def _devices_and_rates(
    capability: str | None, nic: str | None, cluster: str | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return speeds and NIC rates of devices; the devices of a node share its NICs."""
    if cluster is None:
        speeds, rates = _parse_numbers("--capability", capability), _parse_numbers("--nic", nic)
        if rates and len(rates) != len(speeds):
            expected = f"{len(speeds)}, as devices"
            raise UsageError(explain("--nic: how many", got=len(rates), expected=expected, do="Give one for each"))
        if not all(value > 0 for value in (*speeds, *rates)):
            got, do = [*speeds, *rates], "Correct them"
            raise UsageError(explain("speeds and rates", got=got, expected="numbers above 0", do=do))
        return speeds, rates
    places = [(device, node) for node in topology.load(cluster).nodes for device in node.devices]
    return (
        tuple(device.speed for device, _ in places),
        tuple(node.rate_bytes_per_s / node.num_devices for _, node in places),
    )


def _workload(
    work: tuple[float, ...],
    num_devices: int,
    steps: tuple[str, int],
    activation: tuple[float, ...],
    gradients: tuple[float, ...],
    memory: PartitionMemory | None,
) -> PipelineWorkload:
    half = tuple(each / 2 for each in activation)
    return PipelineWorkload(
        forward_s=(tuple(each / 3 for each in work),),
        backward_s=(tuple(2 * each / 3 for each in work),),
        num_devices=num_devices,
        schedule=steps[0],
        num_microbatches=steps[1],
        forward_bytes=half,
        backward_bytes=half,
        gradient_bytes=gradients,
        memory=memory,
    )


def _print_stages(load: PipelineWorkload, conditions: DeviceConditions, num_samples: int, *, as_json: bool) -> None:
    """Print the best stages of several devices, and the step of the best with one device a stage."""
    plan = stage_planner.plan_stages(load, conditions, num_samples)
    try:
        alone: StagePlan | None = stage_planner.plan_stages(load, conditions, num_samples, max_width=1)
    except UsageError:
        alone = None
    click.echo(json.dumps(_stages_document(plan, alone)) if as_json else "\n".join(_stages_lines(plan, alone)))


def _stages_document(plan: StagePlan, alone: StagePlan | None) -> dict[str, Any]:
    times = plan.workload.times(plan.splits, plan.conditions)
    return {
        "splits": list(plan.splits),
        "devices": str(plan.devices),
        "stages": [[share._asdict() for share in stage] for stage in plan.devices.stages],
        "compute_s": [f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)],
        "reduce_s": list(times.reduce_s),
        "microbatches": plan.workload.num_microbatches,
        "simulated_step_s": plan.step_s,
        "one_device_a_stage": None
        if alone is None
        else {"splits": list(alone.splits), "devices": str(alone.devices), "simulated_step_s": alone.step_s},
    }


def _stages_lines(plan: StagePlan, alone: StagePlan | None) -> list[str]:
    times, edges = plan.workload.times(plan.splits, plan.conditions), (0, *plan.splits, plan.workload.num_blocks)
    lines = [
        f"splits {', '.join(map(str, plan.splits)) or 'none'}; devices {plan.devices}",
        f"step of {plan.workload.num_microbatches} microbatches {plan.step_s:.6g} s (simulated)",
        "no order of one device a stage fits"
        if alone is None
        else f"one device a stage: at best {alone.step_s:.6g} s (simulated), {alone.step_s / plan.step_s:.3g} times as "
        f"long; splits {', '.join(map(str, alone.splits)) or 'none'}; devices {alone.devices}",
        "",
        "stage  blocks  device  samples   compute s",
    ]
    for stage, shares in enumerate(plan.devices.stages):
        blocks = f"{edges[stage] + 1}-{edges[stage + 1]}"
        for device, samples in shares:
            compute_s = times.forward_s[device] + times.backward_s[device]
            lines.append(f"{stage:>5}  {blocks:<6}  {device:>6}  {samples:>7}  {compute_s:>10.4g}")
    return lines


def _num_depths(memory: str | None, devices: tuple[float, ...]) -> int:
    """Return the number of devices whose microbatches in flight matter: none without memory limits."""
    return 0 if memory is None else len(devices)


def _check_picture_path(picture: str | None) -> Any:
    if picture is None:
        return None
    from ringweave.plots import figures

    return figures.check_picture_path(picture)


def _parse_numbers(option: str, text: str | None) -> tuple[float, ...]:
    """Parse numbers between commas; none if the option was not given."""
    if text is None or not text.strip():
        return ()
    found = []
    for number, part in enumerate(text.split(","), start=1):
        try:
            found.append(float(part))
        except ValueError as error:
            expected = "a number"
            raise UsageError(
                explain(f"{option}, number {number}", got=part, expected=expected, do="Write numbers between commas")
            ) from error
    return tuple(found)


def _parse_memory(
    limit: str | None, state: str | None, stash: str | None, in_flight: tuple[int, ...], num_blocks: int
) -> PartitionMemory | None:
    if limit is None and state is None and stash is None:
        return None
    if limit is None or (state is None and stash is None):
        got = "only --memory" if limit is not None else "no --memory"
        expected = "--memory of devices together with --block-memory or --block-stash"
        raise UsageError(explain("memory", got=got, expected=expected, do="Give both sides, or neither"))
    nothing = (0.0,) * num_blocks
    return PartitionMemory(
        limit=_parse_numbers("--memory", limit),
        state=_parse_numbers("--block-memory", state) or nothing,
        stash=_parse_numbers("--block-stash", stash) or nothing,
        in_flight=in_flight,
    )


def _partition_document(found: Partition, num_microbatches: int | None) -> dict[str, Any]:
    return {
        "splits": list(found.splits),
        "stages": [list(range(stage.first, stage.last + 1)) for stage in found.stages],
        "compute_s": [stage.compute_s for stage in found.stages],
        "transfer_s": [stage.transfer_s for stage in found.stages],
        "memory": [stage.memory for stage in found.stages],
        "microbatches": num_microbatches,
        "bottleneck_s": found.bottleneck_s,
        "predicted_step_s": found.predicted_step_s,
    }


def _partition_lines(found: Partition, num_microbatches: int | None) -> list[str]:
    from ringweave.plots import partition_chart

    lines = [
        f"splits {', '.join(map(str, found.splits)) or 'none'}",
        f"bottleneck {found.bottleneck_s:.6g} s (predicted), set by {_bottleneck_owner(found)}",
    ]
    if num_microbatches is not None:
        lines.append(f"step of {num_microbatches} microbatches {found.predicted_step_s:.6g} s (predicted)")
    return [*lines, "", *partition_chart.partition_rows(found)]


def _bottleneck_owner(found: Partition) -> str:
    """Return the first stage or link that takes as long as the bottleneck."""
    for stage in found.stages:
        if stage.transfer_s == found.bottleneck_s and stage.transfer_s > stage.compute_s:
            return f"the link into device {stage.device + 1}"
        if stage.compute_s == found.bottleneck_s:
            return f"device {stage.device + 1}"
    raise AssertionError("the bottleneck is the time of a stage or a link")
