"""What the Pods and the ConfigMap of a job say, as `reconcile` sees it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ringweave.jobs.life.observing import Cause, Group, Lack, Observed, Phase, cause_of_exit
from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Opening, Report
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.objects import configs, silence
from ringweave.launch.kubernetes.objects.pods import CONTAINER
from ringweave.launch.kubernetes.resource import times

Pod = Mapping[str, Any]
Key = tuple[int, int]
_WAITS_WELL = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The objects of a job as they were read, all after its record."""

    config: Mapping[str, Any] | None
    """The ConfigMap; None where there is none."""
    pods: Mapping[Key, Pod]
    """(node, attempt) -> Pod."""
    is_torn: bool = False
    """The Secret or the Service beside the ConfigMap is missing, or not the job's."""

    @property
    def opening(self) -> Opening | None:
        """The last opening of the gate."""
        return configs.opening_of(self.config)

    def observed(self, now: float) -> Observed:
        """As `reconcile` sees it."""
        opening = self.opening
        groups = tuple(group_of(pod, now) for _, pod in sorted(self.pods.items()))
        gate = opening.round if opening else 0
        return Observed(config=self.config is not None, torn=self.is_torn, gate=gate, groups=groups)


def by_key(pods: Iterable[Pod]) -> dict[Key, Pod]:
    """The Pods by node and attempt; those without such labels are not ours."""
    return {key: pod for pod in pods if (key := key_of(pod)) is not None}


def key_of(pod: Pod) -> Key | None:
    """Node and attempt of a Pod, by its labels."""
    labels = pod["metadata"].get("labels", {})
    try:
        return int(labels[names.NODE_LABEL]), int(labels[names.ATTEMPT_LABEL])
    except (KeyError, ValueError):
        return None


def round_of(pod: Pod) -> int:
    """The round that it was told to gather for; the first one where somebody wrote anything else there."""
    text = pod["metadata"].get("annotations", {}).get(names.ROUND, "1")
    return int(text) if text.isdecimal() else 1


def report_of(pod: Pod) -> Report | None:
    """What its agent said last: in its condition, or in its last words where the desk has not heard of its end.

    Both say the same of an end but for its time, which the desk tells by the operator's clock.
    """
    conditions = pod.get("status", {}).get("conditions") or ()
    at_desk = _parsed(item.get("message", "") for item in conditions if item["type"] == names.AT_GATE)
    ended = state_of(pod).get("terminated")
    if at_desk is not None and (ended is None or not at_desk.phase.is_alive):
        return at_desk
    return _parsed([ended.get("message", "")] if ended else []) or at_desk


def _parsed(texts: Iterable[str]) -> Report | None:
    for text in texts:
        try:
            return posts.parse_report(text)
        except ValueError:
            continue
    return None


def group_of(pod: Pod, now: float) -> Group:
    """The worker group that a Pod is.

    Args:
        pod: One of the job's.
        now: Seconds since 1970: the API server tells ends in whole seconds, so one of this second counts as now.
    """
    key = key_of(pod)
    assert key is not None
    try:
        told = _ended(pod, now) if _is_over(pod) else _living(pod)
        told = replace(told, silence=silence.silence_of(pod, now))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        told = _not_understood(pod, error)
    is_to_go = "deletionTimestamp" in pod["metadata"]
    was_stopped = names.STOPPED in pod["metadata"].get("annotations", {})
    leaving = is_to_go or (was_stopped and told.phase.is_alive)
    is_held = told.phase.is_alive or leaving
    return replace(told, node=key[0], attempt=key[1], leaving=leaving, silence=told.silence if is_held else None)


def _not_understood(pod: Pod, error: Exception) -> Group:
    """Of a Pod that holds what nobody expects: it is to be replaced, and stands in nobody's way."""
    text = f"its Pod cannot be understood ({type(error).__name__}: {error})"
    return Group(node=0, attempt=0, round=round_of(pod), phase=Phase.FAILED, cause=Cause.PLACE, text=text)


def _is_over(pod: Pod) -> bool:
    """Its workers' container has ended; others in it may run on, and the Pod's phase with them."""
    return "terminated" in state_of(pod) or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _living(pod: Pod) -> Group:
    report, round_ = report_of(pod), round_of(pod)
    if report is None:
        lack, text = _waits_for(pod)
        return Group(node=0, attempt=0, round=round_, phase=Phase.PENDING, text=text, lacks=lack)
    # It may not have heard yet that it is called back. Ended by its own word: the container is about to.
    return report.group(0, 0, called=round_)


def _ended(pod: Pod, now: float) -> Group:
    """Of a Pod in whose container for workers nothing runs any more."""
    report, status = report_of(pod), pod["status"]
    ended = state_of(pod).get("terminated") or {}
    ended_s = _ended_s(ended, now)
    if report is not None and not report.phase.is_alive:
        group = report.group(0, 0)
        return replace(group, ended_s=group.ended_s or ended_s)
    round_ = report.round if report else round_of(pod)
    exit_code = ended.get("exitCode")
    base = Group(node=0, attempt=0, round=round_, phase=Phase.FAILED, exit_code=exit_code, ended_s=ended_s)
    base = replace(base, **_result(report))
    if names.STOPPED in pod["metadata"].get("annotations", {}):
        return replace(base, phase=Phase.STOPPED, text="it was told to stop")
    if status["phase"] == "Succeeded" or (exit_code == 0 and not status.get("reason")):
        return replace(base, phase=Phase.SUCCEEDED)
    cause = cause_of_exit(exit_code, None, complains_of_peer=False) if ended else Cause.PLACE
    if status.get("reason") or ended.get("reason") not in (None, "Error"):
        cause = Cause.PLACE  # evicted, out of memory, lost with its node: not the script's doing
    return replace(base, cause=cause, text=_why_failed(status, ended))


def _result(report: Report | None) -> dict[str, Any]:
    return {} if report is None else {"iterations": report.iterations, "last_loss": report.last_loss}


def _why_failed(status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    words = [status.get("reason"), status.get("message"), ended.get("reason")]
    if ended:
        words.append(f"exit code {ended.get('exitCode')}")
    return ", ".join(str(word) for word in words if word) or "its Pod failed"


def _ended_s(ended: Mapping[str, Any], now: float) -> float | None:
    """When it ended: somewhere within the second that the API server names; None where the kubelet does not know."""
    if not ended.get("finishedAt"):  # null, where it found the container gone
        return None
    second_s = times.parse(ended["finishedAt"])
    return now if second_s <= now < second_s + 1 else second_s + 0.5


def state_of(pod: Pod) -> Mapping[str, Any]:
    """What the kubelet says of the workers' container: `waiting`, `running` or `terminated`, or nothing yet.

    Containers that somebody else puts beside it, such as the proxy of a service mesh, do not count.
    """
    containers = pod.get("status", {}).get("containerStatuses") or ()
    return next((each.get("state", {}) for each in containers if each.get("name") == CONTAINER), {})


def _waits_for(pod: Pod) -> tuple[Lack | None, str]:
    """What it lacks, and why it is not ready yet, as the scheduler or the kubelet says."""
    status = pod.get("status", {})
    before = (each.get("state", {}) for each in status.get("initContainerStatuses") or ())
    for state in (state_of(pod), *before):
        waiting = state.get("waiting", {})
        if waiting.get("reason") and waiting["reason"] not in _WAITS_WELL:
            return Lack.MEANS, _said(waiting)
    for item in status.get("conditions") or ():
        if item["type"] == "PodScheduled" and item["status"] == "False":
            return Lack.ROOM, _said(item)
    return None, "its container is being made" if status.get("phase") else ""


def _said(found: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (found.get("reason", ""), found.get("message", "")) if part)
