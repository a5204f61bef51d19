"""Two servers in this thread, with the real `Leadership`, on virtual time; what they tell each other may be lost."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from ringweave import rpc
from ringweave.errors import ConnectionLostError, DeadlineError, NotLeaderError, RemoteError, RpcError
from ringweave.param_server.leadership import FolderLeadershipLog, LeadershipRecord, Reachability
from ringweave.param_server.messages import Push
from ringweave.param_server.replication import CopyState, RenewLease, ReplicatePush
from ringweave.param_server.standby import ServerLeadership

LEASE_S = 1e6
"""So long in virtual time that threads that renew it, which wait in real time, never come to it."""


class Server:
    """What it has applied, and what it may answer."""

    def __init__(self, world: "World", own: int) -> None:
        self.own, self._world = own, world
        self.log: list[int] = []
        self.reachability = Reachability.MOST
        self.leadership = ServerLeadership(
            own,
            world.register,
            lambda: cast("rpc.RpcClient", Line(world, 1 - own)),
            lease_s=LEASE_S,
            reachability=lambda: self.reachability,
            clock=lambda: world.now_s,
        )

    @contextmanager
    def paused_state(self) -> Iterator[bytes]:
        """See `leadership.Model`."""
        yield b""

    def push(self, number: int) -> bool:
        """As the service does; whether it was acknowledged."""
        push = Push(
            term=self.leadership.term,
            ring=0,
            sequence=number,
            base_version=0,
            content="gradient",
            num_samples=1,
            batch_share=1.0,
        )
        try:
            self.leadership.check_term(push.term)
            if number not in self.log:
                self.leadership.replicate_push(push, ())
                self.log.append(number)
        except NotLeaderError:
            return False
        return True

    def tell(self, message: rpc.RpcMessage) -> None:
        """As `Following` does."""
        match message:
            case CopyState():
                self.log = list(self._world.servers[1 - self.own].log)
                self.leadership.become_standby()
            case ReplicatePush():
                self.leadership.note_leader_heard()
                if message.push.sequence not in self.log:
                    self.log.append(message.push.sequence)
            case RenewLease():
                self.leadership.note_leader_heard()
            case other:
                raise AssertionError(f"not said here: {other}")


class Line:
    """Stands in for a connection to a server."""

    def __init__(self, world: "World", to: int) -> None:
        if world.lines == "cut":
            raise DeadlineError("nobody answers")
        self._world, self._to, self._server = world, to, world.servers[to]

    def call(self, message: rpc.RpcMessage, buffers: Sequence[memoryview] = (), *, timeout_s: float) -> None:
        if self._world.servers[self._to] is not self._server:
            raise ConnectionLostError("it has died")
        if self._world.lines == "cut":
            raise DeadlineError("no answer")
        try:
            self._server.tell(message)
        except NotLeaderError as error:
            raise RemoteError(str(error), type(error).__name__) from error
        if self._world.lines == "answers lost":
            raise DeadlineError("no answer")

    def close(self) -> None:
        pass


class World:
    """Both servers; server 0 leads at first."""

    def __init__(self, register: Any) -> None:
        """`register` has the methods of `Claims`."""
        self.register: FolderLeadershipLog = register
        self.now_s = 0.0
        self.lines = ""
        """`cut`: nothing gets through between the servers; `answers lost`: no answer does."""
        self.acknowledged: list[int] = []
        self.servers: list[Server] = []
        self.servers = [Server(self, own) for own in (0, 1)]
        for server in self.servers:
            server.leadership.begin_leading(server)

    def close(self) -> None:
        """End all threads."""
        for server in self.servers:
            server.leadership.close()

    def restart(self, own: int) -> None:
        """Kill it, and start it again with nothing."""
        self.servers[own].leadership.close()
        self.servers[own] = Server(self, own)
        self.servers[own].leadership.begin_leading(self.servers[own])

    def join(self, own: int) -> None:
        """That server, which has nothing, asks the other one to be taken in."""
        asks, asked = self.servers[own].leadership, self.servers[1 - own].leadership
        if not (asks.is_leading or asks.is_following or asks.superseded) and self.lines == "":
            with suppress(NotLeaderError, RpcError):
                asked.admit_standby()

    def push(self, own: int, number: int) -> bool:
        """A ring pushes there; whether it was acknowledged."""
        is_acknowledged = self.servers[own].push(number)
        if is_acknowledged and number not in self.acknowledged:
            self.acknowledged.append(number)
        return is_acknowledged

    def tick(self, own: int) -> None:
        """A while after: that server looks whether it has to go on without the other one."""
        server, other = self.servers[own], self.servers[1 - own]
        with suppress(NotLeaderError):
            server.leadership.tick(is_leader_connected=other.leadership.is_leading and self.lines == "")

    def check(self, newest: LeadershipRecord | None) -> None:
        """Whoever may go on after the newest claim has all that was acknowledged, once."""
        assert newest is not None
        for server in self.servers:
            assert len(set(server.log)) == len(server.log)
            has_something = server.leadership.is_leading or server.leadership.is_following
            if server.own in newest.members and has_something:
                assert set(self.acknowledged) <= set(server.log), (newest, server.own)
