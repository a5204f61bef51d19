"""Machines that do not answer, as their Pods show it."""

from typing import Any

import pytest

from ringweave.platforms.kubernetes import objects, pod_status

NOW = 1_800_000_000.0
LONG_AGO, JUST_NOW = objects.format_time(NOW - 31), objects.format_time(NOW - 29)


def a_pod(*conditions: dict[str, Any], machine: str | None = "gpu-7", metadata: Any = None, **status: Any) -> dict:
    return {
        "metadata": {"name": "text-1-1", "namespace": "team", **(metadata or {})},
        "spec": {"nodeName": machine} if machine else {},
        "status": {"phase": "Running", "conditions": list(conditions), **status},
    }


def condition(kind: str, status: str, since: str = objects.format_time(NOW - 600)) -> dict[str, Any]:
    return {"type": kind, "status": status, "lastTransitionTime": since}


WELL = (condition("ContainersReady", "True"), condition(objects.BARRIER_CONDITION, "True"))


@pytest.mark.parametrize(
    ("pod", "text"),
    [
        (a_pod(metadata={"deletionTimestamp": LONG_AGO}), f"its Pod was to end by {LONG_AGO}, and has not ended"),
        (a_pod(reason="NodeLost"), "its Pod is NodeLost (kubectl get node gpu-7)"),
        (a_pod(phase="Unknown"), "its Pod is Unknown (kubectl get node gpu-7)"),
        (a_pod(condition("Ready", "Unknown")), "its Pod was marked as not ready, but not by its own kubelet"),
        (a_pod(condition("Ready", "False", LONG_AGO), *WELL), "its Pod was marked as not ready, but not by its own"),
    ],
)
def test_what_shows_that_a_machine_does_not_answer(pod: dict[str, Any], text: str) -> None:
    found = pod_status.unresponsive_machine(pod, NOW)
    assert found is not None
    assert found.text.startswith(text)
    assert found.fix == "kubectl -n team delete pod text-1-1 --force, or kubectl delete node gpu-7"
    assert pod_status.unresponsive_machine(pod, NOW + 600.0) == found, "the same as long as it lasts"


@pytest.mark.parametrize(
    "pod",
    [
        a_pod(condition("Ready", "True"), *WELL),
        a_pod(metadata={"deletionTimestamp": JUST_NOW}),
        a_pod(metadata={"deletionTimestamp": LONG_AGO, "finalizers": ["example.org/keeps-it"]}),
        a_pod(metadata={"deletionTimestamp": LONG_AGO}, machine=None),
        a_pod(condition("Ready", "False", JUST_NOW), *WELL),
        a_pod(condition("Ready", "False", LONG_AGO), WELL[0], condition(objects.BARRIER_CONDITION, "False")),
        a_pod(condition("Ready", "False", LONG_AGO), condition("ContainersReady", "False"), WELL[1]),
        a_pod(condition("Ready", "False", LONG_AGO), WELL[0], condition(objects.BARRIER_CONDITION, "True", JUST_NOW)),
        a_pod({"type": "Ready", "status": "False", "lastTransitionTime": None}, *WELL),
    ],
)
def test_what_does_not(pod: dict[str, Any]) -> None:
    assert pod_status.unresponsive_machine(pod, NOW) is None
