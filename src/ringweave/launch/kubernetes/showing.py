"""A TrainingJob as the commands show it, also one that the operator has not admitted yet, or has refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringweave.errors import JobError
from ringweave.jobs.life import records
from ringweave.jobs.life.advancing import as_asked
from ringweave.jobs.life.records import Job
from ringweave.jobs.life.states import JobState, Reason
from ringweave.jobs.requests.request import NodeRequest, Request
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.resource import reading, refusals, times
from ringweave.launch.kubernetes.resource.definition import REFUSED
from ringweave.launch.services import views
from ringweave.launch.services.views import EventView, JobView

Resource = Mapping[str, Any]


def view(resource: Resource, now: float, *, with_events: bool = False) -> JobView:
    """What users see of it."""
    events = resource.get("status", {}).get("events", ()) if with_events else ()
    shown = [EventView(time_s=times.parse(each["time"]), kind=each["kind"], text=each["text"]) for each in events]
    metadata = resource["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    files = f"kubectl -n {namespace} get pods,configmaps -l ringweave.dev/job={name}"
    return views.view(as_asked(job_of(resource, now), now), place=names.PLACE, events=shown, files=files)


def job_of(resource: Resource, now: float) -> Job:
    """The job; of one without a record, one that waits for the operator, or that it refused.

    One that breaks a rule which the API server did not know when it was stored is shown as far as it can be.
    """
    try:
        known = reading.job_of(resource)
        request = reading.request_of(resource)
    except JobError as error:
        return _invalid(resource, error, now)
    if known is not None:
        return refusals.seen_in(known, resource["status"])
    counts = request.split.counts or (0,) * len(request.nodes)
    status = resource.get("status", {})
    job = records.new_job(request, requester=reading.requester_of(resource), counts=counts, now=_made_s(resource, now))
    if status.get("state") == REFUSED:
        why = Reason(code=status["reason"], text=status["message"], helps="Mend that; the operator looks again")
        return replace(job, record=replace(job.record, state=JobState.FAILED, reason=why))
    leads = resource["spec"].get("managedBy") or "the operator"
    why = Reason(
        code="NotAdmitted",
        text=f"waits for {leads} to admit it",
        helps="See whether it runs: kubectl -n ringweave-system get pods",
    )
    return replace(job, record=replace(job.record, reason=why))


def _invalid(resource: Resource, error: JobError, now: float) -> Job:
    spec, name = resource["spec"], resource["metadata"]["name"]
    device, total = ("cuda", spec["gpus"]) if "gpus" in spec else ("cpu", spec.get("cpuWorkers", 1))
    request = Request(
        name=name, num_workers=total, script="-", device=device, nodes=(NodeRequest(name="n0", capacity=total),)
    )
    job = records.new_job(request, requester=reading.requester_of(resource), counts=(0,), now=_made_s(resource, now))
    why = Reason(
        code="Invalid", text=str(error), helps=f"ringweave delete {name} --on {names.PLACE}, and submit it anew"
    )
    return replace(job, record=replace(job.record, state=JobState.FAILED, reason=why))


def _made_s(resource: Resource, now: float) -> float:
    made = resource["metadata"].get("creationTimestamp")
    return now if made is None else times.parse(made)
