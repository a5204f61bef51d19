"""The verbs of the API over the store: create, get, list, replace, patch, delete. No HTTP here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringweave.testing.kubernetes.checks import pod_security, policies, rules, schemas
from ringweave.testing.kubernetes.checks.users import User, Users
from ringweave.testing.kubernetes.server import objects, patching, refusing, resources
from ringweave.testing.kubernetes.server.refusing import Refused
from ringweave.testing.kubernetes.server.resources import Resource
from ringweave.testing.kubernetes.server.selecting import Selector
from ringweave.testing.kubernetes.server.store import Item, Object, Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a request is about."""

    resource: Resource
    namespace: str
    name: str
    subresource: str
    user: User
    params: Mapping[str, str]

    @property
    def key(self) -> tuple[str, str]:
        """Of the object, in its resource's shelf."""
        return (self.namespace if self.resource.is_namespaced else "", self.name)

    @property
    def is_dry(self) -> bool:
        """Nothing is to be stored."""
        return self.params.get("dryRun") == "All"


class Api:
    """All objects, and what may be done with them."""

    def __init__(self) -> None:
        """Begins with the namespace `default`."""
        self.store = Store()
        self.users = Users(self.store)
        self.mutate: Callable[[Resource, Object], Object] = lambda _, body: body
        """What webhooks make of an object that is created, where a test plays some."""
        self.resources: dict[tuple[str, str, str], Resource] = {
            (found.group, found.version, found.plural): found for found in resources.BUILT_IN
        }
        namespace = self.resources["", "v1", "namespaces"]
        self.store.put(namespace.key, ("", "default"), objects.made(namespace, "", {"metadata": {"name": "default"}}))

    def get(self, request: Request) -> Item:
        """The object.

        Raises:
            Refused: There is none.
        """
        found = self.store.get(request.resource.key, request.key)
        if found is None:
            raise refusing.not_found(request.resource.plural, request.resource.group, request.name)
        return found

    def list(self, resource: Resource, selector: Selector) -> list[Item]:
        """The objects that are asked for, by namespace and name."""
        found = self.store.all(resource.key, selector.equal_labels)
        return [item for _, item in found if selector.matches(item.body)]

    def create(self, request: Request, body: Object) -> Item:
        """A new object.

        Raises:
            Refused: There is one of this name, or it is not legal.
        """
        resource = request.resource
        _check_kind(resource, body)
        if resource.is_namespaced and self.store.get(("", "namespaces"), ("", request.namespace)) is None:
            raise refusing.not_found("namespaces", "", request.namespace)
        new = self.mutate(resource, objects.made(resource, request.namespace, body))
        new = objects.checked(resource, new, None, is_strict=request.params.get("fieldValidation") == "Strict")
        policies.check(self.store, resource, "CREATE", request.user, new, None)
        if resource.plural == "pods":
            space = self.store.get(("", "namespaces"), ("", request.namespace))
            pod_security.check(space.body if space else {"metadata": {}}, new)
        name = new["metadata"]["name"]
        key = (request.namespace if resource.is_namespaced else "", name)
        if self.store.get(resource.key, key) is not None:
            what = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
            raise Refused(409, "AlreadyExists", f'{what} "{name}" already exists', name=name, kind=resource.plural)
        if resource.plural == "customresourcedefinitions":
            new = self._defined(new)
        if request.is_dry:
            new["metadata"]["resourceVersion"] = str(self.store.version)
            return Item(new)
        return self.store.put(resource.key, key, new)

    def replace(self, request: Request, body: Object) -> Item:
        """Another version of the object.

        Raises:
            Refused: Of another version than the one there, or not legal.
        """
        resource = request.resource
        _check_kind(resource, body)
        if resource.is_custom and not (body.get("metadata") or {}).get("resourceVersion"):
            problem = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
            raise refusing.invalid(resource.kind, resource.group, request.name, [problem])
        return self._change(request, self.get(request), body)

    def patch(self, request: Request, patch: Any, content_type: str) -> Item:
        """The object with a patch applied.

        Raises:
            Refused: The patch is of another version, cannot be applied, or makes it illegal.
        """
        old = self.get(request)
        body = patching.patched(old.body, patch, content_type, is_custom=request.resource.is_custom)
        return self._change(request, old, body, is_patch=True)

    def bind(self, request: Request, body: Object) -> Item:
        """The Pod on the node that a scheduler has chosen for it.

        Raises:
            Refused: There is no such Pod, or it has a node.
        """
        new = objects.bound(self.get(request).body, body["target"]["name"])
        return self.store.put(request.resource.key, request.key, {**new, "metadata": dict(new["metadata"])})

    def _change(self, request: Request, old: Item, body: Object, *, is_patch: bool = False) -> Item:
        resource = request.resource
        new = objects.updated(resource, old.body, body, subresource=request.subresource, is_patch=is_patch)
        is_strict = request.params.get("fieldValidation") == "Strict"
        new = objects.checked(resource, new, old.body, is_strict=is_strict)
        if request.subresource != "status":
            policies.check(self.store, resource, "UPDATE", request.user, new, old.body)
        if resource.plural == "customresourcedefinitions":
            new = self._defined(new)
        new = {**new, "metadata": dict(new["metadata"])}  # what the store holds never changes
        if "generation" in new["metadata"] and new.get("spec") != old.body.get("spec"):
            new["metadata"]["generation"] += 1
        if new == old.body or request.is_dry:
            return Item(new)
        # A namespace has finalizers in its spec too.
        finalizers = new["metadata"].get("finalizers") or (new.get("spec") or {}).get("finalizers")
        is_let_go = "deletionTimestamp" in new["metadata"] and not finalizers
        if is_let_go and not new["metadata"].get("deletionGracePeriodSeconds"):
            return self.store.remove(resource.key, request.key, new)
        return self.store.put(resource.key, request.key, new)

    def delete(self, request: Request, options: Mapping[str, Any]) -> Item:
        """The object on its way, or gone.

        Raises:
            Refused: There is none, or it is not the one that is meant.
        """
        resource, old = request.resource, self.get(request)
        for key, value in (options.get("preconditions") or {}).items():
            if value != old.body["metadata"].get(key):
                known = old.body["metadata"].get(key)
                why = f"Precondition failed: {key} in precondition: {value}, in object meta: {known}"
                raise refusing.conflict(resource.plural, resource.group, request.name, why)
        grace_s = objects.grace_s(resource, old.body, options)
        if request.is_dry:
            return old
        if resource.plural == "namespaces" or old.body["metadata"].get("finalizers") or grace_s:
            return self._mark(request, old, grace_s)
        if resource.plural == "customresourcedefinitions":
            for found in resources.custom(old.body):
                self.resources.pop((found.group, found.version, found.plural), None)
        return self.store.remove(resource.key, request.key)

    def _mark(self, request: Request, old: Item, grace_s: int) -> Item:
        """Deleted, and kept until its finalizers, its kubelet or its namespace's controller let go."""
        metadata = dict(old.body["metadata"])
        if "deletionTimestamp" in metadata and metadata.get("deletionGracePeriodSeconds", 0) <= grace_s:
            return old
        # The time at which it is to be gone, and not the one of the request.
        metadata |= {"deletionTimestamp": objects.now_text(grace_s), "deletionGracePeriodSeconds": grace_s}
        if "generation" in metadata:
            metadata["generation"] += 1
        new = {**old.body, "metadata": metadata}
        if request.resource.plural == "namespaces":
            new["status"] = {"phase": "Terminating"}
        return self.store.put(request.resource.key, request.key, new)

    def _defined(self, definition: Object) -> Object:
        """The definition in force, with the conditions that say so."""
        spec = definition["spec"]
        found = []
        for index, version in enumerate(spec["versions"]):
            path = f"spec.versions[{index}].schema.openAPIV3Schema"
            schema = version["schema"]["openAPIV3Schema"]
            found += schemas.definition_problems(schema, path)
            found += rules.definition_problems(schema, path)
        if found:
            group = "apiextensions.k8s.io"
            raise refusing.invalid("CustomResourceDefinition", group, definition["metadata"]["name"], found)
        for resource in resources.custom(definition):
            self.resources[resource.group, resource.version, resource.plural] = resource
        since = objects.now_text()
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": since, "reason": reason, "message": ""}
            for kind, reason in (("NamesAccepted", "NoConflicts"), ("Established", "InitialNamesAccepted"))
        ]
        stored = [version["name"] for version in spec["versions"] if version["storage"]]
        status = {"conditions": conditions, "acceptedNames": spec["names"], "storedVersions": stored}
        return {**definition, "status": definition.get("status") or status}


def _check_kind(resource: Resource, body: Object) -> None:
    got = (body.get("apiVersion"), body.get("kind"))
    if got != (resource.api_version, resource.kind):
        text = f"the object provided is unrecognized (must be of type {resource.kind}): got {got}"
        raise Refused(400, "BadRequest", text)
