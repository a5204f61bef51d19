"""What a peer that belongs to the job, or talks without encryption, can do with bytes."""

import contextlib
import random
import socket
import threading
import tracemalloc

import pytest

from ringweave import rpc
from ringweave.errors import MessageError, RemoteError, RpcError, TrainingError
from ringweave.rpc import framing
from ringweave.rpc.framing import FrameKind
from tests import effort
from tests.fakes.plaintext import PlaintextAuthentication
from tests.polling import wait_until
from tests.rpc.mutations import damaged, host, mutated, raw_peer, send_damaged
from tests.rpc.parts import (
    Add,
    Echo,
    Events,
    Sum,
    Wait,
    connect,
    frame,
    packed,
    read_frame,
    serving,
    trust,
)

LIMITS = rpc.RpcLimits(
    max_message_bytes=1 << 20, max_body_bytes=4096, max_bytes_in_flight=1 << 22, patience_s=60.0, handshake_s=60.0
)
GOOD_NUMBER = 77_777_777


def plain(role: str) -> PlaintextAuthentication:
    return PlaintextAuthentication(rpc.Identity(job="job1", role=role, name="0"), "token")


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
    authority: rpc.CertificateAuthority, events: Events, secure: bool, announced: dict, text: str
) -> None:
    server_trust = trust(authority, "server", "0") if secure else plain("server")
    peer_trust = trust(authority, "worker", "0") if secure else plain("worker")
    data = framing.pack_frame(FrameKind.CALL, call=1, name="test.add", **announced)[: framing.PREFIX_BYTES]
    with serving(server_trust, limits=LIMITS, write_event=events) as server, raw_peer(server.port, peer_trust) as sock:
        with raw_peer(server.port, peer_trust) as first:  # brings what any refusal needs once
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
        serving(plain("server"), limits=LIMITS, write_event=events) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock,
    ):
        sock.sendall(framing.pack_frame(FrameKind.HELLO, body=b"x" * 4000)[: framing.PREFIX_BYTES])
        assert "bytes of a message's body: 4000, expected at most 2048" in refusal(sock)


def test_nothing_but_hello_comes_first(events: Events) -> None:
    with (
        serving(plain("server"), limits=LIMITS, write_event=events) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock,
    ):
        sock.sendall(frame(Add(), 1))
        assert "first frame: 'CALL', expected HELLO. Check which process called." in refusal(sock)


@pytest.mark.parametrize("kept", [10, framing.PREFIX_BYTES, framing.PREFIX_BYTES + 5, -1, -9])
def test_a_frame_that_stops_halfway_is_given_up_in_time(events: Events, kept: int) -> None:
    limits = rpc.RpcLimits(patience_s=0.5)
    with (
        serving(plain("server"), limits=limits, write_event=events) as server,
        raw_peer(server.port, plain("worker")) as sock,
    ):
        sock.sendall(frame(Add(), 1, b"abcdefgh")[:kept])
        assert (
            "time for a message: 'used up in the middle of a frame; the connection is cut'"
            in (events.wait_reason("deadline")["text"])
        )
        wait_until(lambda: server.held_bytes == 0)


@pytest.mark.parametrize("kept", [10, framing.PREFIX_BYTES, -1])
def test_a_peer_that_hangs_up_halfway_leaves_nothing(kept: int) -> None:
    with serving(plain("server"), limits=LIMITS) as server:
        with raw_peer(server.port, plain("worker")) as sock:
            sock.sendall(frame(Add(), 1, b"abcdefgh")[:kept])
        wait_until(lambda: not server.peers())
        assert server.held_bytes == 0


def test_a_peer_that_trickles_is_cut_though_bytes_keep_coming(events: Events) -> None:
    limits = rpc.RpcLimits(patience_s=0.5, slowest_bytes_per_s=100_000)
    with (
        serving(plain("server"), limits=limits, write_event=events) as server,
        raw_peer(server.port, plain("worker")) as sock,
    ):
        data, stop = frame(Add(), 1, bytes(50_000)), threading.Event()

        def trickle() -> None:
            for byte in data:  # 1,000 s in all
                sock.sendall(bytes([byte]))
                stop.wait(0.02)

        with pytest.raises(OSError):
            trickle()
        events.wait_reason("deadline")


def test_a_repeated_call_is_cut_off(events: Events) -> None:
    with (
        serving(plain("server"), limits=LIMITS, write_event=events) as server,
        raw_peer(server.port, plain("worker")) as sock,
    ):
        sock.sendall(frame(Add(), 5))
        read_frame(sock)
        sock.sendall(frame(Add(), 5))
        assert "number of a call: 5, expected more than 5. A message was repeated" in refusal(sock)


class Taken:
    """A handler that remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Add, bytes]] = []

    def __call__(self, call: rpc.RpcCall) -> Sum:
        self.seen.append((call.message, b"".join(call.buffers)))
        return Sum(total=0, peer="")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("secure", "num_messages"), [(False, effort.share_of(20_000)), (True, effort.share_of(5_000))], ids=["plain", "tls"]
)
def test_mutated_messages_reach_nobody_harm_nothing_and_are_written_down(
    authority: rpc.CertificateAuthority, events: Events, secure: bool, num_messages: int
) -> None:
    taken, complaints = Taken(), []
    server = rpc.RpcServer(
        trust(authority, "server", "0") if secure else plain("server"),
        [rpc.RpcHandler(message=Add, handle=taken)],
        limits=LIMITS,
        write_event=events,
        on_handler_error=lambda *each: complaints.append(each),
    ).start("127.0.0.1")
    peer_trust = trust(authority, "worker", "0") if secure else plain("worker")
    good = frame(Add(number=GOOD_NUMBER, words=("a", "b")), 1, b"parameters" * 20, b"", b"\x01")
    with server, connect(server, peer_trust) as honest:
        refused = send_damaged(server.port, peer_trust, [good], num_messages, seed=7, limits=LIMITS)
        assert len(refused) > num_messages / 2, "the others stop halfway"
        assert taken.seen == []
        assert complaints == []
        wait_until(lambda: server.refusals.total == len(refused))
        assert {(event["peer"].partition(":")[0], event["reason"]) for event in events.seen} == {
            (host, "message") for host in refused
        }
        honest.call(Add(number=1), [b"x"], timeout_s=60)
        assert taken.seen == [(Add(number=1), b"x")]
        wait_until(lambda: len(server.peers()) == 1)
        wait_until(lambda: server.held_bytes == 0)


@pytest.mark.parametrize(
    ("name", "body", "text"),
    [
        ("test.add", b'{"number":"1"}', "message test.add, number: '1', expected a valid one"),
        ("test.nothing", b"{}", "kind of message: 'test.nothing', expected one of test.add"),
    ],
)
def test_whoever_breaks_a_schema_is_written_down_and_stays(events: Events, name: str, body: bytes, text: str) -> None:
    with (
        serving(plain("server"), limits=LIMITS, write_event=events) as server,
        raw_peer(server.port, plain("worker"), host(0)) as sock,
    ):
        sock.sendall(packed(name, body, [b"skipped"]))
        assert read_frame(sock)[0].kind == FrameKind.FAILURE
        (event,) = events.seen
        assert (event["reason"], event["peer"].partition(":")[0]) == ("message", host(0))
        assert text in event["text"]
        sock.sendall(frame(Add(), 2, b"x"))
        assert read_frame(sock)[0].kind == FrameKind.REPLY


def test_what_a_handler_refuses_is_not_written_down(events: Events) -> None:
    """It is between the two of them: in the life of a job it is nothing unusual."""

    def refuse(call: rpc.RpcCall) -> rpc.Ack:
        raise MessageError("too late")

    def refuse_room(incoming: rpc.IncomingCall) -> list[memoryview]:
        raise TrainingError("too large")

    handlers = (
        rpc.RpcHandler(message=Echo, handle=refuse),
        rpc.RpcHandler(message=Wait, handle=refuse, allocate=refuse_room),
    )
    with serving(plain("server"), *handlers, write_event=events) as server, connect(server, plain("worker")) as client:
        with pytest.raises(RemoteError, match="too late"):
            client.call(Echo(), timeout_s=60)
        with pytest.raises(RemoteError, match="too large"):
            client.call(Wait(), timeout_s=60)
    assert events.seen == []


@pytest.mark.slow
def test_mutated_hellos_let_nobody_in_and_are_written_down(events: Events) -> None:
    server_trust, peer_trust = plain("server"), plain("worker")
    hello = f'{{"token":"{peer_trust.token}","identity":"{peer_trust.identity}"}}'.encode()
    good, rng = framing.pack_frame(FrameKind.HELLO, body=hello), random.Random(3)
    with serving(server_trust, limits=LIMITS, write_event=events) as server:
        for index in range(1000):
            source, answer = (host(index), 0), b""
            with socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=source) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(damaged(rng, good))
                    sock.shutdown(socket.SHUT_WR)
                    answer = sock.recv(65536)
                assert answer[5:6] in {b"", bytes([FrameKind.REFUSED])}
            assert not server.peers()
        wait_until(lambda: server.refusals.total == 1000)
        assert {event["peer"].partition(":")[0] for event in events.seen} == {host(index) for index in range(1000)}
        assert {event["reason"] for event in events.seen} == {"message", "connection"}, "the latter stop halfway"
        connect(server, peer_trust).close()


def test_a_client_survives_a_server_that_sends_rubbish(authority: rpc.CertificateAuthority) -> None:
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
                sock.sendall(framing.pack_frame(FrameKind.WELCOME, body=body))
                read_frame(sock)
                good = framing.pack_frame(FrameKind.REPLY, call=1, name="test.echo", body=b"{}")
                data = mutated(rng, good)
                sock.sendall(b"x" if data.startswith(good) else data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=rubbish, args=(listener,), daemon=True).start()
        for _ in range(200):
            port = listener.getsockname()[1]
            client = rpc.RpcClient.connect("127.0.0.1", port, plain("worker"), role="server", limits=LIMITS)
            with client, pytest.raises(RpcError, match=r".+"):
                client.call(Echo(), timeout_s=60)
