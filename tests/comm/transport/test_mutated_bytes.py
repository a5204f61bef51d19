"""What a stranger can do with bytes at the door of a rank, and what a peer can do with a header."""

import random
import select
import socket
import time

import pytest

from ringweave.accept_limits import connection_id
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.transport import connect
from ringweave.comm.transport.connect import ConnectionManager, open_listeners
from ringweave.comm.transport.interface import MismatchError
from ringweave.comm.transport.sockets import TcpConnection
from tests.rpc.mutations import mutated

TOKEN = b"0123456789abcdef"
TAG = 7 << 32 | 5
CONTENT = b"contents" * 3


@pytest.mark.slow
def test_mutated_hellos_let_nobody_in_but_those_who_know_the_token() -> None:
    (door,) = open_listeners(["127.0.0.1"], 1)
    ranks = tuple(RankInfo(rank, RankLocation("n", "127.0.0.1", (), (1.0,)), (door.endpoint,)) for rank in range(3))
    switchboard = ConnectionManager(door, 0, GroupInfo(ranks, 2, TOKEN), 60.0, time.monotonic)
    good, rng = connect._HELLO.pack(TOKEN, 1, 0), random.Random(8)
    try:
        assert caller(switchboard, good) == (1, connect.ConnectionPlace(0, 0, 1))
        for _ in range(20_000):
            data = mutated(rng, good)
            found = caller(switchboard, data)
            if not data.startswith(TOKEN):
                assert found is None
            assert found is None or found[0] in (0, 1), "never a rank that there is not"
            assert found is None or found[1].is_among(1), "nor a rail or a stream"
    finally:
        switchboard.close()


def caller(switchboard: ConnectionManager, data: bytes) -> tuple[int, connect.ConnectionPlace] | None:
    """Who is let in when a stranger says this and hangs up."""
    known, (ours, theirs) = switchboard._incoming, socket.socketpair()
    ours.setblocking(False)
    theirs.sendall(data)
    theirs.close()
    known._pending[ours.fileno()] = connect._PendingConnection(ours, connection_id(ours))
    with ours:
        while known._pending:
            said = known.wait_hello(60.0)
        return switchboard._identify(*said) if said is not None else None


@pytest.mark.slow
def test_mutated_headers_never_write_past_the_piece_that_was_posted() -> None:
    rng, good, num_refused = random.Random(9), header(TAG, 8), 0
    for _ in range(3000):
        data, room = mutated(rng, good), bytearray(b"-" * 8 + b"keep")
        ours, theirs = tcp_pair()
        with ours:
            theirs.sendall(data + CONTENT)
            theirs.close()
            connection = TcpConnection(0, ours)
            message = connection.receive(memoryview(room)[:8], TAG)
            is_taken = True
            try:
                while not message.done:
                    connection.read()
                    select.select([ours], [], [], 60)
            except (MismatchError, ConnectionResetError):
                is_taken, num_refused = False, num_refused + 1
            assert is_taken == (data + CONTENT).startswith(good)
            assert room[8:] == b"keep"
    assert num_refused > 2000


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """A connection over the loopback interface; the first end does not block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)
    return ours, theirs


def header(tag: int, num_bytes: int) -> bytes:
    """As a peer sends it."""
    ours, theirs = tcp_pair()
    with ours, theirs:
        TcpConnection(0, ours).send(memoryview(bytes(num_bytes)), tag)
        found = b""
        while len(found) < num_bytes + 1 or select.select([theirs], [], [], 0)[0]:
            found += theirs.recv(1000)
        return found[:-num_bytes]
