"""`ringweave logs`: what the workers of a job printed, in all attempts."""

from dataclasses import asdict

import click

from ringweave.cli.jobs import asking
from ringweave.cli.jobs.following import shown
from ringweave.errors import UsageError, explain
from ringweave.launch.services.service import LogQuery


@click.command
@asking.answering()
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--node", metavar="NODE", help="Only workers of this node.")
@click.option("--rank", type=int, metavar="N", help="Only the worker of this global rank.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Only this attempt of the nodes. Default: all.")
@asking.NAME
def command(
    place: str, output: str, follow: bool, node: str | None, rank: int | None, attempt: int | None, name: str
) -> int:
    """Print what the workers of JOB printed, of all attempts, with the rank in front of each line.

    Lines of later attempts and rounds are marked NODE.ATTEMPT/ROUND.
    """
    if follow and output != "table":
        do = "Leave out one of the two"
        raise UsageError(explain("-o", got=output, expected="table with --follow, which never ends", do=do))
    lines = asking.service(place).logs(name, LogQuery(node=node, rank=rank, attempt=attempt, follow=follow))
    if output == "table":
        for line in lines:
            click.echo(shown(line, many=line.attempt > 1 or line.round > 1))
        return 0
    asking.show(output, {"name": name, "lines": [asdict(line) for line in lines]}, list)
    return 0
