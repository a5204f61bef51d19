"""The CustomResourceDefinition of TrainingJob, rendered from fields, rules and the states of a job."""

from typing import Any

from ringweave.jobs.life.states import JobState
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.resource import fields, rules
from ringweave.launch.kubernetes.resource.fields import Schema

CONDITIONS = {
    "Admitted": "It may run: the requester may submit it, and the total can be split.",
    "Running": "All its nodes train; of an elastic job enough of them do.",
    "Suspended": "It is suspended.",
    "Succeeded": "All nodes finished with exit code 0; of an elastic job all that did not hang.",
    "Failed": "The script failed, a node failed too often, or somebody stopped it.",
}
"""Type -> what it says when it is True."""
REFUSED = "Refused"
"""The state of a job that was not admitted."""


def definition() -> dict[str, Any]:
    """The whole object, as it is applied."""
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema()},
        "subresources": {"status": {}},
        "additionalPrinterColumns": _columns(),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}", "labels": {"app.kubernetes.io/name": "ringweave"}},
        "spec": {
            "group": names.GROUP,
            "names": {
                "plural": names.PLURAL,
                "singular": "trainingjob",
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "shortNames": ["tj"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _schema() -> Schema:
    spec = fields.spec()
    spec["x-kubernetes-validations"] = rules.of_spec()
    for name, field in spec["properties"].items():
        found = rules.of_field(name)
        if found:
            field["x-kubernetes-validations"] = found
    return {
        "type": "object",
        "description": "A training job: N GPUs in all over nodes that may run unequal numbers of them.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this schema."},
            "kind": {"type": "string", "description": f"{names.KIND}."},
            "metadata": {"type": "object", "properties": {"name": fields.job_name()}},
            "spec": spec,
            "status": _status(),
        },
    }


def _status() -> Schema:
    states = ", ".join([*JobState, REFUSED])
    properties = {
        "observedGeneration": _integer("The generation of the spec that this tells of."),
        "state": _text(f"One of {states}."),
        "reason": _text("Why it does not run, as one word; empty while it does."),
        "message": _text("What it waits for, or what happened."),
        "helps": _text("What would help."),
        "ready": _text("How many of the used nodes are at the gate or beyond, such as 2/3."),
        "workers": _integer("GPUs, or CPU workers, in all."),
        "run": _integer("1, and one more for each retry of the whole job."),
        "round": _integer("How often all nodes have been gathered at the gate."),
        "admittedAt": _time("When it was admitted."),
        "endedAt": _time("When its outcome was decided; the TTL counts from here."),
        "nodes": _list("What each node does, in the order of the spec.", ["name"], _node_status()),
        "conditions": _list("Conditions.", ["type"], _condition()),
        "events": _list("The last things that happened, oldest first.", ["key"], _event()),
        "record": _text("What the operator knows, as JSON; the fields above say the same for people."),
    }
    return {"type": "object", "description": "What became of it; written by the operator.", "properties": properties}


def _node_status() -> Schema:
    return _object(
        "A node.",
        ["name"],
        {
            "name": _text("Its name in the spec."),
            "workers": _integer("What the split gave it; 0: not used."),
            "state": _text("What it does."),
            "reason": _text("Why it does not run, as one word."),
            "message": _text("What it waits for, or what happened."),
            "helps": _text("What would help."),
            "attempt": _integer("The current attempt."),
            "retries": _integer("Replacements after failures of its own in this run."),
            "iterations": _integer("Training steps done, as last reported."),
            "lastLoss": {"type": "number", "description": "The last loss reported."},
        },
    )


def _condition() -> Schema:
    return _object(
        "A condition.",
        ["type", "status", "lastTransitionTime", "reason", "message"],
        {
            "type": _text(f"One of {', '.join(CONDITIONS)}."),
            "status": {
                "type": "string",
                "description": "True, False or Unknown.",
                "enum": ["True", "False", "Unknown"],
            },
            "reason": _text("One word for programs."),
            "message": _text("In words."),
            "lastTransitionTime": _time("When the status changed last."),
            "observedGeneration": _integer("The generation of the spec that this tells of."),
        },
    )


def _event() -> Schema:
    return _object(
        "Something that happened.",
        ["key"],
        {
            "key": _text("Unique within the job."),
            "time": _time("When."),
            "kind": _text("A reason's code, or a state."),
            "text": _text("In words."),
        },
    )


def _columns() -> list[dict[str, Any]]:
    def column(name: str, path: str, description: str, kind: str = "string", *, wide: bool = False) -> dict[str, Any]:
        shown = {"name": name, "type": kind, "jsonPath": path, "description": description}
        return {**shown, "priority": 1} if wide else shown

    return [
        column("State", ".status.state", "What it does."),
        column("Reason", ".status.reason", "Why it does not run."),
        column("Ready", ".status.ready", "Nodes at the gate or beyond, of those used."),
        column("Workers", ".status.workers", "GPUs, or CPU workers, in all.", "integer"),
        column("Requester", ".spec.requester.username", "Who asked for it."),
        column("Age", ".metadata.creationTimestamp", "Since when it is there.", "date"),
        column("Message", ".status.message", "What it waits for, or what happened.", wide=True),
        column("Helps", ".status.helps", "What would help.", wide=True),
    ]


def _object(description: str, required: list[str], properties: Schema) -> Schema:
    return {"type": "object", "description": description, "required": required, "properties": properties}


def _list(description: str, keys: list[str], items: Schema) -> Schema:
    kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys}
    return {"type": "array", "description": description, **kind, "items": items}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _integer(description: str) -> Schema:
    return {"type": "integer", "format": "int64", "description": description}


def _time(description: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": description}
