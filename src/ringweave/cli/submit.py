"""`ringweave submit`: builds a job from a file and flags, shows its plan, asks, submits and follows it.

`ringweave split` divides a number of GPUs over unequal nodes as a job would be.
"""

import functools
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ringweave import units
from ringweave.cli import job_options
from ringweave.cli.echo import echo
from ringweave.cli.job_options import WORKER_OPTIONS, with_options
from ringweave.errors import UsageError
from ringweave.jobs import request, split
from ringweave.jobs.request import JobFlag, JobRequest
from ringweave.jobs.split import MIN_PER_NODE, WorkerSplit
from ringweave.platforms import api, submission
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig
from ringweave.platforms.api import JobView, Submission
from ringweave.platforms.registry import with_platform_option

PLANNED_BUCKET_BYTES = 25_000_000
"""DDP's gradient bucket, for which the schedule is chosen."""
_MAX_NAMED_RANKS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlacement:
    """Placement of workers on one node."""

    name: str
    workers: int
    capacity: int
    ranks: tuple[int, ...]
    """Global ranks of its workers, ascending; empty for an unused node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """Plan of a job before it runs."""

    nodes: tuple[NodePlacement, ...]
    split_reason: str
    ring: tuple[int, ...] = ()
    """Global ranks in the order of the ring of all workers; this and the next three only if the network is planned."""
    leaders: tuple[int, ...] = ()
    """Global ranks that talk to other nodes: one for each node, or for each of its NICs."""
    schedule: str = ""
    """Schedule that is predicted to be the fastest for a bucket, or the one that the job forces."""
    predicted_s: float | None = None
    """Predicted seconds of an allreduce of a bucket, at assumed rates; in a lab at those of its cluster file. None if a
    forced schedule has no prediction."""
    servers: tuple[str, ...] = ()
    """Nodes of the parameter server and of its standby; empty if the mode needs none."""


def plan_job(request: JobRequest, job: JobView, *, has_network: bool = True) -> JobPlan:
    """Plan an admitted job at assumed rates; they are measured when its first group is formed.

    `has_network`: plan rings, leaders and schedule, which takes a third of a second of processor time.
    """
    used = [(index, node) for index, node in enumerate(job.nodes) if node.workers]
    config = JobConfig(
        job=job.name,
        device=job.device,
        mode=job.mode,
        min_workers=request.elastic.min if request.elastic else None,
        has_standby=request.standby,
        nodes=tuple(NodeConfig(index=index, name=node.name, workers=node.workers) for index, node in used),
        worker_options=request.worker_options,
        lab=request.lab,
        cluster=submission.lab_cluster_text(request),
    )
    placed = JobPlan(
        nodes=tuple(_node_placements(job, config)),
        split_reason=_split_reason(request, job),
        servers=job_config.server_nodes(config),
    )
    return _with_network(placed, config, request) if has_network else placed


def _with_network(plan: JobPlan, config: JobConfig, request: JobRequest) -> JobPlan:
    from ringweave import planning  # brings numpy

    cluster = job_config.build_cluster(config, {})
    by_rank = {rank: name for name, ranks in config.ranks_by_node.items() for rank in ranks}
    nodes = [by_rank[rank] for rank in range(config.world_size)]
    group_plan = planning.plan_group(cluster, nodes, leader_per_nic=request.leader_per_nic)
    choice = group_plan.choose(PLANNED_BUCKET_BYTES, request.schedule)
    return replace(
        plan,
        ring=tuple(group_plan.ring_order),
        leaders=tuple(group_plan.leaders),
        schedule=choice.schedule,
        predicted_s=choice.predicted_s if math.isfinite(choice.predicted_s) else None,
    )


def job_plan_document(plan: JobPlan) -> dict[str, Any]:
    """Return the plan for `submit --json`."""
    nodes = [
        {"name": each.name, "workers": each.workers, "capacity": each.capacity, "ranks": list(each.ranks)}
        for each in plan.nodes
    ]
    return {
        "split": nodes,
        "why": plan.split_reason,
        "ring": list(plan.ring),
        "leaders": list(plan.leaders),
        "schedule": plan.schedule,
        "bytes": PLANNED_BUCKET_BYTES,
        "predicted_s": plan.predicted_s,
        "server": plan.servers[0] if plan.servers else None,
        "standby": plan.servers[1] if len(plan.servers) > 1 else None,
    }


def job_plan_lines(plan: JobPlan, request: JobRequest, job: JobView) -> list[str]:
    """Return the plan as lines for people."""
    device = "GPUs" if request.device == "cuda" else "CPU workers"
    network, first = _network_lines(plan, request) if plan.schedule else ([], [])
    rows = [f"  {_placement_text(each)}" for each in plan.nodes]
    program = " ".join(replace(job_config.worker_program(request), arguments=()).command_words())
    place = "which has the best connection" if request.elastic is None else "the first node"
    standby = f"; its standby on {plan.servers[1]}" if len(plan.servers) > 1 else ""
    served = [f"server   on {plan.servers[0]}, {place}{standby}"] if plan.servers else []
    return [
        f"job {job.name} on {job.platform} for {job.requester}: {job.workers} {device}, {program}",
        f"split    {plan.split_reason}",
        *rows,
        *network,
        *served,
        *_elastic_lines(plan, request),
        *first,
    ]


def _network_lines(plan: JobPlan, request: JobRequest) -> tuple[list[str], list[str]]:
    """Return the lines about rings and leaders, and the one about the schedule."""
    size = units.format_bytes(PLANNED_BUCKET_BYTES)
    rates = "assumed rates" if request.lab is None else f"the rates of lab {request.lab}"
    predicted = (
        f", predicted {plan.predicted_s * 1e3:.1f} ms at {rates}; the rates are measured when it runs"
        if plan.predicted_s is not None
        else ""
    )
    asked = "" if request.schedule is None else ", as the job asks"
    rings = f"rings    in each node one of its own workers; through all: {_ranks_text(plan.ring)}"
    return [rings, f"leaders  {_leaders_text(plan)}"], [f"first    {plan.schedule} for {size}{asked}{predicted}"]


def _elastic_lines(plan: JobPlan, request: JobRequest) -> list[str]:
    if request.elastic is None:
        return []
    names = [each.name for each in plan.nodes if each.workers][:2]
    lost, plural = ("a node is lost", "s") if len(names) > 1 else ("others fail", "")
    least = f"continues with {request.elastic.min} of {request.num_workers} workers or more when {lost}"
    spares = f"; {request.elastic.spares} spares on each node" if request.elastic.spares else ""
    return [f"elastic  {least}; coordinator{plural} on {' and '.join(names)}{spares}"]


def _placement_text(each: NodePlacement) -> str:
    if not each.ranks:
        return f"{each.name}: not used, of {each.capacity}"
    first, last = each.ranks[0], each.ranks[-1]
    ranks = f"{first}-{last}" if last - first == len(each.ranks) - 1 else _ranks_text(each.ranks)
    return f"{each.name}: {each.workers} of {each.capacity}, ranks {ranks}"


def _leaders_text(plan: JobPlan) -> str:
    nodes = {rank: each.name for each in plan.nodes for rank in each.ranks}
    named = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in plan.leaders[:_MAX_NAMED_RANKS])
    return named + (f" and {len(plan.leaders) - _MAX_NAMED_RANKS} more" if len(plan.leaders) > _MAX_NAMED_RANKS else "")


def _ranks_text(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks[:_MAX_NAMED_RANKS])) + (" ..." if len(ranks) > _MAX_NAMED_RANKS else "")


def _node_placements(job: JobView, config: JobConfig) -> list[NodePlacement]:
    ranks = config.ranks_by_node
    return [
        NodePlacement(
            name=node.name, workers=node.workers, capacity=node.capacity, ranks=tuple(ranks.get(node.name, ()))
        )
        for node in job.nodes
    ]


def _split_reason(request: JobRequest, job: JobView) -> str:
    used, there = len(job.used_nodes), len(job.nodes)
    at_least = f"at least {request.min_per_node} on each, the minimum of a ring"
    return f"{job.workers} on {used} of {there} nodes: the fewest that hold them, the largest first, {at_least}"


@click.command
@job_options.answer_options(is_new_job=True)
@click.option("--name", metavar="NAME", help="Name of the job.")
@click.option("--gpus", type=int, metavar="N", help="Total number of GPUs.")
@click.option("--cpu-workers", type=int, metavar="N", help="Total number of workers without a GPU.")
@click.option("--capacity", metavar="A,B,..", help="Capacities of nodes n0, n1, ..")
@click.option("--max-retries", type=int, metavar="N", help="Maximum number of replacements of each node of --capacity.")
@click.option("--deletion", metavar="POLICY", help="Deletion policy of each: delete, keep or keep-on-failure.")
@click.option("--min-per-node", type=int, metavar="N", help="Minimum number of workers on a used node.")
@click.option("--script", metavar="FILE", help="Path of the script.")
@click.option("--module", metavar="NAME", help="Module to run instead of a script, as with python -m.")
@click.option("--command", metavar="PROGRAM", help="Program to run instead of a script, without an interpreter.")
@click.option("--directory", metavar="DIR", help="Folder of the program.")
@click.option("--arguments", metavar="WORDS", help="Arguments of the program, split as by a shell.")
@click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="Environment variable of the workers.")
@click.option("--data", metavar="WHERE", help="Location of the training data.")
@click.option("--image", metavar="IMAGE", help="Container image.")
@click.option("--claim", metavar="NAME", help="PersistentVolumeClaim that all Pods mount at /claim, on Kubernetes.")
@click.option(
    "--elastic",
    type=int,
    metavar="MIN",
    help="Smallest number of workers with which the job continues without a lost node.",
)
@click.option("--spares", type=int, metavar="N", help="Number of spares on each node; needs --elastic.")
@functools.partial(with_options, WORKER_OPTIONS)
@click.option(
    "--standby",
    is_flag=True,
    default=None,
    help="A second parameter server of an elastic job, on the second node, that takes over when the first one is lost.",
)
@click.option("--lab", metavar="NAME", help="Run the nodes in a lab that is up on this machine.")
@click.option("--ttl", metavar="TIME", help="Remove the job at this time after its end, such as 3600s.")
@click.option("--suspend", is_flag=True, default=None, help="Submit it suspended.")
@click.option("-y", "--yes", is_flag=True, help="Submit without confirmation.")
@click.option("--detach", is_flag=True, help="Return when it is submitted, without following it.")
@click.option(
    "--dry-run",
    is_flag=False,
    flag_value="plan",
    type=click.Choice(["plan", "full"]),
    help="Check everything and change nothing; full also prints the objects of the job on its platform.",
)
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(dir_okay=False))
def command(
    place: str, output: str, yes: bool, detach: bool, dry_run: str | None, path: str | None, **flags: Any
) -> int:
    """Submit the job that FILE describes. Flags override keys of the file; without a file they are the job.

    Its plan is shown first: the split of workers over the nodes with its reason, rings and leaders. With -y --detach
    the split alone is shown. Relative paths start from the file's folder; those of flags from the current one. The job
    continues when this command or its terminal ends. Without --detach the exit code is the job's: 0 if it succeeded,
    else 1.
    """
    request, base = _read_request(path, flags)
    platform = job_options.open_user_platform(place)
    is_batch = yes and detach and dry_run is None and output == "table"
    tried = platform.submit(request, base=base, dry_run=not is_batch)
    plan = plan_job(request, tried.job, has_network=not is_batch)
    if output == "table":
        echo("\n".join(job_plan_lines(plan, request, tried.job)), err=dry_run is None)
    if dry_run is not None:
        _print_dry_run(output, tried, job_plan_document(plan), full=dry_run == "full")
        return 0
    if not yes and not _confirm_submission(request.name):
        echo("ringweave: nothing was submitted", err=True)
        return 1
    made = tried if is_batch else platform.submit(request, base=base)
    if output != "table":
        job_options.print_answer(
            output, {"plan": job_plan_document(plan), "job": api.job_view_document(made.job)}, list
        )
        return 0
    if detach:
        text = f"{request.name}: submitted. ringweave status {request.name}; ringweave logs -f {request.name}"
        echo(with_platform_option(text, request.name, place))
        return 0
    return job_options.follow_job(request.name, place, lambda: job_options.open_user_platform(place))


def _print_dry_run(output: str, submission: Submission, plan: dict[str, Any], *, full: bool) -> None:
    objects = {each.name: each.text for each in submission.objects} if full else {}
    content = {"plan": plan, "job": api.job_view_document(submission.job), "objects": objects}
    parts = [line for name, text in objects.items() for line in (f"--- {name}", *text.rstrip().split("\n"))]
    job_options.print_answer(output, content, lambda: [*parts, "nothing was submitted"])


def _confirm_submission(name: str) -> bool:
    if not sys.stdin.isatty():
        do = "Add -y to submit without confirmation, or --dry-run to see only the plan"
        raise UsageError("answer", got="no terminal", expected="a terminal for the confirmation", do=do)
    return click.confirm(f"Submit {name}?", err=True)


def _read_request(path: str | None, flags: dict[str, Any]) -> tuple[JobRequest, Path]:
    """Return the request, and the folder that its relative paths start from."""
    given = _read_flags(flags, in_file=path is not None)
    if path is None:
        return request.request_from_flags(given), Path()
    return request.load_request(path, given), Path(path).parent


def _read_flags(flags: dict[str, Any], *, in_file: bool) -> dict[str, JobFlag]:
    flags = dict(flags)
    given = _node_flags(flags.pop("capacity"), flags.pop("max_retries"), flags.pop("deletion"))
    given |= _elastic_flags(flags.pop("elastic"), flags.pop("spares"))
    for key, value in flags.items():
        if value is None or value == ():
            continue
        name = f"--{key.replace('_', '-')}"
        if key == "arguments":
            given[key] = JobFlag(name=name, value=_split_arguments(value))
        elif key == "environment":
            given[key] = JobFlag(name="--env", value=dict(map(_parse_variable, value)))
        elif key == "directory" or (key == "script" and in_file and flags["directory"] is None):
            given[key] = JobFlag(name=name, value=str(Path(value).absolute()))
        else:
            given[key] = JobFlag(name=name, value=value)
    return given


def _elastic_flags(min_workers: int | None, num_spares: int | None) -> dict[str, JobFlag]:
    if min_workers is None:
        if num_spares is not None:
            do = "Add --elastic MIN, or write elastic.spares into the file"
            raise UsageError("--spares", got="no --elastic", expected="an elastic job", do=do)
        return {}
    spares = {} if num_spares is None else {"spares": num_spares}
    name = "--elastic, --spares" if spares else "--elastic"
    return {"elastic": JobFlag(name=name, value={"min": min_workers, **spares})}


def _node_flags(capacity: str | None, max_retries: int | None, deletion: str | None) -> dict[str, JobFlag]:
    """Return the nodes that the flags define; none if the file defines them."""
    each = {"max_retries": max_retries, "deletion": deletion}
    given = {key: value for key, value in each.items() if value is not None}
    if capacity is None:
        if given:
            do = "Write them into the nodes of the file, or add --capacity"
            got = ", ".join(f"--{key.replace('_', '-')}" for key in given)
            raise UsageError("flags", got=got, expected="--capacity, to whose nodes they apply", do=do)
        return {}
    nodes = [{"capacity": each, **given} for each in _parse_capacities(capacity)]
    return {"nodes": JobFlag(name="--capacity, --max-retries, --deletion" if given else "--capacity", value=nodes)}


def _split_arguments(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        do = "Close the quotes"
        raise UsageError("--arguments", got=text, expected="words in shell syntax", do=do) from error


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError("--env", got=text, expected="NAME=VALUE", do="Write it like SEED=1")
    return name, value


@click.command
@click.option("--gpus", type=int, metavar="N", required=True, help="GPUs (or CPU workers) in all.")
@click.option("--capacity", metavar="A,B,..", required=True, help="Capacity of each node, in node order.")
@click.option(
    "--min-per-node", type=int, metavar="M", default=MIN_PER_NODE, show_default=True, help="Minimum of a used node."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def split_gpus(gpus: int, capacity: str, min_per_node: int, as_json: bool) -> int:
    """Split N GPUs over unequal nodes: the fewest nodes that hold them, with at least M GPUs on each.

    Exit code 2 if there is no such split; then the nearest possible totals are printed.
    """
    found = split.split_workers(gpus, _parse_capacities(capacity), min_per_node=min_per_node)
    if as_json:
        echo(json.dumps(_split_document(found)))
    elif found.is_feasible:
        echo("\n".join(_split_lines(found)))
    if not found.is_feasible:
        echo(f"ringweave: error: {found.refusal_text()}", err=True)
    return 0 if found.is_feasible else 2


def _parse_capacities(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        expected = "whole numbers separated by commas, one for each node"
        raise UsageError("--capacity", got=text, expected=expected, do="Write it like 10,5") from error


def _split_document(found: WorkerSplit) -> dict[str, Any]:
    document: dict[str, Any] = {
        "gpus": found.total,
        "capacity": list(found.capacities),
        "min_per_node": found.min_per_node,
        "nodes": None if found.counts is None else list(found.counts),
    }
    if not found.is_feasible:
        nearest = {"nearest_below": found.nearest_below, "nearest_above": found.nearest_above}
        document |= nearest | {"error": found.refusal_text()}
    return document


def _split_lines(found: WorkerSplit) -> list[str]:
    rows = [
        f"node {node}: {count} of {capacity}" if count else f"node {node}: not used, of {capacity}"
        for node, (count, capacity) in enumerate(zip(found.counts or (), found.capacities, strict=True))
    ]
    return [f"{found.total} on {found.num_nodes} of {len(found.capacities)} nodes", *rows]
