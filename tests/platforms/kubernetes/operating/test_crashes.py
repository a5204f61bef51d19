"""The operator is killed (SIGKILL) right after each of its writes, every one of them; the end is the same."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.platforms.kubernetes import api_client, objects, pod_status
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object
from ringweave.testing import ranks
from tests import effort
from tests.fakes.kubernetes.crashing_operator import run_crashing_operator
from tests.fakes.kubernetes.simulated_kubelet import SimulatedKubelet

SOON_S = 250.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Scene:
    """What is seen between two steps of the Pods."""

    job: Object | None
    pods: dict[tuple[int, int], Object]

    @property
    def state(self) -> str:
        return (self.job or {}).get("status", {}).get("state", "")

    @property
    def all_run(self) -> bool:
        reports = [pod_status.agent_status(pod) for pod in self.pods.values()]
        return len(reports) == 2 and all(report and report.phase is GroupPhase.RUNNING for report in reports)


Happening = tuple[Callable[[Scene], bool], Callable[["World", Scene], Any]]


@dataclass
class World:
    """One job, its Pods, and what happens to it, in order."""

    client: KubernetesClient
    name: str
    script: list[Happening]
    kubelet: SimulatedKubelet = field(init=False)

    def __post_init__(self) -> None:
        self.kubelet = SimulatedKubelet(self.client, "default")

    async def step(self) -> Scene:
        try:
            job = await self.client.get(api_client.TRAINING_JOBS, "default", self.name)
        except ApiError:
            job = None
        scene = Scene(job, await self.kubelet.advance_pods(self.name))
        if self.script and self.script[0][0](scene):
            await self.script.pop(0)[1](self, scene)
        return scene

    async def end_all(self, scene: Scene) -> None:
        for pod in scene.pods.values():
            await self.kubelet.succeed_pod(pod)

    async def kill(self, scene: Scene) -> None:
        attempt = max(attempt for node, attempt in scene.pods if node == 1)
        await self.kubelet.fail_pod(scene.pods[1, attempt], EndCause.PLATFORM)

    async def fail_script(self, scene: Scene) -> None:
        await self.kubelet.fail_pod(scene.pods[0, 2], EndCause.PROGRAM, exit_code=3)

    async def change(self, **spec: Any) -> None:
        await self.client.patch(api_client.TRAINING_JOBS, "default", self.name, {"spec": spec})

    async def remove(self, _: Scene) -> None:
        await self.client.delete(api_client.TRAINING_JOBS, "default", self.name)


def in_state(state: str) -> Callable[[Scene], bool]:
    return lambda scene: scene.state == state


FINISHES: list[Happening] = [(lambda scene: scene.all_run, World.end_all)]
LIVES: dict[str, tuple[dict[str, Any], list[Happening], set[str]]] = {
    "replaced": (
        {"ttlSecondsAfterFinished": 0.05},
        [
            (lambda scene: scene.all_run, World.kill),
            (lambda scene: (1, 2) in scene.pods and scene.all_run, World.end_all),
        ],
        {"0-1", "1-1", "1-2"},
    ),
    "elastic": (
        {"elastic": {"min": 3}},
        [
            (lambda scene: scene.all_run, World.kill),
            (lambda scene: (1, 2) in scene.pods and scene.all_run, World.end_all),
            (in_state("Succeeded"), World.remove),
        ],
        {"0-1", "1-1", "1-2"},
    ),
    "suspended": (
        {},
        [
            (lambda scene: scene.all_run, lambda world, _: world.change(suspend=True)),
            (lambda scene: scene.state == "Suspended" and not scene.pods, lambda world, _: world.change(suspend=False)),
            (lambda scene: scene.all_run, World.end_all),
            (in_state("Succeeded"), World.remove),
        ],
        {"0-1", "1-1", "0-2", "1-2"},
    ),
    "stopped": (
        {},
        [
            (lambda scene: scene.all_run, lambda world, _: world.change(stopRun=1)),
            (in_state("Stopped"), lambda world, _: world.change(retryRun=1)),
            (lambda scene: scene.all_run, World.remove),
        ],
        {"0-1", "1-1", "0-2", "1-2"},
    ),
    "failed": (
        {
            "nodes": [
                {"name": "n0", "capacity": 3, "deletionPolicy": "keep-on-failure"},
                {"name": "n1", "capacity": 3, "maxRetries": 1},
            ]
        },
        [
            (lambda scene: scene.all_run, World.kill),
            (lambda scene: (1, 2) in scene.pods and scene.all_run, World.kill),
            (in_state("Failed"), lambda world, _: world.change(retryRun=1)),
            (lambda scene: (0, 2) in scene.pods and scene.all_run, World.fail_script),
            (in_state("Failed"), World.remove),
        ],
        {"0-1", "1-1", "1-2", "0-2", "1-3"},
    ),
}
"""By life: what differs in its spec, what happens to it, the Pods that are made (`NODE-ATTEMPT`), each once."""
DAILY = "replaced"
NUM_PARTS = 6
"""Every boundary is in one of them; in one test they would take minutes."""


@dataclass(frozen=True)
class Outcome:
    """What became of a job, and what it was charged for."""

    state: str
    run: int
    round: int
    nodes: list[tuple[str, int, int]]
    """State, current attempt, retries that it paid for."""
    conditions: dict[str, str]


def outcome_of(job: Object) -> Outcome:
    status = job["status"]
    return Outcome(
        state=status["state"],
        run=status["run"],
        round=status["round"],
        nodes=[(node["state"], node.get("attempt", 0), node.get("retries", 0)) for node in status["nodes"]],
        conditions={each["type"]: each["status"] for each in status["conditions"]},
    )


class Run:
    """A life under an operator that is killed once."""

    def __init__(self, kubeconfig: Path, life: str, crash_after: int | None, name: str = "") -> None:
        self._kubeconfig, self._crash_after = kubeconfig, crash_after
        self.spec, script, self.expected = LIVES[life]
        self.name = name or f"{life}-{crash_after}"
        self.script = list(script)

    async def live(self) -> SimulatedKubelet:
        """From submit until nothing is left."""
        environ = {"KUBECONFIG": str(self._kubeconfig)}
        async with KubernetesClient(lambda: api_client.connection_info(environ)) as client:
            world = World(client, self.name, self.script)
            body = {"metadata": {"name": self.name}, "spec": self._spec()}
            made = await client.create(api_client.TRAINING_JOBS, "default", body)
            last = asyncio.create_task(self._last_seen(client, made["metadata"]["resourceVersion"]))
            process, killed = self._start(self._crash_after), 0
            deadline_s = time.monotonic() + SOON_S
            try:
                while (scene := await world.step()).job is not None or world.script:
                    if process.exitcode is not None:
                        killed += 1
                        process = self._start(None)
                    assert time.monotonic() < deadline_s, f"{self.name} does not end: {scene.job}, {world.script}"
                    await asyncio.sleep(0.01)
            finally:
                process.kill()
                process.join()
            assert killed <= 1
            self.outcome = outcome_of(await last)
            self.was_killed = bool(killed)
            selector = f"{objects.JOB_LABEL}={self.name}"
            of_job = (api_client.PODS, api_client.CONFIG_MAPS, api_client.SECRETS, api_client.SERVICES)
            self.left = [item for kind in of_job for item in await client.list(kind, "default", labelSelector=selector)]
            return world.kubelet

    async def _last_seen(self, client: KubernetesClient, version: str) -> Object:
        """The job as it was when it was removed."""
        selected = {"watch": "true", "resourceVersion": version, "fieldSelector": f"metadata.name={self.name}"}
        async for line in client.stream_lines(api_client.TRAINING_JOBS.path("default"), selected):
            event = json.loads(line)
            if event["type"] == "DELETED":
                return event["object"]
        raise AssertionError(f"the watch of {self.name} ended")

    def _spec(self) -> dict[str, Any]:
        nodes = [{"name": "n0", "capacity": 3}, {"name": "n1", "capacity": 3}]
        requester = {"username": "admin", "groups": ["system:masters"]}
        return {
            "cpuWorkers": 6,
            "script": "a.py",
            "source": "pass",
            "nodes": nodes,
            "requester": requester,
            **self.spec,
        }

    def _start(self, crash_after: int | None) -> Any:
        key = ("default", self.name)
        process = ranks.forkserver_context().Process(
            target=run_crashing_operator, args=(str(self._kubeconfig), key, crash_after), daemon=True
        )
        process.start()
        return process


def undisturbed(kubeconfig: Path, life: str, part: int) -> Outcome:
    """How it ends where nobody is killed."""
    run = Run(kubeconfig, life, None, name=f"{life}-whole-{part}")
    asyncio.run(run.live())
    assert not run.was_killed
    return run.outcome


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("life", LIVES)
def test_killed_at_every_boundary_the_end_is_the_same(
    kubeconfig: Path, life: str, part: int, request: pytest.FixtureRequest
) -> None:
    effort.only_one_daily(request, (life, part), (DAILY, 0))
    wanted = undisturbed(kubeconfig, life, part)
    for boundary in itertools.count(part, NUM_PARTS):
        run = Run(kubeconfig, life, boundary)
        kubelet = asyncio.run(run.live())
        assert run.left == []
        assert kubelet.broken_rules == []
        made = [name.removeprefix(run.name + "-") for name, _ in kubelet.created]
        assert sorted(made) == sorted(run.expected), (
            f"killed after write {boundary}: a Pod was made twice, or not at all"
        )
        assert run.outcome == wanted, f"killed after write {boundary}"
        if not run.was_killed:
            break
    assert boundary > 15, "the life has more writes than this"
