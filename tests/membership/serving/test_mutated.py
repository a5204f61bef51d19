"""A coordinator that is told wrong things by a process which has the job's credentials."""

import contextlib
import copy
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ringweave import wire
from ringweave.errors import WireError
from ringweave.membership.messages import Accuse, Enter, Heartbeat, Leave, Listen, Stand
from ringweave.membership.rules.coordinator import Coordinator
from ringweave.membership.rules.electing import Rejoining
from ringweave.membership.rules.records import Decree, Standing
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.rules.signs import Beat
from ringweave.membership.serving.service import CoordinatorService
from ringweave.wire.calls import Budget
from ringweave.wire.framing.channels import Channel
from ringweave.wire.sessions import Session
from tests.wire.parts import packed

MEMBERS = ("0.0", "1.0")
STANDINGS = tuple(Standing(member=each, has_state=True, committed=3, place="127.0.0.1 9") for each in MEMBERS)
REJOINING = Rejoining(
    standing=STANDINGS[1],
    decree=Decree(ballot=(1, 1), standings=STANDINGS, finished=(Standing(member="2.0"),)),
    promised=(1, 1),
    lost_s=1.0,
    patience_s=1.0,
)
RIGHT: tuple[wire.Message, ...] = (
    Enter(rejoining=REJOINING),
    Listen(serial=0),
    Heartbeat(beat=Beat(progress=3, cpu_s=1.0)),
    Stand(ballot=(1, 2), standing=STANDINGS[1]),
    Accuse(ballot=(1, 1), suspects=["0.0"]),
    Leave(standing=STANDINGS[1], is_finished=True),
)
ANYTHING = (
    *(0, 1, -1, 1.5, 10**12, 2**70, float("nan"), float("inf"), True, None),
    *("", "x", "0", "0.0", "7.0", "1.0.0", "-1.0", "9" * 5000, "\0", [], [0], [1, 2], ["x"], [[]], {}, {"x": 1}),
)


class Served:
    """A coordinator, or a standby that knows of nothing yet."""

    def __init__(self, *, is_standby: bool) -> None:
        settings = Settings(bounds=Bounds(least=1, most=4), expected=2)
        coordinator = Coordinator(settings, now_s=0.0, index=int(is_standby), is_standby=is_standby)
        self._service = CoordinatorService(coordinator, clock=lambda: 0.0, seek=lambda places: ())
        self._handlers = {each.message.kind: each for each in self._service.handlers()}
        self.crashes: list[Exception] = []
        if not is_standby:
            for member in MEMBERS:
                self.hear(Enter.kind, Enter(), member)
            for member, standing in zip(MEMBERS, STANDINGS, strict=True):
                self.hear(Stand.kind, Stand(ballot=(1, 1), standing=standing), member)
            assert self._service.num_here == 2

    def hear(self, kind: str, body: Any, member: str) -> None:
        """Let that member say it, and hang up."""
        text = body.model_dump_json() if isinstance(body, wire.Message) else json.dumps(body)
        own, others = socket.socketpair()
        peer = wire.Identity(job="job1", role="worker", name=member)
        with others:
            others.sendall(packed(kind, text.encode(), [], timeout_s=0.01))
            others.shutdown(socket.SHUT_WR)
            channel = Channel(own, wire.Limits(), "here")
            session = Session(channel, peer, self._handlers, Budget(1 << 20), self._complain)
            with contextlib.suppress(WireError):
                session.run()
            assert session.wait_idle(60.0)

    def go_on(self) -> None:
        """Whatever it was told, it looks around as ever."""
        self._service.tick(lambda: MEMBERS)

    def _complain(self, peer: wire.Identity, kind: str, error: Exception) -> None:
        self.crashes.append(error)


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys that lead to each value inside."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*before, key)
        yield from places(inner, (*before, key))


def changed(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The same with another value in one place."""
    found = inner = copy.deepcopy(body)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_standby", [False, True], ids=["deciding", "standby"])
@pytest.mark.parametrize("message", RIGHT, ids=lambda message: message.kind)
def test_one_wrong_value_in_whatever_place_is_no_end_of_the_coordinator(message: Any, is_standby: bool) -> None:
    body = json.loads(message.model_dump_json())
    for place in places(body):
        served = Served(is_standby=is_standby)
        for value in ANYTHING:
            served.hear(message.kind, changed(body, place, value), "1.0")
            served.go_on()
            assert served.crashes == [], (place, value)
