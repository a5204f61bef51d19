"""A coordinator over real connections, and what it makes of the ways in which they end."""

import math
import threading
from collections.abc import Collection, Iterator, Mapping

import pytest

from ringweave import wire
from ringweave.errors import RemoteError
from ringweave.membership.messages import Enter, Heartbeat, Listen, Stand, Told
from ringweave.membership.rules.coordinator import Coordinator
from ringweave.membership.rules.electing import Rejoining
from ringweave.membership.rules.records import Decree, Standing
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.rules.signs import Beat
from ringweave.membership.serving.rivals import Rival
from ringweave.membership.serving.service import CoordinatorService
from ringweave.testing.elastic import Headquarters, patient
from ringweave.wire import Call
from tests.membership.serving.asking import CALL_S, count
from tests.membership.waiting import wait_until


@pytest.fixture
def headquarters(authority: wire.Authority) -> Iterator[Headquarters]:
    found = Headquarters(authority, settings())
    yield found
    found.close()


def settings() -> Settings:
    return Settings(bounds=Bounds(least=1, most=4), expected=2, silence=patient(60.0))


def client(authority: wire.Authority, port: int, name: str, role: str = "worker") -> wire.Client:
    trust = wire.Tls(authority.issue(role, name))
    return wire.Client.connect("127.0.0.1", port, trust, role="coordinator", timeout_s=CALL_S)


def members(authority: wire.Authority, port: int) -> list[wire.Client]:
    """Two members of the first epoch."""
    found = [client(authority, port, name) for name in ("0.0", "1.0")]
    for each in found:
        each.call(Enter(), timeout_s=CALL_S)
    for name, each in zip(("0.0", "1.0"), found, strict=True):
        each.call(Stand(ballot=(1, 1), standing=Standing(member=name)), timeout_s=CALL_S)
    return found


def test_who_hangs_up_is_dead_and_who_says_goodbye_is_not(
    authority: wire.Authority, headquarters: Headquarters
) -> None:
    first, second = members(authority, headquarters.port)
    asker = client(authority, headquarters.port, "0", role="worker")
    assert count(asker).members == ["0.0", "1.0"]
    first.close()
    wait_until(lambda: "0.0" not in headquarters.connected())
    first = client(authority, headquarters.port, "0.0")
    first.call(Heartbeat(beat=Beat()), timeout_s=CALL_S)
    assert count(asker).present == ["0.0", "1.0"], "it went, and has come back"
    second.hang_up()
    wait_until(lambda: count(asker).present == ["0.0"])
    assert headquarters.those_lost == [("1.0", "its connection to the coordinator broke")]
    for each in (first, asker):
        each.close()


def test_who_is_not_known_any_more_hears_that_nobody_decides_for_it(
    authority: wire.Authority, headquarters: Headquarters
) -> None:
    """It stood still while the coordinator stepped down and decided again, and asks anew then."""
    known, stranger = members(authority, headquarters.port)[0], client(authority, headquarters.port, "2.0")
    told = [each.call(Listen(serial=0), timeout_s=CALL_S).message for each in (known, stranger)]
    assert [each.is_active for each in told if isinstance(each, Told)] == [True, False]
    for each in (known, stranger):
        each.close()


def test_nobody_but_a_worker_becomes_a_member(authority: wire.Authority, headquarters: Headquarters) -> None:
    with (
        client(authority, headquarters.port, "0", role="coordinator") as other,
        pytest.raises(RemoteError, match="role of a member: 'coordinator', expected worker"),
    ):
        other.call(Enter(), timeout_s=CALL_S)


def test_a_coordinator_that_was_replaced_hears_of_it_from_the_one_that_took_over(
    authority: wire.Authority, headquarters: Headquarters
) -> None:
    left = members(authority, headquarters.port)
    standby = Headquarters(authority, settings(), is_standby=True)
    decree = Decree(ballot=(1, 1), standings=(Standing(member="0.0"), Standing(member="1.0")))
    voters = [client(authority, standby.port, name) for name in ("0.0", "1.0")]
    trust = wire.Tls(authority.issue("coordinator", "0"))
    with Rival(("127.0.0.1", standby.port), trust, headquarters.service.hear_of):
        assert count(left[0]).is_active
        for name, each in zip(("0.0", "1.0"), voters, strict=True):
            standing = Standing(member=name, has_state=True)
            each.call(Enter(rejoining=Rejoining(standing=standing, decree=decree, promised=(2, 0))), timeout_s=CALL_S)
        assert count(voters[0]).term == 4, "even, and greater than what they have promised"
        wait_until(lambda: not count(left[0]).is_active)
    for each in (*left, *voters):
        each.close()
    standby.close()


@pytest.mark.parametrize("is_found", [False, True])
def test_a_coordinator_that_takes_over_looks_for_who_has_not_come_and_gives_up_whom_it_does_not_find(
    is_found: bool,
) -> None:
    standings = tuple(Standing(member=f"{rank}.0", has_state=True, place=f"10.0.0.{rank} 4711") for rank in range(3))
    decree, now_s = Decree(ballot=(1, 1), standings=standings), [10.0]
    sought, can_answer = list[Mapping[str, str]](), threading.Event()

    def seek(places: Mapping[str, str]) -> Collection[str]:
        sought.append(places)
        can_answer.wait()
        return [] if is_found else places

    wanted = Settings(bounds=Bounds(least=1, most=4), expected=3)
    coordinator = Coordinator(wanted, now_s=now_s[0], index=1, is_standby=True)
    service = CoordinatorService(coordinator, clock=lambda: now_s[0], seek=seek)

    def say(member: str, message: wire.Message) -> None:
        peer = wire.Identity(job="j", role="worker", name=member)
        service.call(Call(peer=peer, message=message, buffers=(), deadline_s=math.inf))

    for standing in standings[:2]:
        beat = Beat(is_waiting=True, still_s=1.0)
        asking = Rejoining(standing=standing, decree=decree, lost_s=1.0, patience_s=2.0, is_settled=False, beat=beat)
        say(standing.member, Enter(rejoining=asking))
    proposal = coordinator.order_for("0.0").proposal
    assert proposal is not None
    for standing in standings[:2]:
        say(standing.member, Stand(ballot=proposal.ballot, standing=standing))
    now_s[0] += 0.05
    can_answer.set()
    if is_found:
        wait_until(lambda: bool(sought) and not any(each.name == "ringweave seeking" for each in threading.enumerate()))
    else:
        wait_until(lambda: coordinator.decree is not None and coordinator.decree.members == ("0.0", "1.0"))
    assert sought == [{"2.0": "10.0.0.2 4711"}]
    assert coordinator.decree is not None
    assert coordinator.decree.members == ("0.0", "1.0", "2.0")[: 3 if is_found else 2]
