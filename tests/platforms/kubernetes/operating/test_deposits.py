"""What agents leave at the desk for others: credentials of a round, the log of a Pod that somebody removes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ringweave.jobs import records
from ringweave.platforms.kubernetes import api_client, job_resource, objects, pod_logs
from ringweave.platforms.kubernetes.agent_gateway import (
    CredentialStore,
    RoundPassedError,
    Uploader,
    UploadRejectedError,
)
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import JobOwner

SPEC: dict[str, Any] = {
    "cpuWorkers": 6,
    "script": "a.py",
    "source": "pass",
    "mode": "ps-hra",
    "nodes": [{"name": "n0", "capacity": 3}, {"name": "n1", "capacity": 3}],
    "requester": {"username": "admin", "groups": ["system:masters"]},
}
FIRST = {"worker-0.0": "zero", "worker-0.1": "nought", "worker-1.0": "one", "worker-1.1": "ace"}
SECOND = {"worker-0.0": "nil", "worker-0.1": "nix", "worker-1.0": "I", "worker-1.1": "i"}


class Scene:
    """An admitted job, and the desk's deposits."""

    def __init__(self, client: KubernetesClient, job: Object) -> None:
        self.client, self.job = client, job
        self.deposits, self.owner = CredentialStore(client), JobOwner.from_resource(job)

    def by(self, node: int = 0, attempt: int = 1) -> Uploader:
        return Uploader(owner=self.owner, node=node, attempt=attempt)

    async def lodged(self, round_: int) -> dict[str, str] | None:
        """Take the next credentials of node 0."""
        return await self.deposits.take_credentials(self.by(), round_, ["worker-0", "worker-1"])

    async def logs(self) -> list[str]:
        selector = f"{self.owner.selector},{pod_logs.LOG_LABEL}"
        found = await self.client.list(api_client.CONFIG_MAPS, "default", labelSelector=selector)
        return [each["data"][pod_logs.LOG_KEY] for each in found]

    async def add_pod(self, **annotations: str) -> None:
        labels = {objects.NODE_LABEL: "0", objects.ATTEMPT_LABEL: "1"}
        metadata = {
            **self.owner.metadata(objects.pod_name(self.owner.name, 0, 1), **labels),
            "annotations": annotations,
        }
        spec = {"containers": [{"name": "workers", "image": "a"}]}
        await self.client.create(api_client.PODS, "default", {"metadata": metadata, "spec": spec})

    async def remove(self) -> None:
        await self.client.delete(api_client.TRAINING_JOBS, "default", self.owner.name)


def play(kubeconfig: Path, name: str, act: Callable[[Scene], Awaitable[None]], **spec: Any) -> None:
    """With a job of its own, of which nothing is left afterwards."""

    async def run() -> None:
        async with KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})) as client:
            metadata = {"name": name, "finalizers": [objects.FINALIZER]}
            made = await client.create(api_client.TRAINING_JOBS, "default", {"metadata": metadata, "spec": SPEC | spec})
            scene = Scene(client, await admitted(client, made))
            try:
                await act(scene)
            finally:
                await clear(client, scene.owner)

    asyncio.run(run())


async def admitted(client: KubernetesClient, made: Object) -> Object:
    request = job_resource.request_from_resource(made)
    job = records.new_job(request, requester="admin", counts=(3, 3), now=0.0)
    status = job_resource.status_from_job(job, before={}, generation=1, events=(), now=0.0)
    return await client.replace(api_client.TRAINING_JOBS, "default", {**made, "status": status}, subresource="status")


async def clear(client: KubernetesClient, owner: JobOwner) -> None:
    for kind in (api_client.SECRETS, api_client.CONFIG_MAPS, api_client.PODS):
        for found in await client.list(kind, "default", labelSelector=owner.selector):
            await client.delete(kind, "default", found["metadata"]["name"])
    await client.delete(api_client.TRAINING_JOBS, "default", owner.name)
    await client.patch(api_client.TRAINING_JOBS, "default", owner.name, {"metadata": {"finalizers": []}})


def test_credentials_are_those_of_the_round_and_of_who_asks(kubeconfig: Path) -> None:
    async def act(scene: Scene) -> None:
        assert await scene.lodged(1) is None
        await scene.deposits.store_credentials(scene.by(), 1, 0, FIRST)
        assert await scene.lodged(1) == {"worker-0": "zero", "worker-1": "one"}
        assert await scene.lodged(1) == {"worker-0": "nought", "worker-1": "ace"}, "an answer was lost"
        await scene.deposits.store_credentials(scene.by(), 1, 0, FIRST)  # an answer was lost
        await scene.deposits.store_credentials(scene.by(attempt=2), 2, 0, SECOND)
        with pytest.raises(RoundPassedError, match=r"round 1 of job lodges is over: round 2 has begun"):
            await scene.lodged(1)
        assert await scene.lodged(3) is None, "not yet"
        assert await scene.lodged(2) == {"worker-0": "nil", "worker-1": "I"}
        with pytest.raises(
            UploadRejectedError, match="credentials of round 1: credentials of a later attempt are stored"
        ):
            await scene.deposits.store_credentials(scene.by(), 1, 0, FIRST)
        with pytest.raises(UploadRejectedError):
            await scene.deposits.store_credentials(scene.by(attempt=1), 2, 0, FIRST)
        assert await scene.lodged(2) == {"worker-0": "nix", "worker-1": "i"}

    play(kubeconfig, "lodges", act)


def test_spare_credentials_are_used_once_each_and_are_those_of_the_round(kubeconfig: Path) -> None:
    async def act(scene: Scene) -> None:
        lives = {"worker-3.0": "a", "worker-3.1": "b", "worker-4.0": "c", "worker-4.1": "d", "coordinator-1.0": "e"}
        second = scene.by(node=1)
        assert await scene.deposits.take_credentials(second, 1, ["worker-3"]) is None, "not yet"
        await scene.deposits.store_credentials(scene.by(), 1, 1, lives)
        await scene.deposits.store_credentials(scene.by(), 1, 1, lives)  # an answer was lost
        assert await scene.deposits.take_credentials(second, 1, ["worker-3", "worker-4"]) == {
            "worker-3": "a",
            "worker-4": "c",
        }
        assert await scene.deposits.take_credentials(second, 1, ["coordinator-1"]) == {"coordinator-1": "e"}
        assert await scene.deposits.take_credentials(second, 1, ["worker-3", "worker-4"]) == {
            "worker-3": "b",
            "worker-4": "d",
        }
        text = r"round 1 of job spares: no credentials are left for coordinator-1, worker-3"
        with pytest.raises(RoundPassedError, match=text):
            await scene.deposits.take_credentials(second, 1, ["worker-3", "coordinator-1"])
        await scene.deposits.store_credentials(scene.by(attempt=2), 2, 1, lives)
        with pytest.raises(RoundPassedError, match=r"round 1 of job spares is over: round 2 has begun"):
            await scene.deposits.take_credentials(second, 1, ["worker-3"])
        with pytest.raises(
            UploadRejectedError, match="credentials of round 1: credentials of a later attempt are stored"
        ):
            await scene.deposits.store_credentials(scene.by(), 1, 1, lives)
        with pytest.raises(
            UploadRejectedError, match="credentials of node 2: job spares has no such node, or needs none"
        ):
            await scene.deposits.store_credentials(scene.by(), 2, 2, lives)

    play(kubeconfig, "spares", act, elastic={"min": 3}, mode="auto")


def test_two_agents_that_take_at_once_get_different_ones(kubeconfig: Path) -> None:
    """As one that is cut off and the one in its place: who is slower is told to ask again."""

    async def act(scene: Scene) -> None:
        lives = {f"worker-0.{life}": f"text {life}" for life in range(8)}
        await scene.deposits.store_credentials(scene.by(), 1, 0, lives)
        asked = [scene.deposits.take_credentials(scene.by(), 1, ["worker-0"]) for _ in range(4)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        texts = [each["worker-0"] for each in found if isinstance(each, dict)]
        assert texts
        assert len(set(texts)) == len(texts)
        assert all(each.is_stale for each in found if isinstance(each, ApiError))
        assert len(texts) + sum(isinstance(each, ApiError) for each in found) == 4

    play(kubeconfig, "races", act, elastic={"min": 3}, mode="auto")


def test_somebody_elses_secret_stays(kubeconfig: Path) -> None:
    async def act(scene: Scene) -> None:
        body = {
            "metadata": {"name": objects.credential_pool_name(scene.owner.name, 0), "namespace": "default"},
            "stringData": {"a": "b"},
        }
        made = await scene.client.create(api_client.SECRETS, "default", body)
        text = r"Secret theirs-credentials-0: 'an object of another owner', expected none, or one of job theirs"
        with pytest.raises(UploadRejectedError, match=text):
            await scene.deposits.store_credentials(scene.by(), 1, 0, FIRST)
        await scene.client.delete(api_client.SECRETS, "default", made["metadata"]["name"])

    play(kubeconfig, "theirs", act)


def test_the_log_of_a_pod_that_somebody_removes_is_kept_once(kubeconfig: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.deposits.archive_log(scene.by(), "[0] loss 1\n[0] loss 0.5")
        assert await scene.logs() == ["[0] loss 1\n[0] loss 0.5"]
        await scene.deposits.archive_log(scene.by(), "[0] something else")
        assert await scene.logs() == ["[0] loss 1\n[0] loss 0.5"], "what the operator kept itself is whole"

    play(kubeconfig, "removed", act)


def test_the_log_of_a_pod_that_was_stopped_and_stays_is_the_kubelets(kubeconfig: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.add_pod(**{objects.STOPPED_ANNOTATION: "true"})
        await scene.deposits.archive_log(scene.by(), "[0] loss 1")
        assert await scene.logs() == []

    play(kubeconfig, "stays", act)


def test_for_a_job_that_is_being_removed_nothing_is_made(kubeconfig: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.remove()
        with pytest.raises(UploadRejectedError, match="job goes: it is being removed"):
            await scene.deposits.store_credentials(scene.by(), 1, 0, FIRST)
        with pytest.raises(UploadRejectedError, match="job goes: it is being removed"):
            await scene.deposits.archive_log(scene.by(), "[0] loss 1")
        assert (await scene.lodged(1), await scene.logs()) == (None, [])

    play(kubeconfig, "goes", act)


def test_what_was_made_while_a_job_was_cleared_away_goes_too(kubeconfig: Path) -> None:
    async def act(scene: Scene) -> None:
        create = scene.client.create

        async def create_late(
            kind: api_client.ResourceKind, namespace: str | None, body: Object, **params: str
        ) -> Object:
            made = await create(kind, namespace, body, **params)
            await scene.remove()
            return made

        scene.client.create = create_late  # type: ignore[method-assign]
        with pytest.raises(UploadRejectedError):
            await scene.deposits.store_credentials(scene.by(), 1, 0, FIRST)
        assert await scene.lodged(1) is None

    play(kubeconfig, "late", act)
