"""Conversions between TrainingJob resources and the types of `ringweave.jobs`; API refusals in the status.

A refusal is in the status beside the record and not in it: the job still waits for its nodes, and is retried.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringweave.files.problems import shorten_names
from ringweave.jobs import records
from ringweave.jobs.records import DesiredJobState, Job, JobEvent, NodeRecord
from ringweave.jobs.request import DeletionPolicy, ElasticRequest, JobRequest, NodeRequest
from ringweave.jobs.states import JobState, NodeState, Reason
from ringweave.platforms.kubernetes import objects
from ringweave.platforms.registry import reason_with_platform_option, with_platform_option

ResourceObject = Mapping[str, Any]
CONDITION_TEXTS = {
    "Admitted": "The requester may submit the job, and the total can be split.",
    "Running": "All nodes train; of an elastic job, enough of them.",
    "Suspended": "The job is suspended.",
    "Succeeded": "All nodes finished with exit code 0; of an elastic job, all but hung ones.",
    "Failed": "The script failed, a node failed more often than maxRetries allows, or a user stopped the job.",
}
"""Condition type -> meaning of True."""
REFUSED_STATE = "Refused"
"""State of a job that was not admitted."""
_SHARED_FIELDS = {
    **{name: name for name in ("script", "module", "command", "directory", "data", "image", "claim")},
    **{name: name for name in ("mode", "schedule", "tuning", "order", "encrypt", "wire")},
    "replaceBackend": "replace_backend",
    "leaderPerNic": "leader_per_nic",
    "maxLossIncrease": "max_loss_increase",
}
"""Fields of the spec whose values are equal in the request -> their names there."""


def request_from_resource(resource: ResourceObject) -> JobRequest:
    """Return the request of a TrainingJob.

    Raises:
        RequestProblemsError: It breaks a rule that the API server did not know when it was stored.
    """
    spec = resource["spec"]
    is_cuda = "gpus" in spec
    same = {ours: spec[theirs] for theirs, ours in _SHARED_FIELDS.items() if theirs in spec}
    return JobRequest(
        name=resource["metadata"]["name"],
        num_workers=spec["gpus"] if is_cuda else spec.get("cpuWorkers", 0),
        device="cuda" if is_cuda else "cpu",
        nodes=tuple(map(_to_node_request, spec["nodes"])),
        arguments=tuple(spec.get("arguments", ())),
        environment={item["name"]: item["value"] for item in spec.get("environment", ())},
        elastic=ElasticRequest(**spec["elastic"]) if "elastic" in spec else None,
        standby=spec.get("standby", False),
        min_per_node=spec["minPerNode"],
        ttl_s=spec.get("ttlSecondsAfterFinished"),
        suspend=spec.get("suspend", False),
        **same,
    )


def _to_node_request(entry: Mapping[str, Any]) -> NodeRequest:
    return NodeRequest(
        name=entry["name"],
        capacity=entry["capacity"],
        max_retries=entry["maxRetries"],
        deletion=DeletionPolicy(entry["deletionPolicy"]),
    )


def job_from_resource(resource: ResourceObject) -> Job | None:
    """Return the job with its record as saved last; None if it was not admitted yet."""
    record = resource.get("status", {}).get("record")
    if record is None:
        return None
    request = request_from_resource(resource)
    counts = [0] * len(request.nodes)
    for index, node in enumerate(resource["status"].get("nodes", ())):
        counts[index] = node.get("workers", 0)
    return Job(
        request=request,
        requester=requester_of(resource),
        created_s=objects.parse_time(resource["metadata"]["creationTimestamp"]),
        counts=tuple(counts),
        desired=desired_from_resource(resource),
        record=records.RECORD_JSON.parse(record),
    )


def desired_from_resource(resource: ResourceObject) -> DesiredJobState:
    """Return the desired state: from the fields that verbs set, and from a deletion."""
    spec = resource["spec"]
    return DesiredJobState(
        suspend=spec.get("suspend", False),
        stop_run=spec.get("stopRun", 0),
        retry_run=spec.get("retryRun", 0),
        delete="deletionTimestamp" in resource["metadata"],
    )


def spec_changes(before: DesiredJobState, after: DesiredJobState) -> dict[str, Any]:
    """Return the changed fields of a spec and no others, since Kueue may have set those meanwhile."""
    fields = {"suspend": "suspend", "stop_run": "stopRun", "retry_run": "retryRun"}
    known = {theirs: (getattr(before, ours), getattr(after, ours)) for ours, theirs in fields.items()}
    return {name: wanted for name, (was, wanted) in known.items() if was != wanted}


def requester_of(resource: ResourceObject) -> str:
    """Return the name of the requesting Kubernetes user; empty if it was not recorded."""
    return resource["spec"].get("requester", {}).get("username", "")


def groups_of(resource: ResourceObject) -> tuple[str, ...]:
    """Return the groups of the requester."""
    return tuple(resource["spec"].get("requester", {}).get("groups", ()))


def hosts_of(resource: ResourceObject) -> Sequence[str | None]:
    """Return the required Kubernetes node of each node of the job; None: any."""
    return [node.get("host") for node in resource["spec"]["nodes"]]


def is_managed_here(resource: ResourceObject) -> bool:
    """Return whether this operator manages the job, and not another one that `managedBy` names."""
    return resource["spec"].get("managedBy", objects.MANAGER) == objects.MANAGER


def resource_from_request(
    request: JobRequest, *, namespace: str, source: str | None, username: str, groups: Sequence[str]
) -> dict[str, Any]:
    """Return the TrainingJob of a request.

    Args:
        request: The request.
        namespace: Namespace of the job.
        source: Text of the script; None if the image has it.
        username: The requester, as the API server reports.
        groups: Groups of the requester.
    """
    spec: dict[str, Any] = {
        "gpus" if request.device == "cuda" else "cpuWorkers": request.num_workers,
        **{theirs: value for theirs, ours in _SHARED_FIELDS.items() if (value := getattr(request, ours)) is not None},
        "nodes": [_to_node_entry(index, node) for index, node in enumerate(request.nodes)],
        "minPerNode": request.min_per_node,
        "suspend": request.suspend,
        "requester": {"username": username, "groups": list(groups)},
    }
    if source is not None:
        spec["source"] = source
    if request.elastic is not None:
        spares = {"spares": request.elastic.spares} if request.elastic.spares else {}
        spec["elastic"] = {"min": request.elastic.min, **spares}
    if request.standby:
        spec["standby"] = True
    if request.arguments:
        spec["arguments"] = list(request.arguments)
    if request.environment:
        spec["environment"] = [{"name": name, "value": value} for name, value in request.environment.items()]
    if request.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = request.ttl_s
    metadata = {"name": request.name, "namespace": namespace}
    return {"apiVersion": objects.API_VERSION, "kind": objects.CRD_KIND, "metadata": metadata, "spec": spec}


def _to_node_entry(index: int, node: NodeRequest) -> dict[str, Any]:
    """Return the entry of a node. A name given by the author requests that host; a generated name does not."""
    host = {} if node.name == f"n{index}" else {"host": node.name}
    return {
        "name": node.name,
        **host,
        "capacity": node.capacity,
        "maxRetries": node.max_retries,
        "deletionPolicy": str(node.deletion),
    }


StatusObject = dict[str, Any]
_OTHER_REFUSAL, _SERVER_FAILURE = "ObjectRefused", "ApiServerError"
_REFUSAL_KINDS = {
    "AlreadyExists": (
        r"exists already, and does not belong to the job",
        "Remove that object, or delete the job and submit it under another name",
    ),
    "WebhookUnreachable": (
        r"fail\w+ calling (admission )?webhook",
        "Ask the administrator of the cluster why this webhook does not answer; the request is tried again",
    ),
    "QuotaExceeded": (
        r"exceeded quota|failed quota|maximum .* usage per",
        "Free some of it (kubectl describe resourcequota, limitrange), or ask for a larger quota; it is tried again",
    ),
    "PodSecurityViolation": (
        r"violates PodSecurity",
        "Have the namespace allow such Pods (its labels pod-security.kubernetes.io/*), or submit it in another one",
    ),
    "AdmissionDenied": (
        r"admission webhook|ValidatingAdmissionPolicy|denied the request",
        "Ask the administrator of the cluster about this policy; the request is tried again",
    ),
    "OperatorForbidden": (
        r"cannot \w+ resource",
        "Apply deploy/base again: the operator's role lacks a permission",
    ),
    "ObjectInvalid": (
        r"is invalid",
        "Correct the named field: delete the job and submit it again",
    ),
    _SERVER_FAILURE: (r"(?!)", "Ask the administrator of the cluster about the API server; the request is tried again"),
    _OTHER_REFUSAL: (r"", "Ask the administrator of the cluster; the request is tried again"),
}
"""Code -> pattern of the API server's message, tried in this order, and hint."""
REFUSAL_CODES = tuple(_REFUSAL_KINDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiRefusal:
    """Object or change that the API server refuses or fails at."""

    node: int | None
    """Index of the node in the job; None: all."""
    message: str
    what: str = "the Pod"
    """Refused object or change."""
    is_failure: bool = False
    """The API server does not forbid it, but fails, or a webhook fails."""


def refusal_reason(job: Job, refusals: list[ApiRefusal]) -> Reason:
    """Return the reason for all refusals, with the text of the first."""
    first = refusals[0]
    code = next(code for code, (pattern, _) in _REFUSAL_KINDS.items() if re.search(pattern, first.message))
    if first.is_failure and code != "WebhookUnreachable":
        code = _SERVER_FAILURE
    nodes = [job.node_name(refusal.node) for refusal in refusals if refusal.node is not None]
    plural = "s" if len(nodes) > 1 else ""
    what = f"{first.what}{plural} of node{plural} {shorten_names(nodes, len(nodes))}" if nodes else first.what
    verb = "fails at" if first.is_failure else "refuses"
    return Reason(code=code, text=f"the API server {verb} {what}: {first.message}", hint=_REFUSAL_KINDS[code][1])


def status_with_refusals(status: Mapping[str, Any], job: Job, refusals: list[ApiRefusal], now: float) -> StatusObject:
    """Return the status with the refusals; an equal one if it has them already."""
    reason = refusal_reason(job, refusals)
    refused = {refusal.node for refusal in refusals}
    nodes = [
        {**node, **_reason_fields(reason)} if index in refused else node for index, node in enumerate(status["nodes"])
    ]
    conditions = [
        {**item, "reason": reason.code, "message": str(reason)} if item["type"] == "Running" else item
        for item in status["conditions"]
    ]
    updated = {**status, **_reason_fields(reason), "nodes": nodes, "conditions": conditions}
    key = f"round{job.record.round}/{reason.code}"
    if key not in {event["key"] for event in status["events"]}:
        event = {"key": key, "time": objects.format_time(now), "kind": reason.code, "text": str(reason)}
        updated["events"] = [*status["events"], event]
    return updated


def _reason_fields(reason: Reason) -> StatusObject:
    return {"reason": reason.code, "message": reason.text, "hint": reason.hint}


def recorded_refusal(status: Mapping[str, Any]) -> Reason | None:
    """Return the refusal in a status, or in the status of a node; None if there is none."""
    if status.get("reason") not in REFUSAL_CODES:
        return None
    return Reason(code=status["reason"], text=status["message"], hint=status["hint"])


def job_with_refusals(job: Job, status: Mapping[str, Any]) -> Job:
    """Return the job to display, with the API server's refusals."""
    refusal = recorded_refusal(status)
    if refusal is None:
        return job
    record = job.record
    reasons = [recorded_refusal(node) for node in status["nodes"]]
    nodes = tuple(
        replace(known, reason=reason) if reason else known for known, reason in zip(record.nodes, reasons, strict=True)
    )
    return replace(job, record=replace(record, reason=refusal, nodes=nodes))


MAX_EVENTS = 100
"""Maximum number of events in the status; the oldest are dropped. An API object has room for 1.5 MB."""

_AT_BARRIER_STATES = (NodeState.READY, NodeState.RUNNING, NodeState.SUCCEEDED)


def status_from_job(
    job: Job, *, before: Mapping[str, Any], generation: int, events: Sequence[JobEvent], now: float
) -> StatusObject:
    """Return the whole status of an admitted job. `generation`: generation of the spec behind this record."""
    saved = records.RECORD_JSON.dump(job.record)
    job, events = _with_platform_options(job), [_event_with_platform_options(job, event) for event in events]
    record = job.record
    status: StatusObject = {
        "observedGeneration": generation,
        "state": str(record.state),
        **_reason_fields(record.reason or Reason(code="", text="all nodes are running", hint="")),
        "ready": _ready_text(job),
        "workers": job.request.num_workers,
        "run": record.run,
        "round": record.round,
        "admittedAt": before.get("admittedAt", objects.format_time(now)),
        "nodes": [_node_status(job, index) for index in range(len(record.nodes))],
        "conditions": _all_conditions(job, before, generation, now),
        "events": _append_events(before, events, now),
        "record": saved,
    }
    if record.ended_s is not None:
        status["endedAt"] = objects.format_time(record.ended_s)
    return status


def refused_status(before: Mapping[str, Any], *, reason: str, text: str, generation: int, now: float) -> StatusObject:
    """Return the status of a job that is not admitted and has no objects."""
    condition = _make_condition(before, "Admitted", False, reason, text, generation, now)
    return {
        "observedGeneration": generation,
        "state": REFUSED_STATE,
        "reason": reason,
        "message": text,
        "hint": "",
        "conditions": [condition],
    }


def _with_platform_options(job: Job) -> Job:
    """Return the job with complete commands in its reasons."""
    name, record = job.request.name, job.record
    nodes = tuple(
        replace(known, reason=reason_with_platform_option(known.reason, name, objects.PLATFORM_NAME))
        for known in record.nodes
    )
    return replace(
        job,
        record=replace(
            record, reason=reason_with_platform_option(record.reason, name, objects.PLATFORM_NAME), nodes=nodes
        ),
    )


def _event_with_platform_options(job: Job, event: JobEvent) -> JobEvent:
    return replace(event, text=with_platform_option(event.text, job.request.name, objects.PLATFORM_NAME))


def _ready_text(job: Job) -> str:
    used = [job.record.nodes[node] for node in job.used_nodes]
    return f"{sum(known.state in _AT_BARRIER_STATES for known in used)}/{len(used)}"


def _node_status(job: Job, index: int) -> StatusObject:
    node_record: NodeRecord = job.record.nodes[index]
    status: StatusObject = {
        "name": job.node_name(index),
        "workers": job.counts[index],
        "state": str(node_record.state),
        "attempt": node_record.attempt,
        "retries": node_record.retries,
    }
    if node_record.reason:
        status |= _reason_fields(node_record.reason)
    if node_record.iterations is not None:
        status["iterations"] = node_record.iterations
    if node_record.last_loss is not None:
        status["lastLoss"] = node_record.last_loss
    return status


def _all_conditions(job: Job, before: Mapping[str, Any], generation: int, now: float) -> list[StatusObject]:
    record = job.record
    reason = record.reason.code if record.reason else "Running"
    text = str(record.reason) if record.reason else "all nodes are running"
    holds = {
        "Admitted": True,
        "Running": record.state is JobState.RUNNING,
        "Suspended": record.state is JobState.SUSPENDED,
        "Succeeded": record.state is JobState.SUCCEEDED,
        "Failed": record.state in (JobState.FAILED, JobState.STOPPED),
    }
    conditions = []
    for kind in CONDITION_TEXTS:
        if kind == "Admitted":
            admitted = f"{job.request.split}, requested by {job.requester}"
            conditions.append(_make_condition(before, kind, True, "Admitted", admitted, generation, now))
        else:
            conditions.append(_make_condition(before, kind, holds[kind], reason, text, generation, now))
    return conditions


def _make_condition(
    before: Mapping[str, Any], kind: str, is_so: bool, reason: str, text: str, generation: int, now: float
) -> StatusObject:
    status = "True" if is_so else "False"
    known = next((item for item in before.get("conditions", ()) if item["type"] == kind), None)
    is_same = known is not None and known["status"] == status
    since = known["lastTransitionTime"] if known is not None and is_same else objects.format_time(now)
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": text,
        "lastTransitionTime": since,
        "observedGeneration": generation,
    }


def _append_events(before: Mapping[str, Any], events: Sequence[JobEvent], now: float) -> list[StatusObject]:
    kept = list(before.get("events", ()))
    keys = {item["key"] for item in kept}
    new = [event for event in events if event.key not in keys]
    added = [
        {"key": event.key, "time": objects.format_time(now), "kind": event.kind, "text": event.text} for event in new
    ]
    return [*kept, *added][-MAX_EVENTS:]
