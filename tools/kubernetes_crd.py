"""CustomResourceDefinition of TrainingJob: OpenAPI fields, CEL rules, status schema and printer columns.

`deploy/base/trainingjobs.yaml` is rendered from it: pytest tests/platforms/kubernetes --update-golden writes that file.

Every key of the job file has its field; a test compares the two. Limits on lists keep the cost of the CEL rules below
what an API server grants. The rules refuse invalid requests in the API server itself, before anything is stored.

The split without sorting: a total N is feasible on capacities c with at least m on each used node iff N >= m and the
K = N div m largest usable capacities sum to at least N: more than K nodes would get less than m each. The sum of the K
largest of c is the smallest of K t + sum(max(c - t, 0)) over t among c and 0, so N has to be at most each of these.

The largest loss of an elastic job, without sorting: the split takes the largest nodes that hold N, and fills them in
node order with m for each later node. So with T the smallest used capacity, X the unused capacity (less than T), and c
the capacity of the last used node in node order, the smallest node gets max(m, min(T, c - X)).
"""

from typing import Any

from ringweave.jobs import request
from ringweave.jobs.request import ELASTIC_SERVER_MODES, MAX_WORKERS, RESERVED_PREFIX, DeletionPolicy, NodeRequest
from ringweave.jobs.split import MIN_PER_NODE
from ringweave.jobs.states import JobState
from ringweave.platforms.kubernetes import objects
from ringweave.platforms.kubernetes.job_resource import CONDITION_TEXTS, REFUSED_STATE

Schema = dict[str, Any]

MAX_NODES = 128
"""With more nodes the quadratic rule of the split would cost more than an API server allows for one check."""
MAX_ARGUMENTS = 1000
MAX_VARIABLES = 200
MAX_SOURCE = 2**20
"""Maximum characters of a script; its bytes are counted when the ConfigMap is created."""
_HOST_NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
_ELASTIC_MIN_TEXT = (
    "Smallest number of workers with which training continues; with fewer, all workers restart from the last "
    "checkpoint. At most the total without the smallest node that the split uses."
)
_VISIBLE_CHARACTER = r"[^\p{C}\p{Z}]"
"""Neither a control character nor a separator, in the API server's regular expressions (RE2)."""
_MAX_RETRIES = NodeRequest.__dataclass_fields__["max_retries"].default

IMMUTABLE_FIELDS = (
    *("gpus", "cpuWorkers", "script", "module", "command", "source", "directory", "arguments", "environment", "data"),
    *(
        "image",
        "claim",
        "mode",
        "schedule",
        "tuning",
        "order",
        "replaceBackend",
        "leaderPerNic",
        "encrypt",
        "wire",
        "maxLossIncrease",
        "elastic",
        "standby",
    ),
    *("nodes", "minPerNode", "ttlSecondsAfterFinished", "managedBy", "requester"),
)
"""Fields that never change after creation; verbs set the others."""


def spec_schema() -> Schema:
    """Return the schema of `spec`, without its rules."""
    properties = {**_program_fields(), **_training_fields(), **_node_fields(), **_lifecycle_fields()}
    return {
        "type": "object",
        "description": "Specification of the job; only suspend, stopRun and retryRun can change.",
        "required": ["nodes"],
        "properties": properties,
    }


def job_name_schema() -> Schema:
    """Return the schema of a job's name, from which the names of Pods and hosts are made."""
    return {"type": "string", "maxLength": 40, "pattern": "^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$"}


def _program_fields() -> Schema:
    return {
        "gpus": _count_schema("Total number of GPUs, split over the nodes. Either gpus or cpuWorkers."),
        "cpuWorkers": _count_schema("Total number of workers without a GPU. Either gpus or cpuWorkers."),
        "script": _line_schema(
            "Path of the Python script: relative to directory if that is set, otherwise its name.", 4096, least=1
        ),
        "module": _line_schema(
            "Module to run instead of a script, in directory or installed in the image.", 4096, least=1
        ),
        "command": _line_schema(
            "Program to run instead of a script, on the PATH of the image or below directory.", 4096, least=1
        ),
        "source": _limited_text_schema(
            "Text of the script, at most 1 MiB with the rest of the ConfigMap. Absent: the image has the script.",
            MAX_SOURCE,
        ),
        "directory": _line_schema("Folder of the program in the image.", 4096, least=1),
        "arguments": {
            "type": "array",
            "description": "Command line arguments of the program.",
            "maxItems": MAX_ARGUMENTS,
            "x-kubernetes-list-type": "atomic",
            "items": _limited_text_schema("One argument.", 16384),
            "default": [],
        },
        "environment": {
            "type": "array",
            "description": "Environment variables of the workers.",
            "maxItems": MAX_VARIABLES,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": _variable_schema(),
            "default": [],
        },
        "data": _line_schema("Location of the training data; the workers' RINGWEAVE_DATA.", 4096, least=1),
        "image": _line_schema(
            "Container image with Python and ringweave. Absent: the operator's default.", 1024, least=1
        ),
        "claim": {
            **_limited_text_schema(
                "PersistentVolumeClaim that all Pods mount at /claim, the workers' RINGWEAVE_CLAIM.", 253, least=1
            ),
            "pattern": _HOST_NAME_PATTERN,
        },
    }


def _training_fields() -> Schema:
    from ringweave import schedules  # brings numpy, which the operator need not wait for

    return {
        "mode": {
            "type": "string",
            "description": "Training mode; auto lets the planner choose. ps-hra and ps use a parameter server.",
            "enum": list(request.MODES),
            "default": "auto",
        },
        "schedule": {
            "type": "string",
            "description": "Schedule of allreduces from 64 KiB up. Absent: the planner chooses.",
            "enum": list(schedules.SCHEDULE_NAMES),
        },
        "tuning": {
            "type": "boolean",
            "description": "Measured times change schedules and plans. Absent: only among several nodes.",
        },
        "order": {
            "type": "string",
            "description": f"Order in which devices get ranks: {request.ORDER_RULE}.",
            "pattern": r"^(block|round-robin|shuffled(:[0-9]{1,18})?)$",
            "maxLength": 30,
            "default": "block",
        },
        "replaceBackend": _flag_schema('ringweave also serves groups of an explicit "gloo" or "nccl".'),
        "leaderPerNic": _flag_schema("A leader for each NIC of a node, not one for all."),
        "encrypt": {
            "type": "string",
            "description": "Encrypt what travels between nodes: auto (as on), on or off.",
            "enum": ["auto", "on", "off"],
            "default": "auto",
        },
        "wire": {
            "type": "string",
            "description": "Format of gradients on the links that bind.",
            "enum": ["exact", "bf16", "int8", "int4", "auto"],
            "default": "exact",
        },
        "maxLossIncrease": {
            "type": "string",
            "description": f"Loss at equal samples that auto may give up for speed: {request.LOSS_RULE}.",
            "pattern": r"^[0-9]{1,3}(\.[0-9]{1,6})?%$",
            "maxLength": 11,
        },
        "elastic": _elastic_schema(),
        "standby": _flag_schema(
            "A second parameter server of an elastic job, on the second node, takes over when the first one is lost."
        ),
    }


def _elastic_schema() -> Schema:
    spares = {"minimum": 0, "maximum": request.MAX_SPARES, "default": 0}
    text = "Idle processes in each Pod that are ready to replace a worker at once."
    return {
        "type": "object",
        "description": "Absent: when a node is lost, all workers restart from the last checkpoint. Present: the "
        "other workers continue without losing a train step, and only the lost Pod is replaced.",
        "required": ["min"],
        "properties": {
            "min": _count_schema(_ELASTIC_MIN_TEXT),
            "spares": {"type": "integer", "format": "int64", "description": text, **spares},
        },
    }


def _flag_schema(description: str) -> Schema:
    return {"type": "boolean", "description": description, "default": False}


def _variable_schema() -> Schema:
    name = _limited_text_schema(f"Name of the variable; {request.RESERVED_PREFIX} is reserved.", 255)
    return {
        "type": "object",
        "description": "An environment variable.",
        "required": ["name", "value"],
        "properties": {
            "name": {**name, "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "value": _limited_text_schema("Value of the variable.", 32768),
        },
    }


def _node_fields() -> Schema:
    return {
        "nodes": {
            "type": "array",
            "description": "Usable nodes, in node order; the split takes the fewest that hold all workers.",
            "minItems": 1,
            "maxItems": MAX_NODES,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": _node_schema(),
        },
        "minPerNode": {**_count_schema("Minimum number of workers on a used node."), "default": MIN_PER_NODE},
    }


def _node_schema() -> Schema:
    return {
        "type": "object",
        "description": "A usable node.",
        "required": ["name", "capacity"],
        "properties": {
            "name": {
                **_limited_text_schema("Name of the node in this job.", 63, least=1),
                "pattern": _HOST_NAME_PATTERN,
            },
            "host": {
                **_limited_text_schema(
                    "Required Kubernetes node (kubernetes.io/hostname). Absent: any node.", 63, least=1
                ),
                "pattern": _HOST_NAME_PATTERN,
            },
            "capacity": {**_count_schema("Maximum number of GPUs (or CPU workers) on the node."), "minimum": 0},
            "maxRetries": {
                "type": "integer",
                "format": "int32",
                "description": "Maximum number of replacements of its Pod after failures not caused by the script.",
                "minimum": 0,
                "maximum": request.MAX_RETRIES,
                "default": _MAX_RETRIES,
            },
            "deletionPolicy": {
                "type": "string",
                "description": "Deletion of its Pod after the end of the job; a TTL or a deletion removes all Pods.",
                "enum": [str(policy) for policy in DeletionPolicy],
                "default": str(DeletionPolicy.DELETE),
            },
        },
    }


def _lifecycle_fields() -> Schema:
    return {
        "ttlSecondsAfterFinished": {
            "type": "number",
            "description": "Seconds from its end to the removal of the job and its objects. Absent: kept.",
            "minimum": 0,
            "maximum": request.MAX_TTL_S,
        },
        "suspend": {
            "type": "boolean",
            "description": "No Pod of the job runs while true. Set by Kueue, ringweave suspend and resume.",
            "default": False,
        },
        "stopRun": _run_number_schema("Runs up to this one are stopped. Set by ringweave stop."),
        "retryRun": _run_number_schema(
            "After this run has failed or was stopped, another run starts. Set by ringweave retry."
        ),
        "managedBy": _limited_text_schema(
            "Controller of the job; absent or ringweave.dev/operator: this operator. Other jobs are ignored.", 63
        ),
        "requester": {
            "type": "object",
            "description": "Requesting user as reported by the API server; set or checked by the admission policies.",
            "required": ["username"],
            "properties": {
                "username": _limited_text_schema("Name of the user.", 1024, least=1),
                "groups": {
                    "type": "array",
                    "description": "Groups of the user, for the permission check.",
                    "maxItems": 500,
                    "x-kubernetes-list-type": "atomic",
                    "items": _limited_text_schema("A group.", 1024),
                },
            },
        },
    }


def _count_schema(description: str) -> Schema:
    limits = {"minimum": 1, "maximum": request.MAX_WORKERS}
    return {"type": "integer", "format": "int64", "description": description, **limits}


def _run_number_schema(description: str) -> Schema:
    return {"type": "integer", "format": "int32", "description": description, "minimum": 0, "default": 0}


def _limited_text_schema(description: str, most: int, *, least: int | None = None) -> Schema:
    limits = {"maxLength": most} if least is None else {"minLength": least, "maxLength": most}
    return {"type": "string", "description": description, **limits}


def _line_schema(description: str, most: int, *, least: int) -> Schema:
    """Return the schema of text on one line that is not blank, as in a request: visible characters and spaces."""
    return {
        **_limited_text_schema(description, most, least=least),
        "pattern": rf"^({_VISIBLE_CHARACTER}| )*{_VISIBLE_CHARACTER}({_VISIBLE_CHARACTER}| )*$",
    }


ValidationRule = dict[str, Any]

_TOTAL = "(has(self.gpus) ? self.gpus : has(self.cpuWorkers) ? self.cpuWorkers : 0)"
_USABLE = "self.nodes.filter(n, n.capacity >= self.minPerNode)"
_TOTAL_CAPACITY = f"{_USABLE}.map(n, n.capacity).sum()"
_FITS_LARGEST_NODES = (
    # An unusable n is smaller than t and adds nothing; a filter would double the cost.
    f"self.nodes.all(t, t.capacity < self.minPerNode || {_TOTAL} <= ({_TOTAL} / self.minPerNode) * t.capacity + "
    "self.nodes.map(n, n.capacity > t.capacity ? n.capacity - t.capacity : 0).sum())"
)
OPTIONAL_FIELDS = (
    *("gpus", "cpuWorkers", "script", "module", "command", "source", "directory", "data", "image", "claim"),
    *("schedule", "tuning", "elastic"),
    *("ttlSecondsAfterFinished", "managedBy"),
)


def spec_rules() -> list[ValidationRule]:
    """Return the rules of the whole spec, in reading order for users."""
    return [
        _creation_rule("has(self.gpus) != has(self.cpuWorkers)", "exactly one of gpus and cpuWorkers is required"),
        _creation_rule(
            " + ".join(f"(has(self.{key}) ? 1 : 0)" for key in request.PROGRAM_KEYS) + " == 1",
            "exactly one of script, module and command is required",
        ),
        _creation_rule(
            f"{_TOTAL} >= self.minPerNode",
            "the total is less than minPerNode: ask for more, or lower minPerNode",
            message_expression="'a total of %d is less than the %d of minPerNode: "
            f"ask for %d or more, or lower minPerNode'.format([{_TOTAL}, self.minPerNode, self.minPerNode])",
        ),
        _creation_rule(
            f"{_TOTAL} <= {_TOTAL_CAPACITY}",
            "the total is more than the capacity of all nodes: ask for less, add a node or raise a capacity",
            message_expression="'a total of %d is more than the %d that nodes of at least %d can run: "
            f"ask for less, add a node or raise a capacity'.format([{_TOTAL}, {_TOTAL_CAPACITY}, self.minPerNode])",
        ),
        _creation_rule(
            # If all usable nodes may be used, their total capacity decides: the previous rule.
            f"{_TOTAL} < self.minPerNode || {_TOTAL} / self.minPerNode >= {_USABLE}.size() || {_FITS_LARGEST_NODES}",
            "no split gives every used node minPerNode: the necessary nodes would get too few workers each; "
            "ringweave split prints the nearest possible totals",
        ),
        *_elastic_rules(),
        _creation_rule("!has(self.source) || has(self.script)", "source is the text of a script: name it in script"),
        _creation_rule(
            "!(has(self.source) && has(self.directory))",
            "source and directory exclude each other: with a directory the image has the script",
        ),
        _make_rule(
            " && ".join(f"has(self.{name}) == has(oldSelf.{name})" for name in OPTIONAL_FIELDS),
            "fields can be neither added nor removed: delete the job and submit it again",
        ),
        _make_rule(
            "self.stopRun >= oldSelf.stopRun && self.retryRun >= oldSelf.retryRun",
            "stopRun and retryRun cannot decrease",
        ),
        _make_rule("!has(oldSelf.requester) || has(self.requester)", "requester cannot be removed"),
    ]


def _elastic_rules() -> list[ValidationRule]:
    served = " || ".join(f"self.mode == '{mode}'" for mode in ELASTIC_SERVER_MODES)
    most = _max_elastic_min()
    return [
        _creation_rule(
            f"!self.standby || (has(self.elastic) && ({served}))",
            "standby needs an elastic job with a parameter server: leave standby out, or add elastic and write mode "
            "ps-hra",
        ),
        _creation_rule(
            f"!has(self.elastic) || self.elastic.min <= {_TOTAL} || "
            f"self.nodes.all(n, n.capacity < self.minPerNode || n.capacity < {_TOTAL})",
            "elastic.min is more than the total, which one node runs: write the total, or less",
        ),
        _creation_rule(
            f"!has(self.elastic) || {_TOTAL} < 1 || {_USABLE}.size() == 0 || self.elastic.min <= {most}",
            "elastic.min is more than the total without the smallest node that the split uses",
            message_expression="'elastic.min of %d is more than the %d without the smallest node that the split "
            "uses: write %d, or less to survive the loss of larger nodes'"
            f".format([self.elastic.min, {most}, {most}])",
        ),
    ]


def _max_elastic_min() -> str:
    """Return the total without the smallest node's part; a number above all totals if there is no such split.

    `[x].map(name, ...)[0]` binds a value to a name: CEL has no other way that all API servers support.
    """
    larger = "self.nodes.map(n, n.capacity > {0} ? n.capacity : 0).sum()"
    smallest_taken = (
        f"self.nodes.filter(t, t.capacity >= self.minPerNode && {larger.format('t.capacity')} < {_TOTAL})"
        ".map(t, t.capacity).min()"
    )
    large, alike = "self.nodes.filter(n, n.capacity > least)", "self.nodes.filter(n, n.capacity == least)"
    # Of equal nodes the first are used. Without indexOf, whose cost is that of the longest possible text.
    taken = "self.nodes.filter(n, n.capacity > least || n.name == mark)"
    last = f"[{alike}[count - 1].name].map(mark, {taken}[{taken}.size() - 1].capacity)[0]"
    is_none = (
        f"{alike}.size() < count || ({large}.size() + count) * self.minPerNode > {_TOTAL}"
        f" || {large}.size() + count == 1"
    )
    left_over = f"(above + count * least - {_TOTAL})"
    smallest = f"[self.minPerNode, [least, {last} - {left_over}].min()].max()"
    value = f"{is_none} ? {MAX_WORKERS} : {_TOTAL} - {smallest}"
    counted = f"[({_TOTAL} - above + least - 1) / least].map(count, {value})[0]"
    return f"[{smallest_taken}].map(least, [{larger.format('least')}].map(above, {counted})[0])[0]"


def field_rules(name: str) -> list[ValidationRule]:
    """Return the rules of one field of the spec."""
    found = []
    if name in IMMUTABLE_FIELDS:
        found.append(_make_rule("self == oldSelf", f"{name} cannot change: delete the job and submit it again"))
    if name == "environment":
        reserved = f"!self.exists(v, v.name.startsWith('{RESERVED_PREFIX}'))"
        found.append(
            _creation_rule(reserved, f"variables that begin with {RESERVED_PREFIX} are reserved for the launcher")
        )
    return found


def _creation_rule(rule: str, message: str, *, message_expression: str | None = None) -> ValidationRule:
    """Return a rule about fields that never change: it is evaluated when a job is created, and at no later write.

    The API server evaluates the rules of a resource at every write, also of its status alone; those of the split take
    up to a second of its processor at 128 nodes. With `optionalOldSelf` (Kubernetes 1.30), `oldSelf` is empty at the
    creation.
    """
    guarded = _make_rule(f"oldSelf.hasValue() || ({rule})", message, message_expression=message_expression)
    return {**guarded, "optionalOldSelf": True}


def _make_rule(rule: str, message: str, *, message_expression: str | None = None) -> ValidationRule:
    """Return a rule with its message, and optionally with an expression for a message with numbers.

    Numbers go into it by `format`: the API server estimates the text of `string(number)` as unbounded, so that a `+`
    with it costs more than the whole definition may.
    """
    return {
        "rule": rule,
        "message": message,
        **({"messageExpression": message_expression} if message_expression else {}),
    }


def custom_resource_definition() -> dict[str, Any]:
    """Return the whole CustomResourceDefinition."""
    version = {
        "name": objects.CRD_VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _resource_schema()},
        "subresources": {"status": {}},
        "additionalPrinterColumns": _printer_columns(),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{objects.CRD_PLURAL}.{objects.API_GROUP}",
            "labels": {"app.kubernetes.io/name": "ringweave"},
        },
        "spec": {
            "group": objects.API_GROUP,
            "names": {
                "plural": objects.CRD_PLURAL,
                "singular": "trainingjob",
                "kind": objects.CRD_KIND,
                "listKind": f"{objects.CRD_KIND}List",
                "shortNames": ["tj"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _resource_schema() -> Schema:
    spec = spec_schema()
    spec["x-kubernetes-validations"] = spec_rules()
    for name, field in spec["properties"].items():
        found = field_rules(name)
        if found:
            field["x-kubernetes-validations"] = found
    return {
        "type": "object",
        "description": "A training job: N GPUs over nodes with unequal numbers of GPUs.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this schema."},
            "kind": {"type": "string", "description": f"{objects.CRD_KIND}."},
            "metadata": {"type": "object", "properties": {"name": job_name_schema()}},
            "spec": spec,
            "status": _status_schema(),
        },
    }


def _status_schema() -> Schema:
    states = ", ".join([*JobState, REFUSED_STATE])
    properties = {
        "observedGeneration": _integer_schema("Generation of the spec that this describes."),
        "state": _text_schema(f"One of {states}."),
        "reason": _text_schema("Reason for not running, in CamelCase; empty while the job runs."),
        "message": _text_schema("Description of the reason."),
        "hint": _text_schema("Remedy."),
        "ready": _text_schema("Number of used nodes that reached the start barrier, such as 2/3."),
        "workers": _integer_schema("Total number of GPUs or CPU workers."),
        "run": _integer_schema("Number of the run: 1, and one more for each retry of the whole job."),
        "round": _integer_schema("Number of the round: 1, and one more for each restart of all nodes."),
        "admittedAt": _time_schema("Time of admission."),
        "endedAt": _time_schema("Time of the outcome; the TTL counts from here."),
        "nodes": _list_schema("Status of each node, in the order of the spec.", ["name"], _node_status_schema()),
        "conditions": _list_schema("Conditions of the job.", ["type"], _condition_schema()),
        "events": _list_schema("Last events, oldest first.", ["key"], _event_schema()),
        "record": _text_schema("Record of the operator, as JSON. The other fields are derived from it."),
    }
    return {"type": "object", "description": "Status of the job, written by the operator.", "properties": properties}


def _node_status_schema() -> Schema:
    return _object_schema(
        "Status of a node.",
        ["name"],
        {
            "name": _text_schema("Name of the node in the spec."),
            "workers": _integer_schema("Number of workers by the split; 0: not used."),
            "state": _text_schema("State of the node."),
            "reason": _text_schema("Reason for not running, in CamelCase."),
            "message": _text_schema("Description of the reason."),
            "hint": _text_schema("Remedy."),
            "attempt": _integer_schema("Number of the current attempt."),
            "retries": _integer_schema("Replacements in this run after failures of this node."),
            "iterations": _integer_schema("Train steps done, as last reported."),
            "lastLoss": {"type": "number", "description": "Last reported loss."},
        },
    )


def _condition_schema() -> Schema:
    return _object_schema(
        "Condition of the job.",
        ["type", "status", "lastTransitionTime", "reason", "message"],
        {
            "type": _text_schema(f"One of {', '.join(CONDITION_TEXTS)}."),
            "status": {
                "type": "string",
                "description": "True, False or Unknown.",
                "enum": ["True", "False", "Unknown"],
            },
            "reason": _text_schema("Reason in CamelCase."),
            "message": _text_schema("Description."),
            "lastTransitionTime": _time_schema("Time of the last change of the status."),
            "observedGeneration": _integer_schema("Generation of the spec that this describes."),
        },
    )


def _event_schema() -> Schema:
    return _object_schema(
        "Event of the job.",
        ["key"],
        {
            "key": _text_schema("Unique within the job."),
            "time": _time_schema("Time of the event."),
            "kind": _text_schema("Code of a reason, or a state."),
            "text": _text_schema("Description."),
        },
    )


def _printer_columns() -> list[dict[str, Any]]:
    def column(name: str, path: str, description: str, kind: str = "string", *, wide: bool = False) -> dict[str, Any]:
        shown = {"name": name, "type": kind, "jsonPath": path, "description": description}
        return {**shown, "priority": 1} if wide else shown

    return [
        column("State", ".status.state", "State of the job."),
        column("Reason", ".status.reason", "Reason for not running."),
        column("Ready", ".status.ready", "Used nodes that reached the start barrier."),
        column("Workers", ".status.workers", "Total number of GPUs or CPU workers.", "integer"),
        column("Requester", ".spec.requester.username", "Requesting user."),
        column("Age", ".metadata.creationTimestamp", "Age of the job.", "date"),
        column("Message", ".status.message", "Description of the reason.", wide=True),
        column("Helps", ".status.hint", "Remedy.", wide=True),
    ]


def _object_schema(description: str, required: list[str], properties: Schema) -> Schema:
    return {"type": "object", "description": description, "required": required, "properties": properties}


def _list_schema(description: str, keys: list[str], items: Schema) -> Schema:
    kind = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys}
    return {"type": "array", "description": description, **kind, "items": items}


def _text_schema(description: str) -> Schema:
    return {"type": "string", "description": description}


def _integer_schema(description: str) -> Schema:
    return {"type": "integer", "format": "int64", "description": description}


def _time_schema(description: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": description}
