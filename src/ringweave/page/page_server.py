"""Server of the live page: static files and a stream of changed sections, for those who know the token."""

import asyncio
import hmac
import json
import os
import secrets
import select
import signal
import stat
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ringweave import http_servers
from ringweave.accept_limits import ConnectionLimiter
from ringweave.errors import LaunchError
from ringweave.http_servers import HTTP_LIMITS, HttpSite
from ringweave.page import html_report, run_model
from ringweave.page.run_source import RunSource

_STANDARD_OUTPUT = 1
INTERVAL_S = 1.0
"""Time between two updates of the page."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageServer:
    """Serves one run; its sections are built while anybody looks, once for all."""

    def __init__(self, source: RunSource, token: str) -> None:
        self._source, self._token = source, token
        self.limiter = ConnectionLimiter(HTTP_LIMITS)
        self._sections: Mapping[str, str] = {}
        self._version = self._num_streams = 0
        self._changed, self.ended = asyncio.Condition(), asyncio.Event()
        self.error: BaseException | None = None
        """Reason for which the page cannot go on."""

    def application(self) -> web.Application:
        """Return the application, with the token at its door."""
        app = web.Application(middlewares=[_token_check(self._token, self.limiter)])
        app.router.add_get("/", _page)
        app.router.add_get("/static/{name}", _static)
        app.router.add_get("/live", self._live)
        app.cleanup_ctx.append(self._updates)
        return app

    async def _updates(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._update())
        task.add_done_callback(self._note_end)
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self.error = None if task.cancelled() else task.exception()
        self.ended.set()

    async def _update(self) -> None:
        loop = asyncio.get_running_loop()
        while not is_output_unread():
            has_more = await loop.run_in_executor(None, self._source.poll)
            if self._num_streams or not self._version:
                sections = await loop.run_in_executor(None, self._dump)
                async with self._changed:
                    self._sections, self._version = sections, self._version + 1
                    self._changed.notify_all()
            await asyncio.sleep(0.0 if has_more else INTERVAL_S)

    def _dump(self) -> Mapping[str, str]:
        return run_model.dump_sections(self._source.sections())

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Stream the sections that have changed, as server-sent events; the first one has all."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
        await response.prepare(request)
        sent: dict[str, str] = {}
        version = 0
        self._num_streams += 1
        try:
            while True:
                version = await self._wait_newer(version)
                news = {name: text for name, text in self._sections.items() if sent.get(name) != text}
                sent.update(news)
                body = ",".join(f"{json.dumps(name)}:{text}" for name, text in news.items())
                await response.write(f"data: {{{body}}}\n\n".encode())  # without news too: it shows that we are there
        except ConnectionError:
            return response
        finally:
            self._num_streams -= 1

    async def _wait_newer(self, version: int) -> int:
        """Wait for the sections after those of that version; return the number of the newest."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version > version)
            return self._version


def _token_check(token: str, limiter: ConnectionLimiter) -> Middleware:
    """Return the middleware that lets those in who have the token: in the address once, then in a cookie."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        cookie = f"ringweave-page-{request.url.port}"  # cookies do not tell ports of a host apart
        given = request.query.get("token", "")
        if request.path == "/" and given and hmac.compare_digest(given.encode(), token.encode()):
            answer = web.Response(status=303, headers={"Location": "/", **_HEADERS})
            answer.set_cookie(cookie, token, httponly=True, samesite="Strict")
            return answer
        if not hmac.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
            text = "This page needs the address that ringweave ui has printed, with its token.\n"
            return web.Response(status=403, text=text, headers=_HEADERS)
        http_servers.admit(request, limiter)
        return await handler(request)

    return check


async def _page(_: web.Request) -> web.Response:
    return web.Response(text=html_report.static_text(html_report.PAGE), content_type="text/html", headers=_HEADERS)


async def _static(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in html_report.STATIC_FILES:
        raise web.HTTPNotFound(headers=_HEADERS)
    return web.Response(
        text=html_report.static_text(name), content_type=html_report.STATIC_FILES[name], headers=_HEADERS
    )


def is_output_unread() -> bool:
    """Return whether standard output is a pipe without a reader: the program that has started this one is gone."""
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(_STANDARD_OUTPUT).st_mode)
    except OSError:  # closed from the beginning
        return False
    poll = select.poll()
    poll.register(_STANDARD_OUTPUT, 0)
    return is_pipe and any(events & select.POLLERR for _, events in poll.poll(0))


def serve(source: RunSource, host: str, port: int, on_ready: Callable[[str], object]) -> None:
    """Serve the page until SIGINT or SIGTERM, or until nobody can read its address; `on_ready` gets that.

    Raises:
        LaunchError: The address cannot be used.
        RingweaveError: The run cannot be read.
    """
    source.follow_logs()
    asyncio.run(_serve(PageServer(source, token := secrets.token_urlsafe(24)), token, (host, port), on_ready))


async def _serve(server: PageServer, token: str, address: tuple[str, int], on_ready: Callable[[str], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.ended.set)
    site = await _listen(server, *address)
    try:
        host, port = site.addresses[0][:2]
        on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}")
        await server.ended.wait()
    finally:
        error = server.error
        await site.cleanup()
    if error is not None:
        raise error


async def _listen(server: PageServer, host: str, port: int) -> HttpSite:
    """Listen.

    Raises:
        LaunchError: The address cannot be used.
    """
    try:
        return await http_servers.serve_application(
            server.application(), server.limiter, (host, port), shutdown_timeout_s=1.0
        )
    except OSError as error:
        got, do = f"{host}:{port} ({error.strerror or error})", "Choose another --host or --port"
        raise LaunchError("page", got=got, expected="a free address of this machine", do=do) from error
