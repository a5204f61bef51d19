"""Chart of benchmark results: grouped bars for one or several clusters."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringweave.plots import figures
from ringweave.units import format_bytes

_SYSTEM_LABELS = {"ringweave": "ringweave", "gloo": "Gloo", "openmpi": "Open MPI", "mpich": "MPICH"}

_MAX_GROUPS_PER_ROW = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemBar:
    """Bar of one system in one group."""

    system: str
    height: float
    low: float
    """Height at the slow end of the interquartile range."""
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BarGroup:
    """The systems at one size in one order on one cluster."""

    label: str
    bars: tuple[SystemBar, ...]


def bar_groups(documents: Sequence[dict[str, Any]]) -> tuple[list[BarGroup], list[BarGroup]]:
    """Return groups with a bound, as fractions of it, and those without, as speeds relative to Gloo (or the first)."""
    bounded, relative = [], []
    for document in documents:
        several = len({result["order"] for result in document["results"]}) > 1
        keys = dict.fromkeys((result["order"], result["bytes"]) for result in document["results"])
        for order, size in keys:
            found = [each for each in document["results"] if (each["order"], each["bytes"]) == (order, size)]
            label = f"{document['cluster']}\n{format_bytes(size)}" + (f", {order}" if several else "")
            if found[0]["bound_s"]:
                bounded.append(BarGroup(label=label, bars=_bars(found, found[0]["bound_s"])))
            else:
                reference = next((each for each in found if each["system"] == "gloo"), found[0])
                relative.append(BarGroup(label=label, bars=_bars(found, reference["median_s"])))
    return bounded, relative


def draw_results(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the plot in the format of the file's name."""
    bounded, relative = bar_groups(documents)
    panels = [
        (row, draw_panel)
        for found, draw_panel in ((bounded, _draw_bounded), (relative, _draw_relative))
        for row in _split_rows(found)
    ]
    widest = max(sum(len(group.bars) + 1 for group in found) for found, _ in panels)
    figure, axes = figures.new_figure(
        max(6.0, 0.42 * widest + 1.5), 3.8 * len(panels), nrows=len(panels), squeeze=False
    )
    for axis, (found, draw_panel) in zip(axes[:, 0], panels, strict=True):
        draw_panel(axis, found)
        _finish_panel(axis, found, widest)
    handles = {
        label: handle for axis in axes[:, 0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), ncols=4, frameon=False, fontsize=9, loc="outside upper left")
    figures.save_figure(figure, path)


def _split_rows(found: Sequence[BarGroup]) -> list[Sequence[BarGroup]]:
    """Split into rows of about equal length, none so wide that its labels could not be read on a page."""
    num_rows = -(-len(found) // _MAX_GROUPS_PER_ROW)
    return [found[row * len(found) // num_rows : (row + 1) * len(found) // num_rows] for row in range(num_rows)]


def _bars(found: Sequence[dict[str, Any]], best_s: float) -> tuple[SystemBar, ...]:
    return tuple(
        _bar(result, best_s)
        for result in sorted(found, key=lambda each: list(figures.SYSTEM_COLOURS).index(each["system"]))
    )


def _bar(result: dict[str, Any], best_s: float) -> SystemBar:
    half_s = result["iqr_s"] / 2
    median_s = result["median_s"]
    low_s, high_s = median_s - half_s, median_s + half_s
    if len(result.get("rounds_s", [])) > 1:
        low_s, high_s = _quartiles(result["rounds_s"])
    return SystemBar(system=result["system"], height=best_s / median_s, low=best_s / high_s, high=best_s / low_s)


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    low_s, _, high_s = statistics.quantiles(seconds, n=4, method="inclusive")
    return low_s, high_s


def _draw_bounded(axis: Any, found: Sequence[BarGroup]) -> None:
    top = max(bar.high for group in found for bar in group.bars)
    for at, bar in _positions(found):
        _draw_bar(axis, at, bar, bottom=0.0)
        axis.text(at, 0.02 * top, f"{bar.height:.2f}", ha="center", va="bottom", color="white", fontsize=7)
    axis.set_ylabel("fraction of the lower bound (1 = optimal)")
    axis.set_ylim(0, max(1.08, 1.05 * top))


def _draw_relative(axis: Any, found: Sequence[BarGroup]) -> None:
    """Draw bars up and down from 1; twice and half as fast are the same distance."""
    axis.set_yscale("log")
    for at, bar in _positions(found):
        _draw_bar(axis, at, bar, bottom=1.0)
        tip, va = (bar.high * 1.05, "bottom") if bar.height >= 1 else (bar.low / 1.05, "top")
        axis.text(at, tip, f"{bar.height:.3g}", ha="center", va=va, fontsize=7)
    low, high = (
        min(bar.low for group in found for bar in group.bars),
        max(b.high for group in found for b in group.bars),
    )
    low, high = min(low / 1.4, 0.5), max(high * 1.4, 2.0)
    axis.set_ylim(low, high)
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    has_gloo = all(any(bar.system == "gloo" for bar in group.bars) for group in found)
    axis.set_ylabel("relative speed (Gloo = 1)" if has_gloo else "relative speed")


def _draw_bar(axis: Any, at: float, bar: SystemBar, *, bottom: float) -> None:
    error = [[bar.height - bar.low], [bar.high - bar.height]]
    axis.bar(
        at,
        bar.height - bottom,
        0.9,
        bottom=bottom,
        color=figures.SYSTEM_COLOURS[bar.system],
        label=_SYSTEM_LABELS[bar.system],
    )
    axis.errorbar(at, bar.height, yerr=error, capsize=2, color="black", linewidth=1)


def _finish_panel(axis: Any, found: Sequence[BarGroup], widest: int) -> None:
    centres, at = [], 0
    for group in found:
        centres.append(at + (len(group.bars) - 1) / 2)
        at += len(group.bars) + 1
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_xticks(centres, [group.label for group in found], fontsize=8)
    axis.set_xlim(-1, widest - 1)
    axis.spines[["top", "right"]].set_visible(False)


def _positions(found: Sequence[BarGroup]) -> Iterator[tuple[int, SystemBar]]:
    at = 0
    for group in found:
        for bar in group.bars:
            yield at, bar
            at += 1
        at += 1
