"""Requests to an API server: plain JSON over one pool of connections; what is refused becomes an `ApiError`."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any

import aiohttp
import kopf

from ringweave.launch.kubernetes.api import failures
from ringweave.launch.kubernetes.api.kinds import Kind
from ringweave.launch.kubernetes.api.pooling import Pool

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
"""Merges conditions by their type; only for what is built in."""
_TIMEOUT_S = 60.0
_MOST_AT_ONCE = 2**16


class Client:
    """One connection pool; to be used inside one event loop, as a context manager."""

    def __init__(self, connect: Callable[[], kopf.ConnectionInfo]) -> None:
        """Connects when the first request is made.

        Args:
            connect: Says where to, and as whom; asked again when the credentials are not accepted any more, as those
                of a service account change every hour.
        """
        self._connect = connect
        self._connection = connection = connect()
        self._server = connection.server.rstrip("/")
        self._headers = connection.as_http_headers()
        self._pool: Pool | None = None

    @property
    def namespace(self) -> str:
        """Where the user is by default."""
        return self._connection.default_namespace or "default"

    @property
    def server(self) -> str:
        """The address of the API server."""
        return self._server

    async def __aenter__(self) -> "Client":
        self._pool = Pool(
            self._connection,
            limit=64,
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            read_bufsize=2**18,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pool is not None
        await self._pool.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """One object.

        Raises:
            ApiError: There is none, or it may not be read.
        """
        return await self.request("GET", kind.path(namespace, name))

    async def list(self, kind: Kind, namespace: str | None, **params: str) -> list[Object]:
        """All objects that the parameters select."""
        return (await self.request("GET", kind.path(namespace), params=params))["items"] or []

    async def create(self, kind: Kind, namespace: str | None, body: Object, **params: str) -> Object:
        """Make an object.

        Raises:
            ApiError: It exists (`is_taken`), or is refused.
        """
        whole = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        return await self.request("POST", kind.path(namespace), params=params, body=whole)

    async def replace(
        self, kind: Kind, namespace: str | None, body: Object, *, subresource: str | None = None
    ) -> Object:
        """Put the object in the place of the one that has its resourceVersion.

        Raises:
            ApiError: Somebody else changed it (`is_stale`).
        """
        path = kind.path(namespace, body["metadata"]["name"], subresource)
        return await self.request("PUT", path, body={"apiVersion": kind.api_version, "kind": kind.kind, **body})

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Object, *, subresource: str | None = None
    ) -> Object:
        """Merge the fields into the object, lists as a whole; conditions of a subresource by their type."""
        path = kind.path(namespace, name, subresource)
        is_built_in = kind.api_version == "v1"
        return await self.request("PATCH", path, body=body, content_type=STRATEGIC if is_built_in else MERGE)

    async def delete(self, kind: Kind, namespace: str | None, name: str, **options: Any) -> None:
        """Delete the object; one that is gone already, or is another one than the preconditions say, is gone."""
        try:
            await self.request("DELETE", kind.path(namespace, name), body=options or None)
        except failures.ApiError as error:
            if not error.is_gone and not (error.is_stale and "preconditions" in options):
                raise

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send a request and read the answer.

        Raises:
            ApiError: It was refused.
            LaunchError: Nobody answered.
        """
        data = None if body is None else json.dumps(body, separators=(",", ":"))
        headers = {"Accept": "application/json", **({"Content-Type": content_type} if data else {})}
        status, answer = await self._send(method, path, params, data, headers)
        if status == 401:
            self._headers = self._connect().as_http_headers()
            status, answer = await self._send(method, path, params, data, headers)
        if status >= 400:
            raise failures.from_answer(f"{method} {path}", status, answer)
        return answer

    async def _send(
        self, method: str, path: str, params: Mapping[str, str] | None, data: str | None, headers: Mapping[str, str]
    ) -> tuple[int, Object]:
        assert self._pool is not None
        whole = {**self._headers, **headers}
        content = None if data is None else _content(data.encode())
        try:
            async with self._pool.session.request(
                method, self._server + path, params=params, data=content, headers=whole
            ) as response:
                return response.status, _parsed(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise failures.unreachable(self._server, error) from error

    async def lines(self, path: str, params: Mapping[str, str]) -> AsyncIterator[str]:
        """The answer line by line as it comes: a watch, or a log that is followed.

        Raises:
            ApiError: It was refused.
            LaunchError: Nobody answered, or the connection broke.
        """
        assert self._pool is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S)
        try:
            async with self._pool.session.get(
                self._server + path, params=params, timeout=timeout, headers=self._headers
            ) as response:
                if response.status >= 400:
                    raise failures.from_answer(f"GET {path}", response.status, _parsed(await response.read()))
                rest = b""
                async for chunk in response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        yield line.decode("utf-8", "replace")
                if rest:
                    yield rest.decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise failures.unreachable(self._server, error) from error


def _content(data: bytes) -> bytes | io.BytesIO:
    """A small body goes out with its headers, at half the cost; one that may have a megabyte in pieces."""
    return data if len(data) <= _MOST_AT_ONCE else io.BytesIO(data)


def _parsed(content: bytes) -> Object:
    try:
        answer = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        return {"reason": "NotJson", "message": content[:200].decode("utf-8", "replace")}
    return answer if isinstance(answer, dict) else {"message": str(answer)[:200]}
