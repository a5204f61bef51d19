"""What Slurm is asked for: the split as components of one job, and the batch script. Pure.

A job with nodes that get unequal numbers is a heterogeneous job of Slurm, one component for each node; nothing else
gives exactly the split (docs/jobs-slurm.md has what else was tried). Slurm gives components out one after the other,
each to the first machine where it fits, and never two to one machine. So the largest goes first, or a small one could
take the machine that only the large one fills, and the job would wait for ever.
"""

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringweave.errors import JobError, explain
from ringweave.files.problems import closest
from ringweave.jobs import splitting
from ringweave.jobs.life.records import Job
from ringweave.launch.slurm.asking.commands import Host

MAX_COMPONENTS = 128
"""Slurm takes no more."""
RESTARTS = 20
"""How often the batch script starts the controller again after a signal or an error has ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A node of the job as a part of the allocation."""

    node: int
    """Index in the request."""
    workers: int
    host: str | None
    """The machine that is meant; None: any with room."""


def components(job: Job, hosts: Collection[str]) -> tuple[Component, ...]:
    """The parts of the allocation, in the order in which Slurm is to give them out.

    Args:
        job: As admitted.
        hosts: Names of the machines. A node that is named like one of them means that one.
    """
    parts = [
        Component(node=node, workers=job.counts[node], host=name if (name := job.node_name(node)) in hosts else None)
        for node in job.used_nodes
    ]
    return tuple(sorted(parts, key=lambda part: (-part.workers, part.host is None, part.node)))


def check(job: Job, hosts: Sequence[Host]) -> None:
    """Refuse what no machine can ever give.

    Raises:
        JobError: The text says what there is, and the nearest totals that it can give.
    """
    unit = "GPUs" if job.request.device == "cuda" else "CPUs"
    room = {host.name: host.gpus if unit == "GPUs" else host.cpus for host in hosts}
    parts = components(job, room)
    names = [job.node_name(part.node) for part in parts]
    for part, name in zip(parts, names, strict=True):
        if part.host is None and not _is_default(name, part.node):
            do = closest(name, room) or "Leave the names of nodes out to take any machine"
            raise JobError(
                explain("node", got=name, expected=f"a machine of Slurm: {_told(room, unit)}", do=do, where="slurm")
            )
    if not _fits(parts, room):
        total, counts = job.request.num_workers, "+".join(str(part.workers) for part in parts)
        rooms = [count for count in room.values() if count] or [0]
        nearest = splitting.split(total, rooms, min_per_node=job.request.min_per_node)
        totals = [str(each) for each in (nearest.nearest_below, nearest.nearest_above) if each is not None]
        if nearest.is_feasible:
            do = f"Correct the capacities of the nodes: {total} can be shared as {nearest}"
        else:
            do = f"Ask for {' or '.join(totals)}" if totals else "Ask whoever runs the cluster"
        expected = f"what the machines can give together: {_told(room, unit)}"
        raise JobError(
            explain(f"{unit} of job {job.request.name}", got=counts, expected=expected, do=do, where="slurm")
        )
    if len(parts) > MAX_COMPONENTS:
        do = "Use machines with more GPUs each"
        raise JobError(explain("nodes", got=len(parts), expected=f"at most {MAX_COMPONENTS} on Slurm", do=do))


def job_name(job: Job) -> str:
    """What Slurm calls it."""
    return f"rw-{job.request.name}"


def script(job: Job, job_id: str, parts: Sequence[Component], folder: Path, controller: Sequence[str]) -> str:
    """The batch script: the allocation, and the controller started again until it ends well.

    Args:
        job: As admitted.
        job_id: By which it is found in Slurm though nobody heard its number.
        parts: Of the allocation, in order.
        folder: Of the job, on the shared file system.
        controller: Command line of the controller.
    """
    pinned = sorted(part.host for part in parts if part.host is not None)
    shared = ["--requeue", "--open-mode=append"]
    blocks = [_options(part, pinned, job.request.device, shared) for part in parts]
    log = str(folder / "controller.log").replace("%", "%%")
    head = [f"--job-name={job_name(job)}", f'--output="{log}"', f'--chdir="{folder}"']
    lines = ["#!/bin/sh", *(f"#SBATCH {option}" for option in (*head, f"--comment={job_id}", *blocks[0]))]
    for block in blocks[1:]:
        lines += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in (*head[:1], *block))]
    return "\n".join([*lines, _BODY.format(controller=shlex.join(controller), restarts=RESTARTS)])


def sweep_script(job: Job, wait_s: float, sweeper: Sequence[str]) -> str:
    """The batch script of the job that removes this one when its TTL is over.

    Args:
        job: Which one.
        wait_s: Seconds until it shall begin.
        sweeper: Command line of the sweeper.
    """
    options = (f"--job-name=rw-ttl-{job.request.name}", "--output=/dev/null", "--chdir=/", "--nodes=1", "--ntasks=1")
    lines = [*options, f"--begin=now+{int(wait_s)}", "--requeue"]
    return "\n".join(["#!/bin/sh", *(f"#SBATCH {option}" for option in lines), f"exec {shlex.join(sweeper)}", ""])


_BODY = """
# Slurm sends SIGTERM to all of us; the controller knows what to do then.
trap : TERM INT
left={restarts}
while [ $left -gt 0 ]; do
    {controller}
    code=$?
    [ $code -eq 0 ] && exit 0
    left=$((left - 1))
    sleep 1
done
exit $code
"""


def step(part: int, num_parts: int, name: str, agent: Iterable[str]) -> list[str]:
    """The command line that runs an agent on the machine of a component.

    Args:
        part: Index of the component.
        num_parts: How many there are; a job with one is not heterogeneous.
        name: What the step is called.
        agent: Command line of the agent.
    """
    group = [f"--het-group={part}"] if num_parts > 1 else []
    # --overlap: what a former step has not given back yet must not hold up the next. The step gets all that the
    # component has, since it asks for no number of its own.
    options = ["--nodes=1", "--ntasks=1", "--overlap", f"--job-name={name}", "--input=none", "--export=ALL"]
    return ["srun", *group, *options, *agent]


def _options(part: Component, pinned: Sequence[str], device: str, shared: Sequence[str]) -> list[str]:
    others = [host for host in pinned if host != part.host]
    places = [f"--nodelist={part.host}"] if part.host else [f"--exclude={','.join(others)}"] if others else []
    if device == "cuda":
        # One CPU for each worker at least; SBATCH_CPUS_PER_GPU beats what a script says.
        counts = [f"--gres=gpu:{part.workers}", "--cpus-per-gpu=1"]
    else:
        counts = [f"--cpus-per-task={part.workers}"]
    return ["--nodes=1", "--ntasks=1", *counts, *places, *shared]


def _fits(parts: Sequence[Component], room: dict[str, int]) -> bool:
    """Each part on a machine of its own: the largest part takes the largest machine that nobody names."""
    named = {part.host for part in parts if part.host is not None}
    free = sorted((count for name, count in room.items() if name not in named), reverse=True)
    loose = [part.workers for part in parts if part.host is None]
    is_named_well = all(part.workers <= room[part.host] for part in parts if part.host is not None)
    return is_named_well and len(loose) <= len(free) and all(a <= b for a, b in zip(loose, free, strict=False))


def _is_default(name: str, node: int) -> bool:
    """The job file gave it no name."""
    return name == f"n{node}"


def _told(room: dict[str, int], unit: str) -> str:
    shown = [f"{name} {count}" for name, count in list(room.items())[:8]]
    more = f", and {len(room) - 8} more" if len(room) > 8 else ""
    return f"{unit} of {', '.join(shown)}{more}" if shown else "there is none"
