"""The roles and policies of deploy/ as they are: enough for the operator, and who asks is who the server says."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes import operator as kubernetes_operator
from ringweave.platforms.kubernetes.action_executor import ActionExecutor
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient
from ringweave.platforms.kubernetes.objects import PodSettings
from ringweave.platforms.kubernetes.operator import LeaderElection, LeaseSettings, OperatorSettings
from ringweave.platforms.kubernetes.reconciler import JobAdmission, TrainingJobReconciler
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.fakes.kubernetes.simulated_kubelet import SimulatedKubelet

DEPLOY = Path(__file__).parents[4] / "deploy" / "base"
ACCOUNT = "system:serviceaccount:ringweave-system:ringweave-operator"
SOON_S = 250.0
PLURALS = {"ValidatingAdmissionPolicy": "validatingadmissionpolicies"}
SPEC: dict[str, Any] = {
    "cpuWorkers": 6,
    "script": "a.py",
    "source": "pass",
    "image": "example/train:1",
    "nodes": [{"name": "n0", "capacity": 3}, {"name": "n1", "capacity": 3}],
}


def client_of(path: Path) -> KubernetesClient:
    return KubernetesClient(lambda: api_client.connection_info({"KUBECONFIG": str(path)}))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeCluster, Path, Path]]:
    """A cluster with all of deploy/base but the Deployment itself; the folder of its kubeconfigs, and the admin's."""
    folder = tmp_path_factory.mktemp("deployed")
    with FakeCluster() as cluster:
        admin = cluster.kubeconfig(folder / "admin")
        asyncio.run(_apply(admin))
        yield cluster, folder, admin


async def _apply(admin: Path) -> None:
    """Create everything of deploy/base."""
    base = (DEPLOY / f"{name}.yaml" for name in ("namespace", "trainingjobs", "roles", "requester", "operator"))
    async with client_of(admin) as client:
        for path in base:
            for body in YAML(typ="safe", pure=True).load_all(path.read_text()):
                await client.create(kind_of(body), body["metadata"].get("namespace"), body)


def kind_of(body: dict[str, Any]) -> api_client.ResourceKind:
    return api_client.ResourceKind(
        api_version=body["apiVersion"],
        kind=body["kind"],
        plural=PLURALS.get(body["kind"], body["kind"].lower() + "s"),
        is_namespaced="namespace" in body["metadata"],
    )


async def _apply_namespaced(admin: Path) -> None:
    """Apply deploy/namespaced where deploy/base is, as kubectl does: create what is new, change what is there."""
    read = YAML(typ="safe", pure=True).load
    overlay = DEPLOY.parent / "namespaced"
    whole = read((overlay / "kustomization.yaml").read_text())
    patch = next(each for each in whole["patches"] if each["target"]["kind"] == "ClusterRoleBinding")
    ((operation),) = read(patch["patch"])
    assert (operation["op"], operation["path"]) == ("replace", "/subjects")
    binding = read((overlay / "binding.yaml").read_text())
    kind = kind_of({"apiVersion": binding["apiVersion"], "kind": "ClusterRoleBinding", "metadata": {}})
    async with client_of(admin) as client:
        await client.patch(kind, None, patch["target"]["name"], {"subjects": operation["value"]})
        await client.create(kind_of(binding), binding["metadata"]["namespace"], binding)
        bound = [each for each in await client.list(kind, None) if each.get("subjects")]
    wide = [each["roleRef"]["name"] for each in bound if each["subjects"][0].get("name") == "ringweave-operator"]
    assert wide == ["ringweave-operator"], "which may ask for access reviews, and read nothing"


def test_the_operators_roles_are_enough_for_a_whole_life(deployed: tuple[FakeCluster, Path, Path]) -> None:
    cluster, folder, admin = deployed
    account = cluster.kubeconfig(folder / "account", user=ACCOUNT, groups=())

    async def live() -> None:
        async with client_of(account) as client, client_of(admin) as people:
            lease = LeaseSettings(namespace="ringweave-system", identity="me")
            leader = LeaderElection(client, lease, time.time)
            await leader.wait_acquired()
            actor = ActionExecutor(client, PodSettings(), time.time)
            controller = TrainingJobReconciler(client, actor, JobAdmission(client, PodSettings(), time.time), time.time)
            kubelet = SimulatedKubelet(people, "default")
            requester = {"username": "admin", "groups": ["system:masters"]}
            body = {"metadata": {"name": "whole"}, "spec": {**SPEC, "requester": requester}}
            await people.create(api_client.TRAINING_JOBS, "default", body)
            for _ in range(30):
                while (await controller.reconcile(("default", "whole"))).requeue:
                    pass
                pods = await kubelet.advance_pods("whole")
                job = await people.get(api_client.TRAINING_JOBS, "default", "whole")
                state = job["status"]["state"]
                if state == "Running":
                    for pod in pods.values():
                        await kubelet.succeed_pod(pod)
                if state == "Succeeded":
                    break
            assert state == "Succeeded"
            await people.delete(api_client.TRAINING_JOBS, "default", "whole")
            while (await controller.reconcile(("default", "whole"))).requeue:
                pass
            with pytest.raises(ApiError, match="not found"):
                await people.get(api_client.TRAINING_JOBS, "default", "whole")
            assert await people.list(api_client.CONFIG_MAPS, "default") == []
            await leader.release()

    asyncio.run(live())


def test_with_rights_in_one_namespace_the_operator_leads_jobs_there_and_sees_nothing_elsewhere(tmp_path: Path) -> None:
    with FakeCluster() as cluster:
        admin = cluster.kubeconfig(tmp_path / "admin")
        account = cluster.kubeconfig(tmp_path / "account", user=ACCOUNT, groups=())

        async def live() -> None:
            async with client_of(admin) as people, client_of(account) as client:
                await people.create(api_client.NAMESPACES, None, {"metadata": {"name": "team"}})
                await _apply(admin)
                await _apply_namespaced(admin)
                for namespace in ("default", "ringweave-system"):
                    with pytest.raises(ApiError, match="forbidden"):
                        await client.get(api_client.SECRETS, namespace, "any")
                lease = LeaseSettings(namespace="ringweave-system", identity="me")
                settings = OperatorSettings(lease=lease, namespaces=("team",), gateway_host="127.0.0.1", gateway_port=0)
                connect = kubernetes_operator.connector({"KUBECONFIG": str(account)}, None)
                operator = asyncio.create_task(kubernetes_operator.run_operator(connect, settings))
                requester = {"username": "admin", "groups": ["system:masters"]}
                body = {"metadata": {"name": "whole"}, "spec": {**SPEC, "requester": requester}}
                await people.create(api_client.TRAINING_JOBS, "team", body)
                kubelet = SimulatedKubelet(people, "team")
                try:
                    async with asyncio.timeout(SOON_S):
                        while not await is_in_state(people, "Running"):
                            await kubelet.advance_pods("whole")
                            await asyncio.sleep(0.02)
                finally:
                    operator.cancel()
                    await asyncio.gather(operator, return_exceptions=True)

        asyncio.run(live())


async def is_in_state(people: KubernetesClient, state: str) -> bool:
    found = await people.get(api_client.TRAINING_JOBS, "team", "whole")
    return found.get("status", {}).get("state") == state


@pytest.mark.parametrize(
    ("requester", "text"),
    [
        ({"username": "bob"}, "spec.requester.username has to be ann, who asks"),
        (None, "spec.requester.username has to be ann, who asks"),
        ({"username": "ann", "groups": ["system:masters"]}, "a group that the user is not in"),
        ({"username": "ann", "groups": ["team"]}, None),
        ({"username": "ann"}, None),
    ],
)
def test_nobody_can_ask_as_somebody_else(
    deployed: tuple[FakeCluster, Path, Path], requester: dict[str, Any] | None, text: str | None
) -> None:
    cluster, folder, admin = deployed
    ann = cluster.kubeconfig(folder / "ann", user="ann", groups=("team",))
    binding = {
        "metadata": {"name": "ann"},
        "roleRef": {"kind": "ClusterRole", "name": "ringweave-user"},
        "subjects": [{"kind": "Group", "name": "team"}],
    }
    of_people = api_client.ResourceKind(
        api_version="rbac.authorization.k8s.io/v1", kind="RoleBinding", plural="rolebindings"
    )

    async def ask() -> None:
        async with client_of(admin) as people, client_of(ann) as client:
            await people.create(of_people, "default", binding)
            try:
                spec = {**SPEC, **({"requester": requester} if requester else {})}
                await client.create(api_client.TRAINING_JOBS, "default", {"metadata": {"name": "hers"}, "spec": spec})
                await people.delete(api_client.TRAINING_JOBS, "default", "hers")
            finally:
                await people.delete(of_people, "default", "ann")

    if text is None:
        asyncio.run(ask())
        return
    with pytest.raises(ApiError, match=text):
        asyncio.run(ask())
