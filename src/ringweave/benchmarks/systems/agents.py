"""The program that MPI's starters take for ssh: it enters another node of the lab instead."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringweave.benchmarks.systems.system import Setup


def agent_script(entries: Mapping[str, Sequence[str]], controller_pid: int) -> str:
    """A shell script `agent [OPTIONS] ADDRESS COMMAND...` that runs COMMAND in the node of that address.

    A node does not see the namespaces of the others: the script steps out into the controller's mounts first.

    Args:
        entries: Address -> command line that runs the command that follows it in the address's node.
        controller_pid: A process outside of all nodes.
    """
    cases = "\n".join(f'{address}) set -- {shlex.join(entry)} sh -c "$*" ;;' for address, entry in entries.items())
    return f"""#!/bin/sh
# Taken for ssh by a program that starts ranks on other nodes.
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1
shift
case "$address" in
{cases}
*) echo "agent: no node has the address $address" >&2; exit 255 ;;
esac
exec nsenter --mount=/proc/{controller_pid}/ns/mnt -- "$@"
"""


def write_agent(setup: Setup) -> Path:
    """The script for the nodes of these ranks, as a file that can be run."""
    nodes = set(setup.node_of_rank)
    entries = {setup.place.addresses[node][0]: setup.place.command(node, []) for node in nodes}
    path = setup.folder / "agent"
    path.write_text(agent_script(entries, os.getpid()), encoding="utf-8")
    path.chmod(0o755)
    return path


def write_hosts(path: Path, addresses: Sequence[str]) -> Path:
    """One address for each rank, in rank order: both libraries place ranks in the order of the lines."""
    path.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    return path
