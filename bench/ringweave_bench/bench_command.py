"""`ringweave bench`: measure systems side by side on the same nodes, links and ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from ringweave.errors import UsageError
from ringweave.files import file_io
from ringweave.schedules import CollectiveKind

_DEFAULT_SYSTEMS = "ringweave,gloo,openmpi,mpich"
_KINDS: tuple[CollectiveKind, ...] = ("allreduce", "reduce-scatter", "allgather", "broadcast")


@click.group
def command() -> None:
    """Measure ringweave beside other systems, all alive at once and taking turns."""


@click.command
@click.argument("target", metavar="CLUSTER")
@click.option(
    "--sizes",
    metavar="SIZE,...",
    default="1MB,25MB",
    show_default=True,
    help="Sizes of the messages, all blocks together.",
)
@click.option("--systems", metavar="NAME,...", default=_DEFAULT_SYSTEMS, show_default=True, help="What is measured.")
@click.option("--rounds", type=int, metavar="N", default=15, show_default=True, help="Rounds of each system.")
@click.option(
    "--orders",
    metavar="ORDER,...",
    default="block",
    show_default=True,
    help="How ranks are put on nodes: block, round-robin, shuffled.",
)
@click.option("--schedule", metavar="NAME", help="Use this schedule of ringweave's, not the one that it chooses.")
@click.option(
    "--search-rounds",
    type=int,
    metavar="N",
    default=3,
    show_default=True,
    help="Rounds to find each peer's best knob; 0: its defaults.",
)
@click.option(
    "--out",
    "out_path",
    metavar="FILE",
    help="Write the JSON document here, anew after each size of each order.",
)
@click.option("--picture", "picture_path", metavar="FILE", help="Draw the result here, as PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def _measure(  # noqa: PLR0913, PLR0917 - one parameter per option
    target: str,
    sizes: str,
    systems: str,
    rounds: int,
    orders: str,
    schedule: str | None,
    search_rounds: int,
    out_path: str | None,
    picture_path: str | None,
    as_json: bool,
) -> int:
    """Measure the collective that the verb names."""
    from ringweave import schedules
    from ringweave.cli.echo import ProgressPrinter
    from ringweave_bench import benchmark_request, comparison, result_tables
    from ringweave_bench.comparison import ComparisonReport

    cluster, is_local = benchmark_request.read_target(target)
    kind = next(each for each in _KINDS if each == click.get_current_context().info_name)
    message_sizes = benchmark_request.parse_sizes(sizes)
    has_blocks = kind in ("reduce-scatter", "allgather")
    request = benchmark_request.BenchmarkRequest(
        cluster=cluster,
        is_local=is_local,
        sizes=benchmark_request.whole_blocks(message_sizes, cluster.num_devices) if has_blocks else message_sizes,
        collective=kind,
        systems=benchmark_request.parse_systems(systems),
        orders=benchmark_request.parse_orders(orders),
        num_rounds=benchmark_request.check_count("--rounds", rounds, 1),
        num_search_rounds=benchmark_request.check_count("--search-rounds", search_rounds, 0),
        schedule=schedules.check_schedule_name(schedule, where="--schedule") if schedule is not None else None,
    )
    file_io.check_writable("--out", out_path)
    _check_picture_path(picture_path)
    progress = ProgressPrinter(sys.stderr)

    def keep(partial: ComparisonReport) -> None:
        if problem := _write_outputs(partial.document(), out_path, None):
            progress.print_step(problem)

    report = comparison.run_benchmark(request, progress, keep)
    document = report.document()
    problem = _write_outputs(document, out_path, picture_path)
    click.echo(json.dumps(document) if as_json else result_tables.render_report(report).rstrip())
    if problem:
        click.echo(f"ringweave: error: {problem}", err=True)
    return UsageError.exit_code if problem else 0


_HELP = """Measure {kind} of float32 on CLUSTER.

CLUSTER is a cluster file, which is brought up as a lab for the time of the benchmark (needs root), or local:N for N
ranks on this machine as it is. Time is that of the slowest rank; every value of every round is checked. First the links
are measured and the peers' knobs are tried, then all systems take turns. Peers: make bench-setup.
"""
for _kind in _KINDS:
    command.add_command(
        click.Command(_kind, callback=_measure.callback, params=_measure.params, help=_HELP.format(kind=_kind))
    )


@command.command
@click.argument("results", nargs=-1, required=True, metavar="RESULT...")
@click.option("--out", "out_path", metavar="FILE", required=True, help="Where the picture goes, as PNG or SVG.")
def picture(results: tuple[str, ...], out_path: str) -> int:
    """Draw the RESULTs, documents that `bench` wrote with --out, as one picture."""
    from ringweave_bench.results import load_results

    _check_picture_path(out_path)
    _draw_results([load_results(path) for path in results], out_path)
    return 0


def _write_outputs(document: dict[str, Any], out_path: str | None, picture_path: str | None) -> str:
    """Write the requested files; return the problem if one cannot be written: no measurement is lost."""
    try:
        if out_path:
            file_io.write_output("--out", out_path, json.dumps(document, indent=1) + "\n")
        if picture_path:
            _draw_results([document], picture_path)
    except UsageError as error:
        return str(error)
    return ""


def _draw_results(documents: list[dict[str, Any]], path: str) -> None:
    from ringweave_bench import result_charts

    result_charts.draw_results(documents, Path(path))


def _check_picture_path(path: str | None) -> None:
    if path is not None:
        from ringweave.plots import figures

        figures.check_picture_path(path)
