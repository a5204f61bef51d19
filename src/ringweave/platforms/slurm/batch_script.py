"""Batch script and components of a job's allocation. Pure.

A job whose nodes get unequal numbers of workers is a heterogeneous Slurm job with one component for each node; nothing
else gives exactly the split (docs/how-to/jobs-slurm.md lists the alternatives tried). Slurm allocates components one
after the other, each to the first host where it fits, and never two to one host. So the largest component comes first:
otherwise a small one could take the host that only the large one fits, and the job would wait for ever.
"""

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringweave.errors import JobError
from ringweave.files.problems import suggest_closest
from ringweave.jobs import split
from ringweave.jobs.records import Job
from ringweave.platforms.slurm.commands import SlurmHost

MAX_COMPONENTS = 128
"""Slurm's maximum."""
MAX_CONTROLLER_RESTARTS = 20
"""Restarts of the controller by the batch script, after a signal or an error has ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationComponent:
    """Node of the job as a component of the allocation."""

    node: int
    workers: int
    host: str | None
    """Requested host; None: any host with free capacity."""


def allocation_components(job: Job, hosts: Collection[str]) -> tuple[AllocationComponent, ...]:
    """Return the components of the allocation, in the order in which Slurm has to allocate them.

    Args:
        job: As admitted.
        hosts: Names of the hosts. A node with the name of a host requests that host.
    """
    found = [
        AllocationComponent(
            node=node, workers=job.counts[node], host=name if (name := job.node_name(node)) in hosts else None
        )
        for node in job.used_nodes
    ]
    return tuple(sorted(found, key=lambda part: (-part.workers, part.host is None, part.node)))


def check_feasible(job: Job, hosts: Sequence[SlurmHost]) -> None:
    """Refuse a job that the cluster's hosts can never run.

    Raises:
        JobError: The text names the available capacities and the nearest possible totals.
    """
    unit = "GPUs" if job.request.device == "cuda" else "CPUs"
    capacities = {host.name: host.gpus if unit == "GPUs" else host.cpus for host in hosts}
    needed = allocation_components(job, capacities)
    names = [job.node_name(part.node) for part in needed]
    for part, name in zip(needed, names, strict=True):
        if part.host is None and not _is_default_name(name, part.node):
            do = suggest_closest(name, capacities) or "Leave the names of nodes out to use any machine"
            raise JobError(
                "node",
                got=name,
                expected=f"a machine of Slurm: {_format_capacities(capacities, unit)}",
                do=do,
                where="slurm",
            )
    if not _fits_hosts(needed, capacities):
        total, counts = job.request.num_workers, "+".join(str(part.workers) for part in needed)
        available = [count for count in capacities.values() if count] or [0]
        nearest = split.split_workers(total, available, min_per_node=job.request.min_per_node)
        totals = [str(each) for each in (nearest.nearest_below, nearest.nearest_above) if each is not None]
        if nearest.is_feasible:
            do = f"Correct the capacities of the nodes: {total} can be shared as {nearest}"
        else:
            do = f"Ask for {' or '.join(totals)}" if totals else "Ask the administrator of the cluster"
        expected = f"at most the capacity of the machines: {_format_capacities(capacities, unit)}"
        raise JobError(f"{unit} of job {job.request.name}", got=counts, expected=expected, do=do, where="slurm")
    if len(needed) > MAX_COMPONENTS:
        do = "Use machines with more GPUs each"
        raise JobError("nodes", got=len(needed), expected=f"at most {MAX_COMPONENTS} on Slurm", do=do)


def slurm_job_name(job: Job) -> str:
    """Return the name of the job in Slurm."""
    return f"rw-{job.request.name}"


def render_batch_script(
    job: Job, job_id: str, components: Sequence[AllocationComponent], folder: Path, controller: Sequence[str]
) -> str:
    """Return the batch script: allocation options, and a loop that restarts the controller until it exits with 0.

    Args:
        job: As admitted.
        job_id: Comment by which the job is found in Slurm if its number is unknown.
        components: Components of the allocation, in order.
        folder: Folder of the job on the shared file system.
        controller: Command line of the controller.
    """
    pinned = sorted(part.host for part in components if part.host is not None)
    shared = ["--requeue", "--open-mode=append"]
    blocks = [_sbatch_options(part, pinned, job.request.device, shared) for part in components]
    log = str(folder / "controller.log").replace("%", "%%")
    head = [f"--job-name={slurm_job_name(job)}", f'--output="{log}"', f'--chdir="{folder}"']
    lines = ["#!/bin/sh", *(f"#SBATCH {option}" for option in (*head, f"--comment={job_id}", *blocks[0]))]
    for block in blocks[1:]:
        lines += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in (*head[:1], *block))]
    return "\n".join(
        [*lines, _CONTROLLER_LOOP.format(controller=shlex.join(controller), restarts=MAX_CONTROLLER_RESTARTS)]
    )


def render_cleanup_script(job: Job, wait_s: float, cleanup_command: Sequence[str]) -> str:
    """Return the batch script of the Slurm job that removes this job after its TTL.

    `wait_s`: seconds until the removal starts.
    """
    options = (f"--job-name=rw-ttl-{job.request.name}", "--output=/dev/null", "--chdir=/", "--nodes=1", "--ntasks=1")
    lines = [*options, f"--begin=now+{int(wait_s)}", "--requeue"]
    return "\n".join(
        ["#!/bin/sh", *(f"#SBATCH {option}" for option in lines), f"exec {shlex.join(cleanup_command)}", ""]
    )


_CONTROLLER_LOOP = """
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


def srun_command(component_index: int, num_components: int, name: str, agent: Iterable[str]) -> list[str]:
    """Return the command line that runs an agent on the host of a component."""
    group = [f"--het-group={component_index}"] if num_components > 1 else []
    # --overlap: resources that an earlier step still holds must not delay the next step. The step gets all resources
    # of the component, since it requests no number of its own.
    options = ["--nodes=1", "--ntasks=1", "--overlap", f"--job-name={name}", "--input=none", "--export=ALL"]
    return ["srun", *group, *options, *agent]


def _sbatch_options(
    component: AllocationComponent, pinned: Sequence[str], device: str, shared: Sequence[str]
) -> list[str]:
    others = [host for host in pinned if host != component.host]
    host_options = (
        [f"--nodelist={component.host}"] if component.host else [f"--exclude={','.join(others)}"] if others else []
    )
    if device == "cuda":
        # At least one CPU for each worker; SBATCH_CPUS_PER_GPU overrides the script.
        counts = [f"--gres=gpu:{component.workers}", "--cpus-per-gpu=1"]
    else:
        counts = [f"--cpus-per-task={component.workers}"]
    return ["--nodes=1", "--ntasks=1", *counts, *host_options, *shared]


def _fits_hosts(components: Sequence[AllocationComponent], capacities: dict[str, int]) -> bool:
    """Return whether each component fits a host of its own: the largest gets the largest host that none requests."""
    named = {part.host for part in components if part.host is not None}
    free = sorted((count for name, count in capacities.items() if name not in named), reverse=True)
    unpinned = [part.workers for part in components if part.host is None]
    is_named_well = all(part.workers <= capacities[part.host] for part in components if part.host is not None)
    return is_named_well and len(unpinned) <= len(free) and all(a <= b for a, b in zip(unpinned, free, strict=False))


def _is_default_name(name: str, node: int) -> bool:
    """Return whether the job file gave the node no name."""
    return name == f"n{node}"


def _format_capacities(capacities: dict[str, int], unit: str) -> str:
    shown = [f"{name} {count}" for name, count in list(capacities.items())[:8]]
    more = f", and {len(capacities) - 8} more" if len(capacities) > 8 else ""
    return f"{unit} of {', '.join(shown)}{more}" if shown else "there is none"
