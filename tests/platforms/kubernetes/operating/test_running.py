"""The operator as a whole, in this process: what it watches, and that one which only waits is known to live."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

import ringweave
from ringweave.platforms.kubernetes import api_client, objects
from ringweave.platforms.kubernetes import operator as kubernetes_operator
from ringweave.platforms.kubernetes.api_client import KubernetesClient
from ringweave.platforms.kubernetes.objects import PodSettings
from ringweave.platforms.kubernetes.operator import LeaderElection, LeaseSettings, OperatorSettings
from tests.fakes.kubernetes.fake_cluster import FakeCluster

SOON_S = 250.0


def play(kubeconfig: Path, settings: OperatorSettings, test: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """An operator while the test lasts, which is given what is set when it leads."""

    async def run() -> None:
        ready = asyncio.Event()
        connect = kubernetes_operator.connector({"KUBECONFIG": str(kubeconfig)}, None)
        operator = asyncio.create_task(kubernetes_operator.run_operator(connect, settings, ready=ready))
        try:
            async with asyncio.timeout(SOON_S):
                await test(ready)
        finally:
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)

    asyncio.run(run())


def a_lease(identity: str) -> LeaseSettings:
    return LeaseSettings(namespace="default", identity=identity, duration_s=600.0, renew_s=60.0)


async def remove_lease(kubeconfig: Path) -> None:
    """What the operator of another test has left: one that sees it looks again after a minute."""
    async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
        await client.delete(api_client.LEASES, "default", kubernetes_operator.LEASE_NAME)


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}/healthz"


def test_one_that_waits_for_the_lease_says_that_it_lives_and_has_metrics(kubeconfig: Path) -> None:
    url = free_url()

    async def test(ready: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(url) as answer:
                        assert answer.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)
            async with session.get(url.replace("healthz", "readyz")) as answer:
                assert (answer.status, await answer.text()) == (503, "waits for the lease")
            async with session.get(url.replace("healthz", "metrics")) as answer:
                shown = await answer.text()
                assert (answer.status, answer.content_type) == (200, "text/plain")
        assert (
            'ringweave_job_workers{job="seen",platform="kubernetes/default",requester="ann"} 3.0' in shown.splitlines()
        )
        assert not ready.is_set(), "it leads, though another one has the lease"

    async def take() -> None:
        await remove_lease(kubeconfig)
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            await LeaderElection(client, a_lease("first"), time.time).wait_acquired()
            spec = {"gpus": 3, "script": "a.py", "nodes": [{"name": "n0", "capacity": 3}], "managedBy": "a/b"}
            body = {"metadata": {"name": "seen"}, "spec": {**spec, "requester": {"username": "ann"}}}
            await client.create(api_client.TRAINING_JOBS, "default", body)

    async def give_back() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            await LeaderElection(client, a_lease("first"), time.time).release()
            await client.delete(api_client.TRAINING_JOBS, "default", "seen")

    asyncio.run(take())
    play(kubeconfig, OperatorSettings(lease=a_lease("second"), gateway_port=None, liveness_url=url), test)
    asyncio.run(give_back())


def test_strangers_who_ask_for_metrics_cost_the_api_server_little(cluster: FakeCluster, kubeconfig: Path) -> None:
    url, now_s, lists = free_url(), [50.0], list[str]()

    async def count(http: web.Request) -> None:
        if http.method == "GET" and http.path.endswith("/trainingjobs"):
            lists.append(http.path)

    async def ask(session: aiohttp.ClientSession) -> str:
        async with session.get(url.replace("healthz", "metrics")) as answer:
            assert answer.status == 200
            return await answer.text()

    async def run() -> None:
        connect = kubernetes_operator.connector({"KUBECONFIG": str(kubeconfig)}, None)
        async with (
            KubernetesClient(connect) as client,
            kubernetes_operator.serve_health_and_metrics(url, client, (), asyncio.Event(), lambda: now_s[0]),
            aiohttp.ClientSession() as session,
        ):
            assert len({*await asyncio.gather(*(ask(session) for _ in range(50)))}) == 1
            assert len(lists) == 1
            now_s[0] += 1.0
            await asyncio.gather(*(ask(session) for _ in range(50)))
            assert len(lists) == 2

    cluster.handler.before_request = count
    try:
        asyncio.run(run())
    finally:
        cluster.handler.before_request = None


@pytest.mark.slow
@pytest.mark.parametrize("answers", [True, False])
def test_one_whose_api_server_is_away_leads_again_afterwards(
    cluster: FakeCluster, kubeconfig: Path, answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    url, gateway_port = free_url(), urlsplit(free_url()).port
    path = "/v2/default/none/0/1/desired-state"

    async def is_ready(session: aiohttp.ClientSession) -> int:
        async with session.get(url.replace("healthz", "readyz")) as answer:
            return answer.status

    async def ask_gateway(session: aiohttp.ClientSession) -> int:
        async with session.get(f"http://127.0.0.1:{gateway_port}{path}") as answer:
            return answer.status

    async def away(_: web.Request) -> None:
        if answers:
            raise web.HTTPServiceUnavailable(text="not now")
        await asyncio.Event().wait()

    async def test(ready: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session:
            await ready.wait()
            assert await is_ready(session) == 200
            cluster.handler.before_request = away
            while ready.is_set():
                await asyncio.sleep(0.02)
            assert await is_ready(session) == 503
            assert await ask_gateway(session) == 503, "it refuses in words as long as it may be an endpoint"
            cluster.handler.before_request = None
            await ready.wait()
            assert await is_ready(session) == 200

    lease = LeaseSettings(namespace="default", identity="patient", duration_s=6.0, renew_s=2.0)
    try:
        settings = OperatorSettings(
            lease=lease,
            pods=PodSettings(gateway_url="http://unused"),
            gateway_host="127.0.0.1",
            gateway_port=gateway_port,
            liveness_url=url,
            endpoint_removal_s=1.0,
        )
        asyncio.run(remove_lease(kubeconfig))
        play(kubeconfig, settings, test)
    finally:
        cluster.handler.before_request = None
    assert "lease of the operator: lost, expected to hold it. Another operator leads now, or will." in caplog.text


@pytest.mark.slow
def test_of_pods_and_config_maps_only_those_of_jobs_are_asked_for(cluster: FakeCluster, kubeconfig: Path) -> None:
    asked: dict[tuple[str, bool], set[str | None]] = {}
    agents: set[str] = set()

    async def note(http: web.Request) -> None:
        agents.add(http.headers["User-Agent"])
        plural = http.path.rpartition("/")[2]
        if http.method == "GET" and plural in ("pods", "configmaps", objects.CRD_PLURAL):
            key = plural, "watch" in http.query
            asked.setdefault(key, set()).add(http.query.get("labelSelector"))

    async def test(ready: asyncio.Event) -> None:
        await ready.wait()
        while len(asked) < 6:
            await asyncio.sleep(0.05)

    cluster.handler.before_request = note
    try:
        asyncio.run(remove_lease(kubeconfig))
        play(kubeconfig, OperatorSettings(lease=a_lease("watches"), gateway_port=None), test)
    finally:
        cluster.handler.before_request = None
    of_jobs = {objects.JOB_LABEL}
    assert {key: selectors for key, selectors in asked.items() if key[0] != objects.CRD_PLURAL} == {
        (plural, is_watch): of_jobs for plural in ("pods", "configmaps") for is_watch in (False, True)
    }
    assert asked[objects.CRD_PLURAL, True] == {None}
    assert agents == {f"ringweave/{ringweave.__version__}"}
