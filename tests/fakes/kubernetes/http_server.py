"""Fake API over HTTP: authentication, roles, discovery, watches, tables, and answers as a real server words them."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from ruamel.yaml import YAML

from tests.fakes.kubernetes import api, object_selector
from tests.fakes.kubernetes.api import ApiRequest, FakeApi
from tests.fakes.kubernetes.api_failures import ApiFailure
from tests.fakes.kubernetes.object_selector import ObjectSelector
from tests.fakes.kubernetes.object_store import ObjectStore, StoreChange, StoredObject
from tests.fakes.kubernetes.resources import ApiResource
from tests.fakes.kubernetes.users import AccessAttributes, User

DiscoveryAnswer = dict[str, Any]
FAKE_VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0-fake", "platform": "linux/amd64"}


def discovery_answer(resources: Sequence[ApiResource], parts: Sequence[str]) -> DiscoveryAnswer | None:
    """Return the answer of a path that leads to no object; None if there is nothing at that path."""
    match parts:
        case ["version" | "healthz" | "readyz" | "livez", *_]:
            return FAKE_VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            return api_groups(resources)
        case ["apis", group_]:
            return api_group(resources, group_)
        case ["api", version] | ["apis", _, version]:
            return api_resource_list(resources, "" if len(parts) == 2 else parts[1], version)
        case ["openapi", "v3", *rest]:
            return openapi_document(resources, "/".join(rest)) if rest else openapi_index(resources)
    return None


def api_groups(resources: Iterable[ApiResource]) -> DiscoveryAnswer:
    """Return the answer of `/apis`."""
    found = dict.fromkeys((each.group, each.version) for each in resources if each.group)
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group_entry(*each) for each in found]}


def api_group(resources: Iterable[ApiResource], name: str) -> DiscoveryAnswer | None:
    """Return the answer of `/apis/GROUP`."""
    found = next((each for each in resources if each.group == name), None)
    return {"kind": "APIGroup", "apiVersion": "v1", **_group_entry(found.group, found.version)} if found else None


def _group_entry(name: str, version: str) -> DiscoveryAnswer:
    entry = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def api_resource_list(resources: Iterable[ApiResource], group_: str, version: str) -> DiscoveryAnswer | None:
    """Return the answer of `/api/v1` and `/apis/GROUP/VERSION`."""
    found = [each for each in resources if (each.group, each.version) == (group_, version)]
    if not found:
        return None
    listed = [entry for each in found for entry in _resource_entries(each)]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": found[0].api_version, "resources": listed}


def _resource_entries(resource: ApiResource) -> Iterable[DiscoveryAnswer]:
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


def openapi_index(resources: Iterable[ApiResource]) -> DiscoveryAnswer:
    """Return the answer of `/openapi/v3`."""
    paths = dict.fromkeys(_group_path(each) for each in resources)
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path in paths}}


def openapi_document(resources: Iterable[ApiResource], path: str) -> DiscoveryAnswer | None:
    """Return the answer of `/openapi/v3/apis/GROUP/VERSION`."""
    found = [each for each in resources if _group_path(each) == path]
    if not found:
        return None
    schemas = {_model_name(each): _model_schema(each) for each in found}
    paths: DiscoveryAnswer = {}
    for each in found:
        space = "/namespaces/{namespace}" if each.is_namespaced else ""
        paths[f"/{path}{space}/{each.plural}"] = {
            "get": _openapi_operation(each, "list"),
            "post": _openapi_operation(each, "post"),
        }
        paths[f"/{path}{space}/{each.plural}/{{name}}"] = {
            verb: _openapi_operation(each, verb) for verb in ("get", "put", "patch", "delete")
        }
    info = {"title": "Kubernetes", "version": FAKE_VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _group_path(resource: ApiResource) -> str:
    return f"apis/{resource.api_version}" if resource.group else "api/v1"


def _model_name(resource: ApiResource) -> str:
    reversed_group = ".".join(reversed((resource.group or "core.k8s.io").split(".")))
    return f"{reversed_group}.{resource.version}.{resource.kind}"


def _model_schema(resource: ApiResource) -> Mapping[str, Any]:
    known = resource.schema or {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {**known, "x-kubernetes-group-version-kind": [_group_version_kind(resource)]}


def _group_version_kind(resource: ApiResource) -> DiscoveryAnswer:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _openapi_operation(resource: ApiResource, action: str) -> DiscoveryAnswer:
    names = ("fieldValidation", "dryRun", "fieldManager")
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
    reference = {"$ref": f"#/components/schemas/{_model_name(resource)}"}
    return {
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _group_version_kind(resource),
        "parameters": parameters,
        "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": reference}}}},
    }


_NAME_COLUMN = {"name": "Name", "type": "string", "format": "name", "description": "Name", "priority": 0}
_AGE_COLUMN = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def is_table_requested(accept: str) -> bool:
    """Return whether the client prefers a table."""
    return "as=Table" in accept


def to_table(resource: ApiResource, bodies: Sequence[Mapping[str, Any]], version: str) -> dict[str, Any]:
    """Return the objects as a table."""
    columns = resource.columns or (_AGE_COLUMN,)
    definitions = [
        {
            "name": column["name"],
            "type": column["type"],
            "format": "",
            "description": column.get("description", ""),
            "priority": column.get("priority", 0),
        }
        for column in columns
    ]
    rows = [
        {
            "cells": [body["metadata"]["name"], *(_table_cell(column, body) for column in columns)],
            "object": {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": body["metadata"],
            },
        }
        for body in bodies
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": [_NAME_COLUMN, *definitions],
        "rows": rows,
    }


def _table_cell(column: Mapping[str, Any], body: Mapping[str, Any]) -> Any:
    value: Any = body
    for key in re.findall(r"[A-Za-z0-9]+", column["jsonPath"]):
        value = value.get(key) if isinstance(value, Mapping) else None
    return _age_text(value) if column["type"] == "date" and value else value


def _age_text(text: str) -> str:
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(text.replace("Z", "+00:00"))).total_seconds())
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * unit_s:
            return f"{seconds // unit_s}{unit}"
    return f"{max(0, seconds)}s"


_MAX_WATCH_S = 300.0


async def watch_lines(
    store: ObjectStore, resource: ApiResource, selector: ObjectSelector, params: Mapping[str, str], bookmark_s: float
) -> AsyncIterator[bytes]:
    """Yield the lines of a watch."""
    text = params.get("resourceVersion") or "0"
    version = int(text)
    deadline_s = asyncio.get_running_loop().time() + float(params.get("timeoutSeconds") or _MAX_WATCH_S)
    wants_bookmarks = params.get("allowWatchBookmarks") in ("true", "1")
    if version == 0 or params.get("sendInitialEvents") == "true":
        for _, item in store.list_objects(resource.key, selector.equal_labels):
            if selector.matches(item.body):
                yield _event_line("ADDED", item.text)
        version = store.version
        if params.get("sendInitialEvents") == "true":
            yield _bookmark_line(resource, version, is_end=True)
    while version >= store.oldest_version(resource.key):
        changed = store.change_event(resource.key)
        for change in store.since(resource.key, version):
            version = change.version
            yield _change_line(change, selector)
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            return
        try:
            async with asyncio.timeout(min(left_s, bookmark_s)):
                await changed.wait()
        except TimeoutError:
            if wants_bookmarks:
                version = max(version, store.version) if not store.since(resource.key, version) else version
                yield _bookmark_line(resource, version)
    gone = ApiFailure(410, "Expired", f"too old resource version: {version} ({store.oldest_version(resource.key)})")
    yield _event_line("ERROR", json.dumps(gone.to_status()).encode())


def _change_line(change: StoreChange, selector: ObjectSelector) -> bytes:
    """Return the line of a change as seen through the selector; empty if the selector hides it."""
    before = change.before if change.before and selector.matches(change.before.body) else None
    after = change.after if change.after and selector.matches(change.after.body) else None
    if after is not None:
        return _event_line("MODIFIED" if before is not None else "ADDED", after.text)
    if before is None:
        return b""
    if change.after is None:
        return _event_line("DELETED", before.text)
    # It left the selection: send its last selected version, with the resourceVersion at which it left.
    last = {**before.body, "metadata": {**before.body["metadata"], "resourceVersion": str(change.version)}}
    return _event_line("DELETED", StoredObject(last).text)


def _bookmark_line(resource: ApiResource, version: int, *, is_end: bool = False) -> bytes:
    metadata: dict[str, object] = {"resourceVersion": str(version), "creationTimestamp": None}
    if is_end:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    return _event_line("BOOKMARK", json.dumps(body).encode())


def _event_line(kind: str, text: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + text + b"}\n"


LogSource = Callable[[Mapping[str, Any], Mapping[str, str]], AsyncIterator[bytes] | None]
"""(Pod, parameters of the request) -> its output; None if nothing ran."""
_MAX_REQUEST_BYTES = 8 * 2**20
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ApiHandler:
    """Request handler of the fake API server."""

    def __init__(self, api: FakeApi, *, bookmark_s: float = 30.0) -> None:
        """`bookmark_s`: seconds without events after which a watch gets a bookmark."""
        self._api, self._bookmark_s = api, bookmark_s
        self.logs: LogSource = lambda _pod, _params: None
        self.watches_cut = asyncio.Event()
        """Set to end all watches; then replaced by a new event."""
        self.before_request: Callable[[web.Request], Awaitable[None]] | None = None
        """Called before each request, by tests that delay or break requests."""

    def app(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            if self.before_request is not None:
                await self.before_request(http)
            return await self._answer(http)
        except ApiFailure as refused:
            return _json_response(refused.to_status(), status=refused.status)

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        user = self._api.users.find_user(http.headers.get("Authorization", ""))
        if user is None:
            raise ApiFailure(401, "Unauthorized", "Unauthorized")
        known = self._static_answer(http.path)
        if known is not None:
            return _json_response(known)
        request = self._parse_request(http, user)
        is_list = http.method == "GET" and not request.name
        is_watch = is_list and http.query.get("watch") in ("true", "1")
        verb = "watch" if is_watch else "list" if is_list else _VERBS[http.method]
        self._check_role(request, verb)
        if request.subresource == "log":
            return await self._log(http, request)
        if is_watch:
            return await self._watch(http, request)
        if is_list:
            return self._list_objects(http, request)
        return await self._change_object(http, request)

    def _static_answer(self, path: str) -> dict[str, Any] | None:
        """Return the answer of a path without objects; None if the path leads to objects."""
        parts = [part for part in path.split("/") if part]
        is_object = parts[:1] in (["api"], ["apis"]) and len(parts) > (2 if parts[0] == "api" else 3)
        if is_object:
            return None
        found = discovery_answer(list(self._api.resources.values()), parts)
        if found is None:
            raise ApiFailure(404, "NotFound", "the server could not find the requested resource")
        return found

    def _parse_request(self, http: web.Request, user: User) -> ApiRequest:
        parts = [part for part in http.path.split("/") if part]
        group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        resource = self._api.resources.get((group, version, plural))
        if resource is None:
            raise ApiFailure(404, "NotFound", "the server could not find the requested resource")
        return ApiRequest(
            resource=resource,
            namespace=namespace,
            name=name,
            subresource=subresource,
            user=user,
            params=dict(http.query),
        )

    def _check_role(self, request: ApiRequest, verb: str) -> None:
        resource = request.resource
        if "review" in resource.plural and resource.plural.startswith("self"):
            return
        what = f"{resource.plural}/{request.subresource}" if request.subresource else resource.plural
        wanted = AccessAttributes(
            verb=verb, group=resource.group, resource=what, namespace=request.namespace, name=request.name
        )
        if not self._api.users.is_allowed(request.user, wanted):
            where = f' in the namespace "{request.namespace}"' if request.namespace else " at the cluster scope"
            text = (
                f'{resource.plural}.{resource.group} "{request.name}" is forbidden: User "{request.user.name}" '
                f'cannot {verb} resource "{what}" in API group "{resource.group}"{where}'
            )
            raise ApiFailure(403, "Forbidden", text)

    def _list_objects(self, http: web.Request, request: ApiRequest) -> web.Response:
        found = self._api.list(request.resource, _request_selector(request))
        version = str(self._api.store.version)
        if is_table_requested(http.headers.get("Accept", "")):
            return _json_response(to_table(request.resource, [item.body for item in found], version))
        head = {"kind": f"{request.resource.kind}List", "apiVersion": request.resource.api_version}
        metadata, first, most = {"resourceVersion": version}, int(http.query.get("continue") or 0), len(found)
        if (limit := int(http.query.get("limit") or most)) < most - first:  # "continue" of the fake: how many were sent
            most, metadata["continue"] = first + limit, str(first + limit)
        found = found[first:most]
        start = json.dumps({**head, "metadata": metadata})[:-1].encode()
        texts = (item.text if request.resource.is_custom else item.bare for item in found)
        text = start + b',"items":[' + b",".join(texts) + b"]}"
        return web.Response(body=text, content_type="application/json")

    async def _watch(self, http: web.Request, request: ApiRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        try:
            await response.prepare(http)
        except ConnectionError:  # the client disconnected
            return response
        is_table = is_table_requested(http.headers.get("Accept", ""))
        lines = watch_lines(
            self._api.store, request.resource, _request_selector(request), request.params, self._bookmark_s
        )
        sending = asyncio.create_task(self._send_events(response, request.resource, lines, is_table=is_table))
        cutting = asyncio.create_task(self.watches_cut.wait())
        try:
            await asyncio.wait((sending, cutting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            cutting.cancel()
            await asyncio.gather(sending, cutting, return_exceptions=True)
        return response

    async def _send_events(
        self, response: web.StreamResponse, resource: ApiResource, lines: AsyncIterator[bytes], *, is_table: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):  # the client disconnected
            async for line in lines:
                if line:
                    await response.write(_event_as_table(resource, line) if is_table else line)

    async def _change_object(self, http: web.Request, request: ApiRequest) -> web.Response:
        api, method = self._api, http.method
        if method == "GET":
            return self._object_response(http, request, api.get(request))
        if method == "DELETE":
            options = await _read_body(http)
            if not request.name:
                raise ApiFailure(405, "MethodNotAllowed", "the fake deletes one at a time")
            options = {
                **{key: request.params[key] for key in ("gracePeriodSeconds",) if key in request.params},
                **options,
            }
            return self._object_response(http, request, api.delete(request, options))
        body = await _read_body(http)
        if method == "PATCH":
            kind = http.headers.get("Content-Type", "").partition(";")[0]
            return self._object_response(http, request, api.patch(request, body, kind))
        if not isinstance(body, dict) or not body:
            raise ApiFailure(400, "BadRequest", "the request has no object")
        if "review" in request.resource.plural:
            return _json_response(api.users.answer_review(request.resource.kind, body, request.user), status=201)
        if request.subresource == "binding":
            return self._object_response(http, request, api.bind(request, body), status=201)
        if method == "PUT":
            return self._object_response(http, request, api.replace(request, body))
        return self._object_response(http, request, api.create(request, body), status=201)

    def _object_response(
        self, http: web.Request, request: ApiRequest, item: StoredObject, status: int = 200
    ) -> web.Response:
        if http.method == "GET" and is_table_requested(http.headers.get("Accept", "")):
            return _json_response(to_table(request.resource, [item.body], item.body["metadata"]["resourceVersion"]))
        return web.Response(body=item.text, status=status, content_type="application/json")

    async def _log(self, http: web.Request, request: ApiRequest) -> web.StreamResponse:
        pod = self._api.get(request).body
        container = api.log_container(pod, request.params.get("container", ""))
        lines = self.logs(pod, request.params)
        if lines is None:
            text = f'container "{container}" in pod "{request.name}" is waiting to start: ContainerCreating'
            raise ApiFailure(400, "BadRequest", text)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        response.enable_chunked_encoding()
        await response.prepare(http)
        with contextlib.suppress(ConnectionError):
            async for chunk in lines:
                await response.write(chunk)
        return response


def _request_selector(request: ApiRequest) -> object_selector.ObjectSelector:
    params = request.params
    labels, fields = params.get("labelSelector", ""), params.get("fieldSelector", "")
    if request.name:
        fields = f"{fields},metadata.name={request.name}".lstrip(",")
    return object_selector.parse_selector(request.resource.plural, labels, fields, request.namespace)


async def _read_body(http: web.Request) -> Any:
    content = await http.read()
    if not content:
        return {}
    if "protobuf" in http.headers.get("Content-Type", ""):
        raise ApiFailure(415, "UnsupportedMediaType", "the fake reads JSON and YAML only")
    try:
        is_yaml = "yaml" in http.headers.get("Content-Type", "")
        return YAML(typ="safe", pure=True).load(content) if is_yaml else json.loads(content)
    except ValueError as error:
        raise ApiFailure(400, "BadRequest", f"the body of the request cannot be read: {error}") from error


def _event_as_table(resource: ApiResource, line: bytes) -> bytes:
    event = json.loads(line)
    if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
        body = event["object"]
        event["object"] = to_table(resource, [body], body["metadata"]["resourceVersion"])
    return json.dumps(event).encode() + b"\n"


def _json_response(answer: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.json_response(answer, status=status)
