"""`ringweave bench`: systems measured beside each other on the same nodes, links and ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from ringweave.errors import UsageError
from ringweave.files import writing

_SYSTEMS = "ringweave,gloo,openmpi,mpich"


@click.group
def command() -> None:
    """Measure ringweave beside other systems, all alive at once and taking turns."""


@command.command
@click.argument("target", metavar="CLUSTER")
@click.option("--sizes", metavar="SIZE,...", default="1MB,25MB", show_default=True, help="Sizes of the messages.")
@click.option("--systems", metavar="NAME,...", default=_SYSTEMS, show_default=True, help="What is measured.")
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
def allreduce(  # noqa: PLR0913, PLR0917 - one parameter per option
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
    """Measure allreduce of float32 on CLUSTER.

    CLUSTER is a cluster file, which is brought up as a lab for the time of the benchmark (needs root), or local:N for N
    ranks on this machine as it is. Time is that of the slowest rank; every value of every round is checked. First the
    links are measured and the peers' knobs are tried, then all systems take turns. Peers: make bench-setup.
    """
    from ringweave import schedules
    from ringweave.benchmarks import requests, running, tables
    from ringweave.benchmarks.comparing import Report
    from ringweave.benchmarks.progress import Progress

    cluster, is_local = requests.read_target(target)
    request = requests.Request(
        cluster=cluster,
        is_local=is_local,
        sizes=requests.parse_sizes(sizes),
        systems=requests.parse_systems(systems),
        orders=requests.parse_orders(orders),
        num_rounds=requests.check_count("--rounds", rounds, 1),
        num_search_rounds=requests.check_count("--search-rounds", search_rounds, 0),
        schedule=schedules.check_name(schedule, where="--schedule") if schedule is not None else None,
    )
    writing.check("--out", out_path)
    _check_picture(picture_path)
    progress = Progress(sys.stderr)

    def keep(partial: Report) -> None:
        if problem := _keep(partial.document(), out_path, None):
            progress.step(problem)

    report = running.run(request, progress, keep)
    document = report.document()
    problem = _keep(document, out_path, picture_path)
    click.echo(json.dumps(document) if as_json else tables.render(report).rstrip())
    if problem:
        click.echo(f"ringweave: error: {problem}", err=True)
    return UsageError.exit_code if problem else 0


@command.command
@click.argument("results", nargs=-1, required=True, metavar="RESULT...")
@click.option("--out", "out_path", metavar="FILE", required=True, help="Where the picture goes, as PNG or SVG.")
def picture(results: tuple[str, ...], out_path: str) -> int:
    """Draw the RESULTs, documents that `bench allreduce --out` wrote, as one picture."""
    from ringweave.benchmarks import documents

    _check_picture(out_path)
    _draw([documents.load(path) for path in results], out_path)
    return 0


def _keep(document: dict[str, Any], out_path: str | None, picture_path: str | None) -> str:
    """Write what is asked for; says what is wrong if a file cannot be written, which must not cost the measurement."""
    try:
        if out_path:
            writing.write("--out", out_path, json.dumps(document, indent=1) + "\n")
        if picture_path:
            _draw([document], picture_path)
    except UsageError as error:
        return str(error)
    return ""


def _draw(found: list[dict[str, Any]], path: str) -> None:
    from ringweave.pictures import charts

    charts.draw(found, Path(path))


def _check_picture(path: str | None) -> None:
    if path is not None:
        from ringweave.pictures import plotting

        plotting.check_path(path)
