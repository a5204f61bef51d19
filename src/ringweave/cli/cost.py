"""`ringweave cost`: predicts a training round of the paper's architectures by formula, and their crossovers."""

import json
import math
from typing import Any

import click

from ringweave import units
from ringweave.cli.echo import echo
from ringweave.cost import architectures
from ringweave.cost.architectures import ArchitectureSetting, Crossover, FastestRange
from ringweave.errors import UsageError

_FIGURE_NAMES = ("latency", "workers")
_WORKER_RANGE = (4, 64)


@click.command
@click.option("--architecture", metavar="NAME", help=f"One of {', '.join(architectures.ARCHITECTURES)}.")
@click.option(
    "--figure", type=click.Choice(_FIGURE_NAMES), help="Draw the paper's figure 5 or 6, the corrected one beside."
)
@click.option("--workers", type=int, metavar="N", default=16, show_default=True, help="N: all workers.")
@click.option("--groups", type=int, metavar="K", default=4, show_default=True, help="k: groups; not for ps and ring.")
@click.option("--bytes", "size", metavar="S", default="100MB", show_default=True, help="S: size of the gradients.")
@click.option("--latency", metavar="A", default="10ms", show_default=True, help="a: with the wait for slow workers.")
@click.option("--rate", metavar="B", default="1Gbit/s", show_default=True, help="B: of each worker and of the server.")
@click.option("--reduce-s-per-byte", metavar="C", default="1e-10", show_default=True, help="C: seconds to add a byte.")
@click.option(
    "--picture", metavar="FILE", help="PNG or SVG for --figure; cost-latency.png or cost-workers.png if absent."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    architecture: str | None,
    figure: str | None,
    workers: int,
    groups: int,
    size: str,
    latency: str,
    rate: str,
    reduce_s_per_byte: str,
    picture: str | None,
    as_json: bool,
) -> int:
    """Predict the time of a round of an ARCHITECTURE by formula, or draw a figure of all with their crossovers.

    The formulas are those of Huang and Yang (2022), and ps-hra-shared-link, in which all rings come to the server at
    once and share its link, as the workers of ps do. They know one rate and one latency for all; for the links of a
    real cluster there is `ringweave plan`.
    """
    _check_arguments(architecture, figure, picture)
    is_grouped = figure is not None or architecture in architectures.GROUPED_ARCHITECTURES
    setting = ArchitectureSetting(
        num_workers=workers,
        num_groups=groups if is_grouped else 1,
        num_bytes=units.parse_bytes(size),
        latency_s=units.parse_seconds(latency),
        bandwidth_bytes_per_s=units.parse_rate(rate),
        reduce_s_per_byte=units.parse_seconds(reduce_s_per_byte),
    )
    if architecture is not None:
        document, lines = _predict_time(architectures.check_architecture(architecture), setting)
    else:
        document, lines = _draw_figure(str(figure), setting, picture or f"cost-{figure}.png")
    echo(json.dumps(document) if as_json else "\n".join(lines))
    return 0


def _check_arguments(architecture: str | None, figure: str | None, picture: str | None) -> None:
    if (architecture is None) == (figure is None):
        got = "neither" if figure is None else "both"
        expected = "either --architecture or --figure"
        raise UsageError("what to predict", got=got, expected=expected, do="Give one of the two")
    if picture is not None and figure is None:
        do = "Add --figure latency or --figure workers"
        raise UsageError("--picture", got=picture, expected="a figure to draw", do=do)


def _predict_time(name: str, setting: ArchitectureSetting) -> tuple[dict[str, Any], list[str]]:
    seconds = architectures.round_seconds(name, setting)
    document: dict[str, Any] = {"architecture": name, **_setting_document(setting), "seconds": seconds}
    lines = [f"{seconds:.6g} s predicted for a round of {architectures.ARCHITECTURE_LABELS[name]}"]
    if name not in architectures.GROUPED_ARCHITECTURES:
        del document["groups"]
        return document, lines
    largest_s = architectures.round_seconds_of_largest_ring(name, setting)
    document |= {
        "ring_size": setting.ring_size,
        "largest_ring": setting.largest_ring,
        "seconds_of_largest_ring": largest_s,
    }
    if setting.num_workers % setting.num_groups:
        lines.append(
            f"N/k = {setting.ring_size:.4g} is no whole number: the formula takes it as it is. The last ring has "
            f"{setting.largest_ring} workers, with which a round takes {largest_s:.6g} s (predicted)."
        )
    return document, lines


def _draw_figure(figure: str, setting: ArchitectureSetting, picture: str) -> tuple[dict[str, Any], list[str]]:
    from ringweave.plots import figures

    path = figures.check_picture_path(picture)
    if figure == "latency":
        figures.draw_over_latency(setting, path)
        parts = {"": _crossovers_over_latency(setting)}
    else:
        sweeps = _worker_sweeps(setting)
        figures.draw_over_workers(sweeps, path)
        parts = {sweep.title: _crossovers_over_workers(sweep.settings) for sweep in sweeps}
    document: dict[str, Any] = {"figure": figure, "picture": str(path), **_setting_document(setting), "parts": []}
    lines = [
        f"{path}: predicted times; {', '.join(f'{key} {value}' for key, value in _setting_document(setting).items())}"
    ]
    for title, models in parts.items():
        for model, (found, spans) in models.items():
            document["parts"].append(
                {"models": model, "of": title, "crossovers": _finite_rows(found), "lowest": _finite_rows(spans)}
            )
            lines += ["", f"{model}{', ' + title if title else ''}", *_crossover_lines(found, spans, figure)]
    return document, lines


def _crossovers_over_latency(setting: ArchitectureSetting) -> dict[str, tuple[list[Crossover], list[FastestRange]]]:
    return {
        model: (
            architectures.crossovers_over_latency(setting, names),
            architectures.fastest_over_latency(setting, names),
        )
        for model, names in _FORMULA_MODELS.items()
    }


def _crossovers_over_workers(
    settings: tuple[ArchitectureSetting, ...],
) -> dict[str, tuple[list[Crossover], list[FastestRange]]]:
    return {
        model: (
            architectures.crossovers_over_workers(settings, names),
            architectures.fastest_over_workers(settings, names),
        )
        for model, names in _FORMULA_MODELS.items()
    }


def _worker_sweeps(setting: ArchitectureSetting) -> list[Any]:
    """Return settings for N from 4 to 64 (or twice the setting's), with equal ring sizes and with equal ring counts."""
    from ringweave.plots.figures import WorkerSweep

    most = max(_WORKER_RANGE[1], 2 * setting.num_workers)
    ring_size = max(1, round(setting.ring_size))
    least = max(_WORKER_RANGE[0], setting.num_groups)
    same_size = range(ring_size * -(-_WORKER_RANGE[0] // ring_size), most + 1, ring_size)
    by_size = architectures.settings_over_workers(setting, same_size, lambda count: count // ring_size)
    by_count = architectures.settings_over_workers(setting, range(least, most + 1), lambda _: setting.num_groups)
    return [
        WorkerSweep(title=f"rings of {ring_size}: k = N/{ring_size}", settings=tuple(by_size)),
        WorkerSweep(title=f"k = {setting.num_groups} rings", settings=tuple(by_count)),
    ]


def _crossover_lines(found: list[Crossover], spans: list[FastestRange], figure: str) -> list[str]:
    def place(at: float) -> str:
        if figure == "workers":
            return f"N = {at:g}"
        return f"a = {at:.6g} s"

    lines = [f"  lowest: {_span_text(span, figure)}" for span in spans]
    rows = [
        f"  {place(each.at)}: {each.faster_above} overtakes {each.faster_below}, both at {each.seconds:.4g} s"
        if figure == "latency"
        else f"  {place(each.at)}: {each.faster_above} overtakes {each.faster_below}, at {each.seconds:.4g} s"
        for each in found
    ]
    return lines + rows


def _span_text(span: FastestRange, figure: str) -> str:
    if figure == "workers":
        return f"{span.architecture} for N from {span.first:g} to {span.last:g}"
    if math.isinf(span.last):
        return f"{span.architecture} for a above {span.first:.6g} s"
    return f"{span.architecture} for a from {span.first:.6g} to {span.last:.6g} s"


def _finite_rows(found: list[Crossover] | list[FastestRange]) -> list[dict[str, object]]:
    """Return the rows for JSON, with null for an end that is never reached."""
    rows = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in found]
    return [{key: None if value == math.inf else value for key, value in row.items()} for row in rows]


def _setting_document(setting: ArchitectureSetting) -> dict[str, object]:
    return {
        "workers": setting.num_workers,
        "groups": setting.num_groups,
        "bytes": setting.num_bytes,
        "latency_s": setting.latency_s,
        "rate": units.format_rate(setting.bandwidth_bytes_per_s),
        "reduce_s_per_byte": setting.reduce_s_per_byte,
    }


_FORMULA_MODELS = {
    "the paper's formulas": architectures.PAPER_ARCHITECTURES,
    "the server's link shared": architectures.CORRECTED_ARCHITECTURES,
}
