"""Frames and messages: their layout, their checks before any allocation, and the limits on both. Pure.

```text
prefix   44 bytes   magic RWIR, version, kind, number of buffers, bytes of the name, 0, bytes of the body,
                    time-out in ms, call, bytes of all buffers, checksum of the 36 bytes before it
head                length of each buffer (8 bytes each), name, body, checksum of the head
content             the buffers one after the other, checksum of the content; absent without buffers
```

All numbers are little-endian and unsigned. A checksum is the 64-bit xxh3. It detects accidental damage by memory, a
program or a plain connection; TLS protects against deliberate changes.
"""

import importlib.metadata
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar, TypeVar

import pydantic
import xxhash
from typing_extensions import Buffer

from ringweave.errors import MessageError, UsageError
from ringweave.files import file_io


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcLimits:
    """Limits of one server or client: each bounds memory or time of a connection."""

    max_body_bytes: int = 1 << 20
    """Bytes of a message without its buffers."""
    max_buffers: int = 4096
    """Buffers in one message: one for each tensor of a large model is not too much."""
    max_message_bytes: int = 1 << 30
    """Bytes of all buffers of one message; larger state moves in chunks (`rpc.state_transfer`)."""
    max_bytes_in_flight: int = 2 << 30
    """Bytes of buffers that a server holds for all its peers together; later messages wait unread."""
    max_calls: int = 4
    """Calls of one connection in flight at once."""
    max_connections: int = 1024
    """Authenticated peers at once."""
    max_unauthenticated: int = 64
    """Connections that have not yet authenticated."""
    handshake_s: float = 5.0
    """Timeout of each step of authentication: the TLS handshake, the hello."""
    patience_s: float = 10.0
    """Longest stall of a frame; also the time that a frame may take beside the time for its bytes."""
    slowest_bytes_per_s: float = 250_000.0
    """Minimum rate of a frame on the whole; slower ones are cut off. 2 Mbit/s is below any usable link."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise UsageError(each.name, got=getattr(self, each.name), expected="more than 0", do="Raise the limit")
        if self.max_message_bytes > self.max_bytes_in_flight:
            raise UsageError(
                "max_message_bytes",
                got=self.max_message_bytes,
                expected=f"at most max_bytes_in_flight, {self.max_bytes_in_flight}",
                do="Raise max_bytes_in_flight, or no such message could ever be taken",
            )

    def frame_timeout_s(self, num_bytes: int) -> float:
        """Return the seconds that a frame of so many bytes may take from its first byte to its last."""
        return self.patience_s + num_bytes / self.slowest_bytes_per_s


FRAME_VERSION = 2
FRAME_MAGIC = b"RWIR"
MAX_NAME_BYTES = 64
_PREFIX_STRUCT = struct.Struct("<4sBBHHHIIQQ")
_CHECKSUM_STRUCT = struct.Struct("<Q")
PREFIX_BYTES = _PREFIX_STRUCT.size + _CHECKSUM_STRUCT.size
CHECKSUM_BYTES = _CHECKSUM_STRUCT.size
_MAX_TIMEOUT_MS = 0xFFFFFFFF


class FrameKind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    """Client to server: the token and the identity of the client."""
    WELCOME = 2
    """Server to client: the identity of the server, and the limits that the client has to keep."""
    REFUSED = 3
    """Either way, and the last frame: the reason why the other end is cut off."""
    CALL = 4
    """Client to server: a message that will be answered."""
    REPLY = 5
    """Server to client: the answer."""
    FAILURE = 6
    """Server to client: the reason why there is no answer."""
    CANCEL = 7
    """Client to server: the answer is no longer wanted."""
    BYE = 8
    """Either way, and the last frame: closed on purpose."""


@dataclass(frozen=True, slots=True)
class FramePrefix:
    """The first bytes of a frame."""

    kind: FrameKind
    num_buffers: int
    name_bytes: int
    body_bytes: int
    timeout_ms: int
    call: int
    content_bytes: int

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, its checksum included."""
        return 8 * self.num_buffers + self.name_bytes + self.body_bytes + CHECKSUM_BYTES

    @property
    def total_bytes(self) -> int:
        tail = self.content_bytes + CHECKSUM_BYTES if self.num_buffers else 0
        return PREFIX_BYTES + self.head_bytes + tail


@dataclass(frozen=True, slots=True)
class FrameHead:
    """Frame without its buffers."""

    prefix: FramePrefix
    sizes: tuple[int, ...]
    """Bytes of each buffer."""
    name: str
    """Kind of the message; empty where the kind of the frame suffices."""
    body: bytes
    """The message without its buffers, as JSON."""


def checksum(*pieces: Buffer) -> int:
    """Return the checksum of some bytes."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def pack_checksum(value: int) -> bytes:
    """Return a checksum as sent over the connection."""
    return _CHECKSUM_STRUCT.pack(value)


def as_bytes_view(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer, in place.

    Raises:
        MessageError: The buffer is not contiguous.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise MessageError(
            "buffer", got=view.strides, expected="contiguous memory", do="Copy it first: numpy.ascontiguousarray"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


def pack_frame(
    kind: FrameKind,
    *,
    call: int = 0,
    name: str = "",
    body: bytes = b"",
    timeout_s: float = 0.0,
    sizes: Sequence[int] = (),
) -> bytes:
    """Return prefix and head of a frame; the buffers and their checksum follow."""
    encoded = name.encode()
    timeout_ms = min(_MAX_TIMEOUT_MS, int(timeout_s * 1000))
    fields = _PREFIX_STRUCT.pack(
        FRAME_MAGIC, FRAME_VERSION, kind, len(sizes), len(encoded), 0, len(body), timeout_ms, call, sum(sizes)
    )
    head = struct.pack(f"<{len(sizes)}Q", *sizes) + encoded + body
    return b"".join((fields, _CHECKSUM_STRUCT.pack(checksum(fields)), head, _CHECKSUM_STRUCT.pack(checksum(head))))


def parse_prefix(data: Buffer, limits: RpcLimits) -> FramePrefix:
    """Parse a prefix.

    Raises:
        MessageError: The bytes are no prefix, or announce more than the limits allow.
    """
    view = memoryview(data)
    magic, version, kind, num_buffers, name_bytes, zero, body_bytes, timeout_ms, call, content_bytes = (
        _PREFIX_STRUCT.unpack(view[: _PREFIX_STRUCT.size])
    )
    if magic != FRAME_MAGIC:
        raise frame_error(
            "first bytes of a frame", bytes(magic), f"{FRAME_MAGIC!r}", "Something else than ringweave called here"
        )
    if version != FRAME_VERSION:
        expected = f"{FRAME_VERSION}, which ringweave {importlib.metadata.version('ringweave')} speaks here"
        raise frame_error("version of a frame", version, expected, "Run the same ringweave on all nodes")
    if _CHECKSUM_STRUCT.unpack(view[_PREFIX_STRUCT.size : PREFIX_BYTES])[0] != checksum(view[: _PREFIX_STRUCT.size]):
        raise frame_error("prefix of a frame", "another check", "the one that its bytes give", _DAMAGED_HINT)
    if zero or not 1 <= kind <= max(FrameKind):
        raise frame_error("kind of a frame", kind, f"1 to {max(FrameKind)}", "Run the same ringweave on all nodes")
    if num_buffers == 0 and content_bytes:
        raise frame_error("bytes of a frame without buffers", content_bytes, "0", _DAMAGED_HINT)
    _check_limit("buffers of a message", num_buffers, limits.max_buffers, "max_buffers")
    _check_limit("bytes of a message's name", name_bytes, MAX_NAME_BYTES, "")
    _check_limit("bytes of a message's body", body_bytes, limits.max_body_bytes, "max_body_bytes")
    _check_limit("bytes of a message", content_bytes, limits.max_message_bytes, "max_message_bytes")
    return FramePrefix(FrameKind(kind), num_buffers, name_bytes, body_bytes, timeout_ms, call, content_bytes)


def parse_head(prefix: FramePrefix, data: Buffer) -> FrameHead:
    """Parse a head, of the length that the prefix says.

    Raises:
        MessageError: The bytes were damaged, or contradict the prefix.
    """
    content, stated_checksum = memoryview(data)[:-CHECKSUM_BYTES], memoryview(data)[-CHECKSUM_BYTES:]
    if _CHECKSUM_STRUCT.unpack(stated_checksum)[0] != checksum(content):
        raise frame_error("head of a frame", "another check", "the one that its bytes give", _DAMAGED_HINT)
    sizes = struct.unpack_from(f"<{prefix.num_buffers}Q", content)
    if sum(sizes) != prefix.content_bytes:
        raise frame_error("sum of a message's buffers", sum(sizes), f"{prefix.content_bytes}", _DAMAGED_HINT)
    start = 8 * prefix.num_buffers
    name = bytes(content[start : start + prefix.name_bytes])
    if not name.isascii():
        raise frame_error("name of a message", name, "ASCII", _DAMAGED_HINT)
    return FrameHead(prefix, sizes, name.decode(), bytes(content[start + prefix.name_bytes :]))


def verify_content(buffers: Sequence[memoryview], stated_checksum: Buffer) -> None:
    """Compare the buffers of a message with the checksum that followed them.

    Raises:
        MessageError: They were damaged.
    """
    if _CHECKSUM_STRUCT.unpack(stated_checksum)[0] != checksum(*buffers):
        raise frame_error("buffers of a message", "another check", "the one that their bytes give", _DAMAGED_HINT)


def frame_error(what: str, got: object, expected: str, do: str) -> MessageError:
    """Return an error about the bytes of a frame."""
    return MessageError(what, got=got, expected=expected, do=do)


_DAMAGED_HINT = "The bytes were damaged on the way or by their sender: connect again"


def _check_limit(what: str, got: int, maximum: int, limit: str) -> None:
    if got > maximum:
        fix = f"Send less at once, or raise {limit} on the other end" if limit else _DAMAGED_HINT
        raise frame_error(what, got, f"at most {maximum}", fix)


class RpcMessage(pydantic.BaseModel):
    """Base of all messages: frozen and strict; unknown fields are errors.

    A message with an answer names the class of the answer in `reply`; the default is `Ack`.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")

    kind: ClassVar[str]
    """Name of the message in frames, such as `params.push`; at most 64 ASCII characters, unique on a server."""
    reply: ClassVar[type["RpcMessage"]]


class Ack(RpcMessage):
    """Empty answer: the call has been handled."""

    kind: ClassVar[str] = "done"


RpcMessage.reply = Ack

MessageT = TypeVar("MessageT", bound=RpcMessage)


@dataclass(frozen=True, slots=True)
class RpcReply:
    """Answer of a handler: a message and its buffers, which must not change until they are sent."""

    message: RpcMessage
    buffers: Sequence[Buffer] = ()


class HandshakeHello(RpcMessage):
    """First message of a client. It holds the job's token, maybe in a wrong field, so no error shows any of it."""

    model_config = pydantic.ConfigDict(hide_input_in_errors=True)

    kind: ClassVar[str] = "hello"

    token: str = pydantic.Field(repr=False)
    identity: str


class HandshakeWelcome(RpcMessage):
    """First message of a server: its identity and its limits."""

    kind: ClassVar[str] = "welcome"

    identity: str
    max_body_bytes: int
    max_buffers: int
    max_message_bytes: int
    max_calls: int


class RpcFailure(RpcMessage):
    """Reason why a call has no answer."""

    kind: ClassVar[str] = "failure"

    error: str
    """Name of the error's class."""
    text: str
    """Text of the error, in the project's form for errors of the tree in `errors.py`."""


def encode_message(message: RpcMessage) -> bytes:
    """Return a message without its buffers, as JSON."""
    return message.model_dump_json().encode()


def decode_message(model: type[MessageT], body: bytes) -> MessageT:
    """Parse a message of that class.

    Raises:
        MessageError: The bytes are not one; the text names the field, and shows its value unless the class hides its
            input.
    """
    try:
        return model.model_validate_json(file_io.bounded(body))
    except pydantic.ValidationError as cause:
        first: Any = cause.errors(include_url=False, include_context=False)[0]
        is_hidden = model.model_config.get("hide_input_in_errors", False)
        # An unknown key is untrusted input too.
        field_path = ".".join(str(key) for key in first["loc"] if not is_hidden or key in model.model_fields)
        raise MessageError(
            f"message {model.kind}" + (f", {field_path[:80]}" if field_path else ""),
            got=first["type"] if is_hidden else first.get("input"),
            expected=f"a valid one ({first['msg'][:120]})",
            do="Run the same ringweave on all nodes",
        ) from cause
