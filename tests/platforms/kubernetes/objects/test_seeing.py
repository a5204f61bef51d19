"""Pods as worker groups: what kubelet and agent say of them, and what is made of silence."""

from typing import Any

import pytest
from ruamel.yaml import YAML

from ringweave.jobs.records import EndCause, GroupPhase, PendingCause
from ringweave.platforms.agent.agent_channel import STATUS_JSON, AgentStatus
from ringweave.platforms.kubernetes import objects, pod_status
from ringweave.platforms.kubernetes.objects import WORKER_CONTAINER

NOW = 1_800_000_000.0


def a_pod(
    phase: str = "Running",
    *,
    report: AgentStatus | None = None,
    ended: dict[str, Any] | None = None,
    round_: int = 1,
    status: dict[str, Any] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    conditions = (
        [{"type": objects.BARRIER_CONDITION, "status": "True", "message": STATUS_JSON.dump(report)}] if report else []
    )
    state = {"terminated": ended} if ended is not None else {"running": {}}
    annotations = {objects.ROUND_ANNOTATION: str(round_), **metadata.pop("annotations", {})}
    labels = {objects.NODE_LABEL: "1", objects.ATTEMPT_LABEL: "2"}
    return {
        "metadata": {"name": "text-1-2", "labels": labels, "annotations": annotations, **metadata},
        "status": {
            "phase": phase,
            "conditions": conditions,
            "containerStatuses": [{"name": WORKER_CONTAINER, "state": state}],
            **(status or {}),
        },
    }


def workers(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of the workers' container, which is alone in its Pod."""
    return [{"name": WORKER_CONTAINER, "state": state}]


def said(phase: GroupPhase, round_: int = 1, **more: Any) -> AgentStatus:
    return AgentStatus(round=round_, phase=phase, pid=1, **more)


@pytest.mark.parametrize("phase", [GroupPhase.READY, GroupPhase.RUNNING, GroupPhase.INTERRUPTED])
def test_what_the_agent_says_of_its_round_counts(phase: GroupPhase) -> None:
    group = pod_status.observed_group(a_pod(report=said(phase, 2), round_=2), NOW)
    assert (group.node, group.attempt, group.round, group.phase) == (1, 2, 2, phase)


def test_what_it_said_of_an_earlier_round_is_all_that_is_known_until_it_has_heard_that_it_is_called_back() -> None:
    group = pod_status.observed_group(a_pod(report=said(GroupPhase.RUNNING, 1), round_=2), NOW)
    assert (group.round, group.requested_round, group.phase) == (1, 2, GroupPhase.RUNNING)
    assert pod_status.observed_group(a_pod(report=said(GroupPhase.READY, 1), round_=2), NOW).round == 1, (
        "it is not at the new gate"
    )


def test_one_that_finished_an_earlier_round_finished_that() -> None:
    ended = {"exitCode": 0, "message": STATUS_JSON.dump(said(GroupPhase.SUCCEEDED, 1, ended_s=NOW - 3.25))}
    group = pod_status.observed_group(a_pod("Succeeded", ended=ended, round_=2), NOW)
    assert (group.round, group.phase, group.ended_s) == (1, GroupPhase.SUCCEEDED, NOW - 3.25)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"phase": "Pending", "containerStatuses": [], "conditions": []}, "its container is being created"),
        (
            {
                "containerStatuses": [],
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
                ],
            },
            "Unschedulable: 0/3 nodes",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": WORKER_CONTAINER,
                        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such"}},
                    }
                ]
            },
            "ImagePullBackOff: no such",
        ),
    ],
)
def test_why_it_is_pending(status: dict[str, Any], text: str) -> None:
    group = pod_status.observed_group(a_pod(status=status), NOW)
    assert (group.phase, group.text) == (GroupPhase.PENDING, text)


@pytest.mark.parametrize(
    ("waiting", "lack"),
    [
        ("ImagePullBackOff", PendingCause.PREREQUISITE),
        ("CreateContainerConfigError", PendingCause.PREREQUISITE),
        ("ContainerCreating", None),
    ],
)
def test_what_does_not_come_by_itself_is_told_apart_from_a_place(waiting: str, lack: PendingCause | None) -> None:
    status = {"containerStatuses": workers({"waiting": {"reason": waiting}})}
    assert pod_status.observed_group(a_pod(status=status), NOW).pending_cause is lack
    unplaced = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}
    assert pod_status.observed_group(a_pod(status=status | unplaced), NOW).pending_cause is (
        lack or PendingCause.CAPACITY
    )


@pytest.mark.parametrize(
    ("ended", "status", "cause"),
    [
        ({"exitCode": 1, "reason": "Error"}, {}, EndCause.PROGRAM),
        ({"exitCode": 137, "reason": "Error"}, {}, EndCause.PLATFORM),
        ({"exitCode": 1, "reason": "OOMKilled"}, {}, EndCause.PLATFORM),
        ({"exitCode": 1, "reason": "Error"}, {"reason": "Evicted"}, EndCause.PLATFORM),
    ],
)
def test_a_pod_that_failed_without_a_word(ended: dict[str, Any], status: dict[str, Any], cause: EndCause) -> None:
    group = pod_status.observed_group(a_pod("Failed", ended=ended, status=status), NOW)
    assert (group.phase, group.cause) == (GroupPhase.FAILED, cause)
    assert f"exit code {ended['exitCode']}" in group.text


def test_a_pod_that_is_lost_with_its_node() -> None:
    status = {"containerStatuses": [], "reason": "NodeLost", "message": "gone"}
    group = pod_status.observed_group(a_pod("Failed", status=status), NOW)
    assert (group.phase, group.cause, group.text) == (GroupPhase.FAILED, EndCause.PLATFORM, "NodeLost, gone")


def test_one_that_was_told_to_stop_is_leaving_until_it_has_ended() -> None:
    stopped = {objects.STOPPED_ANNOTATION: "true"}
    assert pod_status.observed_group(a_pod(report=said(GroupPhase.RUNNING), annotations=stopped), NOW).is_terminating
    ended = {"exitCode": 143, "reason": "Error"}
    group = pod_status.observed_group(a_pod("Failed", ended=ended, annotations=stopped), NOW)
    assert (group.phase, group.is_terminating) == (GroupPhase.STOPPED, False)
    assert pod_status.observed_group(
        a_pod("Failed", ended=ended, deletionTimestamp="2026-11-21T13:00:00Z"), NOW
    ).is_terminating


@pytest.mark.parametrize(
    ("finished", "expected"), [("2027-01-15T08:00:00Z", NOW + 0.4), ("2027-01-15T07:59:58Z", NOW - 1.5)]
)
def test_an_end_is_told_in_whole_seconds(finished: str, expected: float) -> None:
    pod = a_pod("Failed", ended={"exitCode": 1, "finishedAt": finished})
    assert pod_status.observed_group(pod, NOW + 0.4).ended_s == expected


CONTAINER_STATUS_UNKNOWN = """
phase: Failed
conditions:
- {type: Ready, status: "False", lastProbeTime: null, lastTransitionTime: "2027-01-15T07:59:58Z"}
containerStatuses:
- name: workers
  image: example/train:1
  imageID: ""
  lastState: {}
  ready: false
  restartCount: 0
  started: false
  state:
    terminated:
      exitCode: 137
      finishedAt: null
      message: The container could not be located when the pod was terminated
      reason: ContainerStatusUnknown
      startedAt: null
"""
"""As a kubelet writes it that found no container after its machine was started anew."""


def test_a_container_of_which_the_kubelet_knows_nothing_any_more_was_lost_by_its_place() -> None:
    status = YAML(typ="safe", pure=True).load(CONTAINER_STATUS_UNKNOWN)
    group = pod_status.observed_group(a_pod(status=status), NOW)
    assert (group.phase, group.cause, group.ended_s) == (GroupPhase.FAILED, EndCause.PLATFORM, None)
    assert group.text == "ContainerStatusUnknown, exit code 137"


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"conditions": ["a text"]}, "its Pod has an unreadable status (TypeError: "),
        (
            {"phase": "Failed", "containerStatuses": [{"name": "workers", "state": {"terminated": 1}}]},
            "(AttributeError: ",
        ),
    ],
)
def test_a_pod_that_nobody_understands_is_the_places_failure_and_no_error(odd: dict[str, Any], text: str) -> None:
    group = pod_status.observed_group(a_pod(status=odd, deletionTimestamp="2027-01-15T07:59:58Z"), NOW)
    assert (group.node, group.attempt, group.phase, group.cause) == (1, 2, GroupPhase.FAILED, EndCause.PLATFORM)
    assert text in group.text
    assert group.is_terminating


def test_a_round_that_is_no_number_is_the_first_so_that_it_is_written_anew() -> None:
    assert pod_status.requested_round(a_pod(annotations={objects.ROUND_ANNOTATION: "three"})) == 1


PROXY = {"name": "istio-proxy", "state": {"running": {"startedAt": "2027-01-15T07:00:00Z"}}}


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ({"terminated": {"exitCode": 0, "reason": "Completed"}}, GroupPhase.SUCCEEDED),
        ({"terminated": {"exitCode": 3, "reason": "Error"}}, GroupPhase.FAILED),
        ({"waiting": {"reason": "ImagePullBackOff"}}, GroupPhase.PENDING),
    ],
)
def test_what_others_put_beside_the_workers_does_not_count(state: dict[str, Any], phase: GroupPhase) -> None:
    pod = a_pod(status={"containerStatuses": [PROXY, {"name": WORKER_CONTAINER, "state": state}]})
    group = pod_status.observed_group(pod, NOW)
    assert group.phase is phase
    assert group.exit_code == state.get("terminated", {}).get("exitCode")
    waiting = {"name": "istio-proxy", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    running = a_pod(report=said(GroupPhase.RUNNING), status={"containerStatuses": [waiting]})
    assert pod_status.observed_group(running, NOW).phase is GroupPhase.RUNNING


def test_what_has_to_run_before_the_workers_may_lack_something() -> None:
    before = [{"name": "istio-init", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}]
    status = {"containerStatuses": [], "initContainerStatuses": before}
    group = pod_status.observed_group(a_pod("Pending", status=status), NOW)
    assert (group.pending_cause, group.text) == (PendingCause.PREREQUISITE, "ErrImagePull: no such")


def test_pods_without_our_labels_are_not_ours() -> None:
    pod = a_pod()
    del pod["metadata"]["labels"][objects.NODE_LABEL]
    assert pod_status.pods_by_attempt([pod, a_pod()]).keys() == {(1, 2)}


def test_an_end_that_the_desk_heard_of_counts_from_then_whatever_the_clock_of_its_node_says() -> None:
    ended = {"exitCode": 0, "message": STATUS_JSON.dump(said(GroupPhase.SUCCEEDED, ended_s=NOW - 3600.0))}
    heard = said(GroupPhase.SUCCEEDED, ended_s=NOW - 2.0)
    assert pod_status.observed_group(a_pod("Succeeded", report=heard, ended=ended), NOW).ended_s == NOW - 2.0
    unheard = said(GroupPhase.RUNNING)
    assert pod_status.observed_group(a_pod("Succeeded", report=unheard, ended=ended), NOW).ended_s == NOW - 3600.0
