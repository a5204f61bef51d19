"""The plan of a job before it runs: its split and why, rings, leaders. Pure but for what planning computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringweave import units
from ringweave.jobs.requests.request import Request
from ringweave.launch.groups import layout
from ringweave.launch.groups.config import Config, ConfigNode
from ringweave.launch.services import submitting
from ringweave.launch.services.views import JobView

BUCKET_BYTES = 25_000_000
"""DDP's gradient bucket, for which the schedule is named."""
_NAMED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """One node's part."""

    name: str
    workers: int
    capacity: int
    first_rank: int | None
    """Of its workers, which are counted on from here; None where it is not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What a job will be."""

    nodes: tuple[NodePlan, ...]
    why: str
    """Why this split."""
    ring: tuple[int, ...]
    """Global ranks in the order of the ring of all."""
    leaders: tuple[int, ...]
    """Global ranks that talk to other nodes, one for each node."""
    schedule: str
    """What is predicted to be the fastest for a bucket."""
    predicted_s: float
    """Predicted seconds of an allreduce of a bucket, at assumed rates; in a lab at those of its cluster file."""
    server: str | None = None
    """The node that has the parameter server; None where the mode needs none."""


def plan(request: Request, job: JobView) -> JobPlan:
    """The plan of an admitted job; its rates are assumed, and measured when its first group is formed."""
    from ringweave import planning  # brings numpy and scipy

    used = [(index, node) for index, node in enumerate(job.nodes) if node.workers]
    config = Config(
        job=job.name,
        device=job.device,
        mode=job.mode,
        nodes=tuple(ConfigNode(index=index, name=node.name, workers=node.workers) for index, node in used),
        script=request.script,
        lab=request.lab,
        cluster=submitting.lab_cluster(request),
    )
    cluster = layout.cluster_of(config, {})
    ranks = [node.name for node in cluster.nodes for _ in node.devices]
    made = planning.plan_group(cluster, ranks)
    choice = made.choose(BUCKET_BYTES)
    return JobPlan(
        nodes=tuple(_nodes(job)),
        why=_why(request, job),
        ring=tuple(made.ring_order),
        leaders=tuple(made.leaders),
        schedule=choice.schedule,
        predicted_s=choice.predicted_s,
        server=layout.server_node(config),
    )


def document(made: JobPlan) -> dict[str, Any]:
    """The plan as in `submit --json`."""
    nodes = [
        {"name": each.name, "workers": each.workers, "capacity": each.capacity, "first_rank": each.first_rank}
        for each in made.nodes
    ]
    return {
        "split": nodes,
        "why": made.why,
        "ring": list(made.ring),
        "leaders": list(made.leaders),
        "schedule": made.schedule,
        "bytes": BUCKET_BYTES,
        "predicted_s": made.predicted_s,
        "server": made.server,
    }


def lines(made: JobPlan, request: Request, job: JobView) -> list[str]:
    """The plan for people."""
    device = "GPUs" if request.device == "cuda" else "CPU workers"
    rows = [f"  {_node(each)}" for each in made.nodes]
    size = units.format_bytes(BUCKET_BYTES)
    rates = "assumed rates" if request.lab is None else f"the rates of lab {request.lab}"
    served = [f"server   on {made.server}, which is connected best"] if made.server else []
    return [
        f"job {job.name} on {job.place} for {job.requester}: {job.workers} {device}, {request.script}",
        f"split    {made.why}",
        *rows,
        f"rings    in each node one of its own workers; through all: {_ranks(made.ring)}",
        f"leaders  {_leaders(made)}",
        *served,
        *_elastic(made, request),
        f"first    {made.schedule} for {size}, predicted {made.predicted_s * 1e3:.1f} ms at {rates}; "
        "they are measured when it runs",
    ]


def _elastic(made: JobPlan, request: Request) -> list[str]:
    if request.elastic is None:
        return []
    first, second = [each.name for each in made.nodes if each.workers][:2]
    least = f"goes on with {request.elastic.min} of {request.num_workers} workers or more when a node is lost"
    return [f"elastic  {least}; coordinators on {first} and {second}"]


def _node(each: NodePlan) -> str:
    if each.first_rank is None:
        return f"{each.name}: not used, of {each.capacity}"
    return (
        f"{each.name}: {each.workers} of {each.capacity}, ranks {each.first_rank}-{each.first_rank + each.workers - 1}"
    )


def _leaders(made: JobPlan) -> str:
    def node(rank: int) -> str:
        return next(
            each.name
            for each in made.nodes
            if each.first_rank is not None and 0 <= rank - each.first_rank < each.workers
        )

    named = ", ".join(f"rank {rank} on {node(rank)}" for rank in made.leaders[:_NAMED])
    return named + (f" and {len(made.leaders) - _NAMED} more" if len(made.leaders) > _NAMED else "")


def _ranks(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks[:_NAMED])) + (" ..." if len(ranks) > _NAMED else "")


def _nodes(job: JobView) -> list[NodePlan]:
    found, first = [], 0
    for node in job.nodes:
        rank = first if node.workers else None
        found.append(NodePlan(name=node.name, workers=node.workers, capacity=node.capacity, first_rank=rank))
        first += node.workers
    return found


def _why(request: Request, job: JobView) -> str:
    used, there = len(job.used_nodes), len(job.nodes)
    at_least = f"at least {request.min_per_node} on each, which is what a ring needs"
    return f"{job.workers} on {used} of {there} nodes: the fewest that hold them, the largest first, {at_least}"
