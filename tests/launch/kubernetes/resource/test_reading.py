"""A request as a TrainingJob and back."""

from dataclasses import replace
from pathlib import Path

from ruamel.yaml import YAML

from ringweave.jobs.life.records import Desired
from ringweave.jobs.requests.request import DeletionPolicy, Elastic, NodeRequest, Request
from ringweave.launch.kubernetes.resource import fields, reading
from ringweave.launch.kubernetes.resource.definition import definition
from ringweave.testing.kubernetes.checks import rules, schemas

EXAMPLE = Path(__file__).parents[4] / "examples" / "kubernetes" / "text.yaml"
SCHEMA = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def a_request(**changes) -> Request:
    nodes = (
        NodeRequest(name="big", capacity=10, deletion=DeletionPolicy.KEEP),
        NodeRequest(name="n1", capacity=5, max_retries=1),
    )
    whole = {"name": "text", "num_workers": 15, "script": "train.py", "nodes": nodes, **changes}
    return Request(**whole)


def stored(resource: dict) -> dict:
    """As the API server would store it."""
    filled = schemas.with_defaults(SCHEMA, resource)
    assert list(schemas.problems(SCHEMA, filled)) == []
    assert list(rules.problems(SCHEMA, filled)) == []
    return filled


def resource_of(request: Request) -> dict:
    made = reading.resource_of(request, namespace="ns", source="pass\n", username="ann", groups=["team"])
    return stored(made)


def test_a_request_becomes_a_resource_and_back() -> None:
    for changes in (
        {},
        {"device": "cpu"},
        {"arguments": ("--epochs", "3"), "environment": {"SEED": "1"}, "ttl_s": 2.5, "suspend": True},
        {"data": "/data", "image": "a/b:1", "claim": "mine", "mode": "balanced", "min_per_node": 5},
        {"elastic": Elastic(min=10)},
    ):
        request = a_request(**changes)
        assert reading.request_of(resource_of(request)) == request


def test_a_name_that_its_author_gave_is_the_host_that_is_meant() -> None:
    assert reading.hosts_of(resource_of(a_request())) == ["big", None]


def test_the_requester_is_the_users_name_with_their_groups() -> None:
    resource = resource_of(a_request())
    assert (reading.requester_of(resource), reading.groups_of(resource)) == ("ann", ("team",))
    del resource["spec"]["requester"]
    assert (reading.requester_of(resource), reading.groups_of(resource)) == ("", ())


def test_what_is_managed_by_somebody_else_is_not_ours() -> None:
    resource = resource_of(a_request())
    assert reading.is_ours(resource)
    resource["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert not reading.is_ours(resource)


def test_deletion_and_verbs_are_what_is_asked() -> None:
    resource = resource_of(a_request())
    resource["metadata"] |= {"creationTimestamp": "2026-11-21T13:00:00Z"}
    resource["spec"] |= {"stopRun": 2, "retryRun": 1}
    desired = reading.desired_of(resource)
    assert (desired.suspend, desired.stop_run, desired.retry_run, desired.delete) == (False, 2, 1, False)
    resource["metadata"]["deletionTimestamp"] = "2026-11-21T13:00:00Z"
    assert reading.desired_of(resource).delete


def test_the_largest_source_is_larger_than_what_a_config_map_takes() -> None:
    # The API server counts characters; bytes are counted when the ConfigMap is made.
    assert fields.MAX_SOURCE == 2**20


def test_the_example_is_legal() -> None:
    resource = YAML(typ="safe", pure=True).load(EXAMPLE)
    request = reading.request_of(stored(resource))
    assert request.split.counts == (10, 5)


def test_only_what_a_verb_changes_is_written() -> None:
    before = Desired(suspend=True, stop_run=1, retry_run=0, delete=False)
    assert reading.changes_of(before, before) == {}
    assert reading.changes_of(before, replace(before, stop_run=2)) == {"stopRun": 2}
    assert reading.changes_of(before, replace(before, suspend=False, retry_run=1)) == {"suspend": False, "retryRun": 1}
