"""Limits of HTTP servers, with real connections: idle, slow and greedy strangers, and callers that are known."""

import asyncio
import contextlib
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from ringweave import http_servers
from ringweave.accept_limits import ConnectionLimiter
from ringweave.errors import LaunchError
from ringweave.http_servers import HTTP_LIMITS, ThreadedHttpServer
from ringweave.page.page_server import PageServer
from ringweave.platforms.kubernetes import operator
from ringweave.platforms.kubernetes.agent_gateway import AgentGateway
from ringweave.platforms.local.platform import LocalPlatform
from ringweave.telemetry.exporters import MetricsServer
from tests.platforms.served import TOKEN, served
from tests.polling import wait_until

NUM_IDLE = HTTP_LIMITS.max_pending_per_source + 20
LARGE = 64 << 20
"""Bytes of an answer that no socket holds."""


@dataclass
class Serving:
    """A server in another thread."""

    port: int
    limiter: ConnectionLimiter
    path: str = "/"
    status: int = 200
    """Answer to a caller that is not known."""
    known: tuple[str, str] | None = None
    """Header of one that is."""

    def ask(self, *headers: tuple[str, str]) -> int:
        """The status of an answer, which is read to its end."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            client.request("GET", self.path, headers=dict(headers))
            answer = client.getresponse()
            answer.read()
            return answer.status
        finally:
            client.close()

    def make_late(self) -> None:
        """Let all pending connections be over their deadline."""
        self.limiter._clock = lambda: time.monotonic() + HTTP_LIMITS.deadline_s

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


@contextlib.contextmanager
def looping(start: Callable[[], Coroutine[Any, Any, Any]], stop: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Run a server in a loop of its own; yields what `start` returns."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    made = run(start())
    try:
        yield made
    finally:
        run(stop(made))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def a_metrics_server() -> Iterator[Serving]:
    server = MetricsServer(CollectorRegistry(), 0)
    yield Serving(server.port, server._server.limiter, "/metrics")
    server.close()


@contextlib.contextmanager
def an_adapter(folder: Path) -> Iterator[Serving]:
    with served(LocalPlatform(folder, requester="ann", environ={})) as adapter:
        known = ("Authorization", f"Bearer {TOKEN}")
        yield Serving(adapter.server_port, adapter.limiter, "/v2/jobs", 401, known)


class NoSource:
    """A run of which nothing comes."""

    def poll(self) -> bool:
        return False

    def sections(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def a_page() -> Iterator[Serving]:
    async def start() -> tuple[PageServer, http_servers.HttpSite]:
        server = PageServer(NoSource(), TOKEN)  # type: ignore[arg-type]  # pyrefly: ignore
        address = ("127.0.0.1", 0)
        app = server.application()
        return server, await http_servers.serve_application(app, server.limiter, address, shutdown_timeout_s=0.1)

    with looping(start, lambda made: made[1].cleanup()) as (server, site):
        port = site.addresses[0][1]
        yield Serving(port, server.limiter, "/", 403, ("Cookie", f"ringweave-page-{port}={TOKEN}"))


@contextlib.contextmanager
def a_gateway() -> Iterator[Serving]:
    gateway = AgentGateway(None, time.time)  # type: ignore[arg-type]  # pyrefly: ignore
    with looping(lambda: gateway.start_serving("127.0.0.1", 0, None), lambda site: site.cleanup()) as site:
        yield Serving(site.addresses[0][1], gateway._limiter, "/v2/default/job/0/1/desired-state", 403)


@contextlib.contextmanager
def a_health_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    limiters = list[ConnectionLimiter]()
    serve = http_servers.serve_application

    async def note_limiter(app: web.Application, limiter: ConnectionLimiter, *args: Any, **options: Any) -> Any:
        limiters.append(limiter)
        return await serve(app, limiter, *args, **options)

    monkeypatch.setattr(http_servers, "serve_application", note_limiter)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/healthz"

    async def start() -> Any:
        serving = operator.serve_health_and_metrics(url, None, (), asyncio.Event())  # type: ignore[arg-type]  # pyrefly: ignore
        await serving.__aenter__()
        return serving

    with looping(start, lambda made: made.__aexit__(None, None, None)):
        yield Serving(port, limiters[0], "/healthz")


@pytest.fixture(params=["metrics", "adapter", "page", "gateway", "health"])
def serving(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    made: dict[str, Callable[[], contextlib.AbstractContextManager[Serving]]] = {
        "metrics": a_metrics_server,
        "adapter": lambda: an_adapter(tmp_path),
        "page": a_page,
        "gateway": a_gateway,
        "health": lambda: a_health_endpoint(monkeypatch),
    }
    with made[request.param]() as serving:
        yield serving


def close_all(socks: Sequence[socket.socket]) -> None:
    for each in socks:
        each.close()


def test_a_request_is_answered_beside_all_the_idle_connections_that_there_may_be(serving: Serving) -> None:
    idle = [serving.connect() for _ in range(NUM_IDLE)]
    assert serving.ask() == serving.status
    assert idle[0].recv(1) == b"", "the oldest has made room"
    assert serving.limiter.num_pending <= HTTP_LIMITS.max_pending_per_source
    close_all(idle)


def test_a_request_that_never_ends_ends_at_the_deadline(serving: Serving) -> None:
    with serving.connect() as slow:
        slow.sendall(f"GET {serving.path} HTTP/1.1\r\nHost: a\r\nX-Slow: ".encode())
        wait_until(lambda: serving.limiter.num_pending == 1)
        slow.sendall(b"slow")
        serving.make_late()
        assert slow.recv(1) == b""
    assert serving.limiter.num_pending == 0


def test_an_unknown_caller_gets_one_answer(serving: Serving) -> None:
    for _ in range(2 * NUM_IDLE):
        with serving.connect() as sock:
            sock.sendall(f"GET {serving.path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            answer = b"".join(iter(lambda: sock.recv(2**16), b""))
            assert answer.split()[1] == str(serving.status).encode()
    assert serving.limiter.num_refused == 0, "those that have ended count no more"


@pytest.mark.parametrize("serving", ["adapter", "page"], indirect=True)
def test_a_known_caller_may_take_its_time(serving: Serving) -> None:
    assert serving.known is not None
    assert serving.ask(serving.known) == 200
    name, value = serving.known
    with serving.connect() as sock:
        path = "/live" if serving.path == "/" else serving.path
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: a:{serving.port}\r\n{name}: {value}\r\n\r\n".encode())
        assert sock.recv(12).endswith(b" 200")
        wait_until(lambda: serving.limiter.num_pending == 0)
        assert serving.limiter.num_refused == 0


class Greedy(BaseHTTPRequestHandler):
    """Answers with more than the socket holds."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(bytes(LARGE))

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def threaded(handler: type[BaseHTTPRequestHandler]) -> Iterator[Serving]:
    with ThreadedHttpServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Serving(server.server_port, server.limiter)
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def looped() -> Iterator[Serving]:
    limiter = ConnectionLimiter(HTTP_LIMITS)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=bytes(LARGE))

    async def start() -> http_servers.HttpSite:
        app = web.Application()
        app.router.add_get("/", answer)
        return await http_servers.serve_application(app, limiter, ("localhost", 0), shutdown_timeout_s=0.1)

    with looping(start, lambda site: site.cleanup()) as site:
        port = next(each[1] for each in site.addresses if each[0] == "127.0.0.1")
        yield Serving(port, limiter)


@pytest.mark.parametrize("start", [lambda: threaded(Greedy), looped])
def test_an_answer_that_nobody_takes_ends_at_the_deadline(
    start: Callable[[], contextlib.AbstractContextManager[Serving]], capfd: pytest.CaptureFixture[str]
) -> None:
    with start() as serving, serving.connect() as greedy:
        greedy.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert greedy.recv(12).endswith(b" 200")
        serving.make_late()
        wait_until(lambda: serving.limiter.num_pending == 0)
        with contextlib.suppress(ConnectionResetError):
            while greedy.recv(2**20):
                pass
    wait_until(lambda: not any("process_request" in each.name for each in threading.enumerate()))
    assert capfd.readouterr().err == ""


def test_a_server_goes_on_where_the_system_had_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with a_metrics_server() as serving:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            for _ in range(3):
                with serving.connect() as refused:
                    assert refused.recv(1) == b""
        assert serving.ask() == 200
        wait_until(lambda: serving.limiter.num_pending == 0, "the end of the thread that answered")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("refused: can't start new thread. Raise ulimit -u, or pids.max.")


class Unreadable(Collector):
    """Metrics of a platform that does not answer."""

    def collect(self) -> Iterator[Metric]:
        raise LaunchError("platform: no answer, expected its jobs. Ask again.")

    def describe(self) -> Iterator[Metric]:
        return iter(())


def test_a_scrape_is_told_why_there_are_no_metrics(capfd: pytest.CaptureFixture[str]) -> None:
    registry = CollectorRegistry()
    registry.register(Unreadable())
    server = MetricsServer(registry, 0)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics")
    assert (caught.value.code, b"no answer, expected its jobs" in caught.value.read()) == (503, True)
    caught.value.close()
    server.close()
    assert capfd.readouterr().err == ""
