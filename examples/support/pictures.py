"""The picture of a run: its losses over the train steps."""

from pathlib import Path

from support import files, report

BLUE, ORANGE, GREY = "#9db8d9", "#d9541e", "#555555"
DARK_BLUE = "#1f4e8c"


def draw_losses(folder: Path, numbers: dict[str, float]) -> None:
    """Writes `loss.png` from the curves in `folder`, with the bigram model as a line to get below."""
    from matplotlib.figure import Figure  # slow to import, and only one rank draws

    bigram = numbers["bigram_nats_per_byte"]
    steps, losses = files.read_curve(folder / report.LOSSES)
    held_out_steps, held_out = files.read_curve(folder / report.HELD_OUT)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=BLUE, linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(losses), color=DARK_BLUE, linewidth=1.8, label="training, smoothed")
    axes.plot(held_out_steps, held_out, "o-", color=ORANGE, markersize=5, linewidth=1, label="held out")
    axes.axhline(bigram, color=GREY, linestyle="--", linewidth=1.2, label=f"bigram, held out: {bigram:.3f}")
    if held_out:
        axes.annotate(
            f"{held_out[-1]:.3f}",
            (held_out_steps[-1], held_out[-1]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="right",
            color=ORANGE,
            fontweight="bold",
        )
    axes.set(xlabel="train step", ylabel="loss (nats per byte, measured)", xlim=(0, max(steps, default=1) * 1.01))
    axes.set_title(
        f"{numbers['parameters'] / 1e6:.2f} M parameters on {numbers['world_size']} workers, "
        f"{numbers['train_s']:.0f} s, {numbers['samples_per_s']:.0f} samples/s (measured)",
        loc="left",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png")


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Returns the exponential moving average, corrected for its start."""
    smoothed, average, total = [], 0.0, 0.0
    for value in values:
        average, total = weight * average + (1 - weight) * value, weight * total + (1 - weight)
        smoothed.append(average / total)
    return smoothed
