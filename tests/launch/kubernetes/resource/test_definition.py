"""The resource as it is applied: the committed file is what the code renders, and has a field for every key."""

import io
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from ringweave.jobs.request import MODES, JobFileEntry, JobNodeEntry
from ringweave.platforms.kubernetes import crd
from ringweave.platforms.kubernetes.crd import custom_resource_definition

DEPLOY = Path(__file__).parents[4] / "deploy"
RENAMED = {
    "cpu_workers": "cpuWorkers",
    "min_per_node": "minPerNode",
    "ttl": "ttlSecondsAfterFinished",
    "replace_backend": "replaceBackend",
    "leader_per_nic": "leaderPerNic",
}
OF_A_NODE = {"max_retries": "maxRetries", "deletion": "deletionPolicy"}
HEAD = "# Rendered by ringweave.platforms.kubernetes.crd: pytest tests/launch/kubernetes --update-golden writes it.\n"


def test_the_committed_file_is_what_the_code_renders(check_golden) -> None:
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width, yaml.sort_base_mapping_type_on_output = False, 110, False
    yaml.dump(custom_resource_definition(), stream)
    check_golden(DEPLOY / "base" / "trainingjobs.yaml", HEAD + stream.getvalue())


def test_every_key_of_the_job_file_has_its_field() -> None:
    spec = crd.spec_schema()["properties"]
    keys = {RENAMED.get(key, key) for key in JobFileEntry.model_fields} - {"name", "lab"}
    assert keys <= spec.keys()
    assert spec["mode"]["enum"] == list(MODES)
    node = spec["nodes"]["items"]["properties"]
    assert {OF_A_NODE.get(key, key) for key in JobNodeEntry.model_fields} - {"count"} <= node.keys()


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("mode", "mode"),
        ("order", "order"),
        ("replaceBackend", "replace_backend"),
        ("leaderPerNic", "leader_per_nic"),
        ("minPerNode", "min_per_node"),
        ("suspend", "suspend"),
    ],
)
def test_defaults_are_those_of_the_job_file(field: str, key: str) -> None:
    assert crd.spec_schema()["properties"][field]["default"] == JobFileEntry.model_fields[key].default


def test_every_manifest_is_in_a_kustomization() -> None:
    yaml = YAML(typ="safe", pure=True)
    for folder in (DEPLOY / "base", DEPLOY / "requester", DEPLOY / "namespaced"):
        whole = yaml.load(folder / "kustomization.yaml")
        patches = {patch["path"] for patch in whole.get("patches", ()) if "path" in patch}
        listed = (set(whole["resources"]) | patches) - {"../base"}
        assert listed == {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}


def test_the_requester_is_written_whole() -> None:
    yaml = YAML(typ="safe", pure=True)
    policy = next(iter(yaml.load_all((DEPLOY / "requester" / "policy.yaml").read_text())))
    (mutation,) = policy["spec"]["mutations"]
    assert mutation["patchType"] == "JSONPatch", "an ApplyConfiguration may not set groups, an atomic list"
    assert 'path: "/spec/requester"' in mutation["jsonPatch"]["expression"]
