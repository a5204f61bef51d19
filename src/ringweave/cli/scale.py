"""`ringweave scale`: changes the number of workers of an elastic run."""

import dataclasses
import json
from pathlib import Path

import click

from ringweave.cli.echo import echo
from ringweave.launcher import scale_requests
from ringweave.launcher.run_dir import RunDir


@click.command
@click.option(
    "--workers", type=int, metavar="N", required=True, help="New number of workers, within MIN:MAX of the run."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("run_dir", metavar="RUN_DIR")
def command(workers: int, as_json: bool, run_dir: str) -> int:
    """Change a run that was started with --elastic MIN:MAX to N workers, ranks 0 to N-1.

    New workers join like restarted ones: they get the state of another worker while the others train. Surplus workers,
    those with the highest ranks, finish their train step and leave. Ranks below N that were given up or had left are
    started again.
    """
    found = scale_requests.request_workers(RunDir(root=Path(run_dir).absolute()), workers)
    if as_json:
        document = dataclasses.asdict(found)
        echo(json.dumps({key: document[key] for key in ("workers", "before", "starting", "leaving")}))
    else:
        echo(scale_requests.describe_answer(found))
    return 0
