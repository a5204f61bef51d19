"""The comparison of the demo: HTML in front of the report of ringweave's run, and the same as a picture."""

import base64
import html
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringweave.plots.figures import DARK, GREY, PALE, PART_COLOURS, SYSTEM_COLOURS
from support.demo_data import Run, Setting

COLOURS = {"ringweave": SYSTEM_COLOURS["ringweave"], "DDP on Gloo": SYSTEM_COLOURS["gloo"]}
PARTS = {"compute": "compute", "wait for the slowest": "wait", "communication": "communication"}
TIMES = {name: PART_COLOURS[part] for name, part in PARTS.items()}
SAMPLE_LINES, SAMPLE_COLUMNS = 12, 88
Draw = Callable[[Any, Setting, Run, Run], str]
"""Draws a panel on axes and returns its alternative text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The sentences of the page."""

    sentence: str
    """The ratio."""
    shares_sentence: str
    kill_sentence: str
    sample_sentence: str
    setting_sentence: str


def write(folder: Path, setting: Setting, gloo: Run, ours: Run) -> Page:
    """Writes preface.html and page.png, and returns what they say."""
    page = Page(
        sentence=ratio_sentence(setting, gloo, ours),
        shares_sentence=shares_sentence(setting, ours),
        kill_sentence=kill_sentence(setting, ours),
        sample_sentence=sample_sentence(gloo, ours),
        setting_sentence=setting_sentence(setting),
    )
    (folder / "preface.html").write_text(preface_html(page, setting, gloo, ours), encoding="utf-8")
    draw_page(page, setting, gloo, ours).savefig(folder / "page.png", dpi=110)
    return page


def ratio_sentence(setting: Setting, gloo: Run, ours: Run) -> str:
    """Returns the one sentence of the demo."""
    fast, slow = (run.samples_per_s(setting.steps, setting.batch) for run in (ours, gloo))
    where = f"steps {setting.steps[0]} to {setting.steps[-1]}"
    return f"ringweave trained {fast / slow:.1f} times as fast as DDP on Gloo: {fast:.0f} against {slow:.0f} samples a second (measured, {where})."  # noqa: E501 - one sentence


def shares_sentence(setting: Setting, ours: Run) -> str:
    """Returns what the shares are, and how the bytes went."""
    shares = ", ".join(f"{node} {share}" for node, share in zip(setting.cpus, ours.shares, strict=True))
    carried = ours.record["collectives_by_schedule"]
    names = sorted((name for name in carried if name != "native"), key=lambda name: -carried[name]["bytes"])
    each = ", ".join(f"{name} {carried[name]['collectives']}" for name in names)
    small = carried.get("native", {}).get("collectives", 0)
    return (
        f"Shares of a batch of {setting.batch}, by measured speed: {shares}. {ours.scheduled_fraction:.1%} of the "
        f"bytes went by schedules of ringweave (collectives: {each}; by Gloo, mostly small ones: {small})."
    )


def kill_sentence(setting: Setting, ours: Run) -> str:
    """Returns what the kill has cost."""
    accounted = ours.record["training"]
    whole = "each sample was computed exactly once" if accounted["exact"] else "some samples were lost"
    assert ours.kill is not None
    again = "the others ended the training without it"
    if ours.returned_s is not None:
        again = f"a new worker had its place {ours.returned_s - ours.kill.at_s:.0f} s later"
    node = list(setting.cpus)[ours.kill.rank]
    return (
        f"Rank {ours.kill.rank} (node {node}) was killed after step {ours.kill.train_step}. The others finished their "
        f"step, {ours.longest_gap_s:.1f} s after the one before, and {again}; {whole} (measured: "
        f"{accounted['samples_accounted']} samples)."
    )


def sample_sentence(gloo: Run, ours: Run) -> str:
    """Returns how good the model is."""
    held_out, bigram = ours.result["held_out_nats_per_byte"], ours.result["bigram_nats_per_byte"]
    other = gloo.result["held_out_nats_per_byte"]
    return (
        f"Held-out text: {held_out:.3f} nats per byte by ringweave's model, {other:.3f} by that of DDP on Gloo, "
        f"{bigram:.3f} by a bigram model (measured). ringweave's model wrote:"
    )


def setting_sentence(setting: Setting) -> str:
    """Returns what the numbers were measured on."""
    cpus = ", ".join(f"{node} {cpu:.2f}" for node, cpu in setting.cpus.items())
    kind = {
        "duty cycle": "a duty cycle by SIGSTOP and SIGCONT, which stands in for quotas of control groups",
    }.get(setting.limits, setting.limits)
    return (
        f"Two racks of two nodes in a lab on one machine of {setting.num_cpus} processors; uplinks {setting.uplink}, "
        f"NICs 400 Mbit/s. Processors of each node: {cpus}, limited by {kind}, while it trains. "
        f"Load of the machine at the end: {setting.load:.1f}."
    )


def draw_losses(axes: Any, setting: Setting, gloo: Run, ours: Run) -> str:
    """Draws both losses over time, with the kill."""
    ends = []
    for run in (gloo, ours):
        steps = sorted(set(run.losses) & set(run.ended_s))
        seconds = [run.ended_s[step] - run.began_s for step in steps]
        losses = [run.losses[step] for step in steps]
        axes.plot(seconds, losses, color=COLOURS[run.name], linewidth=1.8, label=run.name)
        axes.plot(seconds[-1:], losses[-1:], "o", color=COLOURS[run.name])
        ends.append(f"{run.name} ends {steps[-1]} steps after {seconds[-1]:.0f} s at a loss of {losses[-1]:.2f}")
    top = axes.get_ylim()[1]
    killed_s = None if ours.kill is None else ours.kill.at_s
    for text, side, moment_s in (("worker killed", "right", killed_s), ("a new one works", "left", ours.returned_s)):
        if moment_s is not None:
            seconds_then = moment_s - ours.began_s
            axes.axvline(seconds_then, color=COLOURS[ours.name], linestyle=":", linewidth=1.5)
            beside = {"xytext": (5 if side == "left" else -5, -12), "textcoords": "offset points", "ha": side}
            axes.annotate(text, (seconds_then, top), color=COLOURS[ours.name], **beside)
            ends.append(f"ringweave: {text} after {seconds_then:.0f} s")
    bigram = ours.result["bigram_nats_per_byte"]
    axes.axhline(bigram, color=GREY, linestyle="--", linewidth=1.2)
    beside = {"xytext": (-4, 4), "textcoords": "offset points", "ha": "right", "color": GREY}
    axes.annotate(
        f"bigram model, held-out text: {bigram:.2f}", (1, bigram), xycoords=("axes fraction", "data"), **beside
    )
    axes.set(xlabel="seconds since the first train step", ylabel="training loss, nats per byte", xlim=(0, None))
    axes.set_title("Loss over time: the same steps, on the same sequences (measured)", loc="left")
    axes.legend(frameon=False, loc="upper right")
    return f"Training loss over time. {'; '.join(ends)}."


def draw_rates(axes: Any, setting: Setting, gloo: Run, ours: Run) -> str:
    """Draws the samples per second, before the kill and with it."""
    whole = range(setting.steps[0], max(ours.ended_s) + 1)
    rows = [
        ("DDP on Gloo", COLOURS[gloo.name], gloo.samples_per_s(setting.steps, setting.batch)),
        ("ringweave", COLOURS[ours.name], ours.samples_per_s(setting.steps, setting.batch)),
        ("ringweave,\nkill and return\nincluded", COLOURS[ours.name], ours.samples_per_s(whole, setting.batch)),
    ]
    _draw_bars(axes, rows, "{:.0f}")
    axes.set(xlabel="samples a second")
    axes.set_title("Samples per second (measured)", loc="left")
    return "Samples per second. " + "; ".join(f"{' '.join(name.split())}: {value:.0f}" for name, _, value in rows) + "."


def draw_uplink(axes: Any, setting: Setting, gloo: Run, ours: Run) -> str:
    """Draws the bytes on the uplink beside the least that an allreduce can send."""
    least = ours.result["parameters"] * 4e-6
    rows = [(run.name, COLOURS[run.name], run.uplink_bytes_per_step() * 1e-6) for run in (gloo, ours)]
    _draw_bars(axes, rows, "{:.2f}")
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.2 * least))
    axes.axvline(least, color=GREY, linestyle="--", linewidth=1.3)
    beside = {"textcoords": "offset points", "color": GREY, "ha": "center", "va": "bottom", "annotation_clip": False}
    axes.annotate(f"bound {least:.2f} (predicted)", (least, axes.get_ylim()[1]), xytext=(0, 2), **beside)
    axes.set(xlabel="MB a rack sends over its uplink in a train step")
    axes.set_title("Bytes on the uplink (measured, tc's counters)\n", loc="left")
    return f"Megabytes on the uplink in a train step. {rows[0][0]}: {rows[0][2]:.2f}; {rows[1][0]}: {rows[1][2]:.2f}; bound: {least:.2f}."  # noqa: E501 - one text


def draw_waits(axes: Any, setting: Setting, gloo: Run, ours: Run) -> str:
    """Draws each worker's step as computing, waiting and communicating."""
    names, said, position = list(setting.cpus), [], 0.0
    ticks: list[tuple[float, str]] = []
    for run in (gloo, ours):
        times = run.times(setting.steps)
        top = position
        for rank, each in times.items():
            left = 0.0
            parts = (each.compute_s, each.wait_s, each.communication_s)
            for colour, part_s in zip(TIMES.values(), parts, strict=True):
                axes.barh(position, part_s * 1e3, left=left, color=colour, height=0.8)
                left += part_s * 1e3
            said.append(f"{run.name}, {names[rank]}: " + ", ".join(f"{part_s * 1e3:.0f}" for part_s in parts))
            ticks.append((position, names[rank]))
            position += 1
        axes.axhspan(top - 0.5, position - 0.5, xmax=0.008, color=COLOURS[run.name])
        axes.annotate(
            run.name,
            (1, (top + position - 1) / 2),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=COLOURS[run.name],
            weight="bold",
        )
        position += 0.8
    handles = [axes.barh(0, 0, color=colour) for colour in TIMES.values()]
    axes.legend(handles, TIMES, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
    axes.set(xlabel="milliseconds of a train step", xlim=(0, axes.get_xlim()[1] * 1.25), ylim=(position - 1.3, -0.5))
    axes.set_title("Mean train step of each worker, with its waits (measured)\n\n", loc="left")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    return f"Milliseconds of a train step: compute, wait for the slowest, communication. {'; '.join(said)}."


PANELS: tuple[tuple[str, Draw, tuple[float, float]], ...] = (
    ("wide", draw_losses, (11.0, 3.8)),
    ("", draw_rates, (5.4, 2.9)),
    ("", draw_uplink, (5.4, 2.9)),
    ("wide", draw_waits, (11.0, 4.2)),
)
"""Class of each figure in the HTML, its drawing, and its size in inches."""


def draw_page(page: Page, setting: Setting, gloo: Run, ours: Run) -> Any:
    """Returns the figure of the whole page."""
    from matplotlib.figure import Figure  # slow to import, and only this needs it

    figure: Any = Figure(figsize=(12, 15.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.08)
    top, middle, below, last = figure.subfigures(4, 1, height_ratios=(1.35, 6.9, 4.2, 3.2))
    _write_text(top, 0.94, [(page.sentence, 17, "bold"), (page.shares_sentence, 10.5, "normal")], columns=(84, 150))
    axes = middle.subplot_mosaic([["losses", "losses"], ["rates", "uplink"]], height_ratios=(1.25, 1))
    draw_losses(axes["losses"], setting, gloo, ours)
    draw_rates(axes["rates"], setting, gloo, ours)
    draw_uplink(axes["uplink"], setting, gloo, ours)
    waits = below.subplots()
    draw_waits(waits, setting, gloo, ours)
    for each in (*axes.values(), waits):
        each.spines[["top", "right"]].set_visible(False)
    texts = [(page.kill_sentence, 10.5, "normal"), (page.sample_sentence, 10.5, "normal")]
    bottom = _write_text(last, 0.98, texts, columns=(150, 150))
    box = {"facecolor": PALE, "edgecolor": "none", "pad": 8}
    sample = "\n".join(sample_lines(ours.sample))
    last.text(0.02, bottom - 0.03, sample, family="monospace", fontsize=9, va="top", color=DARK, bbox=box)
    _write_text(last, 0.11, [(page.setting_sentence, 9, "normal")], columns=(170,), colour=GREY)
    return figure


def preface_html(page: Page, setting: Setting, gloo: Run, ours: Run) -> str:
    """Returns a section of a report; its pictures are inside of it."""
    figures = "\n".join(_figures(setting, gloo, ours))
    sample = html.escape("\n".join(sample_lines(ours.sample)))
    texts = {name: html.escape(getattr(page, name)) for name in Page.__dataclass_fields__}
    return f"""<section class="card" aria-labelledby="preface"><h2 id="preface">{texts["sentence"]}</h2>
<p>{texts["shares_sentence"]}</p>
<p>{texts["kill_sentence"]}</p>
<div class="columns">
{figures}
</div>
<p>{texts["sample_sentence"]}</p>
<pre tabindex="0">{sample}</pre>
<details><summary>The plan, before anything ran</summary><pre tabindex="0">{html.escape(setting.plan)}</pre></details>
<p class="note">{texts["setting_sentence"]} Below: the report of ringweave's run.</p>
</section>
"""


def sample_lines(sample: str) -> list[str]:
    """Returns the first lines of the model's text, with the characters that a font has not replaced."""
    lines = [line.expandtabs(4).rstrip() for line in sample.splitlines()]
    shown = [line[:SAMPLE_COLUMNS] for line in lines if line.strip()][:SAMPLE_LINES]
    return ["".join(c if 31 < ord(c) < 127 else "?" for c in line) for line in shown]


def _figures(setting: Setting, gloo: Run, ours: Run) -> Iterator[str]:
    from matplotlib.figure import Figure

    for kind, draw, size in PANELS:
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        alternative = draw(axes, setting, gloo, ours)
        axes.spines[["top", "right"]].set_visible(False)
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
        data = base64.b64encode(content.getvalue()).decode()
        image = f'<img alt="{html.escape(alternative)}" src="data:image/svg+xml;base64,{data}">'
        yield f'<figure class="{kind}">{image}</figure>'


def _draw_bars(axes: Any, rows: Sequence[tuple[str, str, float]], text: str) -> None:
    for index, (_, colour, value) in enumerate(rows):
        axes.barh(index, value, color=colour, height=0.62)
        axes.annotate(
            text.format(value), (value, index), xytext=(4, 0), textcoords="offset points", va="center", weight="bold"
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set(xlim=(0, 1.18 * max(value for _, _, value in rows)), ylim=(len(rows) - 0.5, -0.5))


def _write_text(
    figure: Any, top: float, texts: Sequence[tuple[str, float, str]], *, columns: Sequence[int], colour: str = DARK
) -> float:
    """Writes texts below each other, wrapped at so many columns; returns the height below them."""
    import textwrap

    inches = figure.bbox.height / figure.figure.dpi
    for (text, size, weight), width in zip(texts, columns, strict=True):
        lines = textwrap.wrap(text, width)
        figure.text(0.02, top, "\n".join(lines), fontsize=size, weight=weight, va="top", color=colour)
        top -= (1.35 * len(lines) + 0.5) * size / 72 / inches
    return top
