"""`ringweave run`: a PyTorch program on several workers of this machine."""

from pathlib import Path

import click

from ringweave import topology
from ringweave.cli import run_options
from ringweave.cli.run_options import RUN_SETTINGS, ProgramCommand, RunOptions
from ringweave.errors import UsageError
from ringweave.launch import workers
from ringweave.launch.local.sites import ThisMachine


@click.command(cls=ProgramCommand, context_settings=RUN_SETTINGS)
@click.option("--workers", "counts", metavar="N[,N...]", help="Workers per node: 4, or 3,2 for two nodes. Default: 1.")
@click.option(
    "--cluster", "cluster_path", metavar="FILE", help="Cluster file: one worker per device, all on this machine."
)
@run_options.shared
def command(counts: str | None, cluster_path: str | None, options: RunOptions) -> int:
    """Run SCRIPT on several workers, with the environment that torchrun would give them.

    Options come before SCRIPT; everything after it belongs to the script. After -- it may be any command: hostname, or
    bash -c "...". The output of all workers is merged, with
    the rank in front of each line. When a worker fails the others are ended, and the first cause is reported.
    A run directory that was used before keeps the earlier run's files in its folder attempts/.
    """
    cluster, text, places = _cluster(counts, cluster_path, options)
    return options.run(cluster, text, cluster_path, ThisMachine(), places=places)


def _cluster(
    counts: str | None, path: str | None, options: RunOptions
) -> tuple[topology.Cluster, str, topology.Cluster | None]:
    """The cluster, the text of its file, and the cluster with places for workers that may come later."""
    if counts is not None and path is not None:
        raise UsageError("--workers and --cluster: both given, expected one of them. The cluster file says how many.")
    if path is not None:
        return topology.load(path), Path(path).read_text(encoding="utf-8"), None
    parsed = workers.parse_counts(counts if counts is not None else "1")
    places = topology.one_machine(options.places(parsed))
    return topology.one_machine(parsed), topology.dumps(places), places
