"""A frame: the unit that goes over a connection, and the checks that its bytes pass before anything is allocated. Pure.

```text
prefix   44 bytes   magic RWIR, version, kind, number of buffers, bytes of the name, 0, bytes of the body,
                    time-out in ms, call, bytes of all buffers, check of the 36 bytes before it
head                length of each buffer (8 bytes each), name, body, check of the head
content             the buffers one after the other, check of the content; nothing of it where there are no buffers
```

All numbers are little-endian and unsigned; a check is the xxh3 of 64 bits. It finds accidents of memory, of a
program or of a plain connection; that nobody in between changed anything on purpose is what TLS is for.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash
from typing_extensions import Buffer

from ringweave.errors import MessageError, explain
from ringweave.wire.framing.limits import Limits

VERSION = 1
MAGIC = b"RWIR"
MAX_NAME_BYTES = 64
_FIELDS = struct.Struct("<4sBBHHHIIQQ")
_CHECK = struct.Struct("<Q")
PREFIX_BYTES = _FIELDS.size + _CHECK.size
CHECK_BYTES = _CHECK.size
_MAX_TIMEOUT_MS = 0xFFFFFFFF


class FrameKind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    """Client to server: the token, and who the client is."""
    WELCOME = 2
    """Server to client: who the server is, and the limits that the client has to keep."""
    REFUSED = 3
    """Either way, and the last frame: why the other end is cut off."""
    CALL = 4
    """Client to server: a message that will be answered."""
    REPLY = 5
    """Server to client: the answer."""
    FAILURE = 6
    """Server to client: why there is no answer."""
    CANCEL = 7
    """Client to server: nobody waits for that answer any more."""
    BYE = 8
    """Either way, and the last frame: closed on purpose."""


@dataclass(frozen=True, slots=True)
class Prefix:
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
        """Bytes of the head, its check included."""
        return 8 * self.num_buffers + self.name_bytes + self.body_bytes + CHECK_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole frame."""
        tail = self.content_bytes + CHECK_BYTES if self.num_buffers else 0
        return PREFIX_BYTES + self.head_bytes + tail


@dataclass(frozen=True, slots=True)
class Head:
    """All of a frame but its buffers."""

    prefix: Prefix
    sizes: tuple[int, ...]
    """Bytes of each buffer."""
    name: str
    """Kind of the message; empty where the kind of the frame says it all."""
    body: bytes
    """The message without its buffers, as JSON."""


def check(*pieces: Buffer) -> int:
    """The check of some bytes."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def pack_check(value: int) -> bytes:
    """A check as it goes over the connection."""
    return _CHECK.pack(value)


def flat(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, in place.

    Raises:
        MessageError: They do not lie one after the other.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise MessageError(
            explain(
                "buffer", got=view.strides, expected="contiguous memory", do="Copy it first: numpy.ascontiguousarray"
            )
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


def pack(
    kind: FrameKind,
    *,
    call: int = 0,
    name: str = "",
    body: bytes = b"",
    timeout_s: float = 0.0,
    sizes: Sequence[int] = (),
) -> bytes:
    """Prefix and head of a frame; the buffers and their check follow."""
    encoded = name.encode()
    timeout_ms = min(_MAX_TIMEOUT_MS, int(timeout_s * 1000))
    fields = _FIELDS.pack(MAGIC, VERSION, kind, len(sizes), len(encoded), 0, len(body), timeout_ms, call, sum(sizes))
    head = struct.pack(f"<{len(sizes)}Q", *sizes) + encoded + body
    return b"".join((fields, _CHECK.pack(check(fields)), head, _CHECK.pack(check(head))))


def read_prefix(data: Buffer, limits: Limits) -> Prefix:
    """The prefix in these bytes.

    Raises:
        MessageError: They are none, or what they announce is more than the limits allow.
    """
    view = memoryview(data)
    magic, version, kind, num_buffers, name_bytes, zero, body_bytes, timeout_ms, call, content_bytes = _FIELDS.unpack(
        view[: _FIELDS.size]
    )
    if magic != MAGIC:
        raise refusal("first bytes of a frame", bytes(magic), f"{MAGIC!r}", "Something else than ringweave called here")
    if version != VERSION:
        raise refusal("version of a frame", version, str(VERSION), "Run the same ringweave on all nodes")
    if _CHECK.unpack(view[_FIELDS.size : PREFIX_BYTES])[0] != check(view[: _FIELDS.size]):
        raise refusal("prefix of a frame", "another check", "the one that its bytes give", _DAMAGED)
    if zero or not 1 <= kind <= max(FrameKind):
        raise refusal("kind of a frame", kind, f"1 to {max(FrameKind)}", "Run the same ringweave on all nodes")
    if num_buffers == 0 and content_bytes:
        raise refusal("bytes of a frame without buffers", content_bytes, "0", _DAMAGED)
    _bound("buffers of a message", num_buffers, limits.max_buffers, "max_buffers")
    _bound("bytes of a message's name", name_bytes, MAX_NAME_BYTES, "")
    _bound("bytes of a message's body", body_bytes, limits.max_body_bytes, "max_body_bytes")
    _bound("bytes of a message", content_bytes, limits.max_message_bytes, "max_message_bytes")
    return Prefix(FrameKind(kind), num_buffers, name_bytes, body_bytes, timeout_ms, call, content_bytes)


def read_head(prefix: Prefix, data: Buffer) -> Head:
    """The head in these bytes, which are as many as the prefix said.

    Raises:
        MessageError: They were damaged, or say something else than the prefix.
    """
    content, stated = memoryview(data)[:-CHECK_BYTES], memoryview(data)[-CHECK_BYTES:]
    if _CHECK.unpack(stated)[0] != check(content):
        raise refusal("head of a frame", "another check", "the one that its bytes give", _DAMAGED)
    sizes = struct.unpack_from(f"<{prefix.num_buffers}Q", content)
    if sum(sizes) != prefix.content_bytes:
        raise refusal("sum of a message's buffers", sum(sizes), f"{prefix.content_bytes}", _DAMAGED)
    start = 8 * prefix.num_buffers
    name = bytes(content[start : start + prefix.name_bytes])
    if not name.isascii():
        raise refusal("name of a message", name, "ASCII", _DAMAGED)
    return Head(prefix, sizes, name.decode(), bytes(content[start + prefix.name_bytes :]))


def check_content(buffers: Sequence[memoryview], stated: Buffer) -> None:
    """Compare the buffers of a message with the check that came behind them.

    Raises:
        MessageError: They were damaged.
    """
    if _CHECK.unpack(stated)[0] != check(*buffers):
        raise refusal("buffers of a message", "another check", "the one that their bytes give", _DAMAGED)


def refusal(what: str, got: object, expected: str, do: str) -> MessageError:
    """An error about bytes of a frame."""
    return MessageError(explain(what, got=got, expected=expected, do=do))


_DAMAGED = "The bytes were damaged on the way or by their sender: connect again"


def _bound(what: str, got: int, most: int, limit: str) -> None:
    if got > most:
        mend = f"Send less at once, or raise {limit} on the other end" if limit else _DAMAGED
        raise refusal(what, got, f"at most {most}", mend)
