"""Jobs from submit to their end, led by `ringweave operator` as a process of its own."""

import asyncio
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ruamel.yaml import YAML

from ringweave.jobs.failures import EVICTED_HANG
from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.platforms.agent.agent_channel import AgentStatus
from ringweave.platforms.kubernetes import api_client, objects, pod_status
from ringweave.platforms.kubernetes.api_client import ApiError
from tests.fakes.kubernetes.operator_process import OperatorProcess
from tests.kube.conftest import Kube

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def end_all(kube: Kube, name: str) -> None:
    for pod in kube.pods(name).values():
        kube.run(kube.kubelet.succeed_pod(pod))


def end_all_but(kube: Kube, name: str, node: int) -> None:
    for (each, _), pod in kube.pods(name).items():
        if each != node:
            kube.run(kube.kubelet.succeed_pod(pod))


def status(kube: Kube, name: str) -> dict:
    job = kube.job(name)
    assert job is not None
    return job["status"]


def is_gone(kube: Kube, name: str):
    return lambda: kube.left(name) == []


def test_a_job_runs_and_is_deleted(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("runs", nodes=[{"name": "n0", "capacity": 10, "deletionPolicy": "keep"}, {"name": "n1", "capacity": 5}])
    kube.play("runs", lambda: len(kube.pods("runs")) == 2, steps=False)
    config = kube.run(kube.client.get(api_client.CONFIG_MAPS, kube.namespace, objects.config_name("runs")))
    assert [(node.name, node.workers) for node in objects.parse_config_data(config["data"]).nodes] == [
        ("n0", 10),
        ("n1", 5),
    ]
    assert config["data"][objects.SCRIPT_KEY] == "print('hello')\n"
    assert objects.RENDEZVOUS_KEY not in config["data"]
    service = kube.run(kube.client.get(api_client.SERVICES, kube.namespace, "runs"))
    assert service["spec"]["clusterIP"] == "None"
    pod = kube.pods("runs")[0, 1]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "10"}

    kube.play("runs", lambda: status(kube, "runs").get("ready") == "1/2", hold=frozenset({1}))
    told = status(kube, "runs")
    assert told["state"] == "Pending"
    assert "node n1" in told["message"]
    config = kube.run(kube.client.get(api_client.CONFIG_MAPS, kube.namespace, objects.config_name("runs")))
    assert objects.RENDEZVOUS_KEY not in config["data"], "the barrier released before all were ready"

    kube.play("runs", kube.in_state("runs", "Running"))
    told = status(kube, "runs")
    conditions = {item["type"]: item["status"] for item in told["conditions"]}
    assert conditions == {
        "Admitted": "True",
        "Running": "True",
        "Suspended": "False",
        "Succeeded": "False",
        "Failed": "False",
    }
    assert told["observedGeneration"] == 1
    opening = objects.rendezvous_in(
        kube.run(kube.client.get(api_client.CONFIG_MAPS, kube.namespace, objects.config_name("runs")))
    )
    assert opening is not None
    assert (opening.round, opening.master_address.host, opening.master_address.port) == (1, "10.0.1.0", 29500)
    assert set(opening.addresses) == {"n0", "n1"}

    end_all(kube, "runs")
    kube.play("runs", lambda: kube.in_state("runs", "Succeeded")() and set(kube.pods("runs")) == {(0, 1)})
    nodes = status(kube, "runs")["nodes"]
    assert [(node["iterations"], node["lastLoss"]) for node in nodes] == [(100, 1.5), (100, 1.5)]
    posted = kube.run(kube.client.list(api_client.EVENTS, kube.namespace))  # what kubectl describe shows
    told = {event["reason"] for event in posted if event["involvedObject"]["name"] == "runs"}
    assert {"AttemptStarted", "Starting", "Running", "Succeeded"} <= told
    kube.remove("runs")
    kube.play("runs", is_gone(kube, "runs"))


def test_a_failed_node_alone_is_replaced_and_all_gather_again(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("fails")
    kube.play("fails", kube.in_state("fails", "Running"))
    before = {key: pod["metadata"]["uid"] for key, pod in kube.pods("fails").items()}
    kube.run(kube.kubelet.fail_pod(kube.pods("fails")[1, 1], EndCause.PLATFORM, text="killed by SIGKILL"))
    kube.play("fails", lambda: (1, 2) in kube.pods("fails"))
    kube.play("fails", kube.in_state("fails", "Running"))
    pods = kube.pods("fails")
    assert set(pods) == {(0, 1), (1, 2)}
    assert pods[0, 1]["metadata"]["uid"] == before[0, 1]
    assert pod_status.requested_round(pods[0, 1]) == pod_status.requested_round(pods[1, 2]) == 2
    assert [node["retries"] for node in status(kube, "fails")["nodes"]] == [0, 1]
    kube.run(kube.kubelet.fail_pod(pods[0, 1], EndCause.PROGRAM, exit_code=1, text="raised ValueError: no"))
    kube.play("fails", kube.in_state("fails", "Failed"))
    told = status(kube, "fails")
    assert (told["reason"], told["nodes"][0]["retries"]) == ("NonZeroExitCode", 0)
    assert "ValueError" in told["message"]
    assert kube.kubelet.broken_rules == []
    kube.remove("fails")
    kube.play("fails", is_gone(kube, "fails"))


def test_of_an_elastic_job_a_failed_node_alone_is_replaced_and_the_others_are_not_called(
    kube: Kube, operator: OperatorProcess
) -> None:
    keep = {"capacity": 5, "deletionPolicy": "keep", "maxRetries": 1}
    nodes = [{"name": f"n{index}", **keep} for index in range(3)]
    kube.submit("elastic", nodes=nodes, elastic={"min": 5})
    kube.play("elastic", kube.in_state("elastic", "Running"))
    opening = objects.rendezvous_in(
        kube.run(kube.client.get(api_client.CONFIG_MAPS, kube.namespace, objects.config_name("elastic")))
    )
    assert opening is not None
    hosts = [objects.pod_dns_name("elastic", node, kube.namespace) for node in (0, 1)]
    assert [meeting.host for meeting in opening.coordinators] == hosts

    kube.run(kube.kubelet.fail_pod(kube.pods("elastic")[0, 1], EndCause.PLATFORM, text="killed by SIGKILL"))
    kube.play("elastic", lambda: (0, 2) in kube.pods("elastic"), steps=False)
    told = status(kube, "elastic")
    running = next(item for item in told["conditions"] if item["type"] == "Running")
    assert (told["state"], told["reason"], running["status"], running["reason"]) == (
        "Running",
        "Degraded",
        "True",
        "Degraded",
    )
    assert "node n0 failed (killed by SIGKILL), retry 1 of 1; the other nodes continue" in running["message"]
    kube.play("elastic", lambda: status(kube, "elastic")["reason"] == "")
    told = status(kube, "elastic")
    assert (told["round"], [node["retries"] for node in told["nodes"]]) == (1, [1, 0, 0])
    assert set(kube.pods("elastic")) == {(0, 2), (1, 1), (2, 1)}
    assert {pod_status.requested_round(pod) for pod in kube.pods("elastic").values()} == {1}

    kube.change("elastic", suspend=True)
    kube.play("elastic", lambda: kube.in_state("elastic", "Suspended")() and kube.pods("elastic") == {})
    kube.change("elastic", suspend=False)
    kube.play("elastic", kube.in_state("elastic", "Running"))
    assert [node["retries"] for node in status(kube, "elastic")["nodes"]] == [1, 0, 0]

    kube.run(kube.kubelet.fail_pod(kube.pods("elastic")[0, 3], EndCause.PLATFORM, text="killed again"))
    kube.play("elastic", lambda: status(kube, "elastic")["reason"] == "DegradedWithoutRetries")
    end_all_but(kube, "elastic", 0)
    kube.play("elastic", kube.in_state("elastic", "Succeeded"))
    assert set(kube.pods("elastic")) == {(0, 3), (1, 2), (2, 2)}, "all are kept, as their policy says"
    assert kube.kubelet.broken_rules == []
    kube.remove("elastic")
    kube.play("elastic", is_gone(kube, "elastic"))


def test_an_elastic_job_ends_without_a_node_that_hangs(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("hangs", nodes=[{"name": f"n{index}", "capacity": 5} for index in range(3)], elastic={"min": 5})
    kube.play("hangs", kube.in_state("hangs", "Running"))
    pods = kube.pods("hangs")
    for node in range(3):
        knows = {"members": (f"{5 * node}.0",), "generation": (1, 2), "evicted": ("10.0",)}
        kube.run(
            kube.kubelet.set_running(pods[node, 1], AgentStatus(round=1, phase=GroupPhase.RUNNING, pid=1, **knows))
        )
    for node in range(2):
        knows = {"members": (f"{5 * node}.0",), "generation": (1, 2), "evicted": ("10.0",), "ended_s": time.time()}
        kube.run(
            kube.kubelet.end_container(
                pods[node, 1], AgentStatus(round=1, phase=GroupPhase.SUCCEEDED, pid=1, exit_code=0, **knows)
            )
        )
    kube.play("hangs", lambda: suspected_since_s(kube, "hangs", 2) is not None, steps=False)
    assert not kube.in_state("hangs", "Succeeded")()
    let_time_pass(kube, "hangs", 2, EVICTED_HANG.limit_s)
    kube.play("hangs", kube.in_state("hangs", "Succeeded"), steps=False)
    told = status(kube, "hangs")
    assert told["reason"] == "CompletedWithoutNodes"
    assert f"all nodes but node n2 finished their iterations: {EVICTED_HANG.text}" in told["message"]
    assert [(node["state"], node["retries"]) for node in told["nodes"]] == [("Succeeded", 0)] * 2 + [("Stopped", 0)]
    kube.remove("hangs")
    kube.play("hangs", is_gone(kube, "hangs"))


def suspected_since_s(kube: Kube, name: str, node: int) -> float | None:
    return json.loads(status(kube, name)["record"])["nodes"][node].get("suspected_since_s")


def let_time_pass(kube: Kube, name: str, node: int, passed_s: float) -> None:
    """Have a node suspected for longer than it is; tests/jobs/life/test_hanging.py counts the time on its own clock."""
    record = json.loads(status(kube, name)["record"])
    record["nodes"][node]["suspected_since_s"] -= passed_s
    body = {"status": {"record": json.dumps(record)}}
    kube.run(kube.client.patch(api_client.TRAINING_JOBS, kube.namespace, name, body, subresource="status"))


def test_a_pod_that_vanishes_is_replaced(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("loses")
    kube.play("loses", kube.in_state("loses", "Running"))
    kube.run(kube.client.delete(api_client.PODS, kube.namespace, objects.pod_name("loses", 0, 1)))
    kube.play("loses", lambda: (0, 2) in kube.pods("loses"))
    kube.play("loses", kube.in_state("loses", "Running"))
    assert status(kube, "loses")["nodes"][0]["retries"] == 1
    kube.remove("loses")
    kube.play("loses", is_gone(kube, "loses"))


def test_suspended_and_resumed(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("waits", suspend=True)
    kube.play("waits", kube.in_state("waits", "Suspended"))
    assert kube.left("waits") == [f"{objects.CRD_KIND}/waits"]
    kube.change("waits", suspend=False)
    kube.play("waits", kube.in_state("waits", "Running"))
    kube.change("waits", suspend=True)
    kube.play("waits", lambda: kube.in_state("waits", "Suspended")() and kube.pods("waits") == {})
    told = status(kube, "waits")
    assert told["observedGeneration"] == 3
    kube.change("waits", suspend=False)
    kube.play("waits", kube.in_state("waits", "Running"))
    assert [node["retries"] for node in status(kube, "waits")["nodes"]] == [0, 0]
    kube.remove("waits")
    kube.play("waits", is_gone(kube, "waits"))


def test_stopped_kept_and_tried_again(kube: Kube, operator: OperatorProcess) -> None:
    keep = {"capacity": 10, "deletionPolicy": "keep"}
    kube.submit("stops", nodes=[{"name": "n0", **keep}, {"name": "n1", **keep}])
    kube.play("stops", kube.in_state("stops", "Running"))
    kube.change("stops", stopRun=1)
    kube.play("stops", kube.in_state("stops", "Stopped"))
    kept = kube.pods("stops")
    assert {key: pod_status.observed_group(pod, time.time()).phase for key, pod in kept.items()} == dict.fromkeys(
        [(0, 1), (1, 1)], GroupPhase.STOPPED
    )
    assert kept[0, 1]["spec"]["activeDeadlineSeconds"] == 1
    kube.change("stops", retryRun=1)
    kube.play("stops", kube.in_state("stops", "Running"))
    assert set(kube.pods("stops")) == {(0, 2), (1, 2)}
    kube.remove("stops")
    kube.play("stops", is_gone(kube, "stops"))


def test_a_ttl_removes_the_job_within_a_second_of_its_time(kube: Kube, operator: OperatorProcess) -> None:
    ttl_s = 20.0  # an operator that looks late on a busy machine still has time to tell of the end
    keep = {"capacity": 10, "deletionPolicy": "keep"}
    kube.submit("expires", ttlSecondsAfterFinished=ttl_s, nodes=[{"name": "n0", **keep}, {"name": "n1", **keep}])
    kube.play("expires", kube.in_state("expires", "Running"))
    end_all(kube, "expires")
    kube.play("expires", kube.in_state("expires", "Succeeded"), steps=False)
    ended_s = objects.parse_time(status(kube, "expires")["endedAt"])
    kube.play("expires", is_gone(kube, "expires"), steps=False)
    # Never early; how late depends on how busy the machine is, so that is measured in bench/, not here.
    assert time.time() >= ended_s + ttl_s


def test_somebody_elses_job_is_left_alone(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("theirs", managedBy="kueue.x-k8s.io/multikueue")
    kube.submit("ours")
    kube.play("ours", kube.in_state("ours", "Running"))
    job = kube.job("theirs")
    assert job is not None
    assert "status" not in job
    assert "finalizers" not in job["metadata"]
    for name in ("ours", "theirs"):
        kube.remove(name)
        kube.play(name, is_gone(kube, name))


@pytest.mark.usefixtures("roles", "any_requester")
def test_who_may_not_is_refused_with_what_helps(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("refused", requester={"username": "nobody-knows-me"})
    kube.play("refused", kube.in_state("refused", "Refused"))
    told = status(kube, "refused")
    assert told["reason"] == "Forbidden"
    assert "Ask the administrator of this platform to allow nobody-knows-me to submit" in told["message"]
    assert kube.left("refused") == [f"{objects.CRD_KIND}/refused"]
    kube.remove("refused")
    kube.play("refused", is_gone(kube, "refused"))


def test_a_script_too_long_for_a_config_map_is_refused_with_the_mend(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("long", source="#" * (2**20 - 1000))
    kube.play("long", kube.in_state("long", "Refused"))
    told = status(kube, "long")
    assert told["reason"] == "ConfigTooLarge"
    assert "Put the script into the image" in told["message"]
    kube.remove("long")
    kube.play("long", is_gone(kube, "long"))


@pytest.mark.usefixtures("any_requester")
def test_what_cannot_be_run_here_is_refused_with_what_helps(kube: Kube, operator: OperatorProcess) -> None:
    for name, changes, reason, text in (
        ("imageless", {"image": None}, "NoImage", "Write spec.image, or start the operator with --image"),
        ("unasked", {"requester": None}, "RequesterUnknown", "as printed by kubectl auth whoami"),
    ):
        kube.submit(name, **changes)
        kube.play(name, kube.in_state(name, "Refused"))
        told = status(kube, name)
        assert told["reason"] == reason
        assert text in told["message"]
        assert kube.left(name) == [f"{objects.CRD_KIND}/{name}"]
        kube.remove(name)
        kube.play(name, is_gone(kube, name))


def test_of_64_at_once_one_gets_the_name(kube: Kube) -> None:
    body = {"metadata": {"name": "wanted"}, "spec": {**kube.spec(), "managedBy": "somebody/else"}}

    async def all_at_once() -> list[object]:
        wanted = [kube.client.create(api_client.TRAINING_JOBS, kube.namespace, body) for _ in range(64)]
        return await asyncio.gather(*wanted, return_exceptions=True)

    found = kube.run(all_at_once())
    refused = [each for each in found if isinstance(each, ApiError) and each.already_exists]
    assert (len(found), len(refused)) == (64, 63)
    kube.remove("wanted")


def test_the_operator_is_killed_and_goes_on(kube: Kube, operator: OperatorProcess) -> None:
    kube.submit("survives")
    kube.play("survives", kube.in_state("survives", "Running"))
    operator.kill()
    kube.run(kube.kubelet.fail_pod(kube.pods("survives")[0, 1], EndCause.PLATFORM))
    operator.start()
    kube.play("survives", lambda: (0, 2) in kube.pods("survives"))
    kube.play("survives", kube.in_state("survives", "Running"))
    operator.kill()
    kube.remove("survives")
    operator.start()
    kube.play("survives", is_gone(kube, "survives"))
    assert {name for name, _ in kube.kubelet.created if name.startswith("survives-")} == {
        "survives-0-1",
        "survives-0-2",
        "survives-1-1",
    }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kubectl_applies_waits_gets_and_deletes(kube: Kube, operator: OperatorProcess, tmp_path) -> None:
    path = tmp_path / "job.yaml"
    body = {
        "apiVersion": objects.API_VERSION,
        "kind": objects.CRD_KIND,
        "metadata": {"name": "typed"},
        "spec": kube.spec(),
    }
    with path.open("w") as file:
        YAML(typ="safe", pure=True).dump(body, file)
    assert "trainingjob.ringweave.dev/typed created" in kube.kubectl("apply", "-f", str(path))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(kube.kubectl, "wait", "--for=condition=Running", "tj/typed", "--timeout=240s")
        kube.play("typed", waiting.done)
    assert "condition met" in waiting.result()
    shown = kube.kubectl("get", "tj", "typed")
    assert shown.split()[:7] == ["NAME", "STATE", "REASON", "READY", "WORKERS", "REQUESTER", "AGE"]
    assert "Running" in shown
    assert "2/2" in shown
    text = kube.kubectl("delete", "tj", "typed")
    assert "deleted" in text
    assert kube.left("typed") == []
