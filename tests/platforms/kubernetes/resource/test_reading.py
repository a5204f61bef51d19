"""A request as a TrainingJob and back."""

from dataclasses import replace
from pathlib import Path

from ruamel.yaml import YAML

from ringweave.jobs.records import DesiredJobState
from ringweave.jobs.request import DeletionPolicy, ElasticRequest, JobRequest, NodeRequest
from ringweave.platforms.kubernetes import job_resource
from tests.fakes.kubernetes import validation
from tools import kubernetes_crd
from tools.kubernetes_crd import custom_resource_definition

EXAMPLE = Path(__file__).parents[4] / "examples" / "kubernetes" / "text.yaml"
SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def a_request(**changes) -> JobRequest:
    nodes = (
        NodeRequest(name="big", capacity=10, deletion=DeletionPolicy.KEEP),
        NodeRequest(name="n1", capacity=5, max_retries=1),
    )
    whole = {"name": "text", "num_workers": 15, "script": "train.py", "nodes": nodes, **changes}
    return JobRequest(**whole)


def stored(resource: dict) -> dict:
    """As the API server would store it."""
    filled = validation.fill_defaults(SCHEMA, resource)
    assert list(validation.schema_problems(SCHEMA, filled)) == []
    assert list(validation.rule_problems(SCHEMA, filled)) == []
    return filled


def resource_of(request: JobRequest, source: str | None = "pass\n") -> dict:
    made = job_resource.resource_from_request(request, namespace="ns", source=source, username="ann", groups=["team"])
    return stored(made)


def test_a_request_becomes_a_resource_and_back() -> None:
    for changes in (
        {},
        {"device": "cpu"},
        {"arguments": ("--epochs", "3"), "environment": {"SEED": "1"}, "ttl_s": 2.5, "suspend": True},
        {"data": "/data", "image": "a/b:1", "claim": "mine", "mode": "balanced", "min_per_node": 5},
        {"elastic": ElasticRequest(min=10)},
        {"elastic": ElasticRequest(min=10, spares=2)},
        {"schedule": "ring", "tuning": False, "order": "shuffled:7", "replace_backend": True, "leader_per_nic": True},
        {"script": None, "module": "text.train", "directory": "/app"},
        {"script": None, "command": "bash", "arguments": ("train.sh",)},
    ):
        request = a_request(**changes)
        source = "pass\n" if request.script is not None else None
        assert job_resource.request_from_resource(resource_of(request, source)) == request


def test_a_name_that_its_author_gave_is_the_host_that_is_meant() -> None:
    assert job_resource.hosts_of(resource_of(a_request())) == ["big", None]


def test_the_requester_is_the_users_name_with_their_groups() -> None:
    resource = resource_of(a_request())
    assert (job_resource.requester_of(resource), job_resource.groups_of(resource)) == ("ann", ("team",))
    del resource["spec"]["requester"]
    assert (job_resource.requester_of(resource), job_resource.groups_of(resource)) == ("", ())


def test_what_is_managed_by_somebody_else_is_not_ours() -> None:
    resource = resource_of(a_request())
    assert job_resource.is_managed_here(resource)
    resource["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert not job_resource.is_managed_here(resource)


def test_deletion_and_verbs_are_what_is_asked() -> None:
    resource = resource_of(a_request())
    resource["metadata"] |= {"creationTimestamp": "2026-11-21T13:00:00Z"}
    resource["spec"] |= {"stopRun": 2, "retryRun": 1}
    desired = job_resource.desired_from_resource(resource)
    assert (desired.suspend, desired.stop_run, desired.retry_run, desired.delete) == (False, 2, 1, False)
    resource["metadata"]["deletionTimestamp"] = "2026-11-21T13:00:00Z"
    assert job_resource.desired_from_resource(resource).delete


def test_the_largest_source_is_larger_than_what_a_config_map_takes() -> None:
    # The API server counts characters; bytes are counted when the ConfigMap is made.
    assert kubernetes_crd.MAX_SOURCE == 2**20


def test_the_example_is_legal() -> None:
    resource = YAML(typ="safe", pure=True).load(EXAMPLE)
    request = job_resource.request_from_resource(stored(resource))
    assert request.split.counts == (10, 5)


def test_only_what_a_verb_changes_is_written() -> None:
    before = DesiredJobState(suspend=True, stop_run=1, retry_run=0, delete=False)
    assert job_resource.spec_changes(before, before) == {}
    assert job_resource.spec_changes(before, replace(before, stop_run=2)) == {"stopRun": 2}
    assert job_resource.spec_changes(before, replace(before, suspend=False, retry_run=1)) == {
        "suspend": False,
        "retryRun": 1,
    }
