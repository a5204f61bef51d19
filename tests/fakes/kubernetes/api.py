"""Verbs of the fake API over the store, with patches and object rules; no HTTP."""

import re
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import jsonpatch

from tests.fakes.kubernetes import api_failures, resources, validation
from tests.fakes.kubernetes.api_failures import ApiFailure
from tests.fakes.kubernetes.object_selector import ObjectSelector
from tests.fakes.kubernetes.object_store import Object, ObjectStore, StoredObject
from tests.fakes.kubernetes.resources import ApiResource
from tests.fakes.kubernetes.users import User, UserDirectory

_OBJECT_NAME_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SERVER_FIELDS = (
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "namespace",
    "name",
)
_MAX_OBJECT_BYTES = 2**20
_DEFAULT_GRACE_S = 30


def now_text(later_s: float = 0.0) -> str:
    """Return the time in so many seconds, as the server writes it."""
    return (datetime.now(UTC) + timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_object(resource: ApiResource, namespace: str, body: Object) -> Object:
    """Return a new object with name, uid and the server's own status."""
    metadata = dict(body.get("metadata") or {})
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = metadata["generateName"] + secrets.token_hex(3)
    name = metadata.get("name", "")
    if resource.group != "rbac.authorization.k8s.io" and (not _OBJECT_NAME_PATTERN.fullmatch(name) or len(name) > 253):
        rule = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
        raise api_failures.invalid_failure(
            resource.kind, resource.group, name, [f'metadata.name: Invalid value: "{name}": {rule}']
        )
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
    _fill_built_in(resource, new)
    return new


def _fill_built_in(resource: ApiResource, new: Object) -> None:
    """Fill in the server's defaults of a built-in resource."""
    if resource.plural == "pods":
        spec = new["spec"]
        usual = {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": _DEFAULT_GRACE_S,
            "dnsPolicy": "ClusterFirst",
        }
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


def updated_object(
    resource: ApiResource, old: Object, body: Object, *, subresource: str, is_patch: bool = False
) -> Object:
    """Return the object after an update.

    Raises:
        ApiFailure: It is of another version, or changes an immutable field.
    """
    name = old["metadata"]["name"]
    given = body.get("metadata") or {}
    version, uid = given.get("resourceVersion"), given.get("uid")
    if version and version != old["metadata"]["resourceVersion"]:
        raise api_failures.conflict_failure(resource.plural, resource.group, name, api_failures.MODIFIED_TEXT)
    if uid and uid != old["metadata"]["uid"] and is_patch:
        problem = f'metadata.uid: Invalid value: "{uid}": field is immutable'
        raise api_failures.invalid_failure(resource.kind, resource.group, name, [problem])
    if uid and uid != old["metadata"]["uid"]:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
        raise api_failures.conflict_failure(resource.plural, resource.group, name, why)
    if subresource == "status":
        status = body.get("status", {})
        return {**old, "status": _with_null_times(status) if resource.plural == "pods" else status}
    kept = {key: old["metadata"][key] for key in _SERVER_FIELDS if key in old["metadata"]}
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
            raise api_failures.invalid_failure(resource.kind, resource.group, name, [why])
    if resource.plural == "pods":
        _check_pod_update(resource, old, new)
    return new


def log_container(pod: Object, requested: str) -> str:
    """Return the name of the container whose log is requested.

    Raises:
        ApiFailure: There is none of this name, or none was named and there are several.
    """
    name, spec = pod["metadata"]["name"], pod["spec"]
    names, before = ([each["name"] for each in spec.get(key) or ()] for key in ("containers", "initContainers"))
    if not requested and len(names) > 1:
        others = f" or one of the init containers: [{' '.join(before)}]" if before else ""
        text = f"a container name must be specified for pod {name}, choose one of: [{' '.join(names)}]{others}"
        raise ApiFailure(400, "BadRequest", text)
    if requested and requested not in (*names, *before):
        raise ApiFailure(400, "BadRequest", f"container {requested} is not valid for pod {name}")
    return requested or names[0]


def bound_pod(old: Object, machine: str) -> Object:
    """Return a Pod that is bound to a node.

    Raises:
        ApiFailure: The Pod has a node.
    """
    name = old["metadata"]["name"]
    if old["spec"].get("nodeName"):
        text = f"pod {name} is already assigned to node {old['spec']['nodeName']!r}"
        raise api_failures.conflict_failure("pods/binding", "", name, text)
    status = old.get("status", {})
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now_text()}
    conditions = [item for item in status.get("conditions") or () if item["type"] != "PodScheduled"]
    bound_status = _with_null_times({**status, "conditions": [*conditions, scheduled]})
    return {**old, "spec": {**old["spec"], "nodeName": machine}, "status": bound_status}


def _with_null_times(status: Mapping[str, Any]) -> Object:
    """Return a Pod's status with null for unknown times, as a server has it."""
    containers = [
        {
            **item,
            "state": {kind: _state_with_null_times(kind, state) for kind, state in (item.get("state") or {}).items()},
        }
        for item in status.get("containerStatuses") or ()
    ]
    conditions = [
        {"lastProbeTime": None, "lastTransitionTime": None, **item} for item in status.get("conditions") or ()
    ]
    given = {"containerStatuses": containers, "conditions": conditions}
    return {**status, **{key: value for key, value in given.items() if key in status}}


def _state_with_null_times(kind: str, state: Mapping[str, Any]) -> Object:
    times = {"running": ("startedAt",), "terminated": ("startedAt", "finishedAt")}.get(kind, ())
    return {**state, **{name: state.get(name) for name in times}}


def _check_pod_update(resource: ApiResource, old: Object, new: Object) -> None:
    """Refuse changes of a Pod's spec, of which hardly anything may change."""
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
        raise api_failures.invalid_failure(resource.kind, resource.group, old["metadata"]["name"], problems)


def checked_object(resource: ApiResource, body: Object, old: Object | None, *, is_strict: bool) -> Object:
    """Return the object to store: with defaults, without unknown fields, and valid.

    Raises:
        ApiFailure: The object is invalid.
    """
    name = body["metadata"].get("name", "")
    if resource.schema is None:
        _check_object_size(resource, body)
        return body
    schema = {**resource.schema, "properties": dict(resource.schema.get("properties", {}))}
    schema["properties"].setdefault("metadata", {"type": "object"})
    unknown: list[str] = []
    kept = validation.prune_unknown(
        resource.schema, validation.fill_defaults(resource.schema, body), unknown=unknown, is_root=True
    )
    if unknown and is_strict:
        listed = ", ".join(f'unknown field "{path}"' for path in unknown)
        raise ApiFailure(
            400,
            "BadRequest",
            f'{resource.kind} in version "{resource.version}" cannot be handled: strict decoding error: {listed}',
        )
    problems = list(validation.schema_problems(resource.schema, kept))
    if not problems:
        problems = list(validation.rule_problems(resource.schema, kept, validation.MISSING if old is None else old))
    if problems:
        raise api_failures.invalid_failure(resource.kind, resource.group, name, problems)
    return kept


def _check_object_size(resource: ApiResource, body: Object) -> None:
    if resource.plural not in ("configmaps", "secrets"):
        return
    texts = (body.get("data") or {}).items()
    if sum(len(key) + len(value.encode()) for key, value in texts) > _MAX_OBJECT_BYTES:
        problem = f"[]: Too long: may not be more than {_MAX_OBJECT_BYTES} bytes"
        raise api_failures.invalid_failure(resource.kind, resource.group, body["metadata"]["name"], [problem])


def deletion_grace_s(resource: ApiResource, body: Object, options: Mapping[str, Any]) -> int:
    """Return the grace period of a deletion; a Pod without a node, or one that has ended, is deleted at once."""
    if resource.plural != "pods":
        return 0
    phase = body.get("status", {}).get("phase")
    if not body["spec"].get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    given = options.get("gracePeriodSeconds")
    return body["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S) if given is None else int(given)


MERGE_PATCH_TYPE = "application/merge-patch+json"
JSON_PATCH_TYPE = "application/json-patch+json"
STRATEGIC_PATCH_TYPE = "application/strategic-merge-patch+json"
_MERGE_KEYS = {"conditions": "type", "containers": "name", "volumes": "name", "env": "name", "ownerReferences": "uid"}


def apply_patch(body: dict[str, Any], patch: Any, content_type: str, *, is_custom: bool) -> dict[str, Any]:
    """Return a patched copy of the object.

    Raises:
        ApiFailure: The patch cannot be applied, or its type is not supported.
    """
    if content_type == MERGE_PATCH_TYPE:
        return merge_patch(body, patch)
    if content_type == STRATEGIC_PATCH_TYPE and not is_custom:
        return merge_patch(body, patch, by_key=True)
    if content_type == JSON_PATCH_TYPE:
        try:
            return jsonpatch.apply_patch(body, patch)
        except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
            raise ApiFailure(
                422, "Invalid", f"the server rejected our request due to an error in our request: {error}"
            ) from error
    raise ApiFailure(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content_type}")


def merge_patch(value: Any, patch: Any, *, by_key: bool = False) -> Any:
    """Return the value with the patch merged into it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(value) if isinstance(value, dict) else {}
    for key, item in patch.items():
        if item is None:
            result.pop(key, None)
        elif by_key and key in _MERGE_KEYS and isinstance(item, list):
            result[key] = _merge_list(result.get(key) or [], item, _MERGE_KEYS[key])
        elif by_key and key == "finalizers":
            result[key] = list(dict.fromkeys([*(result.get(key) or []), *item]))
        else:
            result[key] = merge_patch(result.get(key), item, by_key=by_key)
    return result


def _merge_list(values: list[Any], patches: list[Any], key: str) -> list[Any]:
    result = list(values)
    for patch in patches:
        place = next((index for index, item in enumerate(result) if item.get(key) == patch.get(key)), None)
        if patch.get("$patch") == "delete":
            result = [item for item in result if item.get(key) != patch.get(key)]
        elif place is None:
            result.append(patch)
        else:
            result[place] = merge_patch(result[place], patch, by_key=True)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiRequest:
    """Request to the API."""

    resource: ApiResource
    namespace: str
    name: str
    subresource: str
    user: User
    params: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str]:
        """Key of the object among those of its resource."""
        return (self.namespace if self.resource.is_namespaced else "", self.name)

    @property
    def is_dry(self) -> bool:
        """Return whether nothing may be stored."""
        return self.params.get("dryRun") == "All"


class FakeApi:
    """Fake API: all objects and the verbs on them."""

    def __init__(self) -> None:
        """Start with the namespace `default`."""
        self.store = ObjectStore()
        self.users = UserDirectory(self.store)
        self.mutate: Callable[[ApiResource, Object], Object] = lambda _, body: body
        """Change made by mutating webhooks to a new object, if a test has some."""
        self.resources: dict[tuple[str, str, str], ApiResource] = {
            (found.group, found.version, found.plural): found for found in resources.BUILT_IN_RESOURCES
        }
        namespace = self.resources["", "v1", "namespaces"]
        self.store.put(namespace.key, ("", "default"), new_object(namespace, "", {"metadata": {"name": "default"}}))

    def get(self, request: ApiRequest) -> StoredObject:
        """Return the object.

        Raises:
            ApiFailure: There is none.
        """
        found = self.store.get(request.resource.key, request.key)
        if found is None:
            raise api_failures.not_found_failure(request.resource.plural, request.resource.group, request.name)
        return found

    def list(self, resource: ApiResource, selector: ObjectSelector) -> "list[StoredObject]":
        """Return the selected objects, by namespace and name."""
        found = self.store.list_objects(resource.key, selector.equal_labels)
        return [item for _, item in found if selector.matches(item.body)]

    def create(self, request: ApiRequest, body: Object) -> StoredObject:
        """Create an object.

        Raises:
            ApiFailure: The name exists, or the object is invalid.
        """
        resource = request.resource
        _check_body_kind(resource, body)
        if resource.is_namespaced and self.store.get(("", "namespaces"), ("", request.namespace)) is None:
            raise api_failures.not_found_failure("namespaces", "", request.namespace)
        new = self.mutate(resource, new_object(resource, request.namespace, body))
        new = checked_object(resource, new, None, is_strict=request.params.get("fieldValidation") == "Strict")
        validation.check_admission_policies(self.store, resource, "CREATE", request.user, new, None)
        if resource.plural == "pods":
            space = self.store.get(("", "namespaces"), ("", request.namespace))
            validation.check_pod_security(space.body if space else {"metadata": {}}, new)
        name = new["metadata"]["name"]
        key = (request.namespace if resource.is_namespaced else "", name)
        if self.store.get(resource.key, key) is not None:
            what = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
            raise ApiFailure(409, "AlreadyExists", f'{what} "{name}" already exists', name=name, kind=resource.plural)
        if resource.plural == "customresourcedefinitions":
            new = self._install_definition(new)
        if request.is_dry:
            new["metadata"]["resourceVersion"] = str(self.store.version)
            return StoredObject(new)
        return self.store.put(resource.key, key, new)

    def replace(self, request: ApiRequest, body: Object) -> StoredObject:
        """Replace the object by another version.

        Raises:
            ApiFailure: The version is not the current one, or the object is invalid.
        """
        resource = request.resource
        _check_body_kind(resource, body)
        if resource.is_custom and not (body.get("metadata") or {}).get("resourceVersion"):
            problem = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise api_failures.invalid_failure(resource.kind, resource.group, request.name, [problem])
        return self._update(request, self.get(request), body)

    def patch(self, request: ApiRequest, patch: Any, content_type: str) -> StoredObject:
        """Patch the object.

        Raises:
            ApiFailure: The patch is of another version, cannot be applied, or makes the object invalid.
        """
        old = self.get(request)
        body = apply_patch(old.body, patch, content_type, is_custom=request.resource.is_custom)
        return self._update(request, old, body, is_patch=True)

    def bind(self, request: ApiRequest, body: Object) -> StoredObject:
        """Bind a Pod to the node that a scheduler has chosen.

        Raises:
            ApiFailure: There is no such Pod, or it has a node.
        """
        new = bound_pod(self.get(request).body, body["target"]["name"])
        return self.store.put(request.resource.key, request.key, {**new, "metadata": dict(new["metadata"])})

    def _update(self, request: ApiRequest, old: StoredObject, body: Object, *, is_patch: bool = False) -> StoredObject:
        resource = request.resource
        new = updated_object(resource, old.body, body, subresource=request.subresource, is_patch=is_patch)
        is_strict = request.params.get("fieldValidation") == "Strict"
        new = checked_object(resource, new, old.body, is_strict=is_strict)
        if request.subresource != "status":
            validation.check_admission_policies(self.store, resource, "UPDATE", request.user, new, old.body)
        if resource.plural == "customresourcedefinitions":
            new = self._install_definition(new)
        new = {**new, "metadata": dict(new["metadata"])}  # stored objects never change
        if "generation" in new["metadata"] and new.get("spec") != old.body.get("spec"):
            new["metadata"]["generation"] += 1
        if new == old.body or request.is_dry:
            return StoredObject(new)
        # A namespace has finalizers in its spec too.
        finalizers = new["metadata"].get("finalizers") or (new.get("spec") or {}).get("finalizers")
        is_let_go = "deletionTimestamp" in new["metadata"] and not finalizers
        if is_let_go and not new["metadata"].get("deletionGracePeriodSeconds"):
            return self.store.remove(resource.key, request.key, new)
        return self.store.put(resource.key, request.key, new)

    def delete(self, request: ApiRequest, options: Mapping[str, Any]) -> StoredObject:
        """Delete the object, or mark it as deleted.

        Raises:
            ApiFailure: There is none, or a precondition fails.
        """
        resource, old = request.resource, self.get(request)
        for key, value in (options.get("preconditions") or {}).items():
            if value != old.body["metadata"].get(key):
                known = old.body["metadata"].get(key)
                why = f"Precondition failed: {key} in precondition: {value}, in object meta: {known}"
                raise api_failures.conflict_failure(resource.plural, resource.group, request.name, why)
        grace_s = deletion_grace_s(resource, old.body, options)
        if request.is_dry:
            return old
        if resource.plural == "namespaces" or old.body["metadata"].get("finalizers") or grace_s:
            return self._mark_deleted(request, old, grace_s)
        if resource.plural == "customresourcedefinitions":
            for found in resources.custom_resources(old.body):
                self.resources.pop((found.group, found.version, found.plural), None)
        return self.store.remove(resource.key, request.key)

    def _mark_deleted(self, request: ApiRequest, old: StoredObject, grace_s: int) -> StoredObject:
        """Mark an object as deleted; it stays until its finalizers, kubelet or namespace controller release it."""
        metadata = dict(old.body["metadata"])
        if "deletionTimestamp" in metadata and metadata.get("deletionGracePeriodSeconds", 0) <= grace_s:
            return old
        # The time at which it is to be gone, and not the one of the request.
        metadata |= {"deletionTimestamp": now_text(grace_s), "deletionGracePeriodSeconds": grace_s}
        if "generation" in metadata:
            metadata["generation"] += 1
        new = {**old.body, "metadata": metadata}
        if request.resource.plural == "namespaces":
            new["status"] = {"phase": "Terminating"}
        return self.store.put(request.resource.key, request.key, new)

    def _install_definition(self, definition: Object) -> Object:
        """Install a definition and return it with its conditions."""
        spec = definition["spec"]
        found = []
        for index, version in enumerate(spec["versions"]):
            path = f"spec.versions[{index}].schema.openAPIV3Schema"
            schema = version["schema"]["openAPIV3Schema"]
            found += validation.schema_definition_problems(schema, path)
            found += validation.rule_definition_problems(schema, path)
        if found:
            group = "apiextensions.k8s.io"
            raise api_failures.invalid_failure("CustomResourceDefinition", group, definition["metadata"]["name"], found)
        for resource in resources.custom_resources(definition):
            self.resources[resource.group, resource.version, resource.plural] = resource
        since = now_text()
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": since, "reason": reason, "message": ""}
            for kind, reason in (("NamesAccepted", "NoConflicts"), ("Established", "InitialNamesAccepted"))
        ]
        stored = [version["name"] for version in spec["versions"] if version["storage"]]
        status = {"conditions": conditions, "acceptedNames": spec["names"], "storedVersions": stored}
        return {**definition, "status": definition.get("status") or status}


def _check_body_kind(resource: ApiResource, body: Object) -> None:
    got = (body.get("apiVersion"), body.get("kind"))
    if got != (resource.api_version, resource.kind):
        text = f"the object provided is unrecognized (must be of type {resource.kind}): got {got}"
        raise ApiFailure(400, "BadRequest", text)
