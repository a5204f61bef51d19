"""`ringweave server`: starts the parameter server of a job in mode ps-hra."""

import os
import sys

import click

from ringweave.param_server.leadership import LEASE_S

_SERVER_MAIN = "ringweave.param_server.main"


@click.command()
@click.option("--host", required=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen at. Default: a free one.")
@click.option(
    "--credentials",
    required=True,
    metavar="WHERE",
    help="File with the server's credentials (mode 0600), or fd:N, an inherited descriptor.",
)
@click.option("--node", default="", help="Name of the node, for the event log.")
@click.option("--run-dir", metavar="DIR", help="Folder of the event log. Default: none.")
@click.option("--snapshots", metavar="DIR", help="Folder of snapshots of the whole state. Default: none.")
@click.option("--snapshot-every-s", type=float, default=60.0, help="Interval of snapshots in seconds. Default: 60.")
@click.option("--resume", metavar="FILE", help="Continue from this snapshot.")
@click.option("--other", metavar="HOST:PORT", help="Address of the other server of a pair with a standby.")
@click.option("--index", type=click.IntRange(0, 1), default=0, help="Index in the pair; 0 leads at the start.")
@click.option(
    "--claims",
    metavar="WHERE",
    help="Folder of the leadership log of both servers, or fd:N, an inherited socket to a node agent that has it.",
)
@click.option("--lease-s", type=float, default=LEASE_S, help=f"Lease of the leader in seconds. Default: {LEASE_S:g}.")
def command(**given: object) -> int:
    """Run the parameter server of a job in mode ps-hra: hold the parameters, and apply pushed gradients.

    ringweave run --mode ps-hra starts it beside the workers, on the node with the best connection; other launchers
    need this command. It ends when all rings have left, or by SIGTERM.
    """
    argv = [part for name, value in given.items() if value not in (None, "") for part in (_flag(name), str(value))]
    # The server replaces this process: it needs torch, which the command line does not import.
    return os.execv(sys.executable, [sys.executable, "-m", _SERVER_MAIN, *argv])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
