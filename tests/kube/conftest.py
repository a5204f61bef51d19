"""One suite for any API server: `make test-kube KUBECONFIG=...`. Without one it runs against the fake.

It needs an API server alone: it plays the kubelet itself, wants no controller, and leaves its namespace behind empty.
"""

import asyncio
import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ringweave.platforms.kubernetes import api_client, objects
from ringweave.platforms.kubernetes import operator as kubernetes_operator
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object
from tests.fakes.kubernetes import validation
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.fakes.kubernetes.operator_process import OperatorProcess
from tests.fakes.kubernetes.simulated_kubelet import SimulatedKubelet
from tests.polling import wait_until
from tools.kubernetes_crd import custom_resource_definition

SOON_S = 250.0
SERVICE_ACCOUNTS = api_client.ResourceKind(api_version="v1", kind="ServiceAccount", plural="serviceaccounts")
_Result = TypeVar("_Result")


class Kube:
    """An API server, a namespace of its own, and a kubelet that the test plays."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self.kubeconfig, self.namespace = kubeconfig, namespace
        self._runner = asyncio.Runner()
        self.environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self.client = KubernetesClient(lambda: api_client.connection_info(self.environ))
        self.run(self.client.__aenter__())
        self.kubelet = SimulatedKubelet(self.client, namespace)
        user = self.run(self.client.create(api_client.SELF_REVIEWS, None, {}))["status"]["userInfo"]
        self.requester = {"username": user["username"], "groups": user.get("groups") or []}

    def spec(self) -> dict[str, Any]:
        """15 on (10, 5), asked for by the user of the kubeconfig: where deploy/ is applied nobody asks for another."""
        return {
            "gpus": 15,
            "script": "train.py",
            "source": "print('hello')\n",
            "image": "example/train:1",
            "requester": self.requester,
            "nodes": [{"name": "n0", "capacity": 10}, {"name": "n1", "capacity": 5}],
        }

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self.client.__aexit__(None, None, None))
        self._runner.close()

    def job(self, name: str) -> Object | None:
        try:
            return self.run(self.client.get(api_client.TRAINING_JOBS, self.namespace, name))
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    def submit(self, name: str, **spec: Any) -> Object:
        whole = {key: value for key, value in {**self.spec(), **spec}.items() if value is not None}
        body = {"metadata": {"name": name, "namespace": self.namespace}, "spec": whole}
        return self.run(self.client.create(api_client.TRAINING_JOBS, self.namespace, body))

    def change(self, name: str, **spec: Any) -> Object:
        return self.run(self.client.patch(api_client.TRAINING_JOBS, self.namespace, name, {"spec": spec}))

    def remove(self, name: str) -> None:
        self.run(self.client.delete(api_client.TRAINING_JOBS, self.namespace, name))

    def pods(self, name: str) -> dict[tuple[int, int], Object]:
        return self.run(self.kubelet.list_pods(name))

    def left(self, name: str) -> list[str]:
        """Everything of a job that is there."""
        selector = f"{objects.JOB_LABEL}={name}"
        of_job = (api_client.PODS, api_client.CONFIG_MAPS, api_client.SECRETS, api_client.SERVICES)
        found = [
            f"{kind.kind}/{item['metadata']['name']}"
            for kind in of_job
            for item in self.run(self.client.list(kind, self.namespace, labelSelector=selector))
        ]
        return found + ([f"{objects.CRD_KIND}/{name}"] if self.job(name) else [])

    def play(
        self, name: str, until: Callable[[], bool], *, hold: frozenset[int] = frozenset(), steps: bool = True
    ) -> None:
        """Let Pods take their steps until the test sees what it waits for."""
        began_s = time.monotonic()
        while True:
            if steps:
                self.run(self.kubelet.advance_pods(name, hold=hold))
            if until():
                return
            passed_s = time.monotonic() - began_s
            if passed_s > SOON_S:
                pytest.fail(f"not in {SOON_S} s: job {self.job(name)}, pods {list(self.pods(name))}")
            time.sleep(min(0.02 + passed_s / 20, 0.25))  # each look takes the processor from what is waited for

    def in_state(self, name: str, *states: str) -> Callable[[], bool]:
        return lambda: ((self.job(name) or {}).get("status") or {}).get("state") in states

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        home = str(self.kubeconfig.parent)
        done = subprocess.run(
            ["kubectl", "--kubeconfig", str(self.kubeconfig), "-n", self.namespace, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=SOON_S,
            env={**self.environ, "HOME": home},
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def kubeconfig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    given = request.config.getoption("--kubeconfig")
    if given:
        yield Path(given).absolute()
        return
    with FakeCluster(bookmark_s=1.0) as cluster:
        yield cluster.kubeconfig(tmp_path_factory.mktemp("kube") / "config")


@pytest.fixture(scope="session")
def kube(kubeconfig: Path) -> Iterator[Kube]:
    """With the resource defined and a namespace made; nothing of it is left in the end."""
    with contextlib.closing(Kube(kubeconfig, f"ringweave-test-{secrets.token_hex(4)}")) as kube:
        _refuse_another_operator(kube)
        before = _define(kube)
        _make_namespace(kube)
        yield kube
        _remove(kube)
        name = custom_resource_definition()["metadata"]["name"]
        if before is None:
            kube.run(kube.client.delete(api_client.DEFINITIONS, None, name))
        else:
            now = kube.run(kube.client.get(api_client.DEFINITIONS, None, name))
            kube.run(kube.client.replace(api_client.DEFINITIONS, None, {**now, "spec": before["spec"]}))


def _refuse_another_operator(kube: Kube) -> None:
    """One that leads jobs of all namespaces would lead those of the tests as well."""
    for lease in kube.run(kube.client.list(api_client.LEASES, None)):
        holder = lease["spec"].get("holderIdentity")
        if lease["metadata"]["name"] == kubernetes_operator.LEASE_NAME and holder:
            where = lease["metadata"]["namespace"]
            pytest.exit(
                f"operator {holder} leads jobs here (Lease {kubernetes_operator.LEASE_NAME} in namespace {where}), "
                f"and would lead those of the tests: kubectl -n {where} scale deployment "
                f"{kubernetes_operator.LEASE_NAME} --replicas 0, and again to 1 "
                "afterwards. Where none runs any more, delete the Lease.",
                returncode=2,
            )


def _make_namespace(kube: Kube) -> None:
    for kind, where, name in (
        (api_client.NAMESPACES, None, kube.namespace),
        # Made by a controller elsewhere; Pods are refused without it.
        (SERVICE_ACCOUNTS, kube.namespace, "default"),
    ):
        try:
            # Where the cluster's own default is stricter, Pods of the tests are still taken.
            labels = {validation.ENFORCE_LABEL: "privileged"} if kind is api_client.NAMESPACES else {}
            kube.run(kube.client.create(kind, where, {"metadata": {"name": name, "labels": labels}}))
        except ApiError as error:
            if not error.already_exists:
                raise


def _remove(kube: Kube) -> None:
    """The namespace, also where there is no controller that empties it and lets it go."""
    of_jobs = (
        api_client.TRAINING_JOBS,
        api_client.PODS,
        api_client.CONFIG_MAPS,
        api_client.SECRETS,
        api_client.SERVICES,
    )
    for kind in (*of_jobs, SERVICE_ACCOUNTS, api_client.LEASES, api_client.EVENTS):
        for item in kube.run(kube.client.list(kind, kube.namespace)):
            name = item["metadata"]["name"]
            if item["metadata"].get("finalizers"):  # a test failed, and its operator is gone
                body: Object = {"metadata": {"finalizers": None}}
                kube.run(kube.client.patch(kind, kube.namespace, name, body))
            kube.run(kube.client.delete(kind, kube.namespace, name))
    kube.run(kube.client.delete(api_client.NAMESPACES, None, kube.namespace))
    try:
        found = kube.run(kube.client.get(api_client.NAMESPACES, None, kube.namespace))
        whole = {**found, "spec": {"finalizers": []}}
        kube.run(kube.client.replace(api_client.NAMESPACES, None, whole, subresource="finalize"))
    except ApiError as error:
        if not (error.is_not_found or error.is_stale):  # a controller was faster
            raise


def _define(kube: Kube) -> Object | None:
    """The resource, served; as it was before, None where it was not there."""
    wanted = custom_resource_definition()
    name = wanted["metadata"]["name"]
    known: Object | None = None
    try:
        kube.run(kube.client.create(api_client.DEFINITIONS, None, wanted))
    except ApiError as error:
        if not error.already_exists:
            raise
        known = kube.run(kube.client.get(api_client.DEFINITIONS, None, name))
        kube.run(kube.client.replace(api_client.DEFINITIONS, None, {**known, "spec": wanted["spec"]}))

    def established() -> bool:
        found = kube.run(kube.client.get(api_client.DEFINITIONS, None, name)).get("status", {})
        conditions = found.get("conditions") or ()  # null at first
        return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)

    def served() -> bool:
        """Established is said before it is served, and before it is described."""
        try:
            kube.run(kube.client.list(api_client.TRAINING_JOBS, "default"))
            described = kube.run(kube.client.request("GET", f"/openapi/v3/apis/{objects.API_VERSION}"))
        except ApiError:
            return False
        return any(name.endswith(f".{objects.CRD_KIND}") for name in described.get("components", {}).get("schemas", ()))

    for holds in (established, served):
        wait_until(holds, f"the resource is {holds.__name__}")
    return known


@pytest.fixture(scope="session")
def roles(kube: Kube) -> None:
    """Skips where the API server has no roles, and allows everybody everything."""
    attributes = {
        "namespace": kube.namespace,
        "verb": "submit",
        "group": objects.API_GROUP,
        "resource": objects.CRD_PLURAL,
    }
    spec = {"user": "nobody-knows-me", "resourceAttributes": attributes}
    review = kube.run(kube.client.create(api_client.ACCESS_REVIEWS, None, {"spec": spec}))
    if review["status"]["allowed"]:
        pytest.skip("this API server allows everybody everything (--authorization-mode=RBAC changes that)")


@pytest.fixture(scope="session")
def any_requester(kube: Kube) -> None:
    """Skips where admission policies see to it that nobody asks in another's name."""
    body = {"metadata": {"name": "another"}, "spec": {**kube.spec(), "requester": {"username": "nobody-knows-me"}}}
    try:
        kube.run(kube.client.create(api_client.TRAINING_JOBS, kube.namespace, body, dryRun="All"))
    except ApiError as error:
        pytest.skip(f"this API server refuses another requester: {error}")


@pytest.fixture(scope="session")
def operator(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """`ringweave operator` for the namespace of the tests."""
    arguments = ["--namespace", kube.namespace, "--lease-namespace", kube.namespace]
    arguments += ["--no-desk", "--identity", "test", "-v", "--lease-s", "600"]
    log = tmp_path_factory.mktemp("operator") / "log"
    with OperatorProcess(kube.kubeconfig, arguments, log) as operator:
        yield operator
        assert operator.stop() == 0, log.read_text()
    assert "a bug of ours" not in log.read_text(), log.read_text()
