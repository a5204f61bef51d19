"""The roles and policies of deploy/ as they are: enough for the operator, and who asks is who the server says."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ringweave.launch.kubernetes.api import connecting, kinds
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.objects.pods import PodSettings
from ringweave.launch.kubernetes.operating import running
from ringweave.launch.kubernetes.operating.acting import Actor
from ringweave.launch.kubernetes.operating.admission import Admission
from ringweave.launch.kubernetes.operating.controller import Controller
from ringweave.launch.kubernetes.operating.leading import Leader, LeaseSettings
from ringweave.launch.kubernetes.operating.running import OperatorSettings
from ringweave.testing.kubernetes.cluster import FakeCluster
from ringweave.testing.kubernetes.kubelet import PlayedKubelet

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


def client_of(path: Path) -> Client:
    return Client(lambda: connecting.connection({"KUBECONFIG": str(path)}))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeCluster, Path, Path]]:
    """A cluster with all of deploy/base but the Deployment itself; the folder of its kubeconfigs, and the admin's."""
    folder = tmp_path_factory.mktemp("deployed")
    with FakeCluster() as cluster:
        admin = cluster.kubeconfig(folder / "admin")
        asyncio.run(_apply(admin))
        yield cluster, folder, admin


async def _apply(admin: Path, *files: Path, without: tuple[tuple[str, str], ...] = ()) -> None:
    """Everything of deploy/base and of other files, without some (kind, name)."""
    base = (DEPLOY / f"{name}.yaml" for name in ("namespace", "trainingjobs", "roles", "requester", "operator"))
    async with client_of(admin) as client:
        for path in (*base, *files):
            for body in YAML(typ="safe", pure=True).load_all(path.read_text()):
                if (body["kind"], body["metadata"]["name"]) in without:
                    continue
                kind = kinds.Kind(
                    api_version=body["apiVersion"],
                    kind=body["kind"],
                    plural=PLURALS.get(body["kind"], body["kind"].lower() + "s"),
                    is_namespaced="namespace" in body["metadata"],
                )
                await client.create(kind, body["metadata"].get("namespace"), body)


def test_the_operators_roles_are_enough_for_a_whole_life(deployed: tuple[FakeCluster, Path, Path]) -> None:
    cluster, folder, admin = deployed
    account = cluster.kubeconfig(folder / "account", user=ACCOUNT, groups=())

    async def live() -> None:
        async with client_of(account) as client, client_of(admin) as people:
            lease = LeaseSettings(namespace="ringweave-system", identity="me")
            leader = Leader(client, lease, time.time)
            await leader.acquire()
            actor = Actor(client, PodSettings(), time.time)
            controller = Controller(client, actor, Admission(client, PodSettings(), time.time), time.time)
            kubelet = PlayedKubelet(people, "default")
            requester = {"username": "admin", "groups": ["system:masters"]}
            body = {"metadata": {"name": "whole"}, "spec": {**SPEC, "requester": requester}}
            await people.create(kinds.TRAINING_JOBS, "default", body)
            for _ in range(30):
                while (await controller.reconcile(("default", "whole"))).again:
                    pass
                pods = await kubelet.step("whole")
                job = await people.get(kinds.TRAINING_JOBS, "default", "whole")
                state = job["status"]["state"]
                if state == "Running":
                    for pod in pods.values():
                        await kubelet.succeed(pod)
                if state == "Succeeded":
                    break
            assert state == "Succeeded"
            await people.delete(kinds.TRAINING_JOBS, "default", "whole")
            while (await controller.reconcile(("default", "whole"))).again:
                pass
            with pytest.raises(ApiError, match="not found"):
                await people.get(kinds.TRAINING_JOBS, "default", "whole")
            assert await people.list(kinds.CONFIG_MAPS, "default") == []
            await leader.release()

    asyncio.run(live())


def test_with_rights_in_one_namespace_the_operator_leads_jobs_there_and_sees_nothing_elsewhere(tmp_path: Path) -> None:
    overlay = DEPLOY.parent / "namespaced"
    everywhere = YAML(typ="safe", pure=True).load((overlay / "everywhere.yaml").read_text())
    removed = (everywhere["kind"], everywhere["metadata"]["name"])
    with FakeCluster() as cluster:
        admin = cluster.kubeconfig(tmp_path / "admin")
        account = cluster.kubeconfig(tmp_path / "account", user=ACCOUNT, groups=())

        async def live() -> None:
            async with client_of(admin) as people, client_of(account) as client:
                await people.create(kinds.NAMESPACES, None, {"metadata": {"name": "team"}})
                await _apply(admin, overlay / "binding.yaml", without=(removed,))
                for namespace in ("default", "ringweave-system"):
                    with pytest.raises(ApiError, match="forbidden"):
                        await client.get(kinds.SECRETS, namespace, "any")
                lease = LeaseSettings(namespace="ringweave-system", identity="me")
                settings = OperatorSettings(lease=lease, namespaces=("team",), desk_host="127.0.0.1", desk_port=0)
                connect = running.connector({"KUBECONFIG": str(account)}, None)
                operator = asyncio.create_task(running.operate(connect, settings))
                requester = {"username": "admin", "groups": ["system:masters"]}
                body = {"metadata": {"name": "whole"}, "spec": {**SPEC, "requester": requester}}
                await people.create(kinds.TRAINING_JOBS, "team", body)
                kubelet = PlayedKubelet(people, "team")
                try:
                    async with asyncio.timeout(SOON_S):
                        while not await is_in_state(people, "Running"):
                            await kubelet.step("whole")
                            await asyncio.sleep(0.02)
                finally:
                    operator.cancel()
                    await asyncio.gather(operator, return_exceptions=True)

        asyncio.run(live())


async def is_in_state(people: Client, state: str) -> bool:
    found = await people.get(kinds.TRAINING_JOBS, "team", "whole")
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
    of_people = kinds.Kind(api_version="rbac.authorization.k8s.io/v1", kind="RoleBinding", plural="rolebindings")

    async def ask() -> None:
        async with client_of(admin) as people, client_of(ann) as client:
            await people.create(of_people, "default", binding)
            try:
                spec = {**SPEC, **({"requester": requester} if requester else {})}
                await client.create(kinds.TRAINING_JOBS, "default", {"metadata": {"name": "hers"}, "spec": spec})
                await people.delete(kinds.TRAINING_JOBS, "default", "hers")
            finally:
                await people.delete(of_people, "default", "ann")

    if text is None:
        asyncio.run(ask())
        return
    with pytest.raises(ApiError, match=text):
        asyncio.run(ask())
