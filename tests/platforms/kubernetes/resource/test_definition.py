"""The resource as it is applied: the committed file is what the code renders, and has a field for every key."""

import io
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from ringweave.jobs.request import MODES, JobFileEntry, JobNodeEntry
from tests.fakes.kubernetes import validation
from tools import kubernetes_crd
from tools.kubernetes_crd import custom_resource_definition

DEPLOY = Path(__file__).parents[4] / "deploy"
RENAMED = {
    "cpu_workers": "cpuWorkers",
    "min_per_node": "minPerNode",
    "ttl": "ttlSecondsAfterFinished",
    "replace_backend": "replaceBackend",
    "leader_per_nic": "leaderPerNic",
    "max_loss_increase": "maxLossIncrease",
}
OF_A_NODE = {"max_retries": "maxRetries", "deletion": "deletionPolicy"}
HEAD = "# Rendered by tools/kubernetes_crd.py: pytest tests/platforms/kubernetes --update-golden writes it.\n"


def test_the_committed_file_is_what_the_code_renders(check_golden) -> None:
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width, yaml.sort_base_mapping_type_on_output = False, 110, False
    yaml.dump(custom_resource_definition(), stream)
    check_golden(DEPLOY / "base" / "trainingjobs.yaml", HEAD + stream.getvalue())


def test_every_key_of_the_job_file_has_its_field() -> None:
    spec = kubernetes_crd.spec_schema()["properties"]
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
    assert kubernetes_crd.spec_schema()["properties"][field]["default"] == JobFileEntry.model_fields[key].default


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


def test_a_write_of_the_status_evaluates_no_rule_of_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the API server does it: it evaluates every rule of the spec at each write, here by a CEL library with a count.

    A probe stands in each rule where what the rule computes begins.
    """
    counted: list[int] = []
    monkeypatch.setitem(validation._CEL_FUNCTIONS, "probe", lambda index: counted.append(index) is None)
    rules = [*kubernetes_crd.spec_rules(), *kubernetes_crd.field_rules("environment")]
    on_creation = [each for each in rules if each.get("optionalOldSelf")]
    assert not [each for each in rules if ".sum()" in each["rule"] and each not in on_creation]
    nodes = [{"name": f"n{index}", "capacity": 4} for index in range(kubernetes_crd.MAX_NODES)]
    spec = {"cpuWorkers": 500, "script": "train.py", "nodes": nodes, "minPerNode": 3, "standby": False, "mode": "auto"}
    guard = "oldSelf.hasValue() || ("
    for index, each in enumerate(on_creation[:-1]):
        assert each["rule"].startswith(guard)
        probed = {**each, "rule": each["rule"].replace(guard, f"{guard}probe({index}) && ", 1)}
        assert list(validation._broken_rule(probed, spec, spec, "spec")) == []
        assert counted == [], each["rule"]
        assert list(validation._broken_rule(probed, spec, validation.MISSING, "spec")) == []
        assert counted == [index], each["rule"]
        counted.clear()
