"""The fields of a TrainingJob's spec as OpenAPI, with descriptions, defaults and limits taken from the request's own.

Every key of the job file has its field; a test compares the two. Lists have limits that keep the cost of the rules
below what an API server grants.
"""

from typing import Any

from ringweave.jobs.requests import request as rules
from ringweave.jobs.requests.request import DeletionPolicy, NodeRequest
from ringweave.jobs.splitting import MIN_PER_NODE

Schema = dict[str, Any]

MAX_NODES = 128
"""More would make the rule of the split, which is quadratic, dearer than an API server allows for one check."""
MAX_ARGUMENTS = 1000
MAX_VARIABLES = 200
MAX_SOURCE = 2**20
"""Characters of a script; its bytes count when the ConfigMap is made."""
_HOST_NAME = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
_LEAST = (
    "With so many workers at least the others go on, with fewer all begin again from the last checkpoint. At most all "
    "but those of the smallest node that the split uses."
)
_SEEN = r"[^\p{C}\p{Z}]"
"""Neither a control character nor a separator, in the regular expressions of the API server (RE2)."""
_MAX_RETRIES = NodeRequest.__dataclass_fields__["max_retries"].default

FIXED = (
    *("gpus", "cpuWorkers", "script", "source", "directory", "arguments", "environment", "data", "image", "claim"),
    *("mode", "elastic", "nodes", "minPerNode", "ttlSecondsAfterFinished", "managedBy", "requester"),
)
"""Fields that never change once a job is there; the others are what verbs set."""


def spec() -> Schema:
    """The schema of `spec`, without its rules."""
    properties = {**_what_runs(), **_where(), **_asked()}
    return {
        "type": "object",
        "description": "What is asked for; only suspend, stopRun and retryRun can change.",
        "required": ["script", "nodes"],
        "properties": properties,
    }


def job_name() -> Schema:
    """What the name of a job may be: names of Pods and hosts are made of it."""
    return {"type": "string", "maxLength": 40, "pattern": "^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$"}


def _what_runs() -> Schema:
    return {
        "gpus": _count("GPUs in all, shared out over the nodes. Either gpus or cpuWorkers."),
        "cpuWorkers": _count("Workers without a GPU in all. Either gpus or cpuWorkers."),
        "script": _line(
            "Path of the Python program: below directory where there is one, else its name.", 4096, least=1
        ),
        "source": _text(
            "Text of the script, at most 1 MiB with the rest of the ConfigMap. Absent: the image has the script.",
            MAX_SOURCE,
        ),
        "directory": _line("Folder in the image that the script needs around it.", 4096, least=1),
        "arguments": {
            "type": "array",
            "description": "What the script is called with.",
            "maxItems": MAX_ARGUMENTS,
            "x-kubernetes-list-type": "atomic",
            "items": _text("One argument.", 16384),
            "default": [],
        },
        "environment": {
            "type": "array",
            "description": "Variables of the workers.",
            "maxItems": MAX_VARIABLES,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": _variable(),
            "default": [],
        },
        "data": _line("Where the training data is; workers see it as RINGWEAVE_DATA.", 4096, least=1),
        "image": _line("Container image with Python and ringweave. Absent: the operator's.", 1024, least=1),
        "claim": {
            **_text("PersistentVolumeClaim that all Pods mount at /claim, which RINGWEAVE_CLAIM says.", 253, least=1),
            "pattern": _HOST_NAME,
        },
        "mode": {
            "type": "string",
            "description": "How to train; auto leaves the choice to the planner. ps-hra, ps: with a parameter server.",
            "enum": list(rules.MODES),
            "default": "auto",
        },
        "elastic": {
            "type": "object",
            "description": "Absent: when a node is lost all begin again from the last checkpoint. Present: the others "
            "go on without losing a train step, its Pod alone is replaced, and its workers join the others.",
            "required": ["min"],
            "properties": {"min": _count(_LEAST)},
        },
    }


def _variable() -> Schema:
    name = _text(f"Name of the variable; {rules.RESERVED} is ours.", 255)
    return {
        "type": "object",
        "description": "A variable.",
        "required": ["name", "value"],
        "properties": {
            "name": {**name, "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "value": _text("Its value.", 32768),
        },
    }


def _where() -> Schema:
    return {
        "nodes": {
            "type": "array",
            "description": "The nodes that may be used, in node order; the split takes the fewest that can hold all.",
            "minItems": 1,
            "maxItems": MAX_NODES,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": _node(),
        },
        "minPerNode": {**_count("The least that a used node gets."), "default": MIN_PER_NODE},
    }


def _node() -> Schema:
    return {
        "type": "object",
        "description": "A node that may be used.",
        "required": ["name", "capacity"],
        "properties": {
            "name": {**_text("What it is called in this job.", 63, least=1), "pattern": _HOST_NAME},
            "host": {
                **_text("Kubernetes node that it must be (kubernetes.io/hostname). Absent: any.", 63, least=1),
                "pattern": _HOST_NAME,
            },
            "capacity": {**_count("How many GPUs (or CPU workers) it may run."), "minimum": 0},
            "maxRetries": {
                "type": "integer",
                "format": "int32",
                "description": "How often its Pod is replaced after a failure that is not the script's.",
                "minimum": 0,
                "maximum": rules.MAX_RETRIES,
                "default": _MAX_RETRIES,
            },
            "deletionPolicy": {
                "type": "string",
                "description": "What becomes of its Pod when the job has ended; a TTL or delete removes all.",
                "enum": [str(policy) for policy in DeletionPolicy],
                "default": str(DeletionPolicy.DELETE),
            },
        },
    }


def _asked() -> Schema:
    return {
        "ttlSecondsAfterFinished": {
            "type": "number",
            "description": "So long after its end the job is removed with all it left. Absent: kept until deleted.",
            "minimum": 0,
            "maximum": rules.MAX_TTL_S,
        },
        "suspend": {
            "type": "boolean",
            "description": "Nothing of it runs until it is false. Kueue sets it, and ringweave suspend and resume.",
            "default": False,
        },
        "stopRun": _level("Runs up to this one shall stop; ringweave stop sets it."),
        "retryRun": _level("This run, once it ended badly, shall be followed by another; ringweave retry sets it."),
        "managedBy": _text("Who leads it; absent or ringweave.dev/operator: this operator, else it keeps away.", 63),
        "requester": {
            "type": "object",
            "description": "Who asks, as the API server says; set or checked by the admission policies.",
            "required": ["username"],
            "properties": {
                "username": _text("The user's name.", 1024, least=1),
                "groups": {
                    "type": "array",
                    "description": "The user's groups, for the question whether they may.",
                    "maxItems": 500,
                    "x-kubernetes-list-type": "atomic",
                    "items": _text("A group.", 1024),
                },
            },
        },
    }


def _count(description: str) -> Schema:
    limits = {"minimum": 1, "maximum": rules.MAX_WORKERS}
    return {"type": "integer", "format": "int64", "description": description, **limits}


def _level(description: str) -> Schema:
    return {"type": "integer", "format": "int32", "description": description, "minimum": 0, "default": 0}


def _text(description: str, most: int, *, least: int | None = None) -> Schema:
    limits = {"maxLength": most} if least is None else {"minLength": least, "maxLength": most}
    return {"type": "string", "description": description, **limits}


def _line(description: str, most: int, *, least: int) -> Schema:
    """Text on one line that is not blank, as a request wants it: of what can be seen, and spaces."""
    return {**_text(description, most, least=least), "pattern": rf"^({_SEEN}| )*{_SEEN}({_SEEN}| )*$"}
