"""The API over HTTP: who asks, what they may, which verb a request is, and answers as a real server words them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from ruamel.yaml import YAML

from ringweave.testing.kubernetes.checks.users import Attributes, User
from ringweave.testing.kubernetes.server import discovery, objects, selecting, tables, watching
from ringweave.testing.kubernetes.server.api import Api, Request
from ringweave.testing.kubernetes.server.refusing import Refused
from ringweave.testing.kubernetes.server.resources import Resource
from ringweave.testing.kubernetes.server.store import Item

Logs = Callable[[Mapping[str, Any], Mapping[str, str]], AsyncIterator[bytes] | None]
"""(Pod, parameters of the request) -> what it printed; None where nothing ran."""
_MOST_BYTES = 8 * 2**20
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Handler:
    """Answers requests."""

    def __init__(self, api: Api, *, bookmark_s: float = 30.0) -> None:
        """`bookmark_s`: seconds of silence on a watch after which it gets a bookmark."""
        self._api, self._bookmark_s = api, bookmark_s
        self.logs: Logs = lambda _pod, _params: None
        self.cut = asyncio.Event()
        """Set to end all watches; replaced by another one then."""
        self.delay: Callable[[web.Request], Awaitable[None]] | None = None
        """Called before each request is looked at, by tests that slow or break them."""

    def app(self) -> web.Application:
        """The application that serves it."""
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """One request."""
        try:
            if self.delay is not None:
                await self.delay(http)
            return await self._answer(http)
        except Refused as refused:
            return _json(refused.answer(), status=refused.status)

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        user = self._api.users.of(http.headers.get("Authorization", ""))
        if user is None:
            raise Refused(401, "Unauthorized", "Unauthorized")
        known = self._known(http.path)
        if known is not None:
            return _json(known)
        request = self._request(http, user)
        is_list = http.method == "GET" and not request.name
        is_watch = is_list and http.query.get("watch") in ("true", "1")
        verb = "watch" if is_watch else "list" if is_list else _VERBS[http.method]
        self._check_role(request, verb)
        if request.subresource == "log":
            return await self._log(http, request)
        if is_watch:
            return await self._watch(http, request)
        if is_list:
            return self._list(http, request)
        return await self._change(http, request)

    def _known(self, path: str) -> dict[str, Any] | None:
        """What does not depend on objects; None where the path leads to some."""
        parts = [part for part in path.split("/") if part]
        is_object = parts[:1] in (["api"], ["apis"]) and len(parts) > (2 if parts[0] == "api" else 3)
        if is_object:
            return None
        found = discovery.answer(list(self._api.resources.values()), parts)
        if found is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return found

    def _request(self, http: web.Request, user: User) -> Request:
        parts = [part for part in http.path.split("/") if part]
        group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        resource = self._api.resources.get((group, version, plural))
        if resource is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return Request(
            resource=resource,
            namespace=namespace,
            name=name,
            subresource=subresource,
            user=user,
            params=dict(http.query),
        )

    def _check_role(self, request: Request, verb: str) -> None:
        resource = request.resource
        if "review" in resource.plural and resource.plural.startswith("self"):
            return
        what = f"{resource.plural}/{request.subresource}" if request.subresource else resource.plural
        wanted = Attributes(
            verb=verb, group=resource.group, resource=what, namespace=request.namespace, name=request.name
        )
        if not self._api.users.may(request.user, wanted):
            where = f' in the namespace "{request.namespace}"' if request.namespace else " at the cluster scope"
            text = (
                f'{resource.plural}.{resource.group} "{request.name}" is forbidden: User "{request.user.name}" '
                f'cannot {verb} resource "{what}" in API group "{resource.group}"{where}'
            )
            raise Refused(403, "Forbidden", text)

    def _list(self, http: web.Request, request: Request) -> web.Response:
        found = self._api.list(request.resource, _selector(request))
        version = str(self._api.store.version)
        if tables.is_wanted(http.headers.get("Accept", "")):
            return _json(tables.table(request.resource, [item.body for item in found], version))
        head = {"kind": f"{request.resource.kind}List", "apiVersion": request.resource.api_version}
        start = json.dumps({**head, "metadata": {"resourceVersion": version}})[:-1].encode()
        texts = (item.text if request.resource.is_custom else item.bare for item in found)
        text = start + b',"items":[' + b",".join(texts) + b"]}"
        return web.Response(body=text, content_type="application/json")

    async def _watch(self, http: web.Request, request: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        try:
            await response.prepare(http)
        except ConnectionError:  # it hung up
            return response
        is_table = tables.is_wanted(http.headers.get("Accept", ""))
        lines = watching.watch(self._api.store, request.resource, _selector(request), request.params, self._bookmark_s)
        sending = asyncio.create_task(self._send(response, request.resource, lines, is_table=is_table))
        cutting = asyncio.create_task(self.cut.wait())
        try:
            await asyncio.wait((sending, cutting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            cutting.cancel()
            await asyncio.gather(sending, cutting, return_exceptions=True)
        return response

    async def _send(
        self, response: web.StreamResponse, resource: Resource, lines: AsyncIterator[bytes], *, is_table: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):  # it hung up
            async for line in lines:
                if line:
                    await response.write(_as_table(resource, line) if is_table else line)

    async def _change(self, http: web.Request, request: Request) -> web.Response:
        api, method = self._api, http.method
        if method == "GET":
            return self._one(http, request, api.get(request))
        if method == "DELETE":
            options = await _body(http)
            if not request.name:
                raise Refused(405, "MethodNotAllowed", "the fake deletes one at a time")
            options = {
                **{key: request.params[key] for key in ("gracePeriodSeconds",) if key in request.params},
                **options,
            }
            return self._one(http, request, api.delete(request, options))
        body = await _body(http)
        if method == "PATCH":
            kind = http.headers.get("Content-Type", "").partition(";")[0]
            return self._one(http, request, api.patch(request, body, kind))
        if not isinstance(body, dict) or not body:
            raise Refused(400, "BadRequest", "the request has no object")
        if "review" in request.resource.plural:
            return _json(api.users.review(request.resource.kind, body, request.user), status=201)
        if request.subresource == "binding":
            return self._one(http, request, api.bind(request, body), status=201)
        if method == "PUT":
            return self._one(http, request, api.replace(request, body))
        return self._one(http, request, api.create(request, body), status=201)

    def _one(self, http: web.Request, request: Request, item: Item, status: int = 200) -> web.Response:
        if http.method == "GET" and tables.is_wanted(http.headers.get("Accept", "")):
            return _json(tables.table(request.resource, [item.body], item.body["metadata"]["resourceVersion"]))
        return web.Response(body=item.text, status=status, content_type="application/json")

    async def _log(self, http: web.Request, request: Request) -> web.StreamResponse:
        pod = self._api.get(request).body
        container = objects.container_of(pod, request.params.get("container", ""))
        lines = self.logs(pod, request.params)
        if lines is None:
            text = f'container "{container}" in pod "{request.name}" is waiting to start: ContainerCreating'
            raise Refused(400, "BadRequest", text)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        response.enable_chunked_encoding()
        await response.prepare(http)
        with contextlib.suppress(ConnectionError):
            async for chunk in lines:
                await response.write(chunk)
        return response


def _selector(request: Request) -> selecting.Selector:
    params = request.params
    labels, fields = params.get("labelSelector", ""), params.get("fieldSelector", "")
    if request.name:
        fields = f"{fields},metadata.name={request.name}".lstrip(",")
    return selecting.parse(request.resource.plural, labels, fields, request.namespace)


async def _body(http: web.Request) -> Any:
    content = await http.read()
    if not content:
        return {}
    if "protobuf" in http.headers.get("Content-Type", ""):
        raise Refused(415, "UnsupportedMediaType", "the fake reads JSON and YAML only")
    try:
        is_yaml = "yaml" in http.headers.get("Content-Type", "")
        return YAML(typ="safe", pure=True).load(content) if is_yaml else json.loads(content)
    except ValueError as error:
        raise Refused(400, "BadRequest", f"the body of the request cannot be read: {error}") from error


def _as_table(resource: Resource, line: bytes) -> bytes:
    event = json.loads(line)
    if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
        body = event["object"]
        event["object"] = tables.table(resource, [body], body["metadata"]["resourceVersion"])
    return json.dumps(event).encode() + b"\n"


def _json(answer: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.json_response(answer, status=status)
