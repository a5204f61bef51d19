"""Comparison report as a text table. Pure."""

from collections.abc import Sequence

from ringweave.topology import CORE, Cluster
from ringweave.units import format_bytes, format_rate
from ringweave_bench.comparison import ComparisonReport
from ringweave_bench.results import WIRE_PER_PAYLOAD, BenchmarkResult

_COLUMNS = ("system", "knob", "median", "IQR", "bound", "of bound", "algbw", "CPU s/GB", "uplink bytes / S")


def render_report(report: ComparisonReport) -> str:
    """Return links, then one table for each order and size, then notes."""
    parts = [_head_text(report)]
    for order in report.layouts:
        for size in report.request.sizes:
            found = [each for each in report.results if (each.order, each.num_bytes) == (order, size)]
            if found:
                parts.append(_result_table(report.request.cluster, order, found))
    if report.notes:
        parts.append("\n".join(f"note: {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def _head_text(report: ComparisonReport) -> str:
    cluster = report.request.cluster
    ranks = f"{cluster.num_devices} ranks on {cluster.num_nodes} nodes"
    lines = [f"{report.request.collective} of float32 on {cluster.name}: {ranks}"]
    rates = report.rates
    if rates is None:
        return f"{lines[0]}, no limited links"
    shares = [rates.measured[link] / rates.raw[link] for link in rates.measured]
    if shares:
        lines.append(
            f"links: {len(rates.measured)} of {len(rates.raw)} measured, TCP content at "
            f"{min(shares):.1%} to {max(shares):.1%} of their rates; bounds are at the measured rates"
        )
    for raw in sorted({rates.raw[link] for link in rates.measured}):
        alike = [rates.measured[link] for link in rates.measured if rates.raw[link] == raw]
        lines.append(f"  {len(alike)} of {format_rate(raw)}: {_rate_text(min(alike))} to {_rate_text(max(alike))}")
    return "\n".join(lines)


def _result_table(cluster: Cluster, order: str, found: Sequence[BenchmarkResult]) -> str:
    size = found[0].num_bytes
    rows = [
        _COLUMNS,
        *(_result_row(cluster, result) for result in sorted(found, key=lambda each: each.summary.median_s)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    title = f"{format_bytes(size)}, order {order}, {len(found[0].seconds)} rounds, times of the slowest rank"
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _result_row(cluster: Cluster, result: BenchmarkResult) -> tuple[str, ...]:
    summary, fraction = result.summary, result.fraction_of_bound
    knob = result.knob if result.schedule is None else f"{result.knob}: {result.schedule}"
    return (
        result.system,
        knob,
        _time_text(summary.median_s),
        _time_text(summary.iqr_s),
        "-" if result.bound_s is None else _time_text(result.bound_s),
        "-" if fraction is None else f"{fraction:.3f}",
        _rate_text(result.num_bytes / summary.median_s),
        f"{result.processor_s_per_gb:.3g}",
        _uplink_cell(cluster, result),
    )


def _uplink_cell(cluster: Cluster, result: BenchmarkResult) -> str:
    """Return the busiest link between switches, else that of a node; without headers, beside the theory."""
    switches = {CORE, *(switch.name for switch in cluster.switches)}
    between = [link for link in result.wire_bytes if switches.issuperset(link.split("->"))]
    busiest = max(between or result.wire_bytes, key=lambda link: result.wire_bytes[link], default=None)
    if busiest is None:
        return "-"
    text = f"{result.wire_bytes[busiest] / WIRE_PER_PAYLOAD / result.num_bytes:.3f} on {busiest}"
    if result.theory_bytes is None or busiest not in result.theory_bytes:
        return text
    return f"{text} (theory {result.theory_bytes[busiest] / result.num_bytes:.3f})"


def _time_text(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _rate_text(bytes_per_s: float) -> str:
    return format_rate(float(f"{bytes_per_s * 8:.4g}") / 8)
