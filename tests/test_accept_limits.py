"""Limits of listeners: floods, silence, slow talkers, and no descriptor left."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ringweave import rpc
from ringweave.accept_limits import AcceptLimits, ConnectionLimiter, LimitedListener, connection_id
from ringweave.errors import RpcError
from ringweave.rpc import CertificateAuthority, RpcServer, TlsAuthentication
from tests import effort

NUM_IDLE = 2000


class Listening:
    """A listener with limits whose clock stands still."""

    def __init__(self, **limits: float) -> None:
        self.now_s = 0.0
        self.refused: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.listener.setblocking(False)
        self.limiter = ConnectionLimiter(
            AcceptLimits(**limits),  # pyrefly: ignore
            clock=lambda: self.now_s,
            on_refusal=lambda address, text: self.refused.append(f"{address}: {text}"),
        )
        self.stack = contextlib.ExitStack()

    def call(self, source: str = "127.0.0.1") -> socket.socket:
        sock = socket.create_connection(self.listener.getsockname(), timeout=20, source_address=(source, 0))
        return self.stack.enter_context(sock)

    def accept(self) -> socket.socket | None:
        accepted = self.limiter.accept(self.listener)
        return None if accepted is None else self.stack.enter_context(accepted[0])


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening(max_pending=4, max_pending_per_source=3, deadline_s=10, burst=20, connects_per_s=1)
    with made.listener, made.stack:
        yield made
    made.limiter.close()


def test_the_oldest_connection_of_a_source_makes_room_for_its_next(listening: Listening) -> None:
    callers = [listening.call() for _ in range(4)]
    kept = [listening.accept() for _ in callers]
    assert all(kept)
    assert callers[0].recv(1) == b""
    assert listening.limiter.num_pending == 3
    assert listening.refused == [
        "127.0.0.1: connections that say nothing: 'more', expected at most 3 of an address, 4 in all, 20 at once and 1 "
        "per second. Check which processes call."
    ]


def test_the_busiest_source_makes_room_for_others(listening: Listening) -> None:
    busy = [listening.call("127.0.0.2") for _ in range(3)]
    for _ in busy:
        listening.accept()
    for source in ("127.0.0.3", "127.0.0.4"):
        listening.call(source)
        assert listening.accept() is not None
    assert busy[0].recv(1) == b""
    assert listening.limiter.num_pending == 4


def test_who_has_said_what_it_is_counts_no_more(listening: Listening) -> None:
    for _ in range(10):
        listening.call()
        accepted = listening.accept()
        assert accepted is not None
        listening.limiter.finish(connection_id(accepted))
    assert (listening.limiter.num_pending, listening.refused) == (0, [])


def accept_two_with_one_descriptor(listening: Listening) -> tuple[int, socket.socket, socket.socket]:
    """Return the id of a connection that has ended, the next one with its descriptor, and the caller of that."""
    listening.call()
    ended = listening.accept()
    assert ended is not None
    first, descriptor = connection_id(ended), ended.fileno()
    ended.close()  # as a TLS handshake closes it that fails
    caller = listening.call()  # takes the lowest free descriptor, which was that one, and gives it back
    moved = socket.socket(fileno=os.dup(caller.fileno()))
    caller.close()
    listening.stack.callback(moved.close)
    following = listening.accept()
    assert following is not None
    assert following.fileno() == descriptor
    return first, following, moved


def test_the_late_end_of_a_connection_is_not_that_of_the_next_with_its_descriptor(listening: Listening) -> None:
    ended, following, _ = accept_two_with_one_descriptor(listening)
    listening.limiter.finish(ended)
    assert listening.limiter.num_pending == 1
    listening.limiter.finish(connection_id(following))
    assert listening.limiter.num_pending == 0


def test_a_connection_that_ended_without_a_word_is_not_cut_for_the_next_with_its_descriptor(
    listening: Listening,
) -> None:
    _, following, caller = accept_two_with_one_descriptor(listening)
    listening.limiter.finish(connection_id(following))
    listening.now_s = 10.0
    listening.limiter.cut_overdue()
    following.sendall(b"x")
    assert caller.recv(1) == b"x"
    assert listening.limiter.num_pending == 0


def test_a_silent_connection_ends_at_its_deadline(listening: Listening) -> None:
    silent = listening.call()
    listening.accept()
    listening.now_s = 9.9
    listening.limiter.cut_overdue()
    assert listening.limiter.num_pending == 1
    listening.now_s = 10.0
    listening.limiter.cut_overdue()
    assert silent.recv(1) == b""


def test_the_task_of_a_connection_that_is_cut_ends_with_it() -> None:
    ended, served = list[int](), list[socket.socket]()

    async def serve(sock: socket.socket) -> None:
        index = len(served)
        served.append(sock)
        if index == 0:
            limiter.finish(connection_id(sock))
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)
            sock.close()

    async def call_one_after_another() -> None:
        server = socket.create_server(("127.0.0.1", 0))
        listener = LimitedListener(server, asyncio.get_running_loop(), serve, limiter)
        listener.start()
        with contextlib.ExitStack() as callers:
            for number in range(1, 6):
                callers.enter_context(socket.create_connection(server.getsockname(), timeout=20))
                while len(served) < number:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            assert ended == [1, 2], "the first one is known, and the last two may go on"
            limiter.cut_all()
            await asyncio.sleep(0)
            assert ended == [1, 2, 3, 4]
            assert listener.is_in_use
        listener.close()

    limiter = ConnectionLimiter(AcceptLimits(max_pending=2, max_pending_per_source=2, deadline_s=600))
    asyncio.run(asyncio.wait_for(call_one_after_another(), 60))
    assert ended[-1] == 0


def test_a_flood_is_closed_at_once_and_the_next_second_has_room(listening: Listening) -> None:
    for _ in range(20):
        listening.call()
        accepted = listening.accept()
        assert accepted is not None
        listening.limiter.finish(connection_id(accepted))
    flooding = listening.call()
    assert listening.accept() is None
    assert flooding.recv(1) == b""
    listening.call("127.0.0.9")
    assert listening.accept() is not None, "another source has not flooded"
    listening.now_s = 1.0
    listening.call()
    assert listening.accept() is not None


def test_without_descriptors_connections_are_refused_and_the_listener_goes_on(listening: Listening) -> None:
    listening.call()
    assert listening.accept() is not None
    waiting = listening.call()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))  # noqa: PTH208
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            os.open(os.devnull, os.O_RDONLY)
        assert listening.accept() is None
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert waiting.recv(1) == b""
    listening.call()
    assert listening.accept() is not None


class Query(rpc.RpcMessage):
    """A question without content."""

    kind = "query"
    reply = rpc.Ack


@pytest.mark.slow
def test_a_server_serves_its_job_beside_idle_and_slow_strangers() -> None:
    authority = CertificateAuthority("job")
    handler = rpc.RpcHandler(message=Query, handle=lambda call: rpc.Ack(), is_quick=True)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with RpcServer(TlsAuthentication(authority.issue("server", "0")), [handler]) as server:
        server.start("127.0.0.1")
        client = rpc.RpcClient.connect(
            "127.0.0.1", server.port, TlsAuthentication(authority.issue("worker", "0")), role="server"
        )
        strangers: list[socket.socket] = []
        done = threading.Event()

        def disturb() -> None:
            """Open idle connections from ten addresses, and let some of them say a byte now and then."""
            for number in range(NUM_IDLE):
                with contextlib.suppress(OSError):
                    source = (f"127.0.1.{number % 10 + 1}", 0)
                    strangers.append(
                        socket.create_connection(("127.0.0.1", server.port), timeout=5, source_address=source)
                    )
            while not done.wait(0.2):
                for each in strangers[-20:]:
                    with contextlib.suppress(OSError):
                        each.send(b"\x16")

        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        until_s, num_calls = time.monotonic() + effort.share_of(20), 0
        while time.monotonic() < until_s or (thread.is_alive() and len(strangers) < NUM_IDLE // 2):
            client.call(Query(), timeout_s=20)
            num_calls += 1
            if num_calls % 200 == 0:
                rpc.RpcClient.connect(
                    "127.0.0.1", server.port, TlsAuthentication(authority.issue("worker", "1")), role="server"
                ).close()
        done.set()
        thread.join()
        assert num_calls > 50
        assert server._limiter.num_pending <= server.limits.max_unauthenticated
        assert server.refusals.total > NUM_IDLE // 2
        client.close()
        for each in strangers:
            each.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # noqa: PTH208


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Empty this list, and the system gives servers no more threads."""
    available, start = [True], threading.Thread.start

    def start_if_available(thread: threading.Thread) -> None:
        if not available and thread.name.startswith(("rpc", "http")):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_available)
    return available


def test_a_server_goes_on_where_the_system_had_no_thread(threads: list[bool]) -> None:
    authority, events = CertificateAuthority("job"), list[dict[str, Any]]()
    handler = rpc.RpcHandler(message=Query, handle=lambda call: rpc.Ack())
    trusted = TlsAuthentication(authority.issue("server", "0"))
    with RpcServer(trusted, [handler], write_event=lambda kind, **fields: events.append(fields)) as server:
        server.start("127.0.0.1")

        def connect() -> rpc.RpcClient:
            own = TlsAuthentication(authority.issue("worker", "0"))
            return rpc.RpcClient.connect("127.0.0.1", server.port, own, role="server")

        with connect() as client:
            client.call(Query(), timeout_s=20)
            threads.clear()
            with pytest.raises(RpcError, match=r"thread: 'none from the system', expected one more\. Raise ulimit -u"):
                client.call(Query(), timeout_s=20)
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", server.port), timeout=20) as refused:
                    assert refused.recv(1) == b""
            threads.append(True)
            client.call(Query(), timeout_s=20)
            with connect() as another:
                another.call(Query(), timeout_s=20)
        assert [each["reason"] for each in events] == ["full"], "one line stands for all"
        assert "thread: 'none from the system'" in events[0]["text"]
        assert server._limiter.num_pending == 0
        assert server.held_bytes == 0
