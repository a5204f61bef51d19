"""A TrainingJob as the request and the job that `ringweave.jobs` decides about, and a request as a TrainingJob."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringweave.jobs.life import records
from ringweave.jobs.life.records import Desired, Job
from ringweave.jobs.requests.request import DeletionPolicy, Elastic, NodeRequest, Request
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.resource import times

Resource = Mapping[str, Any]
_SAME = ("script", "directory", "data", "image", "claim", "mode")
"""Fields that the spec and the request have alike."""


def request_of(resource: Resource) -> Request:
    """What a TrainingJob asks for.

    Raises:
        RequestProblemsError: It breaks a rule that the API server does not know, or did not know when it was stored.
    """
    spec = resource["spec"]
    is_cuda = "gpus" in spec
    same = {name: spec[name] for name in _SAME if name in spec}
    return Request(
        name=resource["metadata"]["name"],
        num_workers=spec["gpus"] if is_cuda else spec.get("cpuWorkers", 0),
        device="cuda" if is_cuda else "cpu",
        nodes=tuple(map(_node, spec["nodes"])),
        arguments=tuple(spec.get("arguments", ())),
        environment={item["name"]: item["value"] for item in spec.get("environment", ())},
        elastic=Elastic(min=spec["elastic"]["min"]) if "elastic" in spec else None,
        min_per_node=spec["minPerNode"],
        ttl_s=spec.get("ttlSecondsAfterFinished"),
        suspend=spec.get("suspend", False),
        **same,
    )


def _node(entry: Mapping[str, Any]) -> NodeRequest:
    return NodeRequest(
        name=entry["name"],
        capacity=entry["capacity"],
        max_retries=entry["maxRetries"],
        deletion=DeletionPolicy(entry["deletionPolicy"]),
    )


def job_of(resource: Resource) -> Job | None:
    """The job with its record as saved last; None where it was not admitted yet."""
    record = resource.get("status", {}).get("record")
    if record is None:
        return None
    request = request_of(resource)
    counts = [0] * len(request.nodes)
    for index, node in enumerate(resource["status"].get("nodes", ())):
        counts[index] = node.get("workers", 0)
    return Job(
        request=request,
        requester=requester_of(resource),
        created_s=times.parse(resource["metadata"]["creationTimestamp"]),
        counts=tuple(counts),
        desired=desired_of(resource),
        record=records.parse_record(record),
    )


def desired_of(resource: Resource) -> Desired:
    """What is asked of it now: by the fields that verbs set, and by its deletion."""
    spec = resource["spec"]
    return Desired(
        suspend=spec.get("suspend", False),
        stop_run=spec.get("stopRun", 0),
        retry_run=spec.get("retryRun", 0),
        delete="deletionTimestamp" in resource["metadata"],
    )


def changes_of(before: Desired, after: Desired) -> dict[str, Any]:
    """The fields of a spec that differ, and no others: somebody else (Kueue) may have set those meanwhile."""
    fields = {"suspend": "suspend", "stop_run": "stopRun", "retry_run": "retryRun"}
    known = {theirs: (getattr(before, ours), getattr(after, ours)) for ours, theirs in fields.items()}
    return {name: wanted for name, (was, wanted) in known.items() if was != wanted}


def requester_of(resource: Resource) -> str:
    """Name of the Kubernetes user who asked; empty where nobody recorded it."""
    return resource["spec"].get("requester", {}).get("username", "")


def groups_of(resource: Resource) -> tuple[str, ...]:
    """Groups of the requester."""
    return tuple(resource["spec"].get("requester", {}).get("groups", ()))


def hosts_of(resource: Resource) -> Sequence[str | None]:
    """The Kubernetes node that each node of the job must be; None: any."""
    return [node.get("host") for node in resource["spec"]["nodes"]]


def is_ours(resource: Resource) -> bool:
    """This operator leads it, and not somebody whom `managedBy` names."""
    return resource["spec"].get("managedBy", names.MANAGER) == names.MANAGER


def resource_of(
    request: Request, *, namespace: str, source: str | None, username: str, groups: Sequence[str]
) -> dict[str, Any]:
    """The TrainingJob that a request is.

    Args:
        request: What is asked for.
        namespace: Where it shall be.
        source: Text of the script; None where the image has it.
        username: Who asks, as the API server says.
        groups: Their groups.
    """
    spec: dict[str, Any] = {
        "gpus" if request.device == "cuda" else "cpuWorkers": request.num_workers,
        **{name: getattr(request, name) for name in _SAME if getattr(request, name) is not None},
        "nodes": [_entry(index, node) for index, node in enumerate(request.nodes)],
        "minPerNode": request.min_per_node,
        "suspend": request.suspend,
        "requester": {"username": username, "groups": list(groups)},
    }
    if source is not None:
        spec["source"] = source
    if request.elastic is not None:
        spec["elastic"] = {"min": request.elastic.min}
    if request.arguments:
        spec["arguments"] = list(request.arguments)
    if request.environment:
        spec["environment"] = [{"name": name, "value": value} for name, value in request.environment.items()]
    if request.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = request.ttl_s
    metadata = {"name": request.name, "namespace": namespace}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}


def _entry(index: int, node: NodeRequest) -> dict[str, Any]:
    """One node; a name that its author gave is the host that is meant, one made by its place in the list is not."""
    host = {} if node.name == f"n{index}" else {"host": node.name}
    return {
        "name": node.name,
        **host,
        "capacity": node.capacity,
        "maxRetries": node.max_retries,
        "deletionPolicy": str(node.deletion),
    }


def with_record(resource: Resource, job: Job) -> Job:
    """The job as the resource has it now, with the record that is known to be saved."""
    return replace(job, desired=desired_of(resource))
