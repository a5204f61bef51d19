"""What the API server refuses of a job's objects, or fails at (a quota, a webhook), as a reason that people see.

It stands in the status beside the record and not in it: the job still waits for its nodes, and is tried again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ringweave.files.problems import listed
from ringweave.jobs.life.records import Job
from ringweave.jobs.life.states import Reason
from ringweave.launch.kubernetes.resource import times

Status = dict[str, Any]
_OTHER, _FAILURE = "ObjectRefused", "ApiServerFails"
_KINDS = {
    "NameTaken": (
        r"is there already, and belongs to something else",
        "Remove that object, or delete the job and submit it under another name",
    ),
    "WebhookUnreachable": (
        r"fail\w+ calling (admission )?webhook",
        "Ask whoever runs the cluster why this webhook does not answer; it is tried again",
    ),
    "QuotaExceeded": (
        r"exceeded quota|failed quota|maximum .* usage per",
        "Free some of it (kubectl describe resourcequota, limitrange), or ask for a larger quota; it is tried again",
    ),
    "PodSecurityRefused": (
        r"violates PodSecurity",
        "Have the namespace allow such Pods (its labels pod-security.kubernetes.io/*), or submit it in another one",
    ),
    "WebhookRefused": (
        r"admission webhook|ValidatingAdmissionPolicy|denied the request",
        "Ask whoever runs the cluster what this policy wants; it is tried again",
    ),
    "OperatorForbidden": (
        r"cannot \w+ resource",
        "Apply deploy/base again: the operator's role is not what it has to be",
    ),
    "ObjectInvalid": (
        r"is invalid",
        "Correct what is named there: delete the job and submit it anew",
    ),
    _FAILURE: (r"(?!)", "Ask whoever runs the cluster what ails the API server; it is tried again"),
    _OTHER: (r"", "Ask whoever runs the cluster; it is tried again"),
}
"""Code -> what the API server's words match, in this order, and what helps."""
CODES = tuple(_KINDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Something that the API server does not do."""

    node: int | None
    """For which node of the job; None: for all."""
    message: str
    """What the API server says."""
    what: str = "the Pod"
    """What it does not make or do."""
    is_failure: bool = False
    """It does not forbid it: it fails, or somebody whom it asks does."""


def reason_of(job: Job, refusals: list[Refusal]) -> Reason:
    """Of all of them, in the words of the first."""
    first = refusals[0]
    code = next(code for code, (pattern, _) in _KINDS.items() if re.search(pattern, first.message))
    if first.is_failure and code != "WebhookUnreachable":
        code = _FAILURE
    nodes = [job.node_name(refusal.node) for refusal in refusals if refusal.node is not None]
    plural = "s" if len(nodes) > 1 else ""
    what = f"{first.what}{plural} of node{plural} {listed(nodes, len(nodes))}" if nodes else first.what
    verb = "fails at" if first.is_failure else "refuses"
    return Reason(code=code, text=f"the API server {verb} {what}: {first.message}", helps=_KINDS[code][1])


def with_refusals(status: Mapping[str, Any], job: Job, refusals: list[Refusal], now: float) -> Status:
    """The status that says so; the same one where it says so already."""
    why = reason_of(job, refusals)
    told = {"reason": why.code, "message": why.text, "helps": why.helps}
    refused = {refusal.node for refusal in refusals}
    nodes = [{**node, **told} if index in refused else node for index, node in enumerate(status["nodes"])]
    conditions = [
        {**item, "reason": why.code, "message": str(why)} if item["type"] == "Running" else item
        for item in status["conditions"]
    ]
    whole = {**status, **told, "nodes": nodes, "conditions": conditions}
    key = f"round{job.record.round}/{why.code}"
    if key not in {event["key"] for event in status["events"]}:
        event = {"key": key, "time": times.show(now), "kind": why.code, "text": str(why)}
        whole["events"] = [*status["events"], event]
    return whole


def reason_in(told: Mapping[str, Any]) -> Reason | None:
    """The refusal that a status, or the status of a node, tells of; None where it tells of none."""
    if told.get("reason") not in CODES:
        return None
    return Reason(code=told["reason"], text=told["message"], helps=told["helps"])


def seen_in(job: Job, status: Mapping[str, Any]) -> Job:
    """The job as people are to see it: with what the API server refuses."""
    why = reason_in(status)
    if why is None:
        return job
    record = job.record
    reasons = [reason_in(node) for node in status["nodes"]]
    nodes = tuple(
        replace(known, reason=reason) if reason else known for known, reason in zip(record.nodes, reasons, strict=True)
    )
    return replace(job, record=replace(record, reason=why, nodes=nodes))
