"""`ringweave logs`: prints the output of a job's workers, of all attempts."""

from dataclasses import asdict

import click

from ringweave.cli import job_options
from ringweave.cli.echo import echo
from ringweave.cli.follow import format_log_line
from ringweave.errors import UsageError, explain
from ringweave.platforms.api import LogQuery


@click.command
@job_options.answer_options()
@click.option("-f", "--follow", is_flag=True, help="Continue until the job has ended.")
@click.option("--node", metavar="NODE", help="Only workers of this node.")
@click.option("--rank", type=int, metavar="N", help="Only the worker of this global rank.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Only this attempt of the nodes. Default: all.")
@job_options.JOB_ARGUMENT
def command(
    place: str, output: str, follow: bool, node: str | None, rank: int | None, attempt: int | None, name: str
) -> int:
    """Print the output of the workers of JOB, of all attempts, with the rank in front of each line.

    Lines of later attempts and rounds are marked NODE.ATTEMPT/ROUND.
    """
    if follow and output != "table":
        do = "Leave out one of the two"
        raise UsageError(explain("-o", got=output, expected="table with --follow, which never ends", do=do))
    lines = job_options.open_user_platform(place).logs(
        name, LogQuery(node=node, rank=rank, attempt=attempt, follow=follow)
    )
    if output == "table":
        for line in lines:
            echo(format_log_line(line, many=line.attempt > 1 or line.round > 1))
        return 0
    job_options.print_answer(output, {"name": name, "lines": [asdict(line) for line in lines]}, list)
    return 0
