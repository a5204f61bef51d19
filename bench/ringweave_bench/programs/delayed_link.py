"""A proxy that plays a long link: TCP connections that nftables redirects to it pass with a delay.

    python delayed_link.py PORT ROUND_TRIP_MS

It connects to the address that the client meant. Bytes of either direction come out half a round trip later than they
went in; the first ones a whole round trip later still, since the client's connection opened without one. A target that
refuses closes the client's connection by a reset.
"""

import asyncio
import contextlib
import socket
import struct
import sys

SO_ORIGINAL_DST = 80
SO_MARK = 36
READ_BYTES = 2**16
MAX_READS_UNDERWAY = 256


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, one_way_s: float, start_s: float) -> None:
    """Pass one direction on until its end; nothing comes out before `start_s` of the loop's time."""
    loop = asyncio.get_running_loop()
    underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_READS_UNDERWAY)

    async def read_all() -> None:
        read = b"-"
        while read:
            try:
                read = await reader.read(READ_BYTES)
            except OSError:
                read = b""
            await underway.put((max(loop.time(), start_s) + one_way_s, read))

    reading = asyncio.create_task(read_all())
    try:
        while True:
            due_s, read = await underway.get()
            await asyncio.sleep(due_s - loop.time())
            if not read:
                writer.write_eof()
                return
            writer.write(read)
            await writer.drain()
    except OSError:
        writer.transport.abort()
    finally:
        reading.cancel()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, round_trip_s: float, mark: int) -> None:
    """Connect to the client's destination and pass both directions on."""
    loop = asyncio.get_running_loop()
    start_s = loop.time() + round_trip_s
    client = writer.get_extra_info("socket")
    port, address = struct.unpack("!2xH4s8x", client.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16))
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, SO_MARK, mark)
    try:
        await loop.sock_connect(sock, (socket.inet_ntoa(address), port))
        far_reader, far_writer = await asyncio.open_connection(sock=sock)
    except OSError:
        sock.close()
        await asyncio.sleep(start_s - loop.time())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return
    one_way_s = round_trip_s / 2
    await asyncio.gather(
        pass_on(reader, far_writer, one_way_s, start_s), pass_on(far_reader, writer, one_way_s, start_s)
    )
    for each in (writer, far_writer):
        with contextlib.suppress(OSError):
            each.close()
            await each.wait_closed()


async def main(port: int, round_trip_s: float) -> None:
    """Serve for ever; `ready` is printed once the port is open."""
    server = await asyncio.start_server(lambda r, w: serve(r, w, round_trip_s, port), "0.0.0.0", port)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]) / 1000))
