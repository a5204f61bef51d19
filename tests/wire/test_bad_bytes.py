"""What a peer that belongs to the job, or talks without encryption, can do with bytes."""

import random
import socket
import threading
import tracemalloc
from collections.abc import Callable

import pytest

from ringweave import wire
from ringweave.errors import WireError
from ringweave.wire.framing import frames
from ringweave.wire.framing.frames import FrameKind
from tests.wire.parts import Add, Echo, Events, Sum, connect, frame, introduce, read_frame, serving, trust, wait_until

LIMITS = wire.Limits(
    max_message_bytes=1 << 20, max_body_bytes=4096, max_bytes_in_flight=1 << 22, patience_s=60.0, handshake_s=60.0
)
GOOD_NUMBER = 77_777_777


def plain(role: str) -> wire.Plain:
    return wire.Plain(wire.Identity(job="job1", role=role, name="0"), "token")


def raw_peer(server: wire.Server, trusted: wire.Trust) -> socket.socket:
    """A socket on which the peer has been let in."""
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock = trusted.wrap(raw, serves=False)
    introduce(sock, trusted)
    return sock


def refusal(sock: socket.socket) -> str:
    """What the server says before it hangs up."""
    prefix, body = read_frame(sock)
    assert prefix.kind == FrameKind.REFUSED
    assert sock.recv(1) == b""
    return body.decode()


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize(
    ("announced", "text"),
    [
        ({"sizes": [1 << 50]}, "bytes of a message: 1125899906842624, expected at most 1048576"),
        ({"sizes": [(1 << 20) + 1]}, "bytes of a message: 1048577, expected at most 1048576"),
        ({"sizes": [0] * 65535}, "buffers of a message: 65535, expected at most 4096"),
        ({"body": b"x" * 4097}, "bytes of a message's body: 4097, expected at most 4096"),
    ],
)
def test_too_much_is_refused_before_memory_is_taken(
    authority: wire.Authority, events: Events, secure: bool, announced: dict, text: str
) -> None:
    server_trust = trust(authority, "server", "0") if secure else plain("server")
    peer_trust = trust(authority, "worker", "0") if secure else plain("worker")
    data = frames.pack(FrameKind.CALL, call=1, name="test.add", **announced)[: frames.PREFIX_BYTES]
    with serving(server_trust, limits=LIMITS, record=events) as server, raw_peer(server, peer_trust) as sock:
        with raw_peer(server, peer_trust) as first:  # brings what any refusal needs once
            first.sendall(data)
            assert text in refusal(first)
        tracemalloc.start()
        try:
            sock.sendall(data)
            assert text in refusal(sock)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 900_000
        assert server.held_bytes == 0
        assert text in events.wait_reason("message")["text"]


def test_a_hello_may_not_be_large(events: Events) -> None:
    with (
        serving(plain("server"), limits=LIMITS, record=events) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock,
    ):
        sock.sendall(frames.pack(FrameKind.HELLO, body=b"x" * 4000)[: frames.PREFIX_BYTES])
        assert "bytes of a message's body: 4000, expected at most 2048" in refusal(sock)


def test_nothing_but_hello_comes_first(events: Events) -> None:
    with (
        serving(plain("server"), limits=LIMITS, record=events) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock,
    ):
        sock.sendall(frame(Add(), 1))
        assert "first frame: 'CALL', expected HELLO. Look who called." in refusal(sock)


@pytest.mark.parametrize("kept", [10, frames.PREFIX_BYTES, frames.PREFIX_BYTES + 5, -1, -9])
def test_a_frame_that_stops_halfway_is_given_up_in_time(events: Events, kept: int) -> None:
    limits = wire.Limits(patience_s=0.5)
    with serving(plain("server"), limits=limits, record=events) as server, raw_peer(server, plain("worker")) as sock:
        sock.sendall(frame(Add(), 1, b"abcdefgh")[:kept])
        assert (
            "time for a message: 'used up in the middle of a frame; the connection is cut'"
            in (events.wait_reason("deadline")["text"])
        )
        wait_until(lambda: server.held_bytes == 0)


@pytest.mark.parametrize("kept", [10, frames.PREFIX_BYTES, -1])
def test_a_peer_that_hangs_up_halfway_leaves_nothing(kept: int) -> None:
    with serving(plain("server"), limits=LIMITS) as server:
        with raw_peer(server, plain("worker")) as sock:
            sock.sendall(frame(Add(), 1, b"abcdefgh")[:kept])
        wait_until(lambda: not server.peers())
        assert server.held_bytes == 0


def test_a_peer_that_trickles_is_cut_though_bytes_keep_coming(events: Events) -> None:
    limits = wire.Limits(patience_s=0.5, slowest_bytes_per_s=100_000)
    with serving(plain("server"), limits=limits, record=events) as server, raw_peer(server, plain("worker")) as sock:
        data, stop = frame(Add(), 1, bytes(50_000)), threading.Event()

        def trickle() -> None:
            for byte in data:  # 1,000 s in all
                sock.sendall(bytes([byte]))
                stop.wait(0.02)

        with pytest.raises(OSError):
            trickle()
        events.wait_reason("deadline")


def test_a_repeated_call_is_cut_off(events: Events) -> None:
    with serving(plain("server"), limits=LIMITS, record=events) as server, raw_peer(server, plain("worker")) as sock:
        sock.sendall(frame(Add(), 5))
        read_frame(sock)
        sock.sendall(frame(Add(), 5))
        assert "number of a call: 5, expected more than 5. A message was repeated" in refusal(sock)


def mutated(rng: random.Random, good: bytes) -> bytes:
    """The frame with something wrong: bits, bytes, lengths, cut, doubled, shuffled or made up."""
    data = bytearray(good)
    match rng.randrange(7):
        case 0:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            at = rng.randrange(len(data))
            data[at : at + rng.randint(1, 64)] = rng.randbytes(rng.randint(0, 64))
        case 2:
            at = rng.choice((6, 8, 10, 12, 16, 20, 28))  # a field of the prefix
            data[at : at + 2] = rng.choice((b"\xff\xff", b"\x00\x80", rng.randbytes(2)))
        case 3:
            del data[rng.randrange(len(data)) :]
        case 4:
            at = rng.randrange(len(data))
            data[at:at] = data[at : at + rng.randint(1, 100)]
        case 5:
            first, second = sorted(rng.sample(range(len(data)), 2))
            data = data[first:second] + data[:first] + data[second:]
        case _:
            data = bytearray(rng.randbytes(rng.randint(1, 300)))
    return bytes(data)


class Taken:
    """A handler that remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Add, bytes]] = []

    def __call__(self, call: wire.Call) -> Sum:
        self.seen.append((call.message, b"".join(call.buffers)))
        return Sum(total=0, peer="")


def attack(open_peer: Callable[[], socket.socket], num_messages: int, seed: int) -> int:
    """Send mutated calls, each on a connection of its own; how many really differ from good ones."""
    rng, sent = random.Random(seed), 0
    while sent < num_messages:
        good = frame(Add(number=GOOD_NUMBER, words=("a", "b")), 1, b"parameters" * 20, b"", b"\x01")
        data = mutated(rng, good)
        if data.startswith(good):
            continue
        with open_peer() as sock:
            try:
                sock.sendall(data)
                socket.socket.shutdown(sock, socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except OSError:
                pass  # cut off while sending: all the same
        sent += 1
    return sent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("secure", "num_messages"), [(False, 10_000), (True, 1_000)], ids=["plain", "tls"])
def test_mutated_messages_reach_nobody_and_harm_nothing(
    authority: wire.Authority, secure: bool, num_messages: int
) -> None:
    taken, complaints = Taken(), []
    server = wire.Server(
        trust(authority, "server", "0") if secure else plain("server"),
        [wire.Handler(message=Add, handle=taken)],
        limits=LIMITS,
        complain=lambda *each: complaints.append(each),
    ).start("127.0.0.1")
    peer_trust = trust(authority, "worker", "0") if secure else plain("worker")
    with server, connect(server, peer_trust) as honest:
        assert attack(lambda: raw_peer(server, peer_trust), num_messages, seed=7) == num_messages
        assert taken.seen == []
        assert complaints == []
        honest.call(Add(number=1), [b"x"], timeout_s=60)
        assert taken.seen == [(Add(number=1), b"x")]
        wait_until(lambda: len(server.peers()) == 1)
        wait_until(lambda: server.held_bytes == 0)


@pytest.mark.slow
def test_mutated_hellos_let_nobody_in() -> None:
    server_trust, peer_trust = plain("server"), plain("worker")
    hello = f'{{"token":"{peer_trust.token}","identity":"{peer_trust.identity}"}}'.encode()
    good, rng = frames.pack(FrameKind.HELLO, body=hello), random.Random(3)
    with serving(server_trust, limits=LIMITS) as server:
        for _ in range(1000):
            data = mutated(rng, good)
            if data.startswith(good):
                continue
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
                answer = b""
                try:
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    answer = sock.recv(65536)
                except OSError:
                    pass
                assert answer[5:6] in {b"", bytes([FrameKind.REFUSED])}
            assert not server.peers()
        assert server.refusals.total > 500
        connect(server, peer_trust).close()


def test_a_client_survives_a_server_that_sends_rubbish(authority: wire.Authority) -> None:
    """Every answer is damaged in some way; each call fails with an error of ours, and none hangs."""
    rng = random.Random(5)

    def rubbish(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                read_frame(sock)
                welcome = {"identity": "ringweave://job1/server/0", "max_body_bytes": 1000, "max_buffers": 10}
                body = str(welcome | {"max_message_bytes": 10000, "max_calls": 4}).replace("'", '"').encode()
                sock.sendall(frames.pack(FrameKind.WELCOME, body=body))
                read_frame(sock)
                good = frames.pack(FrameKind.REPLY, call=1, name="test.echo", body=b"{}")
                data = mutated(rng, good)
                sock.sendall(b"x" if data.startswith(good) else data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=rubbish, args=(listener,), daemon=True).start()
        for _ in range(200):
            port = listener.getsockname()[1]
            client = wire.Client.connect("127.0.0.1", port, plain("worker"), role="server", limits=LIMITS)
            with client, pytest.raises(WireError, match=r".+"):
                client.call(Echo(), timeout_s=60)
