"""`ringweave run`: a PyTorch program on several workers of this machine."""

import os
import sys
from datetime import datetime
from pathlib import Path

import click

from ringweave import topology
from ringweave.errors import UsageError
from ringweave.launch import run_dirs, runs, workers
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Program


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--workers", "counts", metavar="N[,N...]", help="Workers per node: 4, or 3,2 for two nodes. Default: 1.")
@click.option(
    "--cluster", "cluster_path", metavar="FILE", help="Cluster file: one worker per device, all on this machine."
)
@click.option("--run-dir", metavar="DIR", help="Where logs, events and run.json go. Default: runs/DATE-TIME-SCRIPT.")
@click.option("--schedule", metavar="NAME", help="Use this schedule for allreduces from 64 KiB up.")
@click.option("--replace-backend", is_flag=True, help='Let a script\'s "gloo" or "nccl" be ringweave too.')
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    counts: str | None,
    cluster_path: str | None,
    run_dir: str | None,
    schedule: str | None,
    replace_backend: bool,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT on several workers, with the environment that torchrun would give them.

    Options come before SCRIPT; everything after it belongs to the script. The output of all workers is merged, with
    the rank in front of each line. When a worker fails the others are ended, and the first cause is reported.
    A run directory that was used before keeps the earlier run's files in its folder attempts/.
    """
    program = Program(target=script, arguments=arguments, is_module=is_module)
    workers.check_target(program)
    _check_schedule(schedule)
    cluster, text = _cluster(counts, cluster_path)
    request = runs.Request(
        program=program,
        cluster=cluster,
        cluster_text=text,
        cluster_path=cluster_path,
        run_dir=_run_dir(run_dir, script),
        schedule=schedule,
        replace_backend=replace_backend,
    )
    return runs.run(request, environ=os.environ, stdout=sys.stdout, stderr=sys.stderr).exit_code


def _cluster(counts: str | None, path: str | None) -> tuple[topology.Cluster, str]:
    """The cluster, and the text of its file."""
    if counts is not None and path is not None:
        raise UsageError("--workers and --cluster: both given, expected one of them. The cluster file says how many.")
    if path is not None:
        return topology.load(path), Path(path).read_text(encoding="utf-8")
    cluster = topology.one_machine(workers.parse_counts(counts if counts is not None else "1"))
    return cluster, topology.dumps(cluster)


def _check_schedule(name: str | None) -> None:
    if name is not None:
        from ringweave import schedules  # brings numpy, which most runs need not wait for here

        schedules.check_name(name, where="--schedule")


def _run_dir(given: str | None, script: str) -> RunDir:
    if given:
        return RunDir(root=Path(given).absolute())
    return run_dirs.fresh(Path("runs"), script, datetime.now())
