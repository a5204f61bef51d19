"""Streams of a relay: connections of this host, connections between relays, and the leading of one to another."""

import asyncio
import contextlib
import socket
import struct
from typing import Protocol

from ringweave import relayed_address

BUFFER_BYTES = 2**20
_PIECE_BYTES = 2**18
_LENGTH = struct.Struct(">I")
_RESET = struct.pack("ii", 1, 0)


class ByteStream(Protocol):
    """One end of a connection that is led on."""

    async def read(self) -> bytes:
        """Return the next bytes; none at the end of this direction."""
        ...

    async def write(self, content: bytes) -> None: ...

    async def write_end(self) -> None:
        """End this direction; the other one goes on."""
        ...

    def close(self) -> None: ...

    def abort(self) -> None:
        """Reset the connection: the other end sees that it is broken."""
        ...


class PlainStream:
    """Connection of this host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    async def read(self) -> bytes:
        return await self._reader.read(_PIECE_BYTES)

    async def write(self, content: bytes) -> None:
        self._writer.write(content)
        await self._writer.drain()

    async def write_end(self) -> None:
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()


class FramedStream:
    """Carrying connection between relays. TLS has no half-close that all libraries offer, so frames say the end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        relayed_address.keep_alive(writer.get_extra_info("socket"))

    async def read(self) -> bytes:
        """Return the next frame.

        Raises:
            asyncio.IncompleteReadError: The connection ended before the end of the direction.
            ConnectionError: A frame is longer than any relay sends.
        """
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if size > _PIECE_BYTES:
            raise ConnectionError(f"frame of {size} bytes, expected at most {_PIECE_BYTES}")
        return await self._reader.readexactly(size)

    async def write(self, content: bytes) -> None:
        self._writer.writelines((_LENGTH.pack(len(content)), content))
        await self._writer.drain()

    async def write_end(self) -> None:
        await self.write(b"")

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


async def lead(one: ByteStream, other: ByteStream) -> None:
    """Copy both directions between two streams until both have ended; a broken one breaks the other."""

    async def copy(source: ByteStream, target: ByteStream) -> None:
        while content := await source.read():
            await target.write(content)
        await target.write_end()

    tasks = [asyncio.ensure_future(copy(one, other)), asyncio.ensure_future(copy(other, one))]
    try:
        await asyncio.gather(*tasks)
    except (OSError, asyncio.IncompleteReadError):
        one.abort()
        other.abort()
    except asyncio.CancelledError:
        one.abort()
        other.abort()
        raise
    finally:
        for task in tasks:
            task.cancel()
        one.close()
        other.close()
