"""Measures the network between the nodes of a job: `ringweave lab run -m ringweave.comm.probing`, or under torchrun.

    torchrun --nnodes 4 ... -m ringweave.comm.probing --write cluster.yaml

Every rank runs it; rank 0 prints the measurement.
"""

import os
import sys
from pathlib import Path

import click

from ringweave.comm import peer_data
from ringweave.comm.probing import measure
from ringweave.comm.probing.network_measurement import NetworkMeasurement
from ringweave.errors import RingweaveError
from ringweave.files import file_io
from ringweave.topology.inference.infer import SurveyLimits


@click.command
@click.option("--write", "path", metavar="FILE", type=click.Path(path_type=Path), help="Write the cluster file there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of pairs. Default: until every pair has met.")
@click.option("--max-age", "max_age_s", type=float, metavar="SECONDS", help="Take findings of that age, if there are.")
@click.option(
    "--cluster",
    "cluster_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Measure as a job with this cluster file does at its start: at its addresses, and as briefly.",
)
def command(
    path: Path | None, as_json: bool, rounds: int | None, max_age_s: float | None, cluster_path: Path | None
) -> None:
    """Measure the network between the nodes of this job; every number that is printed is measured."""
    try:
        _measure(path, as_json, rounds, max_age_s, cluster_path)
    except RingweaveError as error:
        click.echo(f"ringweave: error: {error}", err=True)
        sys.exit(error.exit_code)


def _measure(
    path: Path | None, as_json: bool, rounds: int | None, max_age_s: float | None, cluster_path: Path | None
) -> None:
    if os.environ.get("RANK") == "0":
        file_io.check_writable("--write", path)
    measurement = _find_measurement(rounds, max_age_s, cluster_path)
    if measurement is None:
        return
    click.echo(measurement.to_json() if as_json else measurement.to_text())
    if path is not None:
        text = f"# Measured by ringweave: rates are what TCP streams deliver.\n{measurement.cluster_text}"
        file_io.write_output("--write", path, text)


def _find_measurement(
    rounds: int | None, max_age_s: float | None, cluster_path: Path | None
) -> NetworkMeasurement | None:
    """Return the measurement, on rank 0."""
    store, rank, world_size = peer_data.connect_store(os.environ)
    is_brief = cluster_path is not None and rounds is None
    effort = measure.effort_of_job(world_size) if is_brief else SurveyLimits(num_rounds=rounds)
    measurement = measure.measure_job_network(
        store,
        rank,
        world_size,
        effort=effort,
        max_age_s=max_age_s,
        cluster_path=cluster_path,
        on_progress=_show_progress,
    )
    peer_data.exchange_texts(store, "done", rank, world_size, measure.JOB_TIMEOUT)
    return measurement


def _show_progress(activity: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\rringweave: measuring {activity:<40}", err=True, nl=False)


if __name__ == "__main__":
    command()
