"""A coordinator that is told wrong things by a process which has the job's credentials."""

import contextlib
import copy
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ringweave import rpc
from ringweave.errors import RpcError
from ringweave.membership.coordinator import Coordinator
from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.membership.messages import (
    FailureReport,
    HeartbeatReport,
    Join,
    LeaveMembership,
    MembershipWatch,
    StatusReport,
)
from ringweave.membership.service import CoordinatorService
from ringweave.membership.settings import MemberBounds, MembershipSettings
from ringweave.rpc.channel import RpcChannel
from ringweave.rpc.server import MemoryBudget, PeerSession
from tests.rpc.parts import packed

MEMBERS = ("0.0", "1.0")
STANDINGS = tuple(MemberStatus(member=each, has_state=True, committed=3, address="127.0.0.1 9") for each in MEMBERS)
REJOINING = Rejoin(
    status=STANDINGS[1],
    membership=Membership(generation_id=(1, 1), statuses=STANDINGS, finished=(MemberStatus(member="2.0"),)),
    promised=(1, 1),
    lost_s=1.0,
    patience_s=1.0,
)
RIGHT: tuple[rpc.RpcMessage, ...] = (
    Join(rejoining=REJOINING),
    MembershipWatch(revision=0),
    HeartbeatReport(heartbeat=Heartbeat(progress=3, cpu_s=1.0)),
    StatusReport(generation_id=(1, 2), status=STANDINGS[1]),
    FailureReport(generation_id=(1, 1), suspects=["0.0"]),
    LeaveMembership(status=STANDINGS[1], is_finished=True),
)
ANYTHING = (
    *(0, 1, -1, 1.5, 10**12, 2**70, float("nan"), float("inf"), True, None),
    *("", "x", "0", "0.0", "7.0", "1.0.0", "-1.0", "9" * 5000, "\0", [], [0], [1, 2], ["x"], [[]], {}, {"x": 1}),
)


class Served:
    """A coordinator, or a standby that knows of nothing yet."""

    def __init__(self, *, is_standby: bool) -> None:
        settings = MembershipSettings(bounds=MemberBounds(min_members=1, max_members=4), expected=2)
        coordinator = Coordinator(settings, now_s=0.0, index=int(is_standby), is_standby=is_standby)
        self._service = CoordinatorService(coordinator, clock=lambda: 0.0, find_unreachable=lambda places: {})
        self._handlers = {each.message.kind: each for each in self._service.handlers()}
        self.crashes: list[Exception] = []
        if not is_standby:
            for member in MEMBERS:
                self.hear(Join.kind, Join(), member)
            for member, status in zip(MEMBERS, STANDINGS, strict=True):
                self.hear(StatusReport.kind, StatusReport(generation_id=(1, 1), status=status), member)
            assert self._service.num_present == 2

    def hear(self, kind: str, body: Any, member: str) -> None:
        """Let that member say it, and hang up."""
        text = body.model_dump_json() if isinstance(body, rpc.RpcMessage) else json.dumps(body)
        own, others = socket.socketpair()
        peer = rpc.Identity(job="job1", role="worker", name=member)
        with others:
            others.sendall(packed(kind, text.encode(), [], timeout_s=0.01))
            others.shutdown(socket.SHUT_WR)
            channel = RpcChannel(own, rpc.RpcLimits(), "here")
            session = PeerSession(channel, peer, self._handlers, MemoryBudget(1 << 20), self._on_handler_error)
            with contextlib.suppress(RpcError):
                session.run()
            assert session.wait_idle(60.0)

    def go_on(self) -> None:
        """Whatever it was told, it looks around as ever."""
        self._service.tick(lambda: MEMBERS)

    def _on_handler_error(self, peer: rpc.Identity, kind: str, error: Exception) -> None:
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
