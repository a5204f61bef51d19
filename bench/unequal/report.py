"""What was measured, beside the bars: a table in text, and a picture of loss against wall time."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rows import CONTENDERS, ROWS

OURS = CONTENDERS[1:]
MOST_BEHIND = 1.01
"""Times DDP's final loss."""
TITLES = ("cluster", "seeds", "DDP + Gloo samples/s", "balanced", "ps-hra", "x", "bar", "x", "bar", "ideal")


def to_text(rows: Sequence[dict[str, Any]]) -> str:
    """A table: samples per second, their ratios, final held-out losses."""
    lines = [f"| {' | '.join(TITLES)} | final loss: DDP, balanced, ps-hra | ps-hra / DDP |"]
    lines.append("|" + "---|" * (len(TITLES) + 2))
    for name, runs in by_row(rows):
        lines.append(_line(name, runs))
    accounts = sum(run["accounts"] for run in rows)
    are_exact = all(run["accounts_exact"] for run in rows)
    words = "every sample exactly once" if are_exact else "SAMPLES WERE LOST OR DOUBLED"
    lines.append(f"\nMedians over epochs (measured), but the ideal (predicted). {accounts} accounts: {words}.")
    lines.append("x is times DDP; in the row `changed` a fraction of the ideal after the change.")
    return "\n".join(lines)


def by_row(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Runs of each row, in the order of the table."""
    order = list(ROWS)
    line = sorted(rows, key=lambda run: (order.index(run["row"]), run["seed"]))
    return [(name, list(runs)) for name, runs in itertools.groupby(line, key=lambda run: run["row"])]


def rate(run: dict[str, Any], name: str) -> float:
    """Samples per second: the median epoch, without the first; in `changed` those after the change."""
    seconds = run["measured"][name]["seconds"]
    counted = seconds[len(seconds) // 2 + 1 :] if ROWS[run["row"]].later_speeds else seconds[1:]
    return run["samples"] / statistics.median(counted)


def _line(name: str, runs: Sequence[dict[str, Any]]) -> str:
    row = ROWS[name]
    rates = {each: statistics.median(rate(run, each) for run in runs) for each in CONTENDERS}
    losses = {each: statistics.mean(run["measured"][each]["losses"][-1] for run in runs) for each in CONTENDERS}
    cells = [name, str(len(runs)), *(f"{rates[each]:.0f}" for each in CONTENDERS)]
    for each, bar in zip(OURS, row.bars, strict=True):
        gain = statistics.median(rate(run, each) / rate(run, "gloo") for run in runs)
        cells += [f"{gain / row.ideal if row.later_speeds else gain:.2f}", "" if bar is None else f"{bar:g}"]
    behind = losses["ps-hra"] / losses["gloo"]
    verdict = f"{behind:.3f}" + ("" if behind <= MOST_BEHIND else " (more than 1.01)")
    return (
        f"| {' | '.join(cells)} | {row.ideal:g} | {', '.join(f'{loss:.4f}' for loss in losses.values())} | {verdict} |"
    )


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out loss against wall time for each cluster, and samples per second."""
    grouped = by_row(rows)
    figure, axes = pyplot.subplots(2, len(grouped), figsize=(3.2 * len(grouped), 6), squeeze=False)
    for (name, runs), loss_axis, rate_axis in zip(grouped, axes[0], axes[1], strict=True):
        for each in CONTENDERS:
            measured = runs[0]["measured"][each]
            loss_axis.plot(list(itertools.accumulate(measured["seconds"])), measured["losses"], label=each)
        loss_axis.set(title=name, xlabel="seconds (measured)", yscale="log")
        rate_axis.bar(CONTENDERS, [statistics.median(rate(run, each) for run in runs) for each in CONTENDERS])
    axes[0][0].set_ylabel("held-out loss (measured)")
    axes[1][0].set_ylabel("samples/s (measured)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
