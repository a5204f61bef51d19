"""The Pod of an attempt: what it asks of its namespace and of its node."""

from dataclasses import replace
from typing import Any

import pytest

from ringweave.errors import UsageError
from ringweave.jobs import records
from ringweave.jobs.records import CreateGroup
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms.kubernetes import operator
from ringweave.platforms.kubernetes.objects import JobOwner, PodSettings, Quantity, Toleration, worker_pod
from tests.fakes.kubernetes import validation
from tests.fakes.kubernetes.api_failures import ApiFailure

OWNER = JobOwner(name="text", namespace="team", uid="44444444-4444-4444-4444-444444444444")
RESTRICTED = {"metadata": {"labels": {validation.ENFORCE_LABEL: "restricted"}}}
PLAIN = PodSettings(image="example/train:1")


def spec_of(settings: PodSettings = PLAIN, device: str = "cuda", claim: str | None = None) -> dict[str, Any]:
    nodes = (NodeRequest(name="n0", capacity=3),)
    request = JobRequest(name="text", num_workers=3, script="a.py", nodes=nodes, device=device, claim=claim)
    job = records.new_job(request, requester="ann", counts=(3,), now=0.0)
    action = CreateGroup(node=0, attempt=1, workers=3, round=1)
    return worker_pod(job, OWNER, action, host=None, settings=settings)["spec"]


def test_with_a_user_that_is_not_root_it_may_be_in_a_restricted_namespace() -> None:
    spec = spec_of(replace(PLAIN, user=1000))
    validation.check_pod_security(RESTRICTED, {"metadata": {"name": "text-0-1"}, "spec": spec})
    assert spec["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}


def test_without_one_the_user_is_all_that_it_lacks() -> None:
    with pytest.raises(ApiFailure) as caught:
        validation.check_pod_security(RESTRICTED, {"metadata": {"name": "text-0-1"}, "spec": spec_of()})
    assert caught.value.message == (
        'pods "text-0-1" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true (pod or '
        'container "workers" must set securityContext.runAsNonRoot=true)'
    )


MUCH = replace(PLAIN, worker_cpu=Quantity.parse("1500m"), worker_memory=Quantity.parse("16Gi"))


@pytest.mark.parametrize(
    ("settings", "device", "resources"),
    [
        (PLAIN, "cuda", {"limits": {"nvidia.com/gpu": "3"}}),
        (PLAIN, "cpu", {"requests": {"cpu": "3"}}),
        (
            MUCH,
            "cuda",
            {
                "limits": {"nvidia.com/gpu": "3", "cpu": "4500m", "memory": "48Gi"},
                "requests": {"cpu": "4500m", "memory": "48Gi"},
            },
        ),
        (
            MUCH,
            "cpu",
            {"limits": {"cpu": "4500m", "memory": "48Gi"}, "requests": {"cpu": "4500m", "memory": "48Gi"}},
        ),
    ],
)
def test_what_it_asks_for_is_that_of_all_its_workers(settings: PodSettings, device: str, resources: Any) -> None:
    assert spec_of(settings, device)["containers"][0]["resources"] == resources


def test_a_claim_is_a_folder_of_all_its_pods() -> None:
    spec = spec_of(claim="mine")
    assert {"name": "claim", "persistentVolumeClaim": {"claimName": "mine"}} in spec["volumes"]
    (container,) = spec["containers"]
    assert {"name": "claim", "mountPath": "/claim"} in container["volumeMounts"]
    assert {"name": "RINGWEAVE_CLAIM", "value": "/claim"} in container["env"]
    assert "claim" not in str(spec_of())


def test_it_may_be_on_nodes_with_these_taints() -> None:
    texts = ("nvidia.com/gpu", "pool=train:NoSchedule", "spot:NoExecute")
    spec = spec_of(replace(PLAIN, tolerations=tuple(map(Toleration.parse, texts))))
    assert spec["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "pool", "operator": "Equal", "value": "train", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists", "effect": "NoExecute"},
    ]
    assert "tolerations" not in spec_of()


def test_private_registries_and_kinds_of_gpus_are_those_of_the_operator() -> None:
    kind = (("nvidia.com/gpu.product", "NVIDIA-H200"),)
    spec = spec_of(replace(PLAIN, image_pull_secrets=("registry", "mirror"), node_selector=kind))
    assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    assert spec["nodeSelector"] == dict(kind)
    assert {"imagePullSecrets", "nodeSelector"}.isdisjoint(spec_of())


GIVEN: dict[str, Any] = {
    "lease_namespace": "a",
    "lease_s": 15.0,
    "image": None,
    "gpu_resource": "nvidia.com/gpu",
    "desk": "https://desk",
    "namespaces": (),
    "workers": 8,
    "no_desk": True,
    "desk_port": 1,
    "liveness": None,
    "run_as": 1000,
    "tolerations": ("nvidia.com/gpu",),
    "node_selectors": ("nvidia.com/gpu.product=NVIDIA-H200",),
    "image_pull_secrets": ("registry",),
    "worker_cpu": "2",
    "worker_memory": None,
}


def test_the_operator_is_told_them_on_its_command_line() -> None:
    pods = operator.operator_settings(GIVEN, identity="me").pods
    assert (pods.user, pods.tolerations) == (1000, (Toleration(key="nvidia.com/gpu"),))
    assert pods.node_selector == (("nvidia.com/gpu.product", "NVIDIA-H200"),)
    assert pods.image_pull_secrets == ("registry",)
    assert (pods.worker_cpu, pods.worker_memory) == (Quantity(number=2, suffix=""), None)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("worker_cpu", "1.5", r"--worker-cpu: '1\.5', expected a whole number and a unit: 4, 500m, 16Gi\. Write it in"),
        ("worker_memory", "16GB", r"--worker-memory: '16GB', expected a whole number and a unit"),
        ("node_selectors", ("gpu",), r"--node-selector: 'gpu', expected KEY=VALUE\. Write it in"),
        ("tolerations", ("a:Never",), r"--toleration: 'a:Never', expected KEY\[=VALUE\]\[:EFFECT\]\. Write it in"),
    ],
)
def test_what_is_no_amount_and_no_taint_is_refused(option: str, value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        operator.operator_settings({**GIVEN, option: value}, identity="me")
