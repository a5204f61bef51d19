"""Predicted times against latency or workers: figures 5 and 6 of the paper, the corrected ones beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringweave import units
from ringweave.cost import architectures, crossovers
from ringweave.cost.architectures import Setting
from ringweave.cost.crossovers import Crossover
from ringweave.pictures import plotting

_STYLES = {
    "ps": ("#5f9e6e", "--"),
    "ring": ("#30638e", "-"),
    "hierarchical": ("#c8a13a", "-."),
    "ps-hra": ("#d1495b", "-"),
    "ps-hra-shared-link": ("#d1495b", "-"),
}
_SHORT = {**architectures.LABELS, "ps-hra-shared-link": "PS-HRA"}
_TOUCHING = 1.1
_NUM_POINTS = 400
_LEAST_LATENCY_S, _MOST_LATENCY_S = 1e-3, 10.0
_SETS = (("as in the paper", architectures.PAPER), ("the server's link shared by all rings", architectures.CORRECTED))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Settings that differ in their number of workers, for one panel."""

    title: str
    """What is the same in all of them."""
    settings: tuple[Setting, ...]
    """By growing number of workers."""


def draw_latency(setting: Setting, path: Path) -> None:
    """Time against latency, the paper's formulas left and the corrected ones right; crossovers marked."""
    figure, axes = plotting.new_figure(12.5, 5.4, ncols=2, sharey=True)
    for axis, (title, names) in zip(axes, _SETS, strict=True):
        marks = crossovers.over_latency(setting, names)
        latencies_s = _latencies_s(marks)
        for name in names:
            line = architectures.line(name, setting)
            _plot(axis, name, latencies_s, [line.at(each) for each in latencies_s.tolist()])
        _mark(axis, marks, lambda at: f"{at:.4g} s")
        _finish(axis, title, "latency a, with the wait for slow workers (s)")
        axis.set_xscale("log")
    axes[0].set_ylabel("predicted time of a round (s)")
    figure.suptitle(f"Time of a round against latency: {_stated(setting, with_latency=False)}", fontsize=11)
    plotting.save(figure, path)


def draw_workers(sweeps: Sequence[Sweep], path: Path) -> None:
    """Time against workers: a row for each sweep, the paper's formulas left and the corrected ones right."""
    figure, axes = plotting.new_figure(12.5, 4.6 * len(sweeps), nrows=len(sweeps), ncols=2, sharey=True, squeeze=False)
    for row, sweep in zip(axes, sweeps, strict=True):
        workers = [each.num_workers for each in sweep.settings]
        for axis, (title, names) in zip(row, _SETS, strict=True):
            for name in names:
                _plot(axis, name, workers, [architectures.seconds(name, each) for each in sweep.settings])
            _mark(axis, crossovers.over_workers(sweep.settings, names), lambda at: f"N = {at:g}")
            _finish(axis, f"{title}; {sweep.title}", "workers N")
        row[0].set_ylabel("predicted time of a round (s)")
    stated = _stated(sweeps[0].settings[0], with_latency=True, with_workers=False)
    figure.suptitle(f"Time of a round against workers: {stated}", fontsize=11)
    plotting.save(figure, path)


def _latencies_s(marks: Sequence[Crossover]) -> np.ndarray:
    """From well below the first crossover to well above the last."""
    least_s = min([_LEAST_LATENCY_S, *(each.at / 5 for each in marks)])
    most_s = max([_MOST_LATENCY_S, *(each.at * 2 for each in marks)])
    return np.geomspace(least_s, most_s, _NUM_POINTS)


def _plot(axis: Any, name: str, xs: Any, ys: Sequence[float]) -> None:
    colour, dashes = _STYLES[name]
    axis.plot(xs, ys, dashes, color=colour, label=architectures.LABELS[name], linewidth=2)


def _mark(axis: Any, marks: Sequence[Crossover], place: Callable[[float], str]) -> None:
    """A dot for every crossover, full and with its place where the lowest one changes."""
    for each in marks:
        face = "black" if each.is_lowest else "white"
        axis.plot([each.at], [each.seconds], "o", color="black", markerfacecolor=face, markersize=6, zorder=5)
    for index, found in enumerate(_touching([each for each in marks if each.is_lowest])):
        rows = [f"{place(each.at)}: {_SHORT[each.faster_above]} passes {_SHORT[each.faster_below]}" for each in found]
        axis.annotate(
            "\n".join(rows),
            (found[0].at, found[0].seconds),
            xytext=(14, -26 - 30 * (index % 2)),
            textcoords="offset points",
            fontsize=8,
            va="top",
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.8},
        )


def _touching(marks: Sequence[Crossover]) -> list[list[Crossover]]:
    """Those whose dots touch, to share a text."""
    found: list[list[Crossover]] = []
    for each in marks:
        if found and each.at < found[-1][0].at * _TOUCHING:
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _finish(axis: Any, title: str, label: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(label)
    axis.set_yscale("log")
    axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="upper left")


def _stated(setting: Setting, *, with_latency: bool, with_workers: bool = True) -> str:
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
