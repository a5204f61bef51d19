"""Worker processes of a run, as data: command line, ranks, environment. Pure.

Any launcher (this machine, Slurm, Kubernetes) starts the same specs, and elastic supervision can compute them again
for another cluster.
"""

import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Protocol

from ringweave.environment import WorkerEnvironment
from ringweave.errors import UsageError, explain
from ringweave.jobs.worker_options import BLOCK_ORDER, RankOrder, assign_ranks

_PYTHON_SUFFIXES = (".py", ".pyc", ".pyz", ".pyw")
_MAX_FIRST_LINE_BYTES = 256
MALLOC_SETTINGS = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**28)}
"""Settings of glibc's allocator, in bytes: memory freed in a train step stays for the next one, up to 1 GiB at the end
of the heap and in pieces below 256 MiB. Otherwise the kernel takes it and returns it page by page, zeroed, in each
step."""
RESOLVER_SETTINGS = {"RES_OPTIONS": "timeout:1 attempts:3"}
"""Settings of the resolver: torch (2.13) asks for the names of both ends of each connection to a store, for its logs,
and a lost answer would stop the worker for 5 s."""
USER_CONTROLLED_VARIABLES = ("OMP_NUM_THREADS", *MALLOC_SETTINGS, *RESOLVER_SETTINGS)
"""Variables of a worker that keep the value of the user's environment."""


class NodeLike(Protocol):
    """Part of a cluster's node that a launcher needs."""

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> Sequence[object]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgram:
    """Program that every worker runs."""

    target: str
    """Path of a script, name of a module, or a command."""
    arguments: tuple[str, ...] = ()
    """Passed through untouched."""
    is_module: bool = False
    """Run the target like `python -m`."""
    is_command: bool = False
    """The target is an executable on the PATH, run without an interpreter."""

    @property
    def is_script(self) -> bool:
        return not (self.is_module or self.is_command)

    def argv(self, python: str, *, entry: str | None = None) -> tuple[str, ...]:
        """Return the command line, with the given interpreter and an optional file that runs first.

        An executable has neither.
        """
        before = (python,) if entry is None else (python, entry)
        return tuple(self.command_words()) if self.is_command else (*before, *self.command_words())

    def command_words(self) -> list[str]:
        """Return the words that follow the interpreter, or the whole command if there is none."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPort:
    """Host and port of a listening process."""

    host: str
    """Address that the process listens on and its clients can reach; for rank 0 the MASTER_ADDR."""
    port: int
    """Port that was free on its node when it was chosen; for rank 0 the MASTER_PORT."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """One worker process to start."""

    global_rank: int
    local_rank: int
    """Index among the workers of its node, and of its device there."""
    node: str
    environ: Mapping[str, str]
    """Variables that override its inherited environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """All processes of a run, by global rank."""

    argv: tuple[str, ...]
    """Command line of every worker."""
    workers: tuple[WorkerSpec, ...]

    @property
    def world_size(self) -> int:
        return len(self.workers)


def parse_worker_counts(text: str) -> list[int]:
    """Parse workers per node: `4` (one node) or `3,2` (two nodes).

    Raises:
        UsageError: Not a comma-separated list of positive whole numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(
            "--workers",
            got=text,
            expected="one positive whole number per node, separated by commas",
            do="Write 4 for four workers on one node, or 3,2 for two nodes with three and two",
        )
    return [int(part) for part in parts]


def build_worker_group(
    nodes: Sequence[NodeLike],
    argv: tuple[str, ...],
    master_address: HostPort,
    *,
    num_cpus: int,
    common_environment: WorkerEnvironment,
    node_environ: Callable[[str, int], Mapping[str, str]] = lambda node, local_rank: {},
    order: RankOrder = BLOCK_ORDER,
) -> WorkerGroup:
    """Build a group of one worker per device; ranks follow the devices in the given order.

    Args:
        nodes: Nodes of the cluster, assumed to share one machine's CPUs.
        argv: Command line of every worker.
        master_address: MASTER_ADDR and MASTER_PORT.
        num_cpus: CPUs of the machine; each worker's share becomes OMP_NUM_THREADS.
        common_environment: ringweave's variables of all workers; the node is filled in for each.
        node_environ: Name of a node and local rank -> further variables of the worker there.
        order: Order in which the devices get ranks.

    Returns:
        The group, environ as torchrun would set it, plus ringweave's own variables.
    """
    slots = assign_ranks([len(node.devices) for node in nodes], order)
    shared = _shared_variables(len(slots), len(nodes), master_address, num_cpus)
    workers = tuple(
        WorkerSpec(
            global_rank=global_rank,
            local_rank=local_rank,
            node=nodes[node_index].name,
            environ={
                **shared,
                **_own_variables(global_rank, local_rank, node_index, nodes[node_index], common_environment),
                **node_environ(nodes[node_index].name, local_rank),
            },
        )
        for global_rank, (node_index, local_rank) in enumerate(slots)
    )
    return WorkerGroup(argv=argv, workers=workers)


def _shared_variables(world_size: int, num_nodes: int, master_address: HostPort, num_cpus: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_address.host,
        "MASTER_PORT": str(master_address.port),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "OMP_NUM_THREADS": str(max(1, num_cpus // max(1, world_size))),
        "PYTHONUNBUFFERED": "1",
        **MALLOC_SETTINGS,
        **RESOLVER_SETTINGS,
    }


def _own_variables(
    global_rank: int, local_rank: int, node_index: int, node: NodeLike, common_environment: WorkerEnvironment
) -> dict[str, str]:
    environment = replace(common_environment, node=node.name)
    return {
        "RANK": str(global_rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(node.devices)),
        "GROUP_RANK": str(node_index),
        "NODE_RANK": str(node_index),
        **environment.to_environ(),
    }


def check_program(program: WorkerProgram) -> None:
    """Refuse a program that cannot be found, before anything is started.

    Raises:
        UsageError: The script is not a file, or the module or the command cannot be found from here.
    """
    if is_program_found(program, Path.cwd()):
        return
    if program.is_command:
        raise UsageError(unrunnable_command_text(program.target))
    if program.is_module:
        raise UsageError(
            "module",
            got=program.target,
            expected="a module that `python -m` finds from this directory",
            do="Check its name and the current directory, or leave out -m to run a script",
        )
    raise UsageError(
        "script",
        got=program.target,
        expected="the path of a Python file",
        do="Check the path, or put -m before the name to run a module, or -- before any other command; "
        "options of ringweave come first",
    )


def is_program_found(program: WorkerProgram, directory: Path) -> bool:
    """Return whether workers in this directory find the program: script or path in it, module, command on the PATH."""
    if program.is_command:
        return shutil.which(directory / program.target if "/" in program.target else program.target) is not None
    if program.is_module:
        return is_importable(program.target.split(".")[0], directory)
    return (directory / program.target).is_file()


def is_python_script(word: str) -> bool:
    """Return whether a word names a script for the interpreter, rather than an executable program.

    A file without a Python suffix is a script too, unless it is executable and is compiled or names another interpreter
    on its first line.
    """
    if word.endswith(_PYTHON_SUFFIXES):
        return True
    path = Path(word)
    if not path.is_file():
        return False
    if not os.access(path, os.X_OK):
        return True
    with path.open("rb") as file:
        first_line = file.readline(_MAX_FIRST_LINE_BYTES)
    return not first_line.startswith(b"\x7fELF") and (not first_line.startswith(b"#!") or b"python" in first_line)


def unrunnable_command_text(name: str, *, where: str = "") -> str:
    """Return the error text for a command that cannot be found or is not executable."""
    exists = is_not_executable(name)
    return explain(
        "command",
        got=name,
        expected="a program that can be run" if exists else "a program on the PATH, or the path of one",
        do="Make it executable: chmod +x" if exists else "Check the name; nodes see this machine's files",
        where=where,
    )


def is_not_executable(name: str) -> bool:
    """Return whether the name is the path of an existing file; of a command that failed, it is then not executable."""
    return "/" in name and Path(name).exists()


def is_importable(name: str, directory: Path) -> bool:
    """Return whether workers in this directory can import the module: from there first. Imports nothing."""
    try:
        return bool(PathFinder.find_spec(name, [str(directory)]) or importlib.util.find_spec(name))
    except (ImportError, ValueError):
        return False


def spread_slots(counts: Sequence[int], total: int, *, limits: Sequence[int]) -> list[int]:
    """Return the slots of each node: its initial workers, and later ones one by one where there are fewest.

    `limits`: upper limit of the slots on each node.
    """
    slots = list(counts)
    while sum(slots) < total and (free := [node for node, count in enumerate(slots) if count < limits[node]]):
        slots[min(free, key=slots.__getitem__)] += 1
    return slots


def place_later_workers(counts: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Return the node of each later worker, in the order of their ranks: where there are fewest workers then.

    `counts`: initial workers of each node; `slots`: its slots.
    """
    found, placed = list[int](), list(counts)
    while free := [node for node, count in enumerate(placed) if count < slots[node]]:
        found.append(min(free, key=placed.__getitem__))
        placed[found[-1]] += 1
    return found


def with_later_workers(group: WorkerGroup, nodes: Sequence[NodeLike], *, num_cpus: int) -> WorkerGroup:
    """Return the group with one later worker for each unused device, in the order of their ranks.

    `group`: initial workers, at least one on each node.
    """
    workers = list(group.workers)
    template = {worker.node: worker for worker in workers}
    count = Counter(worker.node for worker in workers)
    initial = [count[node.name] for node in nodes]
    for index in place_later_workers(initial, [len(node.devices) for node in nodes]):
        name = nodes[index].name
        workers.append(_later_worker(template[name], len(workers), count[name], num_cpus))
        count[name] += 1
    return replace(group, workers=tuple(workers))


def _later_worker(template: WorkerSpec, rank: int, local_rank: int, num_cpus: int) -> WorkerSpec:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(rank + 1),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_rank + 1),
        "OMP_NUM_THREADS": str(max(1, num_cpus // (rank + 1))),
    }
    return replace(template, global_rank=rank, local_rank=local_rank, environ={**template.environ, **variables})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExit:
    """End of a worker process."""

    exit_code: int | None
    """None if a signal ended it."""
    signal_name: str | None
    """`SIGKILL`; None if it ended by itself."""
    time_s: float
    """Time at which its end was observed, on the launcher's clock."""
    was_stopped: bool
    """It ended after the launcher had begun to stop the workers, so its end says nothing about the cause."""

    @property
    def is_success(self) -> bool:
        """It exited by itself with code 0."""
        return self.exit_code == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """Observed state of one worker."""

    global_rank: int
    exit: WorkerExit | None
    """None while it runs."""
