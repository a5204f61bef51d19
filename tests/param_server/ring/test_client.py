"""Connections that break: how long a ring tries to reach its server again, in virtual time."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from ringweave import rpc
from ringweave.errors import ConnectionLostError, DeadlineError
from ringweave.param_server.client import RingClient
from ringweave.param_server.messages import LeaveRing, RegisterRingLeader, ServerStatus, ServerStatusRequest

RECONNECT_S, PATIENCE_S = 20.0, 100.0
STATUS = ServerStatus(
    version=3,
    staleness={},
    pushes={},
    samples=0,
    repeats=0,
    received_bytes=0,
    sent_bytes=0,
    most_peers=1,
    train_steps=0.0,
    memory_bytes=0,
)


class World:
    """A server whose connections do, one call after the other, what a test says."""

    def __init__(self, *deeds: Callable[["World"], object], is_there: bool = True) -> None:
        self.now_s = 0.0
        self.num_connections = 0
        self._deeds, self._is_there = list(deeds), is_there

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def connect(self) -> rpc.RpcClient:
        if not self._is_there:
            raise ConnectionLostError("nobody listens")
        self.num_connections += 1
        return cast("rpc.RpcClient", self)

    def call(
        self, message: ServerStatusRequest, content: Any = (), *, timeout_s: float, into: Any = None
    ) -> rpc.RpcReply:
        deed = self._deeds.pop(0) if len(self._deeds) > 1 else self._deeds[0]
        deed(self)
        return rpc.RpcReply(STATUS)

    def close(self) -> None:
        pass

    def client(self) -> RingClient:
        settings: dict[str, Any] = {"answer_timeout_s": PATIENCE_S, "reconnect_timeout_s": RECONNECT_S}
        return RingClient([self.connect], 0, clock=lambda: self.now_s, sleep=self.sleep, **settings)


def answers(world: World) -> None:
    world.sleep(0.1)


def breaks_after(seconds: float) -> Callable[[World], None]:
    def broken(world: World) -> None:
        world.sleep(seconds)
        raise ConnectionLostError("broken")

    return broken


def times_out(world: World) -> None:
    world.sleep(PATIENCE_S)
    raise DeadlineError("no answer")


def test_a_connection_that_breaks_after_a_long_wait_is_made_again():
    world = World(answers, breaks_after(RECONNECT_S + 5), answers)
    client = world.client()
    client.status()
    assert client.status() == STATUS
    assert world.num_connections == 2


def test_one_that_has_stood_for_long_begins_the_count_anew():
    world = World(breaks_after(30), breaks_after(30), answers)
    assert world.client().status() == STATUS
    assert world.num_connections == 3


def test_connections_that_break_at_once_are_given_up():
    world = World(breaks_after(0.0))
    with pytest.raises(ConnectionLostError):
        world.client().status()
    assert RECONNECT_S <= world.now_s <= RECONNECT_S + 1


def test_a_server_out_of_reach_is_given_up():
    world = World(answers, is_there=False)
    with pytest.raises(ConnectionLostError):
        world.client().status()
    assert RECONNECT_S <= world.now_s <= RECONNECT_S + 1


def test_no_answer_in_time_is_not_asked_for_again():
    world = World(times_out)
    with pytest.raises(DeadlineError):
        world.client().status()
    assert world.now_s == PATIENCE_S


def test_connections_that_break_again_and_again_end_with_patience():
    world = World(breaks_after(RECONNECT_S + 1))
    with pytest.raises(ConnectionLostError):
        world.client().status()
    assert world.now_s <= PATIENCE_S + RECONNECT_S + 2


def test_who_represents_a_ring_says_so_to_each_server_and_in_each_epoch():
    said: list[Any] = []

    class Server:
        def __init__(self, breaks: bool) -> None:
            self._breaks = breaks

        def call(self, message: Any, content: Any = (), *, timeout_s: float, into: Any = None) -> rpc.RpcReply:
            said.append(message)
            if self._breaks and isinstance(message, LeaveRing):
                raise ConnectionLostError("broken")
            return rpc.RpcReply(rpc.Ack())

        def close(self, *, is_awaited: bool = False) -> None: ...

    servers, generation_ids = iter([Server(True), Server(False)]), [(1, 1)]
    connect = cast("Callable[[], rpc.RpcClient]", lambda: next(servers))
    client = RingClient(
        [connect], 2, generation_id=lambda: generation_ids[-1], least_incarnations=lambda: {4: 2}, sleep=lambda _: None
    )
    client.pause_ring()
    client.leave_ring(is_for_good=False)
    client.leave_ring(is_for_good=False)
    generation_ids.append((1, 2))
    client.leave_ring(is_for_good=False)
    kinds = [each.generation_id if isinstance(each, RegisterRingLeader) else type(each).__name__ for each in said]
    assert kinds == ["PauseRing", (1, 1), "LeaveRing", (1, 1), "LeaveRing", "LeaveRing", (1, 2), "LeaveRing"]
    told = [each.least_incarnations for each in said if isinstance(each, RegisterRingLeader)]
    assert told == [[(4, 2)]] * 3
