"""Which processes a run consists of, as data: decided here, started by a launcher.

Pure: any launcher (this machine, Slurm, Kubernetes) starts the same specs, and elastic supervision can compute them
again for another cluster.
"""

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Protocol

from ringweave.environment import WorkerEnvironment
from ringweave.errors import UsageError, explain
from ringweave.launch import orders
from ringweave.launch.orders import BLOCK, Order

_PYTHON_SUFFIXES = (".py", ".pyc", ".pyz", ".pyw")
_MOST_OF_A_LINE = 256
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**28)}
"""For glibc's allocator, in bytes: what a train step has freed stays for the next one, up to 1 GiB at the end of the
heap and in pieces of less than 256 MiB. Else the kernel takes it, and returns it page by page, zeroed, in each step."""
USERS_OWN = ("OMP_NUM_THREADS", *KEPT_MEMORY)
"""Variables of a worker that stay as the user has set them."""


class NodeLike(Protocol):
    """What is needed of a node of a cluster."""

    @property
    def name(self) -> str:
        """Name of the node."""
        ...

    @property
    def devices(self) -> Sequence[object]:
        """Its devices; each gets one worker."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What every worker runs."""

    target: str
    """Path of a script, name of a module, or a command."""
    arguments: tuple[str, ...] = ()
    """Passed through untouched."""
    is_module: bool = False
    """Run the target as `python -m` does."""
    is_command: bool = False
    """The target is a program of its own, found on the PATH: no interpreter stands before it."""

    def argv(self, python: str, *, entry: str | None = None) -> tuple[str, ...]:
        """The command line, with the given interpreter, and the file that it runs first if there is one.

        A command of its own has neither.
        """
        before = (python,) if entry is None else (python, entry)
        return tuple(self.words()) if self.is_command else (*before, *self.words())

    def words(self) -> list[str]:
        """What is typed, after the interpreter if it needs one."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the workers of a run find each other."""

    host: str
    """Address that rank 0 listens on and all others can reach (MASTER_ADDR)."""
    port: int
    """Port there, free on rank 0's node (MASTER_PORT)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One process to be started."""

    global_rank: int
    local_rank: int
    """Index among the workers of its node, and of its device there."""
    node: str
    """Name of its node."""
    environ: Mapping[str, str]
    """Variables that it gets on top of the environment it is started in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """All processes of a run, by global rank."""

    argv: tuple[str, ...]
    """Command line of every worker."""
    workers: tuple[WorkerSpec, ...]

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.workers)


def parse_counts(text: str) -> list[int]:
    """Workers per node from `4` (one node) or `3,2` (two nodes).

    Raises:
        UsageError: Not a comma-separated list of positive whole numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(
            explain(
                "--workers",
                got=text,
                expected="one positive whole number per node, separated by commas",
                do="Write 4 for four workers on one node, or 3,2 for two nodes with three and two",
            )
        )
    return [int(part) for part in parts]


def lay_out(
    nodes: Sequence[NodeLike],
    argv: tuple[str, ...],
    meeting: Meeting,
    *,
    num_cpus: int,
    common: WorkerEnvironment,
    order: Order = BLOCK,
) -> WorkerGroup:
    """One worker per device, ranks counted through the devices in the given order.

    Args:
        nodes: Nodes of the cluster, all taken to share one machine's CPUs.
        argv: Command line of every worker.
        meeting: Where the workers find each other.
        num_cpus: CPUs of the machine; each worker's share becomes OMP_NUM_THREADS.
        common: What all workers are told; the node is filled in for each.
        order: In which order the devices get ranks.

    Returns:
        The group, environ as torchrun would set it, plus ringweave's own variables.
    """
    places = orders.deal([len(node.devices) for node in nodes], order)
    shared = _shared_variables(len(places), len(nodes), meeting, num_cpus)
    workers = tuple(
        WorkerSpec(
            global_rank=global_rank,
            local_rank=local_rank,
            node=nodes[node_index].name,
            environ=shared | _own_variables(global_rank, local_rank, node_index, nodes[node_index], common),
        )
        for global_rank, (node_index, local_rank) in enumerate(places)
    )
    return WorkerGroup(argv=argv, workers=workers)


def _shared_variables(world_size: int, num_nodes: int, meeting: Meeting, num_cpus: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "OMP_NUM_THREADS": str(max(1, num_cpus // max(1, world_size))),
        "PYTHONUNBUFFERED": "1",
        **KEPT_MEMORY,
    }


def _own_variables(
    global_rank: int, local_rank: int, node_index: int, node: NodeLike, common: WorkerEnvironment
) -> dict[str, str]:
    told = replace(common, node=node.name)
    return {
        "RANK": str(global_rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(node.devices)),
        "GROUP_RANK": str(node_index),
        "NODE_RANK": str(node_index),
        **told.to_environ(),
    }


def check_target(program: Program) -> None:
    """Refuse a program that is not there before anything is started.

    Raises:
        UsageError: The script is not a file, or the module or the command is not to be found from here.
    """
    if program.is_command:
        if shutil.which(program.target) is None:
            raise UsageError(refuse_command(program.target))
        return
    if program.is_module and not _has_module(program.target.split(".")[0]):
        raise UsageError(
            explain(
                "module",
                got=program.target,
                expected="a module that `python -m` finds from this directory",
                do="Check its name and the current directory, or leave out -m to run a script",
            )
        )
    if not program.is_module and not Path(program.target).is_file():
        raise UsageError(
            explain(
                "script",
                got=program.target,
                expected="the path of a Python file",
                do="Check the path, or put -m before the name to run a module, or -- before any other command; "
                "options of ringweave come first",
            )
        )


def is_python(word: str) -> bool:
    """Whether a word names a script for the interpreter, rather than a program that can be run as it is.

    A file without the suffix of Python's is one too, unless it can be executed and is compiled, or says on its first
    line that another interpreter runs it.
    """
    if word.endswith(_PYTHON_SUFFIXES):
        return True
    path = Path(word)
    if not path.is_file():
        return False
    if not os.access(path, os.X_OK):
        return True
    with path.open("rb") as file:
        first_line = file.readline(_MOST_OF_A_LINE)
    return not first_line.startswith(b"\x7fELF") and (not first_line.startswith(b"#!") or b"python" in first_line)


def refuse_command(name: str, *, where: str = "") -> str:
    """What to say of a command that is not to be found, or not executable."""
    is_there = is_unexecutable(name)
    return explain(
        "command",
        got=name,
        expected="a program that can be run" if is_there else "a program on the PATH, or the path of one",
        do="Make it executable: chmod +x" if is_there else "Check the name; nodes see this machine's files",
        where=where,
    )


def is_unexecutable(name: str) -> bool:
    """Whether it is the path of something that is there, of which it is known that it cannot be run."""
    return "/" in name and Path(name).exists()


def _has_module(name: str) -> bool:
    """Found as workers will find it: in the current directory first. Imports nothing."""
    try:
        return bool(PathFinder.find_spec(name, [str(Path.cwd())]) or importlib.util.find_spec(name))
    except (ImportError, ValueError):
        return False
