"""Pods of machines that do not answer: what the API server shows of that, and what helps. Pure.

Nothing ends such a Pod by itself: the API server keeps it until its kubelet says that it has ended, or somebody says so
in its place. Till then something of it may run, so nobody replaces it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ringweave.jobs.life.observing import Silence
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.resource import times

Pod = Mapping[str, Any]
LATE_S = 30.0
"""A kubelet that lives ends a Pod when its time is over, and hears of a condition, sooner than this."""


def silence_of(pod: Pod, now: float) -> Silence | None:
    """That the machine of a Pod does not answer, and how that is seen; None where it may."""
    machine = pod.get("spec", {}).get("nodeName")
    text = next(_signs(pod, now), None)
    if machine is None or text is None:
        return None
    metadata = pod["metadata"]
    remove = (
        f"kubectl -n {metadata['namespace']} delete pod {metadata['name']} --force, or kubectl delete node {machine}"
    )
    return Silence(text=f"{text} (kubectl get node {machine})", mend=remove)


def _signs(pod: Pod, now: float) -> Iterator[str]:
    metadata, status = pod["metadata"], pod.get("status", {})
    until = metadata.get("deletionTimestamp")  # with its grace
    if until is not None and not metadata.get("finalizers") and now >= times.parse(until) + LATE_S:
        yield f"its Pod was to be gone by {until}, and nobody has ended it"
    if status.get("reason") == "NodeLost" or status.get("phase") == "Unknown":
        yield f"its Pod is {status.get('reason') or 'Unknown'}"
    if _is_unready_by_another(status, now):
        yield "its Pod was marked as not ready, and not by its own kubelet"


def _is_unready_by_another(status: Mapping[str, Any], now: float) -> bool:
    """All that makes it ready is there, and still it is not: so the control plane marks the Pods of a lost machine."""
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    ready, at_gate = conditions.get("Ready", {}), conditions.get(names.AT_GATE, {})
    if ready.get("status") == "Unknown":
        return True
    others = (conditions.get("ContainersReady", {}), at_gate)
    since, told = ready.get("lastTransitionTime"), at_gate.get("lastTransitionTime")
    if ready.get("status") != "False" or any(each.get("status") != "True" for each in others) or not (since and told):
        return False
    return times.parse(told) <= times.parse(since) <= now - LATE_S
