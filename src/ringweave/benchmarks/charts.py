"""Results of one or several clusters as grouped bars. matplotlib is loaded only when something is drawn."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringweave.errors import UsageError, explain
from ringweave.units import format_bytes

_COLOURS = {"ringweave": "#d1495b", "gloo": "#30638e", "openmpi": "#5f9e6e", "mpich": "#c8a13a"}
_LABELS = {"ringweave": "ringweave", "gloo": "Gloo", "openmpi": "Open MPI", "mpich": "MPICH"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One system in one group."""

    system: str
    height: float
    low: float
    """Height at the slow end of the interquartile range."""
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The systems at one size in one order on one cluster."""

    label: str
    bars: tuple[Bar, ...]


def check_library() -> None:
    """Refuse before anything is measured what could not be drawn afterwards.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        do = "Install it: pip install matplotlib"
        raise UsageError(explain("picture", got="no matplotlib", expected="matplotlib to draw it", do=do))


def groups(documents: Sequence[dict[str, Any]]) -> tuple[list[Group], list[Group]]:
    """Groups with a bound, as fractions of it; and those without, as speeds relative to Gloo (or the first system)."""
    bounded, relative = [], []
    for document in documents:
        several = len({result["order"] for result in document["results"]}) > 1
        keys = dict.fromkeys((result["order"], result["bytes"]) for result in document["results"])
        for order, size in keys:
            found = [each for each in document["results"] if (each["order"], each["bytes"]) == (order, size)]
            label = f"{document['cluster']}\n{format_bytes(size)}" + (f", {order}" if several else "")
            if found[0]["bound_s"]:
                bounded.append(Group(label=label, bars=_bars(found, found[0]["bound_s"])))
            else:
                yard = next((each for each in found if each["system"] == "gloo"), found[0])
                relative.append(Group(label=label, bars=_bars(found, yard["median_s"])))
    return bounded, relative


def draw(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture; its format is that of the file's name."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = [
        (found, label)
        for found, label in zip(
            groups(documents), ("fraction of the lower bound (1 = optimal)", "speed, Gloo = 1"), strict=True
        )
        if found
    ]
    widest = max(sum(len(group.bars) + 1 for group in found) for found, _ in panels)
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(max(6.0, 0.42 * widest + 1.5), 4.2 * len(panels)), squeeze=False, layout="constrained"
    )
    for axis, (found, label) in zip(axes[:, 0], panels, strict=True):
        _draw_panel(axis, found, label)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(found: Sequence[dict[str, Any]], best_s: float) -> tuple[Bar, ...]:
    return tuple(
        _bar(result, best_s) for result in sorted(found, key=lambda each: list(_COLOURS).index(each["system"]))
    )


def _bar(result: dict[str, Any], best_s: float) -> Bar:
    half_s = result["iqr_s"] / 2
    median_s = result["median_s"]
    low_s, high_s = median_s - half_s, median_s + half_s
    if len(result.get("rounds_s", [])) > 1:
        low_s, high_s = _quartiles(result["rounds_s"])
    return Bar(system=result["system"], height=best_s / median_s, low=best_s / high_s, high=best_s / low_s)


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    import statistics

    low_s, _, high_s = statistics.quantiles(seconds, n=4, method="inclusive")
    return low_s, high_s


def _draw_panel(axis: Any, found: Sequence[Group], label: str) -> None:
    at, centres, seen = 0.0, [], set()
    top = max(bar.high for group in found for bar in group.bars)
    for group in found:
        for index, bar in enumerate(group.bars):
            name = None if bar.system in seen else _LABELS[bar.system]
            seen.add(bar.system)
            error = [[bar.height - bar.low], [bar.high - bar.height]]
            axis.bar(at + index, bar.height, 0.9, yerr=error, capsize=2, color=_COLOURS[bar.system], label=name)
            axis.text(at + index, 0.02 * top, f"{bar.height:.2f}", ha="center", va="bottom", color="white", fontsize=7)
        centres.append(at + (len(group.bars) - 1) / 2)
        at += len(group.bars) + 1
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_xticks(centres, [group.label for group in found], fontsize=8)
    axis.set_ylabel(label)
    axis.set_ylim(0, max(1.1, 1.15 * top))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(ncols=4, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, 1.14))
