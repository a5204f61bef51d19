"""`ringweave partition`: assigns consecutive blocks of a model to the devices of a pipeline, one a stage."""

import json
from typing import Any

import click

from ringweave.cli.echo import echo
from ringweave.cli.pipeline_stages import WIRE_RATIOS, check_picture_path
from ringweave.errors import UsageError
from ringweave.planning.partition.problem import PartitionMemory, PartitionProblem
from ringweave.planning.partition.solve import Partition, solve_partition
from ringweave.sim import pipeline_schedules


@click.command
@click.option("--work", metavar="w1,..,wn", required=True, help="Of each block: forward and backward of a microbatch.")
@click.option("--capability", metavar="c1,..,cM", required=True, help="Of each device: work per second.")
@click.option("--activation", metavar="a1,..,an", help="All that crosses the cut behind a block; the last is not used.")
@click.option(
    "--wire",
    type=click.Choice(tuple(WIRE_RATIOS)),
    default="exact",
    show_default=True,
    help="Count half or a quarter of --activation, as between stages that send float32 so.",
)
@click.option("--bandwidth", metavar="B2,..,BM", help="Of the link into each device but the first.")
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
    capability: str,
    activation: str | None,
    wire: str,
    bandwidth: str | None,
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
    larger of both. All times are predicted. `ringweave plan CLUSTER --pipeline FILE` plans stages of several devices.
    """
    row = _parse_numbers("--work", work)
    crossing = tuple(each * WIRE_RATIOS[wire] for each in _parse_numbers("--activation", activation))
    devices = _parse_numbers("--capability", capability)
    depths = tuple(
        pipeline_schedules.num_warmup_forwards(schedule, i, len(devices), microbatches)
        for i in range(0 if memory is None else len(devices))
    )
    problem = PartitionProblem(
        work=(row,),
        capability=devices,
        activation=crossing,
        bandwidth=_parse_numbers("--bandwidth", bandwidth),
        memory=_parse_memory(memory, block_memory, block_stash, depths, len(row)),
        allow_empty=allow_empty,
    )
    path = check_picture_path(picture)
    found = solve_partition(problem, microbatches)
    if path is not None:
        from ringweave.plots import figures

        figures.draw_partition(found, path)
    echo(
        json.dumps(_partition_document(found, microbatches))
        if as_json
        else "\n".join(_partition_lines(found, microbatches))
    )
    return 0


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
                f"{option}, number {number}", got=part, expected=expected, do="Write numbers between commas"
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
        raise UsageError("memory", got=got, expected=expected, do="Give both sides, or neither")
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
    from ringweave.plots import figures

    lines = [
        f"splits {', '.join(map(str, found.splits)) or 'none'}",
        f"bottleneck {found.bottleneck_s:.6g} s (predicted), set by {_bottleneck_owner(found)}",
    ]
    if num_microbatches is not None:
        lines.append(f"step of {num_microbatches} microbatches {found.predicted_step_s:.6g} s (predicted)")
    return [*lines, "", *figures.partition_rows(found)]


def _bottleneck_owner(found: Partition) -> str:
    """Return the first stage or link that takes as long as the bottleneck."""
    for stage in found.stages:
        if stage.transfer_s == found.bottleneck_s and stage.transfer_s > stage.compute_s:
            return f"the link into device {stage.device + 1}"
        if stage.compute_s == found.bottleneck_s:
            return f"device {stage.device + 1}"
    raise AssertionError("the bottleneck is the time of a stage or a link")
