"""A job's record as the status of its TrainingJob: for people, for `kubectl wait`, and to go on from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringweave.jobs.life import records
from ringweave.jobs.life.actions import Event
from ringweave.jobs.life.records import Job, NodeRecord
from ringweave.jobs.life.states import JobState, NodeState
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.resource import times
from ringweave.launch.kubernetes.resource.definition import CONDITIONS, REFUSED
from ringweave.launch.services.placing import placed, placed_reason

MAX_EVENTS = 100
"""Kept in the status; older ones go first. An object of the API has room for 1.5 MB in all."""

Status = dict[str, Any]
_AT_GATE = (NodeState.READY, NodeState.RUNNING, NodeState.SUCCEEDED)


def status_of(job: Job, *, before: Mapping[str, Any], generation: int, events: Sequence[Event], now: float) -> Status:
    """The whole status of an admitted job.

    Args:
        job: With the record that is to be saved.
        before: The status so far.
        generation: Of the spec that this record follows from.
        events: What this record tells that the one before did not.
        now: Seconds since 1970.
    """
    saved = records.dump_record(job.record)
    job, events = _placed(job), [_placed_event(job, event) for event in events]
    record = job.record
    told: Status = {
        "observedGeneration": generation,
        "state": str(record.state),
        "reason": record.reason.code if record.reason else "",
        "message": record.reason.text if record.reason else "all nodes run",
        "helps": record.reason.helps if record.reason else "",
        "ready": _ready(job),
        "workers": job.request.num_workers,
        "run": record.run,
        "round": record.round,
        "admittedAt": before.get("admittedAt", times.show(now)),
        "nodes": [_node(job, index) for index in range(len(record.nodes))],
        "conditions": _conditions(job, before, generation, now),
        "events": _events(before, events, now),
        "record": saved,
    }
    if record.ended_s is not None:
        told["endedAt"] = times.show(record.ended_s)
    return told


def refused(before: Mapping[str, Any], *, reason: str, text: str, generation: int, now: float) -> Status:
    """The status of a job that is not admitted: nothing of it is made."""
    condition = _condition(before, "Admitted", False, reason, text, generation, now)
    return {
        "observedGeneration": generation,
        "state": REFUSED,
        "reason": reason,
        "message": text,
        "helps": "",
        "conditions": [condition],
    }


def _placed(job: Job) -> Job:
    """The job with commands in its reasons as they have to be typed."""
    name, record = job.request.name, job.record
    nodes = tuple(replace(known, reason=placed_reason(known.reason, name, names.PLACE)) for known in record.nodes)
    return replace(job, record=replace(record, reason=placed_reason(record.reason, name, names.PLACE), nodes=nodes))


def _placed_event(job: Job, event: Event) -> Event:
    return replace(event, text=placed(event.text, job.request.name, names.PLACE))


def _ready(job: Job) -> str:
    used = [job.record.nodes[node] for node in job.used_nodes]
    return f"{sum(known.state in _AT_GATE for known in used)}/{len(used)}"


def _node(job: Job, index: int) -> Status:
    known: NodeRecord = job.record.nodes[index]
    told: Status = {
        "name": job.node_name(index),
        "workers": job.counts[index],
        "state": str(known.state),
        "attempt": known.attempt,
        "retries": known.retries,
    }
    if known.reason:
        told |= {"reason": known.reason.code, "message": known.reason.text, "helps": known.reason.helps}
    if known.iterations is not None:
        told["iterations"] = known.iterations
    if known.last_loss is not None:
        told["lastLoss"] = known.last_loss
    return told


def _conditions(job: Job, before: Mapping[str, Any], generation: int, now: float) -> list[Status]:
    record = job.record
    reason = record.reason.code if record.reason else "Running"
    text = str(record.reason) if record.reason else "all nodes run"
    holds = {
        "Admitted": True,
        "Running": record.state is JobState.RUNNING,
        "Suspended": record.state is JobState.SUSPENDED,
        "Succeeded": record.state is JobState.SUCCEEDED,
        "Failed": record.state in (JobState.FAILED, JobState.STOPPED),
    }
    told = []
    for kind in CONDITIONS:
        if kind == "Admitted":
            admitted = f"{job.request.split}, asked for by {job.requester}"
            told.append(_condition(before, kind, True, "Admitted", admitted, generation, now))
        else:
            told.append(_condition(before, kind, holds[kind], reason, text, generation, now))
    return told


def _condition(
    before: Mapping[str, Any], kind: str, is_so: bool, reason: str, text: str, generation: int, now: float
) -> Status:
    status = "True" if is_so else "False"
    known = next((item for item in before.get("conditions", ()) if item["type"] == kind), None)
    is_same = known is not None and known["status"] == status
    since = known["lastTransitionTime"] if known is not None and is_same else times.show(now)
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": text,
        "lastTransitionTime": since,
        "observedGeneration": generation,
    }


def _events(before: Mapping[str, Any], events: Sequence[Event], now: float) -> list[Status]:
    kept = list(before.get("events", ()))
    keys = {item["key"] for item in kept}
    new = [event for event in events if event.key not in keys]
    told = [{"key": event.key, "time": times.show(now), "kind": event.kind, "text": event.text} for event in new]
    return [*kept, *told][-MAX_EVENTS:]
