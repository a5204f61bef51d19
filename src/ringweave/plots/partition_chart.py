"""Chart of a pipeline partition: compute time of each stage and transfer time of the link into it."""

from pathlib import Path
from typing import Any

from ringweave.planning.partition.problem import PartitionStage
from ringweave.planning.partition.solve import Partition
from ringweave.plots import figures

_COMPUTE_COLOUR, _TRANSFER_COLOUR = figures.PART_COLOURS["compute"], figures.PART_COLOURS["communication"]
_MAX_LABELS = 40
_TEXT_WIDTH = 40


def draw_partition(partition: Partition, path: Path) -> None:
    """Draw one row per device with its compute and transfer times, and a line at the bottleneck."""
    stages = partition.stages
    figure, axis = figures.new_figure(9.0, 1.6 + min(0.45 * len(stages), 12))
    rows = range(len(stages))
    axis.barh(
        [row - 0.17 for row in rows], [stage.compute_s for stage in stages], 0.4, color=_COMPUTE_COLOUR, label="compute"
    )
    transfers = [stage.transfer_s for stage in stages]
    axis.barh([row + 0.26 for row in rows], transfers, 0.24, color=_TRANSFER_COLOUR, label="transfer into it")
    axis.axvline(partition.bottleneck_s, color=figures.ALARM, linewidth=1.2, label="bottleneck")
    _label_rows(axis, stages)
    axis.set_xlabel("predicted time for one microbatch (s)")
    axis.set_title(f"bottleneck {partition.bottleneck_s:.4g} s (predicted)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    figures.save_figure(figure, path)


def _label_rows(axis: Any, stages: tuple[PartitionStage, ...]) -> None:
    """Label as many rows as can be read."""
    row_step = -(-len(stages) // _MAX_LABELS)
    shown = range(0, len(stages), row_step)
    axis.set_yticks(list(shown), [f"device {row + 1}: {block_range_text(stages[row])}" for row in shown], fontsize=8)
    axis.invert_yaxis()


def block_range_text(stage: PartitionStage) -> str:
    """Return `3-5`, `4`, or `none` for an empty stage."""
    if stage.num_blocks == 0:
        return "none"
    return str(stage.first) if stage.num_blocks == 1 else f"{stage.first}-{stage.last}"


def partition_rows(partition: Partition) -> list[str]:
    """Return the chart as text: one row per stage, `#` for compute and `=` for the transfer into it, on one scale."""
    names = [block_range_text(stage) for stage in partition.stages]
    width = max(len("blocks"), *map(len, names))
    found = [f"device  {'blocks':<{width}}  {'compute s':>10}  {'transfer s':>10}"]
    for number, (stage, name) in enumerate(zip(partition.stages, names, strict=True), start=1):
        times = f"{stage.compute_s:>10.4g}  {stage.transfer_s:>10.4g}"
        bar = "#" * _bar_length(stage.compute_s, partition.bottleneck_s)
        over = "=" * max(0, _bar_length(stage.transfer_s, partition.bottleneck_s) - len(bar))
        found.append(f"{number:>6}  {name:<{width}}  {times}  {bar}{over}".rstrip())
    return found


def _bar_length(time_s: float, bottleneck_s: float) -> int:
    return round(_TEXT_WIDTH * time_s / bottleneck_s) if bottleneck_s else 0
