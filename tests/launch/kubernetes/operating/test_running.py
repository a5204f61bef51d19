"""The operator as a whole, in this process: what it watches, and that one which only waits is known to live."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import connecting, kinds
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.operating import leading, running
from ringweave.launch.kubernetes.operating.leading import Leader, LeaseSettings
from ringweave.launch.kubernetes.operating.running import OperatorSettings
from ringweave.testing.kubernetes.cluster import FakeCluster

SOON_S = 250.0


def play(kubeconfig: Path, settings: OperatorSettings, test: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """An operator while the test lasts, which is given what is set when it leads."""

    async def run() -> None:
        ready = asyncio.Event()
        connect = running.connector({"KUBECONFIG": str(kubeconfig)}, None)
        operator = asyncio.create_task(running.operate(connect, settings, ready=ready))
        try:
            async with asyncio.timeout(SOON_S):
                await test(ready)
        finally:
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)

    asyncio.run(run())


def a_lease(identity: str) -> LeaseSettings:
    return LeaseSettings(namespace="default", identity=identity, duration_s=600.0, renew_s=60.0)


def test_one_that_waits_for_the_lease_says_that_it_lives_and_has_metrics(kubeconfig: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/healthz"

    async def test(ready: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(url) as answer:
                        assert answer.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)
            async with session.get(url.replace("healthz", "metrics")) as answer:
                shown = await answer.text()
                assert (answer.status, answer.content_type) == (200, "text/plain")
        assert 'ringweave_job_workers{job="seen",place="kubernetes/default",requester="ann"} 3.0' in shown.splitlines()
        assert not ready.is_set(), "it leads, though another one has the lease"

    async def take() -> None:
        async with Client(lambda: connecting.connection({"KUBECONFIG": str(kubeconfig)})) as client:
            with contextlib.suppress(ApiError):  # what the operator of another test has left
                await client.delete(kinds.LEASES, "default", leading.NAME)
            await Leader(client, a_lease("first"), time.time).acquire()
            spec = {"gpus": 3, "script": "a.py", "nodes": [{"name": "n0", "capacity": 3}], "managedBy": "a/b"}
            body = {"metadata": {"name": "seen"}, "spec": {**spec, "requester": {"username": "ann"}}}
            await client.create(kinds.TRAINING_JOBS, "default", body)

    async def give_back() -> None:
        async with Client(lambda: connecting.connection({"KUBECONFIG": str(kubeconfig)})) as client:
            await Leader(client, a_lease("first"), time.time).release()
            await client.delete(kinds.TRAINING_JOBS, "default", "seen")

    asyncio.run(take())
    play(kubeconfig, OperatorSettings(lease=a_lease("second"), desk_port=None, liveness=url), test)
    asyncio.run(give_back())


@pytest.mark.slow
def test_of_pods_and_config_maps_only_those_of_jobs_are_asked_for(cluster: FakeCluster, kubeconfig: Path) -> None:
    asked: dict[tuple[str, bool], set[str | None]] = {}

    async def note(http: web.Request) -> None:
        plural = http.path.rpartition("/")[2]
        if http.method == "GET" and plural in ("pods", "configmaps", names.PLURAL):
            key = plural, "watch" in http.query
            asked.setdefault(key, set()).add(http.query.get("labelSelector"))

    async def test(ready: asyncio.Event) -> None:
        await ready.wait()
        while len(asked) < 6:
            await asyncio.sleep(0.05)

    cluster.handler.delay = note
    try:
        play(kubeconfig, OperatorSettings(lease=a_lease("watches"), desk_port=None), test)
    finally:
        cluster.handler.delay = None
    of_jobs = {names.JOB_LABEL}
    assert {key: selectors for key, selectors in asked.items() if key[0] != names.PLURAL} == {
        (plural, is_watch): of_jobs for plural in ("pods", "configmaps") for is_watch in (False, True)
    }
    assert asked[names.PLURAL, True] == {None}
