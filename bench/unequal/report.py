"""Measured results of the table beside the bars: a table in text, and a plot of loss against wall time."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rows import CONTENDERS, GLOO, ROWS, WITHIN_STEPS

from ringweave.plots import figures

OURS = CONTENDERS[1:]
LABELS = {GLOO: "DDP on Gloo", "balanced": "ringweave, balanced", "ps-hra": "ringweave, rings with a server (ps-hra)"}
MOST_BEHIND = 1.01
"""Times synchronous training's final loss."""
MOST_S = 5400
"""The whole table by one command."""
LEAST_OF_BETTER = 0.95
"""Fraction of the better mode's samples per second that the choice of `auto` must have at least."""
TITLES = ("cluster", "seeds", "DDP + Gloo samples/s", *OURS, "x", "bar", "x", "bar", "ideal")
LATER = (
    *("final loss: DDP, balanced, ps-hra", "ps-hra / balanced (1.01)"),
    *("time to a common loss, times faster: balanced, ps-hra", "auto chooses, of the better (0.95)"),
)


def to_text(rows: Sequence[dict[str, Any]], asked: Iterable[tuple[str, int]], *, is_short: bool) -> str:
    """A table: samples per second, their ratios, final held-out losses; `asked` are rows and seeds to be there."""
    lines = [f"| {' | '.join((*TITLES, *LATER))} |", "|" + "---|" * (len(TITLES) + len(LATER))]
    lines += [_line(name, runs, is_short=is_short) for name, runs in by_row(rows)]
    accounts = sum(job["accounts"] for job in jobs(rows))
    are_exact = all(job["accounts_exact"] for job in jobs(rows))
    words = "every sample exactly once" if are_exact else "SAMPLES WERE LOST OR DOUBLED"
    took_s = sum(job["took_s"] for job in jobs(rows))
    commits = sorted({run["machine"]["commit"] for run in rows})
    lines.append(f"\nMedians over epochs (measured), but the ideal (predicted). {accounts} accounts: {words}.")
    found = missed(rows, asked, is_short=is_short)
    lines.append(f"Bars missed: {'; '.join(found)}." if found else "Every bar was met.")
    lines.append(f"x is times DDP; in the row `changed` a fraction of the ideal from {WITHIN_STEPS} steps after the ")
    batches = " or ".join(str(each) for each in sorted({run["batch"] for run in rows}))
    lines[-1] += f"change on. A step has {batches} samples. A number below its bar has an *. "
    lines[-1] += f"It took {took_s:.0f} s; at {', '.join(commits)}."
    return "\n".join(lines)


def missed(rows: Sequence[dict[str, Any]], asked: Iterable[tuple[str, int]], *, is_short: bool) -> list[str]:
    """Bars that were missed, in words; what was asked for and is not there is among them.

    Final losses are compared where training went on until they hardly change, so not in the short table.
    """
    there = {(run["row"], run["seed"]) for run in rows}
    found = [f"{name} seed {seed} not measured" for name, seed in asked if (name, seed) not in there]
    found += [
        f"{job['row']} seed {job['seed']} samples lost or doubled" for job in jobs(rows) if not job["accounts_exact"]
    ]
    if (took_s := sum(job["took_s"] for job in jobs(rows))) > MOST_S:
        found.append(f"took {took_s:.0f} s ({MOST_S})")
    for name, runs in by_row(rows):
        row = ROWS[name]
        for each, bar in zip(OURS, row.bars, strict=True):
            if bar is not None and gain(runs, each) < bar:
                found.append(f"{name} {each} {gain(runs, each):.2f} ({bar:g})")
        if (behind := loss_ratio(runs)) > MOST_BEHIND and not is_short:
            found.append(f"{name} final loss {behind:.3f} ({MOST_BEHIND})")
        for run in runs:
            part = _part_of_better(run, runs)
            if part is None:
                found.append(f"{name} auto {run['auto'][0]}, which was not measured")
            elif part < LEAST_OF_BETTER:
                found.append(f"{name} auto {part:.2f} ({LEAST_OF_BETTER})")
    return found


def jobs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the jobs of the rows, and those beside them of the choices of `auto`."""
    return [*rows, *(run["by_auto"] for run in rows if "by_auto" in run)]


def gain(runs: Sequence[dict[str, Any]], each: str) -> float:
    """Median over the seeds of how many times DDP's speed it has; in `changed` the fraction of the ideal."""
    row = ROWS[runs[0]["row"]]
    found = statistics.median(rate(run, each) / rate(run, GLOO) for run in runs)
    return found / row.ideal if row.later_speeds else found


def loss_ratio(runs: Sequence[dict[str, Any]]) -> float:
    """Final loss of rings beside that of the same samples in the same order, synchronously; means over the seeds.

    DDP's sampler has an order of its own, which makes more of a difference than anything else here.
    """
    losses = _losses(runs)
    return losses["ps-hra"] / losses["balanced"]


def _losses(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {each: statistics.mean(run["measured"][each]["losses"][-1] for run in runs) for each in CONTENDERS}


def time_gain(runs: Sequence[dict[str, Any]], each: str) -> float:
    """Median over the seeds of how many times sooner than DDP it has a loss that both reach: the higher final one."""
    found = []
    for run in runs:
        ours, theirs = run["measured"][each], run["measured"][GLOO]
        loss = max(ours["losses"][-1], theirs["losses"][-1])
        found.append(_seconds_to(loss, theirs) / _seconds_to(loss, ours))
    return statistics.median(found)


def _seconds_to(loss: float, measured: dict[str, Any]) -> float:
    """Wall time until the held-out loss first was that low, straight lines between ends of epochs."""
    seconds = list(itertools.accumulate(measured["seconds"]))
    losses = measured["losses"]
    index = next(index for index, each in enumerate(losses) if each <= loss)
    if not index:
        return seconds[0]
    part = (losses[index - 1] - loss) / (losses[index - 1] - losses[index])
    return seconds[index - 1] + part * (seconds[index] - seconds[index - 1])


def by_row(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Runs of each row, in the order of the table."""
    order = list(ROWS)
    line = sorted(rows, key=lambda run: (order.index(run["row"]), run["seed"]))
    return [(name, list(runs)) for name, runs in itertools.groupby(line, key=lambda run: run["row"])]


def rate(run: dict[str, Any], name: str) -> float:
    """Samples per second: the median epoch without the first; in `changed` all from ten steps after the change on."""
    if ROWS[run["row"]].later_speeds:
        return rate_after(run, name)
    return run["samples"] / statistics.median(run["measured"][name]["seconds"][1:])


def rate_after(run: dict[str, Any], name: str) -> float:
    """Samples per second once the first train steps after the change are over, whatever epoch that is in."""
    measured, turned = run["measured"][name], run["epochs"] // 2
    left_out, num_samples, seconds = WITHIN_STEPS * run["batch"], 0, 0.0
    for epoch in range(turned, run["epochs"]):
        begin_s = 0.0
        for _, end_s, samples in (mark for mark in measured["marks"] if mark[0] == epoch):
            if left_out > 0:
                left_out, begin_s = left_out - samples, end_s
            else:
                num_samples += samples
        seconds += measured["seconds"][epoch] - begin_s if left_out <= 0 else 0.0
    return num_samples / seconds


def _line(name: str, runs: Sequence[dict[str, Any]], *, is_short: bool) -> str:
    row = ROWS[name]
    rates = {each: statistics.median(rate(run, each) for run in runs) for each in CONTENDERS}
    losses = _losses(runs)
    cells = [name, str(len(runs)), *(f"{rates[each]:.0f}" for each in CONTENDERS)]
    for each, bar in zip(OURS, row.bars, strict=True):
        found = gain(runs, each)
        cells += [_marked(found, is_met=bar is None or found >= bar), "" if bar is None else f"{bar:g}"]
    behind = loss_ratio(runs)
    cells += [f"{row.ideal:g}", ", ".join(f"{loss:.4f}" for loss in losses.values())]
    cells += [_marked(behind, is_met=is_short or behind <= MOST_BEHIND, digits=3)]
    cells += [
        ", ".join(f"{time_gain(runs, each):.2f}" for each in OURS),
        ", ".join(_said_of_auto(run, runs) for run in runs),
    ]
    return f"| {' | '.join(cells)} |"


def by_auto(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The job that the mode which `auto` takes has run in: this one, or one beside a run of the same row."""
    mode, jobs_of_row = run["auto"][0], [run, *(each["by_auto"] for each in runs if "by_auto" in each)]
    return next((job for job in jobs_of_row if mode in job["measured"]), None)


def _said_of_auto(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> str:
    """The mode, its speed beside that of the better one, and its final loss beside synchronous training's."""
    mode, part, job = run["auto"][0], _part_of_better(run, runs), by_auto(run, runs)
    if part is None or job is None:
        return f"{mode} not measured*"
    said = f"{mode} {_marked(part, is_met=part >= LEAST_OF_BETTER)}"
    if mode in OURS:
        return said
    beside = next(each for each in runs if each["seed"] == job["seed"])
    loss = job["measured"][mode]["losses"][-1] / beside["measured"]["balanced"]["losses"][-1]
    return f"{said} with {loss:.3f} of the loss"


def _part_of_better(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> float | None:
    """Speed of the mode that `auto` takes beside the better one's; None where it did not run.

    Each is in times of DDP's in its own job.
    """
    mode, job = run["auto"][0], by_auto(run, runs)
    best = max(rate(run, each) for each in OURS) / rate(run, GLOO)
    return rate(job, mode) / rate(job, GLOO) / best if job else None


def _marked(value: float, *, is_met: bool, digits: int = 2) -> str:
    return f"{value:.{digits}f}{'' if is_met else '*'}"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out loss against wall time for each cluster, and samples per second."""
    grouped, colours = by_row(rows), [figures.SYSTEM_COLOURS[each] for each in CONTENDERS]
    figure, axes = figures.new_figure(2.1 * len(grouped) + 0.8, 5.2, nrows=2, ncols=len(grouped), squeeze=False)
    for (name, runs), loss_axis, rate_axis in zip(grouped, axes[0], axes[1], strict=True):
        for each, colour in zip(CONTENDERS, colours, strict=True):
            measured = runs[0]["measured"][each]
            seconds = list(itertools.accumulate(measured["seconds"]))
            loss_axis.plot(seconds, measured["losses"], color=colour, label=LABELS[each])
        loss_axis.set_title(name, fontsize=10)
        loss_axis.set_xlabel("seconds")
        rates = [statistics.median(rate(run, each) for run in runs) for each in CONTENDERS]
        rate_axis.bar_label(rate_axis.bar(CONTENDERS, rates, color=colours), fmt="{:,.0f}", fontsize=7)
        rate_axis.set_xticks([])
        for axis in (loss_axis, rate_axis):
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
    axes[0][0].set_ylabel("held-out loss (measured)")
    axes[1][0].set_ylabel("samples/s (measured)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    figures.save_figure(figure, path)
