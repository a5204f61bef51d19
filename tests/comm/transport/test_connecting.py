"""A rank at its door: strangers and silent callers, and peers that do not come."""

import socket
from collections.abc import Iterator

import pytest

from ringweave.accept_limits import AcceptLimits
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.transport import connect as transport_connect
from ringweave.comm.transport.connect import ChannelListener, ConnectionManager, open_listeners

TOKEN = b"0123456789abcdef"
NEVER = float("inf")
DEADLINE_S = AcceptLimits().deadline_s


class Called:
    """The last of four ranks, which waits for calls."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.door: ChannelListener = open_listeners(["127.0.0.1"], 1)[0]
        ranks = tuple(RankInfo(rank, RankLocation(f"n{rank}", "127.0.0.1"), (self.door.endpoint,)) for rank in range(4))
        self.switchboard = ConnectionManager(self.door, 0, GroupInfo(ranks, 3, TOKEN), 60.0, lambda: self.now_s)
        self.connections: list[socket.socket] = []

    def connect(self) -> socket.socket:
        """Somebody calls, and says nothing."""
        sock = socket.create_connection(self.door.tcp_sockets[0].getsockname())
        sock.settimeout(100)
        self.connections.append(sock)
        return sock

    def answer(self, num_tries: int) -> int | None:
        """Who is answered in so many tries, while rank 0 is waited for."""
        for _ in range(num_tries):
            answered = self.switchboard.accept_peer(0, NEVER)
            if answered is not None:
                self.connections.append(answered[2])
                return answered[0]
        return None


def hello(group_rank: int) -> bytes:
    return transport_connect._HELLO.pack(TOKEN, group_rank, 0)


@pytest.fixture
def called() -> Iterator[Called]:
    made = Called()
    yield made
    made.switchboard.close()
    for sock in made.connections:
        sock.close()


def test_a_caller_that_says_nothing_yet_keeps_nobody_waiting_and_is_answered_when_it_does(called: Called) -> None:
    slow = called.connect()
    assert called.answer(2) is None
    called.connect().sendall(hello(1))
    assert called.answer(100) == 1
    slow.sendall(hello(0)[:10])
    assert called.answer(2) is None
    slow.sendall(hello(0)[10:])
    assert called.answer(100) == 0


def test_a_caller_that_says_nothing_at_all_is_hung_up_on(called: Called) -> None:
    silent = called.connect()
    assert called.answer(2) is None
    called.now_s = DEADLINE_S - 0.1
    assert called.answer(1) is None
    silent.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        silent.recv(1)
    silent.settimeout(100)
    called.now_s = DEADLINE_S
    assert called.answer(1) is None
    assert silent.recv(1) == b""


def test_silent_callers_never_keep_out_one_that_speaks(called: Called) -> None:
    silent = [called.connect() for _ in range(AcceptLimits().max_pending_per_source + 10)]
    for _ in silent:
        called.answer(1)
    called.connect().sendall(hello(2))
    assert called.answer(100) == 2
    assert called.switchboard._incoming._limiter.num_pending <= AcceptLimits().max_pending_per_source
    assert silent[0].recv(1) == b"", "the oldest one had to go"


def test_an_abort_hangs_up_on_those_who_have_said_nothing(called: Called) -> None:
    silent = called.connect()
    assert called.answer(2) is None
    called.switchboard.abort()
    assert silent.recv(1) == b""


def test_a_peer_that_does_not_come_is_looked_for_ever_more_rarely(
    called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def connect(where: object, timeout: float) -> socket.socket:
        looks.append(called.now_s)
        return socket.socket()

    def wait_hello(timeout_s: float) -> None:
        called.now_s += timeout_s

    monkeypatch.setattr(transport_connect.socket, "create_connection", connect)
    monkeypatch.setattr(called.switchboard._incoming, "wait_hello", wait_hello)
    while called.now_s < 60.0:
        assert called.switchboard.accept_peer(0, NEVER) is None
    assert looks[0] < 0.5
    assert len([when_s for when_s in looks if when_s < 2.0]) >= 3
    assert len(looks) <= 20
    assert looks[-1] > 54.0


def test_of_two_ranks_the_one_that_only_calls_out_calls_else_the_lower_one() -> None:
    addresses = ("10.0.0.1", "127.64.0.9", "10.0.0.2", "127.64.0.10")
    ranks = tuple(RankInfo(rank, RankLocation(f"n{rank}", each), ()) for rank, each in enumerate(addresses))
    group = GroupInfo(ranks, 0, TOKEN)
    pairs = [(caller, callee) for caller in range(4) for callee in range(4) if caller != callee]
    calls = {pair for pair in pairs if group.calls(*pair)}
    assert calls == {(0, 2), (1, 0), (1, 2), (1, 3), (3, 0), (3, 2)}
