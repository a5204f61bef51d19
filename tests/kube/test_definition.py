"""The resource as the API server holds it: defaults, what it refuses and in which words, and `kubectl explain`."""

import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ringweave.jobs import split as jobs_split
from ringweave.platforms.kubernetes import api_client, objects
from ringweave.platforms.kubernetes.api_client import ApiError, Object
from tests.kube.conftest import Kube

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
NODE = {"name": "n0", "capacity": 10}
ILLEGAL: Mapping[str, tuple[dict[str, Any], str]] = {
    "no total": ({"gpus": None}, "exactly one of gpus and cpuWorkers is required"),
    "two totals": ({"cpuWorkers": 3}, "exactly one of gpus and cpuWorkers is required"),
    "too few for a ring": ({"gpus": 2}, "a total of 2 is less than the 3 of minPerNode"),
    "no room": ({"gpus": 16}, "a total of 16 is more than the 15"),
    "only small nodes": ({"gpus": 3, "nodes": [{**NODE, "capacity": 2}]}, "a total of 3 is more than the 0"),
    "no split": ({"gpus": 11, "minPerNode": 6, "nodes": [NODE, {"name": "b", "capacity": 10}]}, "no split gives every"),
    "no nodes": ({"nodes": []}, "spec.nodes"),
    "nodes missing": ({"nodes": None}, "spec.nodes: Required value"),
    "a name twice": ({"nodes": [NODE, NODE]}, "Duplicate value"),
    "a node's name": ({"nodes": [{**NODE, "name": "No"}]}, r"spec.nodes\[0\].name"),
    "a node's name too long": ({"nodes": [{**NODE, "name": "n" * 64}]}, r"spec.nodes\[0\].name: Too long"),
    "capacity": ({"nodes": [{**NODE, "capacity": -1}]}, r"spec.nodes\[0\].capacity"),
    "capacity as text": ({"nodes": [{**NODE, "capacity": "10"}]}, r"must be of type integer"),
    "retries": ({"nodes": [{**NODE, "maxRetries": -1}]}, r"spec.nodes\[0\].maxRetries"),
    "policy": ({"nodes": [{**NODE, "deletionPolicy": "perhaps"}]}, "supported values"),
    "mode": ({"mode": "fast"}, "supported values"),
    "ttl": ({"ttlSecondsAfterFinished": -1}, "spec.ttlSecondsAfterFinished"),
    "no script": ({"script": ""}, "spec.script"),
    "no program": ({"script": None}, "exactly one of script, module and command is required"),
    "two programs": ({"command": "bash"}, "exactly one of script, module and command is required"),
    "source of a module": ({"script": None, "module": "m", "source": "pass"}, "source is the text of a script"),
    "schedule": ({"schedule": "rings"}, "supported values"),
    "order": ({"order": "blok"}, "spec.order"),
    "tuning as text": ({"tuning": "no"}, "must be of type boolean"),
    "script on two lines": ({"script": "a\nb"}, "spec.script"),
    "a reserved variable": ({"environment": [{"name": "RINGWEAVE_X", "value": "1"}]}, "begin with RINGWEAVE_"),
    "a variable's name": ({"environment": [{"name": "1X", "value": "1"}]}, r"spec.environment\[0\].name"),
    "a variable twice": ({"environment": [{"name": "X", "value": "1"}] * 2}, "Duplicate value"),
    "source and directory": ({"directory": "/app"}, "source and directory exclude each other"),
    "minimum": ({"minPerNode": 0}, "spec.minPerNode"),
    "elastic with none": ({"elastic": {"min": 0}}, r"spec.elastic.min"),
    "elastic without min": ({"elastic": {}}, r"spec.elastic.min: Required value"),
    "elastic as a number": ({"elastic": 3}, r"spec.elastic.*must be of type object"),
    "elastic, more than are left": (
        {"elastic": {"min": 11}},
        r"elastic.min of 11 is more than the 10 without the smallest node",
    ),
    "elastic, more than all": (
        {"elastic": {"min": 16}},
        r"elastic.min of 16 is more than the 10 without the smallest node",
    ),
    "elastic, and one node gets all": (
        {"elastic": {"min": 16}, "nodes": [{**NODE, "capacity": 15}, {"name": "b", "capacity": 5}]},
        "elastic.min is more than the total, which one node runs: write the total, or less",
    ),
}


def dry(kube: Kube, name: str, spec: Mapping[str, Any], **params: str) -> Object:
    body = {"metadata": {"name": name}, "spec": {key: value for key, value in spec.items() if value is not None}}
    return kube.run(kube.client.create(api_client.TRAINING_JOBS, kube.namespace, body, dryRun="All", **params))


def test_defaults_are_filled_in(kube: Kube) -> None:
    spec = dry(kube, "defaults", kube.spec())["spec"]
    assert spec["nodes"][1] == {"name": "n1", "capacity": 5, "maxRetries": 3, "deletionPolicy": "delete"}
    told = {key: spec[key] for key in ("minPerNode", "mode", "suspend", "stopRun", "retryRun", "arguments")}
    assert told == {
        "minPerNode": 3,
        "mode": "auto",
        "suspend": False,
        "stopRun": 0,
        "retryRun": 0,
        "arguments": [],
    }


def test_the_manifest_of_the_examples_is_legal_to_the_last_field(kube: Kube) -> None:
    manifest = YAML(typ="safe").load(EXAMPLES / "text.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == (objects.API_VERSION, objects.CRD_KIND)
    spec = dry(kube, manifest["metadata"]["name"], manifest["spec"], fieldValidation="Strict")["spec"]
    assert [node["maxRetries"] for node in spec["nodes"]] == [3, 1]


def test_the_manifest_of_an_elastic_job_is_legal(kube: Kube) -> None:
    manifest = YAML(typ="safe").load(EXAMPLES / "elastic.yaml")
    spec = dry(kube, manifest["metadata"]["name"], manifest["spec"], fieldValidation="Strict")["spec"]
    assert spec["elastic"] == {"min": 4, "spares": 0}
    assert {path.name for path in EXAMPLES.iterdir()} == {"text.yaml", "elastic.yaml"}, "all of them are here"


def test_an_unknown_field_is_pruned_or_refused(kube: Kube) -> None:
    assert "gpu" not in dry(kube, "pruned", {**kube.spec(), "gpu": 3})["spec"]
    with pytest.raises(ApiError, match=r'unknown field "spec\.gpu"'):
        dry(kube, "pruned", {**kube.spec(), "gpu": 3}, fieldValidation="Strict")


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_request_is_refused_before_it_is_stored(kube: Kube, case: str) -> None:
    changes, text = ILLEGAL[case]
    with pytest.raises(ApiError, match=text) as caught:
        dry(kube, "illegal", {**kube.spec(), **changes})
    assert caught.value.status == 422


@pytest.mark.parametrize("name", ["Text", "1text", "text-", "a" * 41, "te.xt"])
def test_an_illegal_name_is_refused(kube: Kube, name: str) -> None:
    with pytest.raises(ApiError, match=r"metadata\.name"):
        dry(kube, name, kube.spec())


def cases() -> Iterator[tuple[int, list[int], int]]:
    generator = random.Random(7)
    for _ in range(60):
        capacities = [generator.randint(0, 9) for _ in range(generator.randint(1, 5))]
        yield generator.randint(1, sum(capacities) + 2), capacities, generator.choice([1, 2, 3, 3, 4])


def is_accepted(kube: Kube, spec: Mapping[str, Any]) -> bool:
    try:
        dry(kube, "feasible", spec)
    except ApiError as error:
        if error.status != 422:
            raise
        return False
    return True


def test_the_server_accepts_just_what_can_be_split(kube: Kube) -> None:
    for total, capacities, least in cases():
        nodes = [{"name": f"n{index}", "capacity": capacity} for index, capacity in enumerate(capacities)]
        expected = jobs_split.split_workers(total, capacities, min_per_node=least).is_feasible
        spec = {**kube.spec(), "gpus": total, "nodes": nodes, "minPerNode": least}
        assert is_accepted(kube, spec) is expected, (total, capacities, least)


def test_the_server_accepts_just_the_elastic_jobs_that_the_request_does(kube: Kube) -> None:
    seen: set[bool] = set()
    for total, capacities, least in cases():
        nodes = [{"name": f"n{index}", "capacity": capacity} for index, capacity in enumerate(capacities)]
        split = jobs_split.split_workers(total, capacities, min_per_node=least)
        for left in sorted({1, total // 2 + 1, total - least, total - max(split.counts or (0,)), total}):
            lost = min(filter(None, split.counts or ()), default=0) if split.num_nodes > 1 else 0
            expected = split.is_feasible and 1 <= left <= total - lost
            spec = {**kube.spec(), "gpus": total, "nodes": nodes, "minPerNode": least, "elastic": {"min": left}}
            assert is_accepted(kube, spec) is expected, (total, capacities, least, left)
            seen.add(expected)
    assert seen == {True, False}


def test_the_largest_legal_list_of_nodes_is_checked_within_the_servers_budget(
    kube: Kube, request: pytest.FixtureRequest
) -> None:
    # The fake has no budget, and takes seconds where a real server takes milliseconds.
    num_nodes = 128 if request.config.getoption("--kubeconfig") else 24
    nodes = [{"name": f"n{index}", "capacity": 3 + index % 7} for index in range(num_nodes)]
    total = 3 * (num_nodes - 4)  # fewer nodes than there are may be used, so the rule has to look at all of them
    spec = {**kube.spec(), "gpus": total, "nodes": nodes}
    assert dry(kube, "large", spec)["spec"]["gpus"] == total
    assert dry(kube, "large", {**spec, "elastic": {"min": total // 2}})["spec"]["gpus"] == total
    counts = jobs_split.split_workers(total, [node["capacity"] for node in nodes]).counts or ()
    most = total - min(filter(None, counts))
    with pytest.raises(ApiError, match=rf"elastic.min of {total} is more than the {most} without the smallest node"):
        dry(kube, "large", {**spec, "elastic": {"min": total}})


def test_what_was_asked_for_never_changes(kube: Kube) -> None:
    kube.submit("fixed", managedBy="somebody/else")
    for change, text in (
        ({"gpus": 12}, "gpus cannot change"),
        ({"gpus": None, "cpuWorkers": 15}, "fields can be neither added nor removed"),
        ({"ttlSecondsAfterFinished": 5}, "fields can be neither added nor removed"),
        ({"nodes": [{**NODE, "capacity": 15}]}, "nodes cannot change"),
        ({"requester": {"username": "another"}}, "requester cannot change"),
        ({"requester": None}, "requester cannot be removed"),
        ({"elastic": {"min": 3}}, "fields can be neither added nor removed"),
    ):
        with pytest.raises(ApiError, match=text):
            kube.change("fixed", **change)
    assert kube.change("fixed", suspend=True, stopRun=1, retryRun=1)["spec"]["stopRun"] == 1
    with pytest.raises(ApiError, match="stopRun and retryRun cannot decrease"):
        kube.change("fixed", stopRun=0)
    kube.remove("fixed")


def test_every_field_is_described(kube: Kube) -> None:
    path = f"/openapi/v3/apis/{objects.API_VERSION}"
    schemas = kube.run(kube.client.request("GET", path))["components"]["schemas"]
    ours = next(schema for name, schema in schemas.items() if name.endswith(f".{objects.CRD_KIND}"))

    def undescribed(schema: Mapping[str, Any], where: str) -> Iterator[str]:
        for key, field in schema.get("properties", {}).items():
            if "description" not in field:
                yield f"{where}.{key}"
            yield from undescribed(field.get("items", field), f"{where}.{key}")

    for part in ("spec", "status"):
        assert ours["properties"][part]["description"]
        assert list(undescribed(ours["properties"][part], part)) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kubectl_explains_it(kube: Kube) -> None:
    told = kube.kubectl("explain", "tj.spec.nodes")
    for text in ("TrainingJob", "maxRetries", "Maximum number of replacements of its Pod", "capacity", "-required-"):
        assert text in told
    assert "the split takes the fewest" in " ".join(told.split())
    told = " ".join(kube.kubectl("explain", "tj.spec.elastic").split())
    for text in ("min <integer> -required-", "workers continue without losing a train step", "restart from the last"):
        assert text in told
