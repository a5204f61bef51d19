"""What only the fake can be made to do: watches that expire, objects that a kubelet still holds."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from ruamel.yaml import YAML

from ringweave.platforms.kubernetes import api_client, objects
from ringweave.platforms.kubernetes import operator as kubernetes_operator
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object
from tests.fakes.kubernetes import validation
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.fakes.kubernetes.object_store import ObjectStore
from tests.fakes.kubernetes.operator_process import OperatorProcess
from tests.polling import wait_until

SOON_S = 300.0


def run(kubeconfig: Path, work: Callable[[KubernetesClient], Any]) -> Any:
    async def inside() -> Any:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            return await work(client)

    return asyncio.run(inside())


def listed(kubeconfig: Path, kind: api_client.ResourceKind) -> list[Object]:
    return run(kubeconfig, lambda client: client.list(kind, "default"))


async def watched(client: KubernetesClient, **params: str) -> list[Object]:
    path = api_client.CONFIG_MAPS.path("default")
    return [json.loads(line) async for line in client.stream_lines(path, {"watch": "true", **params})]


def test_a_watch_from_before_what_is_remembered_expires(cluster: FakeCluster, kubeconfig: Path) -> None:
    before = run(kubeconfig, lambda client: client.request("GET", api_client.CONFIG_MAPS.path("default")))
    body = {"metadata": {"name": "any"}}
    run(kubeconfig, lambda client: client.create(api_client.CONFIG_MAPS, "default", body))
    run(kubeconfig, lambda client: client.delete(api_client.CONFIG_MAPS, "default", "any"))
    cluster.call(cluster.api.store.compact)
    version = before["metadata"]["resourceVersion"]
    events = run(kubeconfig, lambda client: watched(client, resourceVersion=version))
    assert [(event["type"], event["object"]["code"], event["object"]["reason"]) for event in events] == [
        ("ERROR", 410, "Expired")
    ]


def test_a_silent_watch_gets_bookmarks_that_it_can_go_on_from(cluster: FakeCluster, kubeconfig: Path) -> None:
    now = run(kubeconfig, lambda client: client.request("GET", api_client.CONFIG_MAPS.path("default")))
    params = {"resourceVersion": now["metadata"]["resourceVersion"], "timeoutSeconds": "2"}
    events = run(kubeconfig, lambda client: watched(client, allowWatchBookmarks="true", **params))
    assert {event["type"] for event in events} == {"BOOKMARK"}
    version = events[-1]["object"]["metadata"]["resourceVersion"]
    cluster.call(cluster.api.store.compact)
    again = {"resourceVersion": version, "timeoutSeconds": "1"}
    assert run(kubeconfig, lambda client: watched(client, **again)) == []


def test_a_pod_that_a_node_has_stays_until_its_kubelet_lets_go(kubeconfig: Path) -> None:
    spec = {"nodeName": "a", "containers": [{"name": "a", "image": "a"}]}

    async def work(client: KubernetesClient) -> None:
        await client.create(api_client.PODS, "default", {"metadata": {"name": "held"}, "spec": spec})
        await client.delete(api_client.PODS, "default", "held")
        found = await client.get(api_client.PODS, "default", "held")
        assert found["metadata"]["deletionGracePeriodSeconds"] == 30
        until_s = objects.parse_time(found["metadata"]["deletionTimestamp"])
        assert until_s - objects.parse_time(found["metadata"]["creationTimestamp"]) >= 30, "when it is to be gone"
        await client.delete(api_client.PODS, "default", "held", gracePeriodSeconds=0)
        with pytest.raises(ApiError, match="not found"):
            await client.get(api_client.PODS, "default", "held")

    run(kubeconfig, work)


def test_of_a_pod_next_to_nothing_changes(kubeconfig: Path) -> None:
    spec = {"containers": [{"name": "a", "image": "a"}]}

    async def work(client: KubernetesClient) -> None:
        await client.create(api_client.PODS, "default", {"metadata": {"name": "fixed"}, "spec": spec})
        await client.patch(api_client.PODS, "default", "fixed", {"spec": {"activeDeadlineSeconds": 5}})
        with pytest.raises(ApiError, match="may not change fields"):
            await client.patch(api_client.PODS, "default", "fixed", {"spec": {"hostname": "another"}})
        with pytest.raises(ApiError, match="less than or equal to previous"):
            await client.patch(api_client.PODS, "default", "fixed", {"spec": {"activeDeadlineSeconds": 6}})
        await client.delete(api_client.PODS, "default", "fixed")

    run(kubeconfig, work)


def test_whoever_shows_no_token_is_nobody(cluster: FakeCluster, kubeconfig: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    yaml = YAML(typ="safe", pure=True)
    config = yaml.load(kubeconfig)
    config["users"][0]["user"]["token"] = "another"
    yaml.dump(config, stranger)
    with pytest.raises(ApiError, match=r"401 Unauthorized.*Log in again"):
        listed(stranger, api_client.PODS)
    ann = cluster.kubeconfig(tmp_path / "ann", user="ann", groups=())
    with pytest.raises(ApiError, match=r'User "ann" cannot list resource "pods".*Ask for a role that allows it'):
        listed(ann, api_client.PODS)


@pytest.mark.parametrize(
    ("expression", "is_refused"),
    [
        ("'a total of ' + string(self.x)", True),
        ("string((self.x + 1) * 2) + ' is too many'", True),
        ("'%d is too many'.format([self.x])", False),
    ],
)
def test_messages_of_unbounded_cost_are_refused(expression: str, is_refused: bool) -> None:
    rule = {"rule": "self.x < 3", "messageExpression": expression}
    problems = list(validation.rule_definition_problems({"x-kubernetes-validations": [rule]}, "schema"))
    assert [problem.partition(":")[0] for problem in problems] == (
        ["schema.x-kubernetes-validations[0].messageExpression"] if is_refused else []
    )


def test_numbers_are_formatted_into_messages() -> None:
    rule = {"rule": "self.x < 3", "messageExpression": "'%d, not less than %d'.format([self.x, [1, 2].sum()])"}
    problems = list(validation.rule_problems({"x-kubernetes-validations": [rule]}, {"x": 7}, path="spec"))
    assert problems == ['spec: Invalid value: "object": 7, not less than 3']


def test_history_forgets_the_oldest() -> None:
    store = ObjectStore(history=2)
    for index in range(4):
        store.put(("", "pods"), ("default", f"p{index}"), {"metadata": {}})
    assert store.oldest_version(("", "pods")) == 3
    assert [change.version for change in store.since(("", "pods"), 3)] == [4, 5]


def spec() -> dict[str, Any]:
    return {
        "cpuWorkers": 3,
        "script": "a.py",
        "source": "pass",
        "image": "a",
        "nodes": [{"name": "n0", "capacity": 3}],
        "requester": {"username": "admin", "groups": ["system:masters"]},
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_operator_goes_on_when_its_watches_expire_and_ends(
    cluster: FakeCluster, kubeconfig: Path, tmp_path: Path
) -> None:
    arguments = ("--lease-namespace", "default", "--no-desk", "-v", "--lease-s", "600")
    with OperatorProcess(kubeconfig, arguments, tmp_path / "log") as operator:
        for name in ("first", "second"):
            body = {"metadata": {"name": name}, "spec": spec()}
            run(kubeconfig, lambda client, body=body: client.create(api_client.TRAINING_JOBS, "default", body))
            wait_until(lambda: listed(kubeconfig, api_client.PODS), operator.log.read_text)
            run(kubeconfig, lambda client, name=name: client.delete(api_client.TRAINING_JOBS, "default", name))
            wait_until(lambda: not listed(kubeconfig, api_client.TRAINING_JOBS), operator.log.read_text)
            # All watches are cut, and what they could go on from is forgotten.
            cluster.call(cluster.cut_watches)
        assert operator.stop() == 0, operator.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_operator_ends_though_the_api_server_answers_nothing_any_more(
    cluster: FakeCluster, kubeconfig: Path, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def never(http: web.Request) -> None:
        asked.append(http.path)
        await asyncio.Event().wait()

    arguments = ("--lease-namespace", "default", "--no-desk", "--lease-s", "600", "--identity", "silenced")
    with OperatorProcess(kubeconfig, arguments, tmp_path / "log") as operator:
        body = {"metadata": {"name": "third"}, "spec": spec()}
        run(kubeconfig, lambda client: client.create(api_client.TRAINING_JOBS, "default", body))
        wait_until(lambda: listed(kubeconfig, api_client.PODS), operator.log.read_text)
        pod = listed(kubeconfig, api_client.PODS)[0]
        cluster.handler.before_request = never
        try:
            # It looks, and waits for an answer; so do its watches, which are cut.
            cluster.call(cluster.cut_watches)
            wait_until(lambda: asked, operator.log.read_text)
            assert operator.stop() == 0, operator.log.read_text()
        finally:
            cluster.handler.before_request = None
    assert "lease: not released: no answer" in operator.log.read_text()
    left = (
        (api_client.TRAINING_JOBS, "third"),
        (api_client.PODS, pod["metadata"]["name"]),
        (api_client.LEASES, kubernetes_operator.LEASE_NAME),
    )
    for kind, name in left:  # the lease, too: the next operator would wait for it to run out
        run(kubeconfig, lambda client, kind=kind, name=name: client.delete(kind, "default", name))
