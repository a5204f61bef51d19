"""The network between the nodes of a job, measured: `ringweave lab run -m ringweave.comm.probing`, or under torchrun.

    torchrun --nnodes 4 ... -m ringweave.comm.probing --write cluster.yaml

Every rank runs it; the first one prints what was found.
"""

import os
import sys
from pathlib import Path

import click

from ringweave.comm import meetings
from ringweave.comm.probing import knowing
from ringweave.comm.probing.findings import Findings
from ringweave.errors import RingweaveError
from ringweave.files import writing
from ringweave.topology.recovery import Effort


@click.command
@click.option("--write", "path", metavar="FILE", type=click.Path(path_type=Path), help="Write the cluster file there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of pairs. Default: until every pair has met.")
@click.option("--max-age", "max_age_s", type=float, metavar="SECONDS", help="Take findings of that age, if there are.")
def command(path: Path | None, as_json: bool, rounds: int | None, max_age_s: float | None) -> None:
    """Measure the network between the nodes of this job; every number that is printed is measured."""
    try:
        _measure(path, as_json, rounds, max_age_s)
    except RingweaveError as error:
        click.echo(f"ringweave: error: {error}", err=True)
        sys.exit(error.exit_code)


def _measure(path: Path | None, as_json: bool, rounds: int | None, max_age_s: float | None) -> None:
    if os.environ.get("RANK") == "0":
        writing.check("--write", path)
    found = _find(rounds, max_age_s)
    if found is None:
        return
    click.echo(found.to_json() if as_json else found.to_text())
    if path is not None:
        text = f"# Measured by ringweave: rates are what TCP streams deliver.\n{found.cluster_text}"
        writing.write("--write", path, text)


def _find(rounds: int | None, max_age_s: float | None) -> Findings | None:
    """What was found, on the first rank."""
    store, rank, world_size = meetings.meet(os.environ)
    effort = Effort(num_rounds=rounds)
    found = knowing.find_for_job(store, rank, world_size, effort=effort, max_age_s=max_age_s, tell=_tell)
    meetings.exchange(store, "done", rank, world_size, knowing.JOB_PATIENCE)
    return found


def _tell(what: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\rringweave: measuring {what:<40}", err=True, nl=False)


if __name__ == "__main__":
    command()
