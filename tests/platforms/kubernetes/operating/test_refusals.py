"""Pods that a quota or a policy refuses are told of, and made once they are allowed; logs survive errors."""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ringweave.jobs.states import JobState
from ringweave.platforms.kubernetes import api_client, job_resource, objects, platform, pod_logs, pod_status
from ringweave.platforms.kubernetes.action_executor import FAILURE_REPORT_DELAY_S, ObjectsRefusedError, UnreadLogError
from ringweave.platforms.kubernetes.api_client import ApiError
from ringweave.platforms.kubernetes.objects import WORKER_CONTAINER
from tests.fakes.kubernetes.api_failures import ApiFailure
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.platforms.kubernetes.operating.worlds import World, fail_a_node, play, refuse

QUOTA = 'pods "{}" is forbidden: exceeded quota: compute, requested: pods=1, used: pods=3, limited: pods=3'


@pytest.fixture(autouse=True)
def _as_before(cluster: FakeCluster) -> Iterator[None]:
    yield
    cluster.handler.before_request = None
    cluster.handler.logs = lambda _pod, _params: None


def test_a_quota_that_refuses_one_pod_is_told_of_until_it_allows_it(cluster: FakeCluster, kubeconfig: Path) -> None:
    refuse(cluster, "POST", "-1-1", lambda name: ApiFailure(403, "Forbidden", QUOTA.format(name)))

    async def test(world: World) -> None:
        with pytest.raises(ObjectsRefusedError, match=r"1 refused, expected none: .*exceeded quota: compute"):
            await world.settle()
        assert await world.pods() == ["limited-0-1"], "those that are allowed are made"
        job = await world.job()
        status = job["status"]
        assert (status["state"], status["reason"]) == ("Pending", "QuotaExceeded")
        assert status["message"].startswith("the API server refuses the Pod of node n1: pods")
        assert "kubectl describe resourcequota" in status["hint"]
        running = next(item for item in status["conditions"] if item["type"] == "Running")
        assert (running["status"], running["reason"]) == ("False", "QuotaExceeded")
        assert [node.get("reason") for node in status["nodes"]][1] == "QuotaExceeded"
        assert [event["kind"] for event in status["events"]][-1] == "QuotaExceeded"
        events = await world.client.list(api_client.EVENTS, "default")
        assert [each["type"] for each in events if each["reason"] == "QuotaExceeded"] == ["Warning"]
        shown = platform.training_job_view(job, world.now_s)
        assert shown.state is JobState.PENDING
        assert shown.reason is not None
        assert shown.reason.code == "QuotaExceeded"

        with pytest.raises(ObjectsRefusedError):
            await world.settle()
        await world.job()
        with pytest.raises(ObjectsRefusedError):
            await world.settle()
        again = await world.job()
        with pytest.raises(ObjectsRefusedError):
            await world.settle()
        assert (await world.job())["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]

        cluster.handler.before_request = None
        await world.settle()
        status = (await world.job())["status"]
        assert sorted(await world.pods()) == ["limited-0-1", "limited-1-1"]
        assert status["reason"] not in job_resource.REFUSAL_CODES
        assert not {node.get("reason") for node in status["nodes"]} & set(job_resource.REFUSAL_CODES)

    play(kubeconfig, "limited", test)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (QUOTA.format("a-0-1"), "QuotaExceeded"),
        ('pods "a" is forbidden: failed quota: q: must specify limits.cpu', "QuotaExceeded"),
        ('pods "a" is forbidden: maximum cpu usage per Container is 1, but limit is 8', "QuotaExceeded"),
        (
            'pods "a" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true',
            "PodSecurityViolation",
        ),
        ('admission webhook "validate.kyverno.svc-fail" denied the request: no', "AdmissionDenied"),
        ('pods is forbidden: User "system:serviceaccount:a:b" cannot create resource "pods"', "OperatorForbidden"),
        ('Pod "a" is invalid: spec.containers[0].image: Required value', "ObjectInvalid"),
        ('pods "a" is forbidden: error looking up service account x/default', "ObjectRefused"),
    ],
)
def test_each_refusal_has_its_word_and_what_helps(message: str, code: str) -> None:
    why = job_resource.refusal_reason(None, [job_resource.ApiRefusal(node=None, message=message, what="its config")])  # type: ignore[arg-type]
    assert why.code == code
    assert str(why).startswith(f"the API server refuses its config: {message}. ")
    assert why.hint


WEBHOOK = (
    'Internal error occurred: failed calling webhook "validate.kyverno.svc-fail": failed to call webhook: Post '
    '"https://kyverno-svc.kyverno.svc:443/validate/fail": dial tcp 10.96.0.7:443: connect: connection refused'
)


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (ApiFailure(500, "InternalError", WEBHOOK), "WebhookUnreachable", f"fails at the Pod of node n1: {WEBHOOK}. "),
        (
            ApiFailure(500, "InternalError", "etcdserver: no leader"),
            "ApiServerError",
            "n1: etcdserver: no leader. Ask the",
        ),
    ],
)
def test_a_failure_that_lasts_is_told_of_until_it_is_over(
    cluster: FakeCluster, kubeconfig: Path, failure: ApiFailure, code: str, text: str
) -> None:
    refuse(cluster, "POST", "-1-1", lambda _: failure)

    async def test(world: World) -> None:
        with pytest.raises(ApiError) as caught:
            await world.settle()
        assert failure.message in str(caught.value)
        assert (await world.job())["status"]["reason"] == "NotReady", "it may be over at once"
        world.now_s += FAILURE_REPORT_DELAY_S
        with pytest.raises(ObjectsRefusedError):
            await world.settle()
        status = (await world.job())["status"]
        assert (status["state"], status["reason"], status["nodes"][1]["reason"]) == ("Pending", code, code)
        assert text in next(item["message"] for item in status["conditions"] if item["type"] == "Running")
        cluster.handler.before_request = None
        await world.settle()
        assert (await world.job())["status"]["reason"] not in job_resource.REFUSAL_CODES
        refuse(cluster, "POST", "-1-2", lambda _: failure)
        await world.client.delete(api_client.PODS, "default", "fails-1-1")
        with pytest.raises(ApiError, match="500 InternalError"):  # counted anew
            await world.settle()

    play(kubeconfig, "fails", test)


def test_a_name_that_is_taken_by_something_else_is_told_of(kubeconfig: Path) -> None:
    async def test(world: World) -> None:
        await world.client.create(api_client.SERVICES, "default", {"metadata": {"name": "web"}, "spec": {}})
        with pytest.raises(ObjectsRefusedError, match="1 refused, expected none: Service web exists already"):
            await world.settle()
        status = (await world.job())["status"]
        assert (status["state"], status["reason"]) == ("Pending", "AlreadyExists")
        assert status["message"] == (
            "the API server refuses its config: Service web exists already, and does not belong to the job "
            "(kubectl -n default get services web -o yaml)"
        )
        assert status["hint"] == "Remove that object, or delete the job and submit it under another name"
        await world.client.delete(api_client.SERVICES, "default", "web")
        await world.settle()
        assert (await world.job())["status"]["reason"] not in job_resource.REFUSAL_CODES

    play(kubeconfig, "web", test)


def test_a_pod_that_a_former_job_of_the_name_has_left_is_told_of(kubeconfig: Path) -> None:
    async def test(world: World) -> None:
        labels = {objects.JOB_LABEL: "orphans", objects.NODE_LABEL: "1", objects.ATTEMPT_LABEL: "1"}
        left = {"metadata": {"name": "orphans-1-1", "labels": labels}, "spec": {"containers": [{"name": "workers"}]}}
        await world.client.create(api_client.PODS, "default", left)  # as kubectl delete --cascade=orphan leaves it
        with pytest.raises(ObjectsRefusedError, match="Pod orphans-1-1 exists already"):
            await world.settle()
        status = (await world.job())["status"]
        assert [node.get("reason") == "AlreadyExists" for node in status["nodes"]] == [False, True]
        assert "refuses the Pod of node n1: Pod orphans-1-1 exists already" in status["message"]
        await world.client.delete(api_client.PODS, "default", "orphans-1-1")
        await world.settle()
        assert "orphans-1-1" in await world.pods()

    play(kubeconfig, "orphans", test)


async def told(*texts: str) -> AsyncIterator[bytes]:
    for text in texts:
        yield text.encode()


def test_the_end_of_a_long_log_is_what_is_kept(cluster: FakeCluster, kubeconfig: Path) -> None:
    asked: list[Mapping[str, str]] = []

    def logs(_: Any, params: Mapping[str, str]) -> AsyncIterator[bytes]:
        asked.append(dict(params))
        return told(*(f"[0] line {index} {'x' * 500}\n" for index in range(3000)), "[0] the last words\n")

    cluster.handler.logs = logs

    async def test(world: World) -> None:
        await fail_a_node(world)
        await world.settle()
        kept = await world.client.get(api_client.CONFIG_MAPS, "default", "wordy-1-1-log")
        text = kept["data"][pod_logs.LOG_KEY]
        assert text.endswith("[0] the last words")
        assert pod_logs.MAX_LOG_BYTES - 1000 < len(text) <= pod_logs.MAX_LOG_BYTES
        assert asked == [{"container": WORKER_CONTAINER, "tailLines": str(pod_logs.MAX_LOG_LINES)}]

    play(kubeconfig, "wordy", test)


def test_a_log_that_cannot_be_read_now_is_tried_again_and_holds_nothing_else_up(
    cluster: FakeCluster, kubeconfig: Path
) -> None:
    refuse(
        cluster, "GET", "/log", lambda _: ApiFailure(500, "InternalError", "dial tcp 10.0.0.5:10250: no route to host")
    )

    async def test(world: World) -> None:
        await fail_a_node(world)
        with pytest.raises(UnreadLogError, match="no route to host"):
            await world.settle()
        assert set(await world.pods()) == {"silent-0-1", "silent-1-1"}, "it stays for its log"
        called_back = (await world.kubelet.list_pods("silent"))[0, 1]
        assert pod_status.requested_round(called_back) == 2, "the other one is not held up"
        with pytest.raises(UnreadLogError):
            await world.settle()
        told = (await world.job())["status"]["nodes"][0]
        assert (told["state"], told["reason"]) == ("Interrupted", "NodeRestarting"), "also once its Pod says so"
        world.now_s += pod_logs.LOG_RETRY_TIMEOUT_S
        await world.settle()
        assert set(await world.pods()) == {"silent-0-1", "silent-1-2"}
        kept = await world.client.get(api_client.CONFIG_MAPS, "default", "silent-1-1-log")
        assert "the rest of this log could not be read: " in kept["data"][pod_logs.LOG_KEY]
        assert objects.JOB_LABEL in kept["metadata"]["labels"]

    play(kubeconfig, "silent", test)
