"""Shared parts of all plots (checks for matplotlib and the file format, new figures, saving); charts of predictions.

The charts: predicted times against latency or workers, which are figures 5 and 6 of the paper with the corrected ones
beside them; and the stages of a pipeline partition, with their compute times and the transfer times into them.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringweave import units
from ringweave.cost import architectures
from ringweave.cost.architectures import ArchitectureSetting, Crossover
from ringweave.errors import UsageError
from ringweave.files import file_io
from ringweave.planning.partition.problem import PartitionStage
from ringweave.planning.partition.solve import Partition

PICTURE_SUFFIXES = (".png", ".svg")

SYSTEM_COLOURS = {
    "ringweave": "#d1495b",
    "balanced": "#d1495b",  # ringweave's synchronous mode
    "gloo": "#30638e",
    "openmpi": "#5f9e6e",
    "mpich": "#c8a13a",
    "ps-hra": "#7d5ba6",
    "ps": "#7f8c9d",
    "ring": "#3d7068",
    "hierarchical": "#e08e45",
}
"""Colours of systems, modes and architectures, the same in all pictures."""
PART_COLOURS = {
    "compute": "#6b7681",
    "input": "#8e6bbf",
    "update": "#4f9ac4",
    "script": "#c08a5a",
    "wait": "#e3b23c",
    "communication": "#74b083",
}
"""Colours of the parts of a train step, as on the page of a run."""
DEVICE_COLOURS = ("#4f7cac", "#c97b84", "#86a873", "#d9b44a", "#9b7fb8", "#8d99ae", "#dd9a62", "#5f8f8b")
"""Colours of devices, which are no systems; again from the first for more."""
TINTS = ("#dbe7f3", "#f6e3cf", "#dfeedd", "#eadff0", "#f6dede", "#e4e4e4", "#d8eeee", "#f3efcf")
"""Backgrounds."""
ALARM, DARK, GREY, LIGHT, PALE = "#b3263a", "#1d2329", "#5b6770", "#dddddd", "#f5f5f5"
"""What binds or is a bound; texts and measurements; lines; grids; backgrounds."""


def check_matplotlib() -> None:
    """Refuse before the computation if plots cannot be drawn afterwards.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        do = "Install it: pip install matplotlib"
        raise UsageError("picture", got="no matplotlib", expected="matplotlib to draw it", do=do)


def check_picture_path(text: str) -> Path:
    """Return the path of a plot, after checking that it can be drawn and written.

    Raises:
        UsageError: matplotlib is not installed, the name has another format's ending, or the file cannot be written.
    """
    check_matplotlib()
    path = Path(text)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        expected = f"a file name ending in {' or '.join(PICTURE_SUFFIXES)}"
        raise UsageError("picture", got=text, expected=expected, do="Name it so")
    if not path.parent.is_dir():
        expected = "a file in a folder that exists"
        raise UsageError("picture", got=text, expected=expected, do="Make the folder first")
    file_io.check_writable("picture", path)
    return path


def new_figure(width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure of this size in inches and its axes, drawn without a screen.

    Options are those of matplotlib's `Figure.subplots`. The figure belongs to no window and needs no closing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**options)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the file's name. The same figure gives the same bytes every time.

    Raises:
        UsageError: The file cannot be written.
    """
    import matplotlib as mpl

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "ringweave"}), file_io.report_write_errors("picture", path):
        figure.savefig(path, dpi=150, metadata=metadata)


_DASHES = {"ps": "--", "hierarchical": "-."}
_SHORT_LABELS = {**architectures.ARCHITECTURE_LABELS, "ps-hra-shared-link": "PS-HRA"}
_TOUCHING_RATIO = 1.1
_NUM_POINTS = 400
_MIN_LATENCY_S, _MAX_LATENCY_S = 1e-3, 10.0
_FORMULA_SETS = (
    ("as in the paper", architectures.PAPER_ARCHITECTURES),
    ("the server's link shared by all rings", architectures.CORRECTED_ARCHITECTURES),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSweep:
    """Settings that differ only in their number of workers, for one panel."""

    title: str
    """Settings that all have in common."""
    settings: tuple[ArchitectureSetting, ...]
    """Sorted by number of workers."""


def draw_over_latency(setting: ArchitectureSetting, path: Path) -> None:
    """Plot time against latency, the paper's formulas left and the corrected ones right; crossovers marked."""
    figure, axes = new_figure(12.5, 5.4, ncols=2, sharey=True)
    for axis, (title, names) in zip(axes, _FORMULA_SETS, strict=True):
        marks = architectures.crossovers_over_latency(setting, names)
        latencies_s = _latencies_s(marks)
        for name in names:
            line = architectures.latency_line(name, setting)
            _plot_curve(axis, name, latencies_s, [line.seconds_at(each) for each in latencies_s.tolist()])
        _mark_crossovers(axis, marks, lambda at: f"{at:.4g} s")
        _finish_axis(axis, title, "latency a, with the wait for slow workers (s)")
        axis.set_xscale("log")
    axes[0].set_ylabel("predicted time of a round (s)")
    figure.suptitle(f"Time of a round against latency: {_setting_text(setting, with_latency=False)}", fontsize=11)
    save_figure(figure, path)


def draw_over_workers(sweeps: Sequence[WorkerSweep], path: Path) -> None:
    """Plot time against workers: one row per sweep, the paper's formulas left and the corrected ones right."""
    figure, axes = new_figure(12.5, 4.6 * len(sweeps), nrows=len(sweeps), ncols=2, sharey=True, squeeze=False)
    for row, sweep in zip(axes, sweeps, strict=True):
        workers = [each.num_workers for each in sweep.settings]
        for axis, (title, names) in zip(row, _FORMULA_SETS, strict=True):
            for name in names:
                _plot_curve(axis, name, workers, [architectures.round_seconds(name, each) for each in sweep.settings])
            _mark_crossovers(
                axis, architectures.crossovers_over_workers(sweep.settings, names), lambda at: f"N = {at:g}"
            )
            _finish_axis(axis, f"{title}; {sweep.title}", "workers N")
        row[0].set_ylabel("predicted time of a round (s)")
    stated = _setting_text(sweeps[0].settings[0], with_latency=True, with_workers=False)
    figure.suptitle(f"Time of a round against workers: {stated}", fontsize=11)
    save_figure(figure, path)


def _latencies_s(marks: Sequence[Crossover]) -> np.ndarray:
    """Return latencies from well below the first crossover to well above the last."""
    least_s = min([_MIN_LATENCY_S, *(each.at / 5 for each in marks)])
    most_s = max([_MAX_LATENCY_S, *(each.at * 2 for each in marks)])
    return np.geomspace(least_s, most_s, _NUM_POINTS)


def _plot_curve(axis: Any, name: str, xs: Any, ys: Sequence[float]) -> None:
    colour, dashes = SYSTEM_COLOURS[name.removesuffix("-shared-link")], _DASHES.get(name, "-")
    axis.plot(xs, ys, dashes, color=colour, label=architectures.ARCHITECTURE_LABELS[name], linewidth=2)


def _mark_crossovers(axis: Any, marks: Sequence[Crossover], position_text: Callable[[float], str]) -> None:
    """Mark every crossover with a dot, filled and labelled if it changes the fastest architecture."""
    for each in marks:
        face = "black" if each.is_lowest else "white"
        axis.plot([each.at], [each.seconds], "o", color="black", markerfacecolor=face, markersize=6, zorder=5)
    for index, found in enumerate(_group_touching([each for each in marks if each.is_lowest])):
        rows = [
            f"{position_text(each.at)}: {_SHORT_LABELS[each.faster_above]} passes {_SHORT_LABELS[each.faster_below]}"
            for each in found
        ]
        axis.annotate(
            "\n".join(rows),
            (found[0].at, found[0].seconds),
            xytext=(0.98, 0.04 + 0.11 * index),  # below the curves, the lowest crossover lowest
            textcoords="axes fraction",
            fontsize=8,
            ha="right",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},  # over the lines of those before it
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.8},
        )


def _group_touching(marks: Sequence[Crossover]) -> list[list[Crossover]]:
    """Group crossovers whose dots touch, so that they share a label."""
    found: list[list[Crossover]] = []
    for each in marks:
        if found and each.at < found[-1][0].at * _TOUCHING_RATIO:
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _finish_axis(axis: Any, title: str, label: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(label)
    axis.set_yscale("log")
    axis.grid(visible=True, which="major", color=LIGHT, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="upper left")


def _setting_text(setting: ArchitectureSetting, *, with_latency: bool, with_workers: bool = True) -> str:
    parts = [
        f"S = {units.format_bytes(int(setting.num_bytes))}",
        f"B = {units.format_rate(setting.bandwidth_bytes_per_s)}",
        f"C = {setting.reduce_s_per_byte:.4g} s/byte",
    ]
    if with_latency:
        parts.append(f"a = {units.format_seconds(setting.latency_s)}")
    if with_workers:
        parts += [f"N = {setting.num_workers}", f"k = {setting.num_groups}"]
    return ", ".join(parts)


_COMPUTE_COLOUR, _TRANSFER_COLOUR = PART_COLOURS["compute"], PART_COLOURS["communication"]
_MAX_LABELS = 40
_TEXT_WIDTH = 40


def draw_partition(partition: Partition, path: Path) -> None:
    """Draw one row per device with its compute and transfer times, and a line at the bottleneck."""
    stages = partition.stages
    figure, axis = new_figure(9.0, 1.6 + min(0.45 * len(stages), 12))
    rows = range(len(stages))
    axis.barh(
        [row - 0.17 for row in rows], [stage.compute_s for stage in stages], 0.4, color=_COMPUTE_COLOUR, label="compute"
    )
    transfers = [stage.transfer_s for stage in stages]
    axis.barh([row + 0.26 for row in rows], transfers, 0.24, color=_TRANSFER_COLOUR, label="transfer into it")
    axis.axvline(partition.bottleneck_s, color=ALARM, linewidth=1.2, label="bottleneck")
    _label_rows(axis, stages)
    axis.set_xlabel("predicted time for one microbatch (s)")
    axis.set_title(f"bottleneck {partition.bottleneck_s:.4g} s (predicted)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    save_figure(figure, path)


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
