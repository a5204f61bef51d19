"""HTTP servers within the limits of `accept_limits`: one with a thread for each connection, and one of aiohttp.

A connection is pending until its caller is known (`admit`). One whose caller stays unknown has `HTTP_LIMITS.deadline_s`
for its request and the answer, and ends with that.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from ringweave.accept_limits import AcceptLimits, ConnectionLimiter, LimitedListener, connection_id

if TYPE_CHECKING:
    from aiohttp import web

HTTP_LIMITS = AcceptLimits(deadline_s=15.0)
"""Prometheus and kubelet wait less than this for an answer."""
_BACKLOG = 128
_LOGGER = logging.getLogger(__name__)


class ThreadedHttpServer(ThreadingHTTPServer):
    """HTTP server with a thread for each connection; it goes on where the system has no thread or descriptor left."""

    daemon_threads = True
    request_queue_size = _BACKLOG

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen.

        Raises:
            OSError: The address or port is not available.
        """
        self.limiter = ConnectionLimiter(HTTP_LIMITS)
        self._has_lacked_threads = False
        super().__init__(address, handler)

    def admit(self, sock: socket.socket) -> None:
        """Note that the caller of a connection is known: it may last from now on."""
        self.limiter.finish(connection_id(sock))

    def get_request(self) -> tuple[socket.socket, Any]:
        accepted = self.limiter.accept(self.socket)
        if accepted is None:
            raise BlockingIOError("there was none, or it was refused")
        return accepted

    def service_actions(self) -> None:
        super().service_actions()
        self.limiter.cut_overdue()

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:
            if not self._has_lacked_threads:
                _LOGGER.warning("HTTP request of %s: refused: %s. Raise ulimit -u, or pids.max.", client_address, error)
            self._has_lacked_threads = True
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of a request; none of a connection that its caller has ended, or that was cut."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def close_request(self, request: Any) -> None:
        self.limiter.finish(connection_id(request))
        super().close_request(request)

    def server_close(self) -> None:
        super().server_close()
        self.limiter.cut_all()
        self.limiter.close()


def admit(request: "web.Request", limiter: ConnectionLimiter) -> None:
    """Note that the caller of a request is known: its connection may last from now on."""
    connection = _connection_of(request)
    if connection is not None:
        limiter.finish(connection)


def _connection_of(request: "web.BaseRequest") -> int | None:
    """Return the id of a request's connection; None if that has ended."""
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    return None if sock is None or sock.fileno() < 0 else connection_id(sock)


class HttpSite:
    """Application of aiohttp that is served; `serve_application` makes it."""

    def __init__(self, runner: "web.AppRunner", limiter: ConnectionLimiter, context: ssl.SSLContext | None) -> None:
        self.addresses: Sequence[Any] = ()
        """Addresses and ports at which it listens."""
        self._runner, self._limiter, self._context = runner, limiter, context
        self._listeners: list[LimitedListener] = []

    async def listen(self, host: str | None, port: int) -> None:
        """Listen at all addresses of a host; None means those of this machine.

        Raises:
            OSError: The address or port is not available.
        """
        loop = asyncio.get_running_loop()
        bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        socks = [each.dup() for each in bound.sockets]
        bound.close()
        self.addresses = [sock.getsockname() for sock in socks]
        for sock in socks:
            sock.listen(_BACKLOG)
            self._listeners.append(LimitedListener(sock, loop, self._serve, self._limiter))
            self._listeners[-1].start()

    async def _serve(self, sock: socket.socket) -> None:
        assert self._runner.server is not None, "it is set up"
        limits: dict[str, Any] = {} if self._context is None else {"ssl_handshake_timeout": HTTP_LIMITS.deadline_s}
        with contextlib.suppress(OSError):  # a stranger, or an end that is gone
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self._runner.server, sock, ssl=self._context, **limits)

    async def cleanup(self) -> None:
        """Accept no more connections, and end those that there are."""
        for each in self._listeners:
            each.close()
        await self._runner.cleanup()


async def serve_application(
    app: "web.Application",
    limiter: ConnectionLimiter,
    address: tuple[str | None, int],
    *,
    context: ssl.SSLContext | None = None,
    shutdown_timeout_s: float,
) -> HttpSite:
    """Serve an application of aiohttp; its handlers `admit` the requests of known callers.

    Raises:
        OSError: The address or port is not available.
    """
    from aiohttp import web  # an extra of the package

    async def end_with_answer(request: web.Request, response: web.StreamResponse) -> None:
        connection = _connection_of(request)
        if connection is not None and limiter.is_pending(connection):
            response.headers["Connection"] = "close"
            response.force_close()

    app.on_response_prepare.append(end_with_answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_timeout_s)
    await runner.setup()
    site = HttpSite(runner, limiter, context)
    try:
        await site.listen(*address)
    except BaseException:
        await site.cleanup()
        raise
    return site
