"""The stages of a partition: what each device computes, and what crosses the link into it."""

from pathlib import Path
from typing import Any

from ringweave.pictures import plotting
from ringweave.planning.partitioning import Partition, Stage

_COMPUTE, _TRANSFER, _BINDING = "#30638e", "#c8a13a", "#d1495b"
_MOST_LABELS = 40
_TEXT_WIDTH = 40


def draw(partition: Partition, path: Path) -> None:
    """A row for each device with its compute and its transfer time, and a line where the bottleneck is."""
    stages = partition.stages
    figure, axis = plotting.new_figure(9.0, 1.6 + min(0.45 * len(stages), 12))
    rows = range(len(stages))
    axis.barh([row - 0.17 for row in rows], [stage.compute_s for stage in stages], 0.4, color=_COMPUTE, label="compute")
    transfers = [stage.transfer_s for stage in stages]
    axis.barh([row + 0.26 for row in rows], transfers, 0.24, color=_TRANSFER, label="transfer into it")
    axis.axvline(partition.bottleneck_s, color=_BINDING, linewidth=1.2, label="bottleneck")
    _label(axis, stages)
    axis.set_xlabel("predicted time for one microbatch (s)")
    axis.set_title(f"bottleneck {partition.bottleneck_s:.4g} s (predicted)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    plotting.save(figure, path)


def _label(axis: Any, stages: tuple[Stage, ...]) -> None:
    """Names the rows, not more of them than can be read."""
    every = -(-len(stages) // _MOST_LABELS)
    shown = range(0, len(stages), every)
    axis.set_yticks(list(shown), [f"device {row + 1}: {blocks(stages[row])}" for row in shown], fontsize=8)
    axis.invert_yaxis()


def blocks(stage: Stage) -> str:
    """`3-5`, `4`, or `none` for an empty stage."""
    if stage.num_blocks == 0:
        return "none"
    return str(stage.first) if stage.num_blocks == 1 else f"{stage.first}-{stage.last}"


def rows(partition: Partition) -> list[str]:
    """The same as text: a row for each stage, `#` for compute and `=` for the transfer into it, on one scale."""
    names = [blocks(stage) for stage in partition.stages]
    width = max(len("blocks"), *map(len, names))
    found = [f"device  {'blocks':<{width}}  {'compute s':>10}  {'transfer s':>10}"]
    for number, (stage, name) in enumerate(zip(partition.stages, names, strict=True), start=1):
        times = f"{stage.compute_s:>10.4g}  {stage.transfer_s:>10.4g}"
        bar = "#" * _length(stage.compute_s, partition.bottleneck_s)
        over = "=" * max(0, _length(stage.transfer_s, partition.bottleneck_s) - len(bar))
        found.append(f"{number:>6}  {name:<{width}}  {times}  {bar}{over}".rstrip())
    return found


def _length(time_s: float, bottleneck_s: float) -> int:
    return round(_TEXT_WIDTH * time_s / bottleneck_s) if bottleneck_s else 0
