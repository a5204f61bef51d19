"""What the API server does to an object before it is stored: checks, defaults, and what only the server may set."""

import re
import secrets
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ringweave.testing.kubernetes.checks import rules, schemas
from ringweave.testing.kubernetes.server import refusing
from ringweave.testing.kubernetes.server.refusing import Refused
from ringweave.testing.kubernetes.server.resources import Resource
from ringweave.testing.kubernetes.server.store import Object

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEPT = (
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "namespace",
    "name",
)
_MOST_BYTES = 2**20
_GRACE_S = 30


def now_text(later_s: float = 0.0) -> str:
    """The time so many seconds from now, as the server writes it."""
    return (datetime.now(UTC) + timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def made(resource: Resource, namespace: str, body: Object) -> Object:
    """A new object: named, numbered, with a status that is the server's."""
    metadata = dict(body.get("metadata") or {})
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = metadata["generateName"] + secrets.token_hex(3)
    name = metadata.get("name", "")
    if resource.group != "rbac.authorization.k8s.io" and (not _NAME.fullmatch(name) or len(name) > 253):
        rule = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
        raise refusing.invalid(resource.kind, resource.group, name, [f'metadata.name: Invalid value: "{name}": {rule}'])
    for key in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"):
        metadata.pop(key, None)
    metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now_text()}
    if resource.is_namespaced:
        metadata["namespace"] = namespace
    new = {**body, "metadata": metadata}
    if resource.is_custom or resource.plural in ("pods", "deployments"):
        metadata["generation"] = 1
    if resource.has_status:
        new.pop("status", None)
    _complete(resource, new)
    return new


def _complete(resource: Resource, new: Object) -> None:
    """What the server fills in of what is built in."""
    if resource.plural == "pods":
        spec = new["spec"]
        usual = {"restartPolicy": "Always", "terminationGracePeriodSeconds": _GRACE_S, "dnsPolicy": "ClusterFirst"}
        new["spec"] = {**usual, "schedulerName": "default-scheduler", "securityContext": {}, **spec}
        new["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    elif resource.plural == "namespaces":
        new["spec"], new["status"] = {"finalizers": ["kubernetes"]}, {"phase": "Active"}
    elif resource.plural == "secrets":
        import base64

        texts = new.pop("stringData", None) or {}
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in texts.items()}
        new["data"] = {**(new.get("data") or {}), **encoded}
        new.setdefault("type", "Opaque")


def updated(resource: Resource, old: Object, body: Object, *, subresource: str, is_patch: bool = False) -> Object:
    """What an update makes of the old object.

    Raises:
        Refused: It is of another version, or changes what cannot be changed.
    """
    name = old["metadata"]["name"]
    given = body.get("metadata") or {}
    version, uid = given.get("resourceVersion"), given.get("uid")
    if version and version != old["metadata"]["resourceVersion"]:
        raise refusing.conflict(resource.plural, resource.group, name, refusing.CHANGED)
    if uid and uid != old["metadata"]["uid"] and is_patch:
        problem = f'metadata.uid: Invalid value: "{uid}": field is immutable'
        raise refusing.invalid(resource.kind, resource.group, name, [problem])
    if uid and uid != old["metadata"]["uid"]:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
        raise refusing.conflict(resource.plural, resource.group, name, why)
    if subresource == "status":
        status = body.get("status", {})
        return {**old, "status": _timed(status) if resource.plural == "pods" else status}
    kept = {key: old["metadata"][key] for key in _KEPT if key in old["metadata"]}
    new = {**body, "metadata": {**given, **kept, "resourceVersion": old["metadata"]["resourceVersion"]}}
    if resource.has_status:
        new["status"] = old.get("status", {})
        if not new["status"]:
            new.pop("status")
    if "deletionTimestamp" in kept:
        added = set(given.get("finalizers") or ()) - set(old["metadata"].get("finalizers") or ())
        if added:
            rule = "no new finalizers can be added if the object is being deleted, found new finalizers"
            why = f"metadata.finalizers: Forbidden: {rule} {sorted(added)}"
            raise refusing.invalid(resource.kind, resource.group, name, [why])
    if resource.plural == "pods":
        _check_pod(resource, old, new)
    return new


def container_of(pod: Object, asked: str) -> str:
    """Name of the container whose log is asked for.

    Raises:
        Refused: There is none of this name, or none was named and there are several.
    """
    name, spec = pod["metadata"]["name"], pod["spec"]
    names, before = ([each["name"] for each in spec.get(key) or ()] for key in ("containers", "initContainers"))
    if not asked and len(names) > 1:
        others = f" or one of the init containers: [{' '.join(before)}]" if before else ""
        text = f"a container name must be specified for pod {name}, choose one of: [{' '.join(names)}]{others}"
        raise Refused(400, "BadRequest", text)
    if asked and asked not in (*names, *before):
        raise Refused(400, "BadRequest", f"container {asked} is not valid for pod {name}")
    return asked or names[0]


def bound(old: Object, machine: str) -> Object:
    """A Pod that its scheduler has given to a node.

    Raises:
        Refused: It has one.
    """
    name = old["metadata"]["name"]
    if old["spec"].get("nodeName"):
        text = f"pod {name} is already assigned to node {old['spec']['nodeName']!r}"
        raise refusing.conflict("pods/binding", "", name, text)
    status = old.get("status", {})
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now_text()}
    conditions = [item for item in status.get("conditions") or () if item["type"] != "PodScheduled"]
    told = _timed({**status, "conditions": [*conditions, scheduled]})
    return {**old, "spec": {**old["spec"], "nodeName": machine}, "status": told}


def _timed(status: Mapping[str, Any]) -> Object:
    """A Pod's status as a server has it: times that nobody knows are null, and never absent."""
    containers = [
        {**item, "state": {kind: _timed_state(kind, state) for kind, state in (item.get("state") or {}).items()}}
        for item in status.get("containerStatuses") or ()
    ]
    conditions = [
        {"lastProbeTime": None, "lastTransitionTime": None, **item} for item in status.get("conditions") or ()
    ]
    given = {"containerStatuses": containers, "conditions": conditions}
    return {**status, **{key: value for key, value in given.items() if key in status}}


def _timed_state(kind: str, state: Mapping[str, Any]) -> Object:
    times = {"running": ("startedAt",), "terminated": ("startedAt", "finishedAt")}.get(kind, ())
    return {**state, **{name: state.get(name) for name in times}}


def _check_pod(resource: Resource, old: Object, new: Object) -> None:
    """Of a Pod's spec next to nothing can change."""
    free = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds")

    def fixed(spec: Mapping[str, Any]) -> Any:
        rest = {key: value for key, value in spec.items() if key not in free}
        return {**rest, "containers": [{**item, "image": ""} for item in spec["containers"]]}

    before, after = old["spec"].get("activeDeadlineSeconds"), new["spec"].get("activeDeadlineSeconds")
    problems = []
    if fixed(old["spec"]) != fixed(new["spec"]):
        problems.append(
            "spec: Forbidden: pod updates may not change fields other than `spec.activeDeadlineSeconds`, ..."
        )
    if before is not None and (after is None or after > before):
        problems.append("spec.activeDeadlineSeconds: Invalid value: must be less than or equal to previous value")
    if problems:
        raise refusing.invalid(resource.kind, resource.group, old["metadata"]["name"], problems)


def checked(resource: Resource, body: Object, old: Object | None, *, is_strict: bool) -> Object:
    """The object as it is stored: with defaults, without what the schema does not know, and legal.

    Raises:
        Refused: It is not legal.
    """
    name = body["metadata"].get("name", "")
    if resource.schema is None:
        _check_size(resource, body)
        return body
    schema = {**resource.schema, "properties": dict(resource.schema.get("properties", {}))}
    schema["properties"].setdefault("metadata", {"type": "object"})
    unknown: list[str] = []
    kept = schemas.pruned(resource.schema, schemas.with_defaults(resource.schema, body), unknown=unknown, is_root=True)
    if unknown and is_strict:
        listed = ", ".join(f'unknown field "{path}"' for path in unknown)
        raise Refused(
            400,
            "BadRequest",
            f'{resource.kind} in version "{resource.version}" cannot be handled: strict decoding error: {listed}',
        )
    problems = list(schemas.problems(resource.schema, kept))
    if not problems:
        problems = list(rules.problems(resource.schema, kept, rules.MISSING if old is None else old))
    if problems:
        raise refusing.invalid(resource.kind, resource.group, name, problems)
    return kept


def _check_size(resource: Resource, body: Object) -> None:
    if resource.plural not in ("configmaps", "secrets"):
        return
    texts = (body.get("data") or {}).items()
    if sum(len(key) + len(value.encode()) for key, value in texts) > _MOST_BYTES:
        problem = f"[]: Too long: may not be more than {_MOST_BYTES} bytes"
        raise refusing.invalid(resource.kind, resource.group, body["metadata"]["name"], [problem])


def grace_s(resource: Resource, body: Object, options: Mapping[str, Any]) -> int:
    """How long a deletion waits for somebody who ends it; a Pod that no node has, or that has ended, goes at once."""
    if resource.plural != "pods":
        return 0
    phase = body.get("status", {}).get("phase")
    if not body["spec"].get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    given = options.get("gracePeriodSeconds")
    return body["spec"].get("terminationGracePeriodSeconds", _GRACE_S) if given is None else int(given)
