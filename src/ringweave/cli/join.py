"""`ringweave join`: takes part in a run on hosts, from a host that ssh does not reach."""

import sys

import click


@click.command
@click.argument("line", metavar="ADDRESS")
@click.option(
    "--address",
    metavar="IP",
    help="Address at which the other hosts reach this one. Default: the one from which it reaches them.",
)
def command(line: str, address: str | None) -> int:
    """Take part in a run on hosts as one of them, until it ends.

    ADDRESS is HOST:PORT#TOKEN, as ringweave run --hosts a:2,join:1 printed it; - reads it from standard input, so that
    other users of this host do not see it in the list of processes. Ctrl-C leaves the run.
    """
    from ringweave.platforms.hosts import joiner

    return joiner.join_run(sys.stdin.readline() if line == "-" else line, address)
