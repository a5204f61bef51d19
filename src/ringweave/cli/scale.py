"""`ringweave scale`: changes the number of workers of an elastic run."""

import dataclasses
import json
from pathlib import Path

import click

from ringweave.launcher import supervise
from ringweave.launcher.run_dir import RunDir


@click.command
@click.option("--workers", type=int, metavar="N", required=True, help="How many it shall have, within its MIN:MAX.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("run_dir", metavar="RUN_DIR")
def command(workers: int, as_json: bool, run_dir: str) -> int:
    """Let a run that was started with --elastic MIN:MAX go on with N workers, ranks 0 to N-1.

    Further workers join as those do that were started again: with the state of one of the others, while these train.
    If there are to be fewer, the last ones finish their train step and leave. Ranks that were given up, or had left,
    are started again if they are among the N.
    """
    found = supervise.request_workers(RunDir(root=Path(run_dir).absolute()), workers)
    if as_json:
        document = dataclasses.asdict(found)
        click.echo(json.dumps({key: document[key] for key in ("workers", "before", "starting", "leaving")}))
    else:
        click.echo(supervise.describe_answer(found))
    return 0
