"""What is done in the API server, where it is more than one request."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringweave.errors import LaunchError
from ringweave.jobs import records
from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.launcher.workers import HostPort
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.agent_channel import AgentStatus
from ringweave.platforms.api import LogQuery
from ringweave.platforms.kubernetes import action_executor, api_client, job_resource, objects, pod_logs
from ringweave.platforms.kubernetes.action_executor import ActionExecutor, ObservedJob
from ringweave.platforms.kubernetes.agent_gateway import barrier_condition
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import JobOwner, PodSettings
from ringweave.platforms.kubernetes.platform import JobLogReader
from ringweave.platforms.kubernetes.pod_status import JobObjects
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.platforms.kubernetes.operating.worlds import World, play, run_all

NODE = {"name": "n0", "capacity": 3}
OF_JOB = (api_client.SECRETS, api_client.SERVICES)
SPEC: dict[str, Any] = {
    "cpuWorkers": 3,
    "script": "a.py",
    "source": "pass",
    "nodes": [NODE],
    "requester": {"username": "admin", "groups": ["system:masters"]},
}


async def a_job(client: KubernetesClient, name: str) -> Object:
    """Held by the operator."""
    body = {"metadata": {"name": name, "finalizers": [objects.FINALIZER]}, "spec": SPEC}
    return await client.create(api_client.TRAINING_JOBS, "default", body)


async def make_beside(client: KubernetesClient, owner: JobOwner) -> None:
    """What is made before the ConfigMap."""
    await client.create(api_client.SECRETS, "default", objects.token_secret(owner))
    await client.create(api_client.SERVICES, "default", objects.headless_service(owner))


async def left(client: KubernetesClient, name: str) -> list[str]:
    selector = f"{objects.JOB_LABEL}={name}"
    lists = [await client.list(kind, "default", labelSelector=selector) for kind in OF_JOB]
    return [item["metadata"]["uid"] for items in lists for item in items]


def test_a_job_that_is_deleted_before_its_config_map_is_there_leaves_nothing(kubeconfig: Path) -> None:
    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            actor = ActionExecutor(client, PodSettings(), time.time)
            job = await a_job(client, "half-made")
            await make_beside(client, JobOwner.from_resource(job))
            assert len(await left(client, "half-made")) == 2
            await client.delete(api_client.TRAINING_JOBS, "default", "half-made")
            await actor.forget_job(await client.get(api_client.TRAINING_JOBS, "default", "half-made"))
            assert await left(client, "half-made") == []
            jobs = await client.list(api_client.TRAINING_JOBS, "default")
            assert [each["metadata"]["name"] for each in jobs] == []

    asyncio.run(run())


def secret_and_service(name: str) -> tuple[tuple[api_client.ResourceKind, str], ...]:
    return (api_client.SECRETS, objects.config_name(name)), (api_client.SERVICES, objects.service_name(name))


@pytest.mark.parametrize("which", [0, 1])
def test_a_secret_or_service_that_somebody_removes_is_made_again(kubeconfig: Path, which: int) -> None:
    name = f"torn-{which}"

    async def test(world: World) -> None:
        kind, removed = secret_and_service(name)[which]
        await run_all(world)
        before = await world.client.get(kind, "default", removed)
        await world.client.delete(kind, "default", removed)
        await world.settle()
        again = await world.client.get(kind, "default", removed)
        assert again["metadata"]["uid"] != before["metadata"]["uid"]
        assert (await world.job())["status"]["state"] == "Running", "who runs is not disturbed"
        await world.client.patch(api_client.TRAINING_JOBS, "default", name, {"spec": {"suspend": True}})
        await world.client.delete(kind, "default", removed)
        await world.settle()
        assert await left(world.client, name) == []
        with pytest.raises(ApiError, match="not found"):
            await world.client.get(api_client.CONFIG_MAPS, "default", objects.config_name(name))

    play(kubeconfig, name, test)


def test_what_is_not_the_jobs_stays(kubeconfig: Path) -> None:
    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            job = await a_job(client, "namesake")
            other = {"metadata": {**job["metadata"], "uid": "33333333-3333-3333-3333-333333333333"}}
            await make_beside(client, JobOwner.from_resource(other))
            await ActionExecutor(client, PodSettings(), time.time).forget_job(job)
            assert len(await left(client, "namesake")) == 2
            await client.delete(api_client.SECRETS, "default", objects.config_name("namesake"))
            await client.delete(api_client.SERVICES, "default", objects.service_name("namesake"))

    asyncio.run(run())


def test_of_many_attempts_the_newest_logs_are_kept(
    cluster: FakeCluster, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_logs, "MAX_LOGS", 2)
    monkeypatch.setattr(cluster.handler, "logs", lambda *_: one_line())

    async def one_line() -> AsyncIterator[bytes]:
        yield b"[0] of the workers"

    async def test(world: World) -> None:
        theirs = JobOwner(name="worn", namespace="default", uid="33333333-3333-3333-3333-333333333333")
        pod = {"metadata": {"name": "theirs", "labels": {objects.NODE_LABEL: "1", objects.ATTEMPT_LABEL: "1"}}}
        await world.client.create(api_client.CONFIG_MAPS, "default", pod_logs.log_config_map(theirs, pod, ["theirs"]))
        for attempt in (1, 2, 3):
            pods = await run_all(world)
            await world.kubelet.fail_pod(pods[1, attempt], EndCause.PLATFORM)
            world.now_s += 600.0
            await world.settle()
        found = await world.client.list(
            api_client.CONFIG_MAPS, "default", labelSelector=f"{objects.JOB_LABEL}=worn,{pod_logs.LOG_LABEL}"
        )
        assert {each["metadata"]["name"] for each in found} == {"worn-1-2-log", "worn-1-3-log", "theirs-log"}
        resource = await world.job()
        job = job_resource.job_from_resource(resource)
        assert job is not None
        assert [each.attempt for each in job.record.nodes[1].history] == [1, 2, 3], "`why` knows more ends than logs"
        lines = JobLogReader(
            lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)}),
            JobOwner.from_resource(resource),
            job,
            LogQuery(node="n1"),
        ).read_lines()
        assert [(line.attempt, line.text) for line in lines] == [(2, "of the workers"), (3, "of the workers")]
        await world.client.delete(api_client.CONFIG_MAPS, "default", "theirs-log")

    play(kubeconfig, "worn", test)


ELASTIC: dict[str, Any] = {**SPEC, "nodes": [NODE, {**NODE, "name": "n1"}], "cpuWorkers": 6, "elastic": {"min": 3}}


def test_the_secrets_of_an_elastic_job_go_with_it(kubeconfig: Path) -> None:
    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            body = {"metadata": {"name": "spared", "finalizers": [objects.FINALIZER]}, "spec": ELASTIC}
            job = await client.create(api_client.TRAINING_JOBS, "default", body)
            owner = JobOwner.from_resource(job)
            await make_beside(client, owner)
            for node in range(2):
                body = objects.credential_secret(
                    owner, objects.credential_pool_name("spared", node), (1, 1), {"worker-0.0": "text"}
                )
                await client.create(api_client.SECRETS, "default", body)
            assert len(await left(client, "spared")) == 4
            await client.delete(api_client.TRAINING_JOBS, "default", "spared")
            await ActionExecutor(client, PodSettings(), time.time).forget_job(
                await client.get(api_client.TRAINING_JOBS, "default", "spared")
            )
            assert await left(client, "spared") == []

    asyncio.run(run())


def looked(*phases: GroupPhase) -> ObservedJob:
    """At an elastic job whose agents say this of themselves; who is ready offers a coordinator."""
    metadata = {"name": "text", "namespace": "default", "uid": "1", "creationTimestamp": "2026-11-22T12:00:00Z"}
    nodes = [{"name": f"n{index}", "capacity": 3, "maxRetries": 3, "deletionPolicy": "delete"} for index in range(2)]
    resource = {"metadata": metadata, "spec": {**ELASTIC, "nodes": nodes, "minPerNode": 3}}
    job = records.new_job(job_resource.request_from_resource(resource), requester="ann", counts=(3, 3), now=0.0)
    pods = {}
    for node, phase in enumerate(phases):
        offers = {"master_address": HostPort(host=f"10.0.0.{node}", port=1)} if phase is GroupPhase.READY else {}
        coordinator = HostPort(host=objects.pod_dns_name("text", node, "default"), port=2) if offers else None
        report = AgentStatus(round=1, phase=phase, pid=1, coordinator=coordinator, **offers)
        pods[node, 1] = {
            "metadata": {"annotations": {objects.ROUND_ANNOTATION: "1"}},
            "status": {"podIP": f"10.0.0.{node}", "conditions": [barrier_condition(report, 0.0)]},
        }
    return ObservedJob(resource=resource, job=job, objects=JobObjects(config=None, pods=pods))


def test_the_gate_of_an_elastic_job_says_where_its_coordinators_are() -> None:
    look = looked(GroupPhase.READY, GroupPhase.READY)
    opening = action_executor.make_rendezvous(look, job_config.job_config(look.job, directory=None, script_text=""), 1)
    hosts = [meeting.host for meeting in opening.coordinators]
    assert hosts == ["text-0.text.default.svc", "text-1.text.default.svc"]
    assert opening.addresses == {"n0": "10.0.0.0", "n1": "10.0.0.1"}


def test_a_gate_that_somebody_shut_while_an_elastic_job_trains_stays_shut() -> None:
    look = looked(GroupPhase.RUNNING, GroupPhase.RUNNING)
    text = (
        r"barrier of round 1: 'no addresses of coordinators', expected the addresses that nodes n0 and n1 "
        r"offered before they started\. Nothing to do; training workers continue, and when a node is "
        r"lost all nodes join the next round"
    )
    with pytest.raises(LaunchError, match=text):
        action_executor.make_rendezvous(look, job_config.job_config(look.job, directory=None, script_text=""), 1)


def test_a_finalizer_that_somebody_else_has_added_since_the_look_stays(kubeconfig: Path) -> None:
    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            look = await a_job(client, "audited")
            both = {"metadata": {"finalizers": [objects.FINALIZER, "example.org/audit"]}}
            await client.patch(api_client.TRAINING_JOBS, "default", "audited", both)
            await ActionExecutor(client, PodSettings(), time.time).forget_job(look)
            found = await client.get(api_client.TRAINING_JOBS, "default", "audited")
            assert found["metadata"]["finalizers"] == ["example.org/audit"]
            none = {"metadata": {"finalizers": []}}
            await client.patch(api_client.TRAINING_JOBS, "default", "audited", none)

    asyncio.run(run())
