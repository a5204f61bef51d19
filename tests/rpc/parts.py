"""Messages and servers that the tests of the wire share."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from ringweave import rpc
from ringweave.rpc import framing


class Sum(rpc.RpcMessage):
    kind: ClassVar[str] = "test.sum"

    total: int
    peer: str


class Add(rpc.RpcMessage):
    """Adds all bytes of its buffers."""

    kind: ClassVar[str] = "test.add"
    reply: ClassVar[type[rpc.RpcMessage]] = Sum

    number: int = 0
    words: tuple[str, ...] = ()


class Wait(rpc.RpcMessage):
    kind: ClassVar[str] = "test.wait"


class Echo(rpc.RpcMessage):
    kind: ClassVar[str] = "test.echo"


class Fail(rpc.RpcMessage):
    kind: ClassVar[str] = "test.fail"

    ours: bool


Echo.reply = Echo


def add(call: rpc.RpcCall) -> Sum:
    return Sum(total=sum(sum(buffer) for buffer in call.buffers), peer=str(call.peer))


def trust(authority: rpc.CertificateAuthority, role: str, name: str) -> rpc.TlsAuthentication:
    return rpc.TlsAuthentication(authority.issue(role, name))


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
def serving(trusted: rpc.PeerAuthentication, *handlers: rpc.RpcHandler, **options: Any) -> Iterator[rpc.RpcServer]:
    server = rpc.RpcServer(trusted, [rpc.RpcHandler(message=Add, handle=add), *handlers], **options)
    server.start("127.0.0.1")
    try:
        yield server
    finally:
        server.close()


def connect(server: rpc.RpcServer, trusted: rpc.PeerAuthentication, **options: Any) -> rpc.RpcClient:
    return rpc.RpcClient.connect("127.0.0.1", server.port, trusted, role="server", **options)


def introduce(sock: socket.socket, trusted: rpc.PeerAuthentication) -> None:
    """Say hello over a raw socket and read the welcome, as a client does."""
    hello = f'{{"token":"{trusted.token}","identity":"{trusted.identity}"}}'.encode()
    sock.sendall(framing.pack_frame(framing.FrameKind.HELLO, body=hello))
    prefix = framing.parse_prefix(_exactly(sock, framing.PREFIX_BYTES), rpc.RpcLimits())
    _exactly(sock, prefix.head_bytes)
    assert prefix.kind == framing.FrameKind.WELCOME


def frame(message: rpc.RpcMessage, call: int, *buffers: bytes, name: str | None = None) -> bytes:
    """All bytes of a call."""
    return packed(name or message.kind, message.model_dump_json().encode(), buffers, call=call)


def packed(name: str, body: bytes, buffers: Sequence[bytes], *, call: int = 1, timeout_s: float = 0.0) -> bytes:
    """The same of any body: the checks are right, whatever it says."""
    sizes = [len(buffer) for buffer in buffers]
    kind = framing.FrameKind.CALL
    head = framing.pack_frame(kind, call=call, name=name, body=body, timeout_s=timeout_s, sizes=sizes)
    tail = framing.pack_checksum(framing.checksum(*buffers)) if buffers else b""
    return b"".join((head, *buffers, tail))


def read_frame(sock: socket.socket) -> tuple[framing.FramePrefix, bytes]:
    """The next frame of the other end, which has no buffers, and its body."""
    prefix = framing.parse_prefix(_exactly(sock, framing.PREFIX_BYTES), rpc.RpcLimits())
    return prefix, framing.parse_head(prefix, _exactly(sock, prefix.head_bytes)).body


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
        self.calls: list[rpc.RpcCall] = []

    def __call__(self, call: rpc.RpcCall) -> rpc.Ack:
        self.calls.append(call)
        self.entered.release()
        while not self.open.wait(0.01) and not call.cancelled.is_set():
            pass
        return rpc.Ack()

    @property
    def handler(self) -> rpc.RpcHandler:
        return rpc.RpcHandler(message=Wait, handle=self)
