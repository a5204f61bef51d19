"""What the servers of a job answer each other and to rings that look for the leader."""

from collections.abc import Callable, Sequence

from ringweave import wire
from ringweave.errors import RefusedError, WireError, explain
from ringweave.params.serving import snapshots
from ringweave.params.serving.replaying import Replay
from ringweave.params.serving.service import ParameterService
from ringweave.params.standby.leadership import STATE, Leadership
from ringweave.params.standby.messages import NOTES, Copy, Follow, Granted, Pushing, Renew
from ringweave.wire import Call, Done, Handler, Incoming, states

_COPY_S = 3600.0
_FOLLOW_S = 3600.0


class Following:
    """Handlers beside those of the service."""

    def __init__(self, leadership: Leadership, service: ParameterService, connect: Callable[[], wire.Client]) -> None:
        """`connect` connects to the other server."""
        self._leadership, self._service, self._connect = leadership, service, connect
        self._replay = Replay(service)
        self._to_leader: wire.Client | None = None

    def handlers(self) -> list[Handler]:
        """What the wire's server has to know."""
        return [
            Handler(message=Follow, handle=self._admit),
            Handler(message=Copy, handle=self._copy),
            Handler(message=Pushing, handle=self._pushing, allocate=self._room),
            Handler(message=Granted, handle=self._granted),
            *(Handler(message=each, handle=self._noted) for each in NOTES),
            Handler(message=Renew, handle=self._renewed),
        ]

    def ask(self) -> bool:
        """Ask the other server to be taken in as its standby; whether it did. Returns late: all is copied meanwhile."""
        try:
            with self._connect() as client:
                self._to_leader = client
                client.call(Follow(), timeout_s=_FOLLOW_S)
        except WireError:
            return False
        finally:
            self._to_leader = None
        return True

    def _admit(self, call: Call) -> Done:
        _check_server(call.peer)
        self._leadership.admit()
        return Done()

    def _copy(self, call: Call) -> Done:
        """Read the state of the leader, who waits for it."""
        _check_server(call.peer)
        rooms: dict[str, bytearray] = {}

        def place(description: states.Description) -> dict[str, bytearray]:
            rooms.update({piece.name: bytearray(piece.num_bytes) for piece in description.pieces})
            return rooms

        client, is_borrowed = self._to_leader, self._to_leader is not None
        client = client or self._connect()
        try:
            states.pull(client, STATE, place, timeout_s=min(_COPY_S, call.left_s()))
        finally:
            if not is_borrowed:
                client.close()
        if rooms[STATE]:
            self._service.resume(snapshots.from_bytes(bytes(rooms.pop(STATE))))
        self._leadership.followed()
        return Done()

    def _room(self, incoming: Incoming) -> Sequence[memoryview]:
        _check_server(incoming.peer)
        self._leadership.heard()
        return self._replay.room(incoming.message.push, incoming.sizes)

    def _pushing(self, call: Call) -> Done:
        self._leadership.heard()
        self._replay.push(call.message.push, call.buffers)
        return Done()

    def _granted(self, call: Call) -> Done:
        self._check(call)
        granted: Granted = call.message
        self._replay.grant(granted.ring, granted.version, granted.ahead)
        return Done()

    def _noted(self, call: Call) -> Done:
        self._check(call)
        self._replay.note(call.message.fact)
        return Done()

    def _renewed(self, call: Call) -> Done:
        _check_server(call.peer)
        if self._leadership.follows:  # else it is being taken in
            self._leadership.heard()
        elif self._leadership.leads or self._leadership.deposed:
            self._leadership.heard()  # refuses
        return Done()

    def _check(self, call: Call) -> None:
        _check_server(call.peer)
        self._leadership.heard()


def follow_on(
    following: Following, leadership: Leadership, stop: Callable[[float], bool], breath_s: float = 0.5
) -> None:
    """Ask until this server leads, follows, or is to end; for a thread of its own."""
    while not (leadership.leads or leadership.follows or leadership.deposed):
        if following.ask() or stop(breath_s):
            return


def _check_server(peer: wire.Identity) -> None:
    if peer.role != "server":
        do = "Push and pull: that is what rings do"
        raise RefusedError(explain("caller", got=peer.role, expected="the other server of the job", do=do))
