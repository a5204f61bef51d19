"""Pods and ConfigMap of a job as the observation that `reconcile` reads. Pure.

A Pod on an unresponsive machine does not end by itself: the API server keeps it until its kubelet, or a person, reports
its end. Until then one of its processes may run, so it is not replaced.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ringweave.jobs.records import (
    EndCause,
    GroupPhase,
    ObservedGroup,
    ObservedJobState,
    PendingCause,
    UnresponsiveMachine,
    cause_of_exit,
)
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import AgentStatus
from ringweave.platforms.agent.job_config import RendezvousResult
from ringweave.platforms.kubernetes import objects
from ringweave.platforms.kubernetes.objects import WORKER_CONTAINER

Pod = Mapping[str, Any]
UNRESPONSIVE_AFTER_S = 30.0
"""A live kubelet ends a Pod after its grace period, and learns of a condition, sooner than this."""


def unresponsive_machine(pod: Pod, now: float) -> UnresponsiveMachine | None:
    """Return the Pod's machine if it shows signs of not responding, else None."""
    machine = pod.get("spec", {}).get("nodeName")
    text = next(_unresponsive_signs(pod, now), None)
    if machine is None or text is None:
        return None
    metadata = pod["metadata"]
    remove = (
        f"kubectl -n {metadata['namespace']} delete pod {metadata['name']} --force, or kubectl delete node {machine}"
    )
    return UnresponsiveMachine(text=f"{text} (kubectl get node {machine})", fix=remove)


def _unresponsive_signs(pod: Pod, now: float) -> Iterator[str]:
    metadata, status = pod["metadata"], pod.get("status", {})
    until = metadata.get("deletionTimestamp")  # with its grace
    if until is not None and not metadata.get("finalizers") and now >= objects.parse_time(until) + UNRESPONSIVE_AFTER_S:
        yield f"its Pod was to end by {until}, and has not ended"
    if status.get("reason") == "NodeLost" or status.get("phase") == "Unknown":
        yield f"its Pod is {status.get('reason') or 'Unknown'}"
    if _was_marked_unready(status, now):
        yield "its Pod was marked as not ready, but not by its own kubelet"


def _was_marked_unready(status: Mapping[str, Any], now: float) -> bool:
    """Return whether the Pod has all it needs and is not ready: the control plane marks Pods of lost machines so."""
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    ready, at_gate = conditions.get("Ready", {}), conditions.get(objects.BARRIER_CONDITION, {})
    if ready.get("status") == "Unknown":
        return True
    others = (conditions.get("ContainersReady", {}), at_gate)
    since, reported = ready.get("lastTransitionTime"), at_gate.get("lastTransitionTime")
    if (
        ready.get("status") != "False"
        or any(each.get("status") != "True" for each in others)
        or not (since and reported)
    ):
        return False
    return objects.parse_time(reported) <= objects.parse_time(since) <= now - UNRESPONSIVE_AFTER_S


AttemptKey = tuple[int, int]
_NORMAL_WAITS = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobObjects:
    """Objects of a job, all read after its record."""

    config: Mapping[str, Any] | None
    """The ConfigMap; None if there is none."""
    pods: Mapping[AttemptKey, Pod]
    """(node, attempt) -> Pod."""
    is_incomplete: bool = False
    """The Secret or the Service beside the ConfigMap is missing, or not the job's."""

    @property
    def rendezvous(self) -> RendezvousResult | None:
        return objects.rendezvous_in(self.config)

    def to_observed_state(self, now: float) -> ObservedJobState:
        """Return the observation for `reconcile`."""
        rendezvous = self.rendezvous
        groups = tuple(observed_group(pod, now) for _, pod in sorted(self.pods.items()))
        gate = rendezvous.round if rendezvous else 0
        return ObservedJobState(
            has_config=self.config is not None,
            is_config_incomplete=self.is_incomplete,
            released_round=gate,
            groups=groups,
        )


def pods_by_attempt(pods: Iterable[Pod]) -> dict[AttemptKey, Pod]:
    """Return the Pods by node and attempt; Pods without these labels are not the job's."""
    return {key: pod for pod in pods if (key := attempt_key(pod)) is not None}


def attempt_key(pod: Pod) -> AttemptKey | None:
    """Return node and attempt of a Pod, by its labels."""
    labels = pod["metadata"].get("labels", {})
    try:
        return int(labels[objects.NODE_LABEL]), int(labels[objects.ATTEMPT_LABEL])
    except (KeyError, ValueError):
        return None


def requested_round(pod: Pod) -> int:
    """Return the round that the Pod has to join; the first if the annotation is invalid."""
    text = pod["metadata"].get("annotations", {}).get(objects.ROUND_ANNOTATION, "1")
    return int(text) if text.isdecimal() else 1


def agent_status(pod: Pod) -> AgentStatus | None:
    """Return the last status of the Pod's agent: from its condition, or from its termination message.

    Both describe an end equally, but for its time: in the condition it is by the operator's clock.
    """
    conditions = pod.get("status", {}).get("conditions") or ()
    in_condition = _parse_first_status(
        item.get("message", "") for item in conditions if item["type"] == objects.BARRIER_CONDITION
    )
    ended = container_state(pod).get("terminated")
    if in_condition is not None and (ended is None or not in_condition.phase.is_alive):
        return in_condition
    return _parse_first_status([ended.get("message", "")] if ended else []) or in_condition


def _parse_first_status(texts: Iterable[str]) -> AgentStatus | None:
    for text in texts:
        try:
            return agent_channel.STATUS_JSON.parse(text)
        except ValueError:
            continue
    return None


def observed_group(pod: Pod, now: float) -> ObservedGroup:
    """Return the worker group of a Pod.

    `now`: seconds since 1970. The API server has ends in whole seconds, so an end in this second counts as now.
    """
    key = attempt_key(pod)
    assert key is not None
    try:
        group = _ended_group(pod, now) if _has_container_ended(pod) else _live_group(pod)
        group = replace(group, unresponsive=unresponsive_machine(pod, now))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        group = _invalid_pod_group(pod, error)
    is_to_go = "deletionTimestamp" in pod["metadata"]
    was_stopped = objects.STOPPED_ANNOTATION in pod["metadata"].get("annotations", {})
    is_terminating = is_to_go or (was_stopped and group.phase.is_alive)
    is_held = group.phase.is_alive or is_terminating
    return replace(
        group,
        node=key[0],
        attempt=key[1],
        is_terminating=is_terminating,
        unresponsive=group.unresponsive if is_held else None,
    )


def _invalid_pod_group(pod: Pod, error: Exception) -> ObservedGroup:
    """Return a failed group for an invalid Pod, so that it is replaced and blocks nothing."""
    text = f"its Pod has an unreadable status ({type(error).__name__}: {error})"
    return ObservedGroup(
        node=0, attempt=0, round=requested_round(pod), phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text=text
    )


def _has_container_ended(pod: Pod) -> bool:
    """Return whether the worker container has ended; other containers, and so the Pod, may run on."""
    return "terminated" in container_state(pod) or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _live_group(pod: Pod) -> ObservedGroup:
    status, round_ = agent_status(pod), requested_round(pod)
    if status is None:
        pending_cause, text = _pending_cause(pod)
        return ObservedGroup(
            node=0, attempt=0, round=round_, phase=GroupPhase.PENDING, text=text, pending_cause=pending_cause
        )
    # The agent may not know yet of its restart. After a final status the container is about to end.
    return status.to_group(0, 0, requested_round=round_)


def _ended_group(pod: Pod, now: float) -> ObservedGroup:
    agent_report, status = agent_status(pod), pod["status"]
    ended = container_state(pod).get("terminated") or {}
    ended_s = _end_time_s(ended, now)
    if agent_report is not None and not agent_report.phase.is_alive:
        group = agent_report.to_group(0, 0)
        return replace(group, ended_s=group.ended_s or ended_s)
    round_ = agent_report.round if agent_report else requested_round(pod)
    exit_code = ended.get("exitCode")
    base = ObservedGroup(node=0, attempt=0, round=round_, phase=GroupPhase.FAILED, exit_code=exit_code, ended_s=ended_s)
    base = replace(base, **_progress_fields(agent_report))
    if objects.STOPPED_ANNOTATION in pod["metadata"].get("annotations", {}):
        return replace(base, phase=GroupPhase.STOPPED, text="it was told to stop")
    if status["phase"] == "Succeeded" or (exit_code == 0 and not status.get("reason")):
        return replace(base, phase=GroupPhase.SUCCEEDED)
    cause = cause_of_exit(exit_code, None, blames_peer=False) if ended else EndCause.PLATFORM
    if status.get("reason") or ended.get("reason") not in (None, "Error"):
        cause = EndCause.PLATFORM  # evicted, out of memory, lost with its node: no fault of the script
    return replace(base, cause=cause, text=_failure_text(status, ended))


def _progress_fields(report: AgentStatus | None) -> dict[str, Any]:
    return {} if report is None else {"iterations": report.iterations, "last_loss": report.last_loss}


def _failure_text(status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    words = [status.get("reason"), status.get("message"), ended.get("reason")]
    if ended:
        words.append(f"exit code {ended.get('exitCode')}")
    return ", ".join(str(word) for word in words if word) or "its Pod failed"


def _end_time_s(ended: Mapping[str, Any], now: float) -> float | None:
    """Return the end time, somewhere in the second that the API server names; None if the kubelet does not know it."""
    if not ended.get("finishedAt"):  # null if the kubelet found the container gone
        return None
    second_s = objects.parse_time(ended["finishedAt"])
    return now if second_s <= now < second_s + 1 else second_s + 0.5


def container_state(pod: Pod) -> Mapping[str, Any]:
    """Return the kubelet's state of the worker container: `waiting`, `running` or `terminated`; empty at first.

    Injected containers, such as the proxy of a service mesh, do not count.
    """
    containers = pod.get("status", {}).get("containerStatuses") or ()
    return next((each.get("state", {}) for each in containers if each.get("name") == WORKER_CONTAINER), {})


def _pending_cause(pod: Pod) -> tuple[PendingCause | None, str]:
    """Return the obstacle of a pending Pod and its text, from the scheduler or the kubelet."""
    status = pod.get("status", {})
    before = (each.get("state", {}) for each in status.get("initContainerStatuses") or ())
    for state in (container_state(pod), *before):
        waiting = state.get("waiting", {})
        if waiting.get("reason") and waiting["reason"] not in _NORMAL_WAITS:
            return PendingCause.PREREQUISITE, _reason_and_message(waiting)
    for item in status.get("conditions") or ():
        if item["type"] == "PodScheduled" and item["status"] == "False":
            return PendingCause.CAPACITY, _reason_and_message(item)
    return None, "its container is being created" if status.get("phase") else ""


def _reason_and_message(found: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (found.get("reason", ""), found.get("message", "")) if part)
