"""A machine that is lost is named, with what helps, and nothing of its job is replaced before somebody has said so."""

from pathlib import Path

import pytest

from ringweave.jobs.records import EndCause
from ringweave.platforms.kubernetes import api_client
from tests.platforms.kubernetes.operating.worlds import World, play, run_all


async def lose_one(world: World) -> None:
    """Both run, the machine of n1 is lost, and n0 notices."""
    pods = await run_all(world)
    await world.kubelet.bind_pod(pods[1, 1], "gpu-7")
    await world.kubelet.lose_machine(pods[1, 1])
    await world.kubelet.fail_pod(pods[0, 1], EndCause.PEER, text="rank 0 lost its peer")
    await settle_later(world, 60.0)


async def settle_later(world: World, after_s: float) -> None:
    world.now_s += after_s
    await world.settle()
    await world.kubelet.advance_pods(world.name)
    await world.settle()


def test_a_lost_machine_is_named_and_replaced_when_somebody_says_that_it_is_off(kubeconfig: Path) -> None:
    async def test(world: World) -> None:
        await lose_one(world)
        status = (await world.job())["status"]
        assert (status["state"], status["reason"]) == ("Retrying", "MachineUnreachable")
        assert status["message"] == (
            "the machine of node n1 does not answer: its Pod was marked as not ready, but not by its own kubelet "
            "(kubectl get node gpu-7)"
        )
        remove = "kubectl -n default delete pod dark-1-1 --force, or kubectl delete node gpu-7"
        assert status["hint"] == f"Once you know that no process runs there any more, {remove}"
        assert status["nodes"][1]["reason"] == "NodeUnreachable"

        # Its taint has its Pods deleted after five minutes, and they stay.
        await world.client.delete(api_client.PODS, "default", "dark-1-1")
        await settle_later(world, 600.0)
        status = (await world.job())["status"]
        assert (status["state"], status["reason"]) == ("Retrying", "MachineUnreachable")
        assert "its Pod was to end by 20" in status["message"]
        assert set(await world.pods()) == {"dark-0-2", "dark-1-1"}, "something of it may run"

        await world.client.delete(api_client.PODS, "default", "dark-1-1", gracePeriodSeconds=0)
        await settle_later(world, 1.0)
        assert set(await world.pods()) == {"dark-0-2", "dark-1-2"}
        await settle_later(world, 1.0)
        await settle_later(world, 1.0)
        assert (await world.job())["status"]["state"] == "Running"

    play(kubeconfig, "dark", test)


@pytest.mark.parametrize(("verb", "state"), [("suspend", "Suspended"), ("stop", "Ending"), ("delete", "Deleting")])
def test_verbs_that_wait_for_a_lost_machine_say_so(kubeconfig: Path, verb: str, state: str) -> None:
    name = f"{verb}s"

    async def test(world: World) -> None:
        await lose_one(world)
        if verb == "delete":
            await world.client.delete(api_client.TRAINING_JOBS, "default", name)
        else:
            spec = {"suspend": True} if verb == "suspend" else {"stopRun": 1}
            await world.client.patch(api_client.TRAINING_JOBS, "default", name, {"spec": spec})
        await settle_later(world, 1.0)
        await settle_later(world, 600.0)
        status = (await world.job())["status"]
        assert (status["state"], status["reason"]) == (state, "MachineUnreachable")
        assert f"kubectl -n default delete pod {name}-1-1 --force" in status["hint"]
        await world.client.delete(api_client.PODS, "default", f"{name}-1-1", gracePeriodSeconds=0)
        await settle_later(world, 1.0)

    play(kubeconfig, name, test)
