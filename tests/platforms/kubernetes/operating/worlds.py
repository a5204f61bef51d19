"""One job and the parts of an operator against the fake API server, without a queue: what tests of them share."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from ringweave.jobs.records import EndCause
from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes.action_executor import ActionExecutor
from ringweave.platforms.kubernetes.api_client import KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import PodSettings
from ringweave.platforms.kubernetes.pod_status import AttemptKey
from ringweave.platforms.kubernetes.reconciler import JobAdmission, TrainingJobReconciler
from tests.fakes.kubernetes.api_failures import ApiFailure
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.fakes.kubernetes.simulated_kubelet import SimulatedKubelet

SPEC: dict[str, Any] = {
    "cpuWorkers": 6,
    "script": "a.py",
    "source": "pass",
    "nodes": [{"name": "n0", "capacity": 3}, {"name": "n1", "capacity": 3}],
    "requester": {"username": "admin", "groups": ["system:masters"]},
}


class World:
    """One job and the parts of an operator, without a queue."""

    def __init__(self, client: KubernetesClient, name: str) -> None:
        self.client, self.name, self.now_s = client, name, time.time()
        settings = PodSettings(image="example/train:1")
        self.actor = ActionExecutor(client, settings, lambda: self.now_s)
        self.controller = TrainingJobReconciler(
            client, self.actor, JobAdmission(client, settings, lambda: self.now_s), lambda: self.now_s
        )
        self.kubelet = SimulatedKubelet(client, "default")

    async def settle(self) -> None:
        """As many passes as it takes until there is nothing to do."""
        while (await self.controller.reconcile(("default", self.name))).requeue:
            pass

    async def job(self) -> Object:
        return await self.client.get(api_client.TRAINING_JOBS, "default", self.name)

    async def pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in (await self.kubelet.list_pods(self.name)).values()]


def play(kubeconfig: Path, name: str, test: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            world = World(client, name)
            await client.create(api_client.TRAINING_JOBS, "default", {"metadata": {"name": name}, "spec": SPEC})
            await test(world)
            await client.delete(api_client.TRAINING_JOBS, "default", name)
            await world.settle()
            assert await world.pods() == []

    asyncio.run(run())


def refuse(cluster: FakeCluster, method: str, ending: str, refused: Callable[[str], ApiFailure]) -> None:
    """Refuse some requests; those that make a Pod by its name."""

    async def look(http: web.Request) -> None:
        if http.method == method and http.path.endswith("/pods" if method == "POST" else ending):
            body = (await http.json())["metadata"]["name"] if method == "POST" else http.path
            if method != "POST" or body.endswith(ending):
                raise refused(body)

    cluster.handler.before_request = look


async def run_all(world: World) -> dict[AttemptKey, Object]:
    """Both nodes run; their Pods."""
    await world.settle()
    for _ in range(2):
        await world.kubelet.advance_pods(world.name)
        await world.settle()
    return await world.kubelet.list_pods(world.name)


async def fail_a_node(world: World) -> None:
    """Both nodes run, then the second one fails, and the time to judge is over."""
    pods = await run_all(world)
    await world.kubelet.fail_pod(pods[1, 1], EndCause.PLATFORM)
    world.now_s += 60.0
