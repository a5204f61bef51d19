"""Pods of which the API server says what nobody expects hold up no job, and no deletion."""

from pathlib import Path

from ringweave.platforms.kubernetes import api_client
from tests.platforms.kubernetes.operating.worlds import World, play, run_all


def test_a_container_that_the_kubelet_has_lost_is_replaced(kubeconfig: Path) -> None:
    async def test(world: World) -> None:
        pods = await run_all(world)
        await world.kubelet.lose_container(pods[1, 1])
        found = await world.kubelet.list_pods("unknown")
        assert found[1, 1]["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] is None
        world.now_s += 60.0
        await world.settle()
        assert set(await world.kubelet.list_pods("unknown")) == {(0, 1), (1, 2)}
        job = await world.job()
        assert [node["retries"] for node in job["status"]["nodes"]] == [0, 1]
        assert "node n1 failed (ContainerStatusUnknown, exit code 137), retry 1 of" in job["status"]["message"]

    play(kubeconfig, "unknown", test)


def test_a_job_with_such_a_pod_can_be_deleted(kubeconfig: Path) -> None:
    async def test(world: World) -> None:
        pods = await run_all(world)
        await world.kubelet.lose_container(pods[0, 1])
        await world.client.delete(api_client.TRAINING_JOBS, "default", "odd")
        await world.settle()
        assert await world.pods() == []
        assert await world.client.list(api_client.TRAINING_JOBS, "default") == []

    play(kubeconfig, "odd", test)
