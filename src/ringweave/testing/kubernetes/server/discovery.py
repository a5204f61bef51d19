"""What clients ask before they ask anything: groups, resources, and schemas as OpenAPI v3."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringweave.testing.kubernetes.server.resources import Resource

Answer = dict[str, Any]
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0-fake", "platform": "linux/amd64"}


def answer(resources: Sequence[Resource], parts: Sequence[str]) -> Answer | None:
    """What a path answers that leads to no object; None where nothing is there."""
    match parts:
        case ["version" | "healthz" | "readyz" | "livez", *_]:
            return VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            return groups(resources)
        case ["apis", group_]:
            return group(resources, group_)
        case ["api", version] | ["apis", _, version]:
            return resource_list(resources, "" if len(parts) == 2 else parts[1], version)
        case ["openapi", "v3", *rest]:
            return openapi(resources, "/".join(rest)) if rest else openapi_index(resources)
    return None


def groups(resources: Iterable[Resource]) -> Answer:
    """What `/apis` answers."""
    found = dict.fromkeys((each.group, each.version) for each in resources if each.group)
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*each) for each in found]}


def group(resources: Iterable[Resource], name: str) -> Answer | None:
    """What `/apis/GROUP` answers."""
    found = next((each for each in resources if each.group == name), None)
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(found.group, found.version)} if found else None


def _group(name: str, version: str) -> Answer:
    entry = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def resource_list(resources: Iterable[Resource], group_: str, version: str) -> Answer | None:
    """What `/api/v1, /apis/GROUP/VERSION` answers."""
    found = [each for each in resources if (each.group, each.version) == (group_, version)]
    if not found:
        return None
    listed = [entry for each in found for entry in _entries(each)]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": found[0].api_version, "resources": listed}


def _entries(resource: Resource) -> Iterable[Answer]:
    entry = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.is_namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
        "shortNames": list(resource.short_names),
        "categories": list(resource.categories),
    }
    yield entry
    if resource.has_status:
        yield {**entry, "name": f"{resource.plural}/status", "verbs": ["get", "patch", "update"], "shortNames": []}
    for name, kind in resource.subresources.items():
        yield {**entry, "name": f"{resource.plural}/{name}", "kind": kind, "verbs": ["get"], "shortNames": []}


def openapi_index(resources: Iterable[Resource]) -> Answer:
    """What `/openapi/v3` answers."""
    paths = dict.fromkeys(_path(each) for each in resources)
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path in paths}}


def openapi(resources: Iterable[Resource], path: str) -> Answer | None:
    """What `/openapi/v3/apis/GROUP/VERSION` answers."""
    found = [each for each in resources if _path(each) == path]
    if not found:
        return None
    schemas = {_model(each): _schema(each) for each in found}
    paths: Answer = {}
    for each in found:
        space = "/namespaces/{namespace}" if each.is_namespaced else ""
        paths[f"/{path}{space}/{each.plural}"] = {"get": _operation(each, "list"), "post": _operation(each, "post")}
        paths[f"/{path}{space}/{each.plural}/{{name}}"] = {
            verb: _operation(each, verb) for verb in ("get", "put", "patch", "delete")
        }
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _path(resource: Resource) -> str:
    return f"apis/{resource.api_version}" if resource.group else "api/v1"


def _model(resource: Resource) -> str:
    reversed_group = ".".join(reversed((resource.group or "core.k8s.io").split(".")))
    return f"{reversed_group}.{resource.version}.{resource.kind}"


def _schema(resource: Resource) -> Mapping[str, Any]:
    known = resource.schema or {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {**known, "x-kubernetes-group-version-kind": [_kind(resource)]}


def _kind(resource: Resource) -> Answer:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _operation(resource: Resource, action: str) -> Answer:
    names = ("fieldValidation", "dryRun", "fieldManager")
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
    reference = {"$ref": f"#/components/schemas/{_model(resource)}"}
    return {
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _kind(resource),
        "parameters": parameters,
        "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": reference}}}},
    }
