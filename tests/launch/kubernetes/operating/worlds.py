"""One job and the parts of an operator against the fake API server, without a queue: what tests of them share."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from ringweave.jobs.life.observing import Cause
from ringweave.launch.kubernetes.api import connecting, kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.objects.pods import PodSettings
from ringweave.launch.kubernetes.objects.seeing import Key
from ringweave.launch.kubernetes.operating.acting import Actor
from ringweave.launch.kubernetes.operating.admission import Admission
from ringweave.launch.kubernetes.operating.controller import Controller
from ringweave.testing.kubernetes.cluster import FakeCluster
from ringweave.testing.kubernetes.kubelet import PlayedKubelet
from ringweave.testing.kubernetes.server.refusing import Refused

SPEC: dict[str, Any] = {
    "cpuWorkers": 6,
    "script": "a.py",
    "source": "pass",
    "nodes": [{"name": "n0", "capacity": 3}, {"name": "n1", "capacity": 3}],
    "requester": {"username": "admin", "groups": ["system:masters"]},
}


class World:
    """One job and the parts of an operator, without a queue."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name, self.now_s = client, name, time.time()
        settings = PodSettings(image="example/train:1")
        self.actor = Actor(client, settings, lambda: self.now_s)
        self.controller = Controller(
            client, self.actor, Admission(client, settings, lambda: self.now_s), lambda: self.now_s
        )
        self.kubelet = PlayedKubelet(client, "default")

    async def settle(self) -> None:
        """As many passes as it takes until there is nothing to do."""
        while (await self.controller.reconcile(("default", self.name))).again:
            pass

    async def job(self) -> Object:
        return await self.client.get(kinds.TRAINING_JOBS, "default", self.name)

    async def pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in (await self.kubelet.pods(self.name)).values()]


def play(kubeconfig: Path, name: str, test: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Client(lambda: connecting.connection({"KUBECONFIG": str(kubeconfig)})) as client:
            world = World(client, name)
            await client.create(kinds.TRAINING_JOBS, "default", {"metadata": {"name": name}, "spec": SPEC})
            await test(world)
            await client.delete(kinds.TRAINING_JOBS, "default", name)
            await world.settle()
            assert await world.pods() == []

    asyncio.run(run())


def refuse(cluster: FakeCluster, method: str, ending: str, refused: Callable[[str], Refused]) -> None:
    """Refuse some requests; those that make a Pod by its name."""

    async def look(http: web.Request) -> None:
        if http.method == method and http.path.endswith("/pods" if method == "POST" else ending):
            body = (await http.json())["metadata"]["name"] if method == "POST" else http.path
            if method != "POST" or body.endswith(ending):
                raise refused(body)

    cluster.handler.delay = look


async def run_all(world: World) -> dict[Key, Object]:
    """Both nodes run; their Pods."""
    await world.settle()
    for _ in range(2):
        await world.kubelet.step(world.name)
        await world.settle()
    return await world.kubelet.pods(world.name)


async def fail_a_node(world: World) -> None:
    """Both nodes run, then the second one fails, and the time to judge is over."""
    pods = await run_all(world)
    await world.kubelet.fail(pods[1, 1], Cause.PLACE)
    world.now_s += 60.0
