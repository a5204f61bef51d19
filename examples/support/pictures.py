"""The picture of a run: its losses over the train steps."""

from pathlib import Path

import numpy as np

from support import files, report

try:
    from ringweave.plots.figures import DARK, GREY, SYSTEM_COLOURS
except ImportError:  # the examples run without ringweave too
    DARK, GREY, SYSTEM_COLOURS = "black", "grey", {"ringweave": "navy"}

OURS = SYSTEM_COLOURS["ringweave"]
SMOOTHED_STEPS = 21


def draw_losses(folder: Path, numbers: dict[str, float]) -> None:
    """Writes `loss.png` from the curves in `folder`, with the bigram model as a line to get below."""
    from matplotlib.figure import Figure  # slow to import, and only one rank draws

    bigram = numbers["bigram_nats_per_byte"]
    train_steps, losses = files.read_curve(folder / report.LOSSES)
    held_out_steps, held_out = files.read_curve(folder / report.HELD_OUT)
    last_step, end, beside = train_steps[-1], held_out[-1], {"textcoords": "offset points", "va": "center"}

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(bigram, color=GREY, linestyle="--", linewidth=1.2)
    axes.annotate(f"bigram\n{bigram:.3f}", (last_step, bigram), xytext=(10, 0), color=GREY, **beside)
    axes.plot(train_steps, losses, color=OURS, alpha=0.3, linewidth=1, label="training batch")
    axes.plot(train_steps, smooth(losses), color=OURS, linewidth=1.8, label=f"mean of {SMOOTHED_STEPS} steps")
    axes.plot(held_out_steps, held_out, "o", color=DARK, markersize=6, clip_on=False, zorder=5, label="held-out text")
    axes.annotate(f"GPT\n{end:.3f}", (last_step, end), xytext=(10, 0), color=DARK, weight="bold", **beside)
    axes.set(xlabel="train step", ylabel="loss (nats per byte, measured)")
    axes.set(xlim=(0, last_step), ylim=(0.9 * min(losses), max(1.6 * bigram, 1.1 * end)))
    axes.set_title(describe(numbers), loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png")


def describe(numbers: dict[str, float]) -> str:
    """Returns the title: how big, on how many workers, how long."""
    return (
        f"A GPT of {numbers['parameters'] / 1e6:.2f} M parameters on the standard library's text: "
        f"{numbers['world_size']} workers, {numbers['train_s']:.0f} s, {numbers['samples_per_s']:.0f} samples/s"
    )


def smooth(values: list[float]) -> np.ndarray:
    """Returns the mean of the values around each value, of fewer near the ends."""
    window = np.ones(min(SMOOTHED_STEPS, len(values)))
    return np.convolve(values, window, mode="same") / np.convolve(np.ones(len(values)), window, mode="same")
