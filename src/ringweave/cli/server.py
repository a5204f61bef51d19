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
@click.option("--run-dir", metavar="DIR", help="Where events go. Default: nowhere.")
@click.option("--snapshots", metavar="DIR", help="Write the whole state there while training goes on. Default: never.")
@click.option(
    "--snapshot-every-s", type=float, default=60.0, help="Seconds from one snapshot to the next. Default: 60."
)
@click.option("--resume", metavar="FILE", help="Go on from this snapshot.")
@click.option("--term", type=int, default=0, help="Refuse messages that are meant for a server of another term.")
@click.option("--other", metavar="HOST:PORT", help="The other one of two servers, one of which is a standby.")
@click.option("--index", type=click.IntRange(0, 1), default=0, help="Which of the two this is; 0 leads at the start.")
@click.option("--claims", metavar="DIR", help="Where both of them register who leads.")
@click.option(
    "--lease-s", type=float, default=LEASE_S, help=f"Silence of the other that is too long. Default: {LEASE_S:g}."
)
def command(**given: object) -> int:
    """Hold the parameters of a job in mode ps-hra, and apply what its rings push.

    ringweave run --mode ps-hra starts it beside the workers, on the node that is connected best; by hand it is needed
    only under other launchers. Ends when all rings have left, or by SIGTERM.
    """
    argv = [part for name, value in given.items() if value not in (None, "") for part in (_flag(name), str(value))]
    # The server replaces this process: it needs torch, which the command line does not import.
    return os.execv(sys.executable, [sys.executable, "-m", _SERVER_MAIN, *argv])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
