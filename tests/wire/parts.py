"""Messages and servers that the tests of the wire share."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from ringweave import wire
from ringweave.wire.framing import frames


class Sum(wire.Message):
    kind: ClassVar[str] = "test.sum"

    total: int
    peer: str


class Add(wire.Message):
    """Adds all bytes of its buffers."""

    kind: ClassVar[str] = "test.add"
    reply: ClassVar[type[wire.Message]] = Sum

    number: int = 0
    words: tuple[str, ...] = ()


class Wait(wire.Message):
    kind: ClassVar[str] = "test.wait"


class Echo(wire.Message):
    kind: ClassVar[str] = "test.echo"


class Fail(wire.Message):
    kind: ClassVar[str] = "test.fail"

    ours: bool


Echo.reply = Echo


def add(call: wire.Call) -> Sum:
    return Sum(total=sum(sum(buffer) for buffer in call.buffers), peer=str(call.peer))


def trust(authority: wire.Authority, role: str, name: str) -> wire.Tls:
    return wire.Tls(authority.issue(role, name))


class Events:
    """Stands in for the event log."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def __call__(self, kind: str, **fields: object) -> None:
        with self._changed:
            self.seen.append({"kind": kind} | fields)
            self._changed.notify_all()

    def wait_reason(self, reason: str, timeout_s: float = 60.0) -> dict[str, Any]:
        with self._changed:
            found: list[dict[str, Any]] = []

            def is_there() -> bool:
                found[:] = [event for event in self.seen if event["reason"] == reason]
                return bool(found)

            assert self._changed.wait_for(is_there, timeout_s), f"no {reason} among {self.seen}"
            return found[0]


@contextmanager
def serving(trusted: wire.Trust, *handlers: wire.Handler, **options: Any) -> Iterator[wire.Server]:
    server = wire.Server(trusted, [wire.Handler(message=Add, handle=add), *handlers], **options)
    server.start("127.0.0.1")
    try:
        yield server
    finally:
        server.close()


def connect(server: wire.Server, trusted: wire.Trust, **options: Any) -> wire.Client:
    return wire.Client.connect("127.0.0.1", server.port, trusted, role="server", **options)


def introduce(sock: socket.socket, trusted: wire.Trust) -> None:
    """Say hello over a raw socket and read the welcome, as a client does."""
    hello = f'{{"token":"{trusted.token}","identity":"{trusted.identity}"}}'.encode()
    sock.sendall(frames.pack(frames.FrameKind.HELLO, body=hello))
    prefix = frames.read_prefix(_exactly(sock, frames.PREFIX_BYTES), wire.Limits())
    _exactly(sock, prefix.head_bytes)
    assert prefix.kind == frames.FrameKind.WELCOME


def frame(message: wire.Message, call: int, *buffers: bytes, name: str | None = None) -> bytes:
    """All bytes of a call."""
    return packed(name or message.kind, message.model_dump_json().encode(), buffers, call=call)


def packed(name: str, body: bytes, buffers: Sequence[bytes], *, call: int = 1, timeout_s: float = 0.0) -> bytes:
    """The same of any body: the checks are right, whatever it says."""
    sizes = [len(buffer) for buffer in buffers]
    kind = frames.FrameKind.CALL
    head = frames.pack(kind, call=call, name=name, body=body, timeout_s=timeout_s, sizes=sizes)
    tail = frames.pack_check(frames.check(*buffers)) if buffers else b""
    return b"".join((head, *buffers, tail))


def read_frame(sock: socket.socket) -> tuple[frames.Prefix, bytes]:
    """The next frame of the other end, which has no buffers, and its body."""
    prefix = frames.read_prefix(_exactly(sock, frames.PREFIX_BYTES), wire.Limits())
    return prefix, frames.read_head(prefix, _exactly(sock, prefix.head_bytes)).body


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """For what other threads do without telling."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it did not become true")


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("closed")
        data += piece
    return data


class Gate:
    """A handler that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.calls: list[wire.Call] = []

    def __call__(self, call: wire.Call) -> wire.Done:
        self.calls.append(call)
        self.entered.release()
        while not self.open.wait(0.01) and not call.cancelled.is_set():
            pass
        return wire.Done()

    @property
    def handler(self) -> wire.Handler:
        return wire.Handler(message=Wait, handle=self)
