"""Well-kept libraries with 4 peers that push 22 MB again and again with mutual TLS, for docs/decisions/0010.

    python bench/wire_alternatives.py [NAME ...] [--rounds 3]

Needs grpcio, websockets, aiohttp and pyzmq beside ringweave. A server process and four client
processes on the loopback; a push is over when the client has the answer. Prints, as medians over interleaved rounds:
bytes pushed per second, processor seconds per GB on each side, and how much the server's memory grew at its peak.
"""

import argparse
import asyncio
import contextlib
import importlib
import ipaddress
import json
import os
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from datetime import UTC, datetime, timedelta
from pathlib import Path

# A long file on purpose: every library has its server and client here, so that one can be read beside the other.


NUM_PEERS, NUM_PUSHES, PUSH_BYTES = 4, 6, 22_000_000
MOST_BYTES = 64 << 20
LENGTH = struct.Struct("<Q")


def make_certificates(folder: Path) -> None:
    """Make one certificate authority, and one certificate for all."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _context(folder: Path, server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    made.load_verify_locations(folder / "cert.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


# --- the standard library: a thread for each peer, straight into memory that was there before


def _ssl_serve(folder: Path) -> None:
    made = _context(folder, server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            peer = listener.accept()[0]
            threading.Thread(target=_ssl_peer, args=(made, peer), daemon=True).start()


def _ssl_peer(made: ssl.SSLContext, raw: socket.socket) -> None:
    room = memoryview(bytearray(PUSH_BYTES))
    with made.wrap_socket(raw, server_side=True) as peer:
        while head := peer.recv(LENGTH.size):
            (left,) = LENGTH.unpack(head)
            while left:
                left -= peer.recv_into(room[PUSH_BYTES - left :])
            peer.sendall(b"k")


def _ssl_push(folder: Path, port: int, content: bytes) -> None:
    made = _context(folder, server=False)
    with made.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1") as peer:
        for _ in range(NUM_PUSHES):
            peer.sendall(LENGTH.pack(len(content)))
            peer.sendall(content)
            peer.recv(1)


# --- asyncio's streams


def _asyncio_serve(folder: Path) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                await reader.readexactly(size)
                writer.write(b"k")

    async def serve() -> None:
        server = await asyncio.start_server(peer, "127.0.0.1", 0, ssl=_context(folder, server=True), limit=1 << 20)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(serve())


def _asyncio_push(folder: Path, port: int, content: bytes) -> None:
    async def push() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=_context(folder, server=False))
        for _ in range(NUM_PUSHES):
            writer.write(LENGTH.pack(len(content)))
            writer.write(content)
            await writer.drain()
            await reader.readexactly(1)
        writer.close()

    asyncio.run(push())


# --- gRPC with handlers of plain bytes


def _grpcio_serve(folder: Path) -> None:
    import grpc

    def push(content: bytes, _: object) -> bytes:
        return b"k"

    limits = [("grpc.max_receive_message_length", MOST_BYTES)]
    server = grpc.server(futures.ThreadPoolExecutor(8), options=limits)
    handlers = {"Push": grpc.unary_unary_rpc_method_handler(push)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("w.W", handlers),))
    key, certificate = (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes()
    trust = grpc.ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)
    print(server.add_secure_port("127.0.0.1:0", trust), flush=True)
    server.start()
    server.wait_for_termination()


def _grpcio_push(folder: Path, port: int, content: bytes) -> None:
    import grpc

    key, certificate = (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes()
    trust = grpc.ssl_channel_credentials(certificate, key, certificate)
    with grpc.secure_channel(f"localhost:{port}", trust) as channel:
        push = channel.unary_unary("/w.W/Push")
        for _ in range(NUM_PUSHES):
            push(content)


# --- websockets, its threads


def _websockets_serve(folder: Path) -> None:
    from websockets.sync.server import serve

    def peer(connection: object) -> None:
        for _ in connection:  # type: ignore[attr-defined]
            connection.send(b"k")  # type: ignore[attr-defined]

    trust = _context(folder, server=True)
    with serve(peer, "127.0.0.1", 0, ssl=trust, max_size=MOST_BYTES, compression=None) as server:
        print(server.socket.getsockname()[1], flush=True)
        server.serve_forever()


def _websockets_push(folder: Path, port: int, content: bytes) -> None:
    from websockets.sync.client import connect

    with connect(f"wss://localhost:{port}", ssl=_context(folder, server=False), compression=None) as connection:
        for _ in range(NUM_PUSHES):
            connection.send(content)
            connection.recv()


# --- aiohttp: a POST for each push


def _aiohttp_serve(folder: Path) -> None:
    from aiohttp import web

    async def push(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"k")

    app = web.Application(client_max_size=MOST_BYTES)
    app.router.add_post("/push", push)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        web.run_app(app, sock=listener, ssl_context=_context(folder, server=True), print=None)


def _aiohttp_push(folder: Path, port: int, content: bytes) -> None:
    import aiohttp

    async def push() -> None:
        trust = _context(folder, server=False)
        async with aiohttp.ClientSession() as session:
            for _ in range(NUM_PUSHES):
                url = f"https://localhost:{port}/push"
                async with session.post(url, data=content, ssl=trust) as answer:
                    await answer.read()

    asyncio.run(push())


# --- ZeroMQ with CURVE: not TLS, and every peer's public key has to be known instead of an authority


def _pyzmq_serve(folder: Path) -> None:
    import zmq

    public, secret = zmq.curve_keypair()
    (folder / "curve").write_bytes(public)
    with zmq.Context() as place, place.socket(zmq.ROUTER) as server:
        server.curve_secretkey, server.curve_publickey, server.curve_server = secret, public, True
        server.maxmsgsize = MOST_BYTES
        print(server.bind_to_random_port("tcp://127.0.0.1"), flush=True)
        while True:
            peer, _ = server.recv_multipart(copy=False)
            server.send_multipart([peer, b"k"])


def _pyzmq_push(folder: Path, port: int, content: bytes) -> None:
    import zmq

    public, secret = zmq.curve_keypair()
    with zmq.Context() as place, place.socket(zmq.DEALER) as peer:
        peer.curve_secretkey, peer.curve_publickey = secret, public
        peer.curve_serverkey = (folder / "curve").read_bytes()
        peer.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(NUM_PUSHES):
            peer.send(content, copy=False)
            peer.recv()


# --- ringweave's own, on the standard library's ssl


def _ringweave_serve(folder: Path) -> None:
    from ringweave import rpc

    authority = rpc.CertificateAuthority("bench")
    for index in range(NUM_PEERS):
        authority.issue("worker", str(index)).save(folder / f"{os.getpid()}-{index}")
    handler = rpc.RpcHandler(message=_push_message(), handle=lambda call: rpc.Ack())
    server = rpc.RpcServer(rpc.TlsAuthentication(authority.issue("server", "0")), [handler]).start("127.0.0.1")
    for index in range(NUM_PEERS):
        (folder / f"{os.getpid()}-{index}").rename(folder / f"{server.port}-{index}")
    print(server.port, flush=True)
    threading.Event().wait()


def _ringweave_push(folder: Path, port: int, content: bytes) -> None:
    from ringweave import rpc

    mine = next(path for path in sorted(folder.glob(f"{port}-*")) if _is_ours(path))
    trust = rpc.TlsAuthentication(rpc.Credentials.load(mine))
    message = _push_message()()
    with rpc.RpcClient.connect("127.0.0.1", port, trust, role="server") as client:
        for _ in range(NUM_PUSHES):
            client.call(message, [content], timeout_s=60)


def _push_message() -> type:
    from ringweave import rpc

    return type("Push", (rpc.RpcMessage,), {"kind": "bench.push", "__module__": __name__})


def _is_ours(path: Path) -> bool:
    """Return True if these credentials were not used before."""
    with contextlib.suppress(FileExistsError):
        path.with_name(f"taken-{path.name}").touch(exist_ok=False)
        return True
    return False


ALL = {
    "ringweave": (_ringweave_serve, _ringweave_push),
    "ssl": (_ssl_serve, _ssl_push),
    "asyncio": (_asyncio_serve, _asyncio_push),
    "grpcio": (_grpcio_serve, _grpcio_push),
    "websockets": (_websockets_serve, _websockets_push),
    "aiohttp": (_aiohttp_serve, _aiohttp_push),
    "pyzmq": (_pyzmq_serve, _pyzmq_push),
}

MODULES = {"ringweave": "ringweave.rpc", "grpcio": "grpc", "websockets": "websockets.sync.client", "pyzmq": "zmq"}


def push(name: str, folder: Path, port: int) -> None:
    """A client: says that it is ready, pushes when told to, prints its processor seconds."""
    content = os.urandom(PUSH_BYTES)
    importlib.import_module(MODULES.get(name, name))
    print("ready", flush=True)
    sys.stdin.readline()
    before_s = time.process_time()
    ALL[name][1](folder, port, content)
    print(time.process_time() - before_s, flush=True)


def _measure(name: str, folder: Path) -> dict[str, float]:
    """Measure one round of one library."""
    import psutil

    me = [sys.executable, __file__]
    server = subprocess.Popen([*me, "--serve", name, "--folder", str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        watched = psutil.Process(server.pid)
        idle_bytes, idle_s = watched.memory_info().rss, sum(watched.cpu_times()[:2])
        argv = [*me, "--push", name, "--folder", str(folder), "--port", port]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        clients = [subprocess.Popen(argv, text=True, **pipes) for _ in range(NUM_PEERS)]
        for client in clients:
            client.stdout.readline()
        started_s = time.perf_counter()
        for client in clients:
            client.stdin.write("go\n")
            client.stdin.flush()
        spent_s = sum(float(client.stdout.readline()) for client in clients)
        wall_s = time.perf_counter() - started_s
        for client in clients:
            client.communicate()
        status = Path(f"/proc/{server.pid}/status").read_text().split("VmHWM:")[1]
        gigabytes = NUM_PEERS * NUM_PUSHES * PUSH_BYTES / 1e9
        return {
            "MB/s": gigabytes * 1e3 / wall_s,
            "server s/GB": (sum(watched.cpu_times()[:2]) - idle_s) / gigabytes,
            "client s/GB": spent_s / gigabytes,
            "server grew MB": (int(status.split()[0]) * 1024 - idle_bytes) / 1e6,
        }
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Measure, or be one end of a measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(ALL))
    parser.add_argument("--rounds", type=int, default=3)
    for option in ("--serve", "--push", "--folder", "--port"):
        parser.add_argument(option)
    asked = parser.parse_args()
    if asked.serve:
        ALL[asked.serve][0](Path(asked.folder))
    elif asked.push:
        push(asked.push, Path(asked.folder), int(asked.port))
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_certificates(Path(folder))
            rounds = [{name: _measure(name, Path(folder)) for name in asked.names} for _ in range(asked.rounds)]
        for name in asked.names:
            keys = rounds[0][name]
            print(
                json.dumps({"name": name} | {k: round(statistics.median(r[name][k] for r in rounds), 2) for k in keys})
            )


if __name__ == "__main__":
    main()
