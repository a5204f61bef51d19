"""Memberships of parts of a job: what happens in one stops no other."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ringweave import wire
from ringweave.errors import RemoteError
from ringweave.membership.messages import (
    JOB,
    LOBBY,
    Count,
    Enter,
    Heartbeat,
    Leave,
    Listen,
    Stand,
    Told,
    ring_part,
)
from ringweave.membership.rules.electing import Rejoining
from ringweave.membership.rules.records import Decree, Standing
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.rules.signs import Beat
from ringweave.membership.serving import parts
from ringweave.membership.serving.notes import Notes
from ringweave.testing.elastic import Headquarters, patient
from ringweave.wire import Call
from tests.membership.rules.table import holder
from tests.membership.serving.asking import CALL_S, count
from tests.membership.waiting import wait_until

Say = Callable[[str, wire.Message], Any]


@pytest.fixture
def headquarters(authority: wire.Authority) -> Iterator[Headquarters]:
    found = Headquarters(authority, settings())
    yield found
    found.close()


def settings() -> Settings:
    return Settings(bounds=Bounds(least=1, most=4), expected=4, silence=patient(60.0))


class Member:
    """A process of the job."""

    def __init__(self, authority: wire.Authority, port: int, name: str) -> None:
        self.name = name
        trust = wire.Tls(authority.issue("worker", name))
        self.client = wire.Client.connect("127.0.0.1", port, trust, role="coordinator", timeout_s=CALL_S)

    def enter(self, part: str, expected: int = 2) -> None:
        self.client.call(Enter(part=part, expected=expected), timeout_s=CALL_S)

    def told(self) -> Told:
        found = self.client.call(Listen(serial=0), timeout_s=CALL_S).message
        assert isinstance(found, Told)
        return found

    def stand(self, *, has_state: bool) -> None:
        """For whatever is proposed."""
        wait_until(lambda: self.told().order.proposal is not None)
        proposal = self.told().order.proposal
        assert proposal is not None
        standing = Standing(member=self.name, has_state=has_state)
        self.client.call(Stand(ballot=proposal.ballot, standing=standing), timeout_s=CALL_S)


def two_rings(authority: wire.Authority, headquarters: Headquarters) -> dict[str, Member]:
    """Four members in two rings, whose first epochs have begun."""
    members = {name: Member(authority, headquarters.port, name) for name in ("0.0", "1.0", "2.0", "3.0")}
    for slot, each in enumerate(members.values()):
        each.enter(LOBBY, expected=4)
        each.enter(ring_part(slot % 2))
    for each in members.values():
        each.stand(has_state=False)
    return members


def members_of(headquarters: Headquarters, part: str) -> list[tuple[str, ...]]:
    return [decree.members for decree in headquarters.by_part.get(part, [])]


def test_only_the_ring_that_loses_a_member_forms_anew(authority: wire.Authority, headquarters: Headquarters) -> None:
    members = two_rings(authority, headquarters)
    wait_until(lambda: all(members_of(headquarters, ring_part(ring)) for ring in range(2)))
    members["2.0"].client.hang_up()
    members["0.0"].stand(has_state=True)
    wait_until(lambda: len(members_of(headquarters, ring_part(0))) == 2)
    assert members_of(headquarters, ring_part(0)) == [("0.0", "2.0"), ("0.0",)]
    assert members_of(headquarters, ring_part(1)) == [("1.0", "3.0")]
    assert members["1.0"].told().order.proposal is None, "the other ring heard nothing of it"
    assert members_of(headquarters, JOB) == [], "there is no membership of all"


def test_a_ring_of_which_nobody_is_left_begins_again_with_whoever_comes(
    authority: wire.Authority, headquarters: Headquarters
) -> None:
    members = two_rings(authority, headquarters)
    wait_until(lambda: all(members_of(headquarters, ring_part(ring)) for ring in range(2)))
    for name in ("0.0", "2.0"):
        members[name].client.hang_up()
    wait_until(lambda: {member for member, _ in headquarters.those_lost} >= {"0.0", "2.0"})
    later = Member(authority, headquarters.port, "0.1")
    later.enter(ring_part(0))
    later.stand(has_state=False)
    wait_until(lambda: members_of(headquarters, ring_part(0))[-1] == ("0.1",))
    assert members_of(headquarters, ring_part(1)) == [("1.0", "3.0")]


def test_a_member_of_a_ring_that_began_again_is_not_let_back(
    authority: wire.Authority, headquarters: Headquarters
) -> None:
    members = two_rings(authority, headquarters)
    wait_until(lambda: all(members_of(headquarters, ring_part(ring)) for ring in range(2)))
    decree = headquarters.by_part[ring_part(0)][0]
    for name in ("0.0", "2.0"):
        members[name].client.hang_up()
    wait_until(lambda: {member for member, _ in headquarters.those_lost} >= {"0.0", "2.0"})
    back = Member(authority, headquarters.port, "2.0")
    standing = Standing(member="2.0", has_state=True)
    rejoining = Rejoining(standing=standing, decree=decree, promised=decree.ballot, is_settled=True)
    back.client.call(Enter(part=ring_part(0), rejoining=rejoining), timeout_s=CALL_S)
    assert back.told().order.is_out


def test_parts_are_counted_with_the_terms_they_are_decided_in(
    authority: wire.Authority, headquarters: Headquarters
) -> None:
    members = two_rings(authority, headquarters)
    members["0.0"].client.call(Heartbeat(beat=Beat(progress=1, is_waiting=False, cpu_s=0.0)), timeout_s=CALL_S)
    counted = count(members["0.0"].client)
    assert counted.parts == {LOBBY: 1, ring_part(0): 1, ring_part(1): 1}
    assert counted.members == []


def test_a_coordinator_that_hears_of_a_later_one_decides_for_that_part_no_more(
    authority: wire.Authority, headquarters: Headquarters
) -> None:
    members = two_rings(authority, headquarters)
    counted = count(members["0.0"].client)
    headquarters.service.hear_of(counted.model_copy(update={"is_active": False, "parts": {ring_part(0): 2}}))
    assert not members["0.0"].told().is_active
    assert members["1.0"].told().is_active


def test_all_is_over_when_all_parts_are(authority: wire.Authority, headquarters: Headquarters) -> None:
    members = two_rings(authority, headquarters)
    for name, each in members.items():
        assert headquarters.service.ended == ""
        standing = Standing(member=name, has_state=True)
        each.client.call(Leave(standing=standing, is_finished=True), timeout_s=CALL_S)
    wait_until(lambda: headquarters.service.ended != "")
    assert headquarters.service.ended == "all workers are done"


def test_the_standby_takes_over_for_one_ring_at_a_time(authority: wire.Authority, headquarters: Headquarters) -> None:
    two_rings(authority, headquarters)
    wait_until(lambda: all(members_of(headquarters, ring_part(ring)) for ring in range(2)))
    decree = headquarters.by_part[ring_part(0)][0]
    standby = Headquarters(authority, settings(), is_standby=True)
    members = {name: Member(authority, standby.port, name) for name in decree.members}
    for name, each in members.items():
        standing = Standing(member=name, has_state=True)
        rejoining = Rejoining(standing=standing, decree=decree, promised=(2, 0), is_settled=True)
        each.client.call(Enter(part=ring_part(0), rejoining=rejoining), timeout_s=CALL_S)
    wait_until(lambda: members["0.0"].told().is_active)
    order = members["0.0"].told().order
    assert order.decree is not None
    assert order.decree.members == decree.members, "the same epoch goes on"
    counted = count(members["0.0"].client)
    assert list(counted.parts) == [ring_part(0)], "the other ring has not asked it to"
    standby.close()


def directly(wanted: Settings, clock: Callable[[], float], *, is_standby: bool = False) -> tuple[parts.Parts, Say]:
    """Coordinators without a server, and how a member says something to them."""
    found = parts.coordinators(
        wanted,
        index=int(is_standby),
        is_standby=is_standby,
        notes=Notes(),
        clock=clock,
    )
    calls = {each.message: each.handle for each in found.handlers()}

    def say(name: str, message: wire.Message) -> Any:
        return calls[type(message)](Call(peer=peer(name), message=message, buffers=(), deadline_s=float("inf")))

    return found, say


def peer(name: str) -> wire.Identity:
    return wire.Identity(job="test", role="worker", name=name)


def test_who_asks_a_standby_while_it_looks_who_is_connected_has_its_vote_counted() -> None:
    found, say = directly(settings(), lambda: 0.0, is_standby=True)
    names = ("0.0", "1.0", "2.0")
    decree = Decree(ballot=(1, 1), standings=tuple(Standing(member=name, has_state=True) for name in names))

    def ask(name: str) -> None:
        standing = Standing(member=name, has_state=True)
        say(name, Enter(rejoining=Rejoining(standing=standing, decree=decree, promised=decree.ballot)))

    asking = threading.Thread(target=ask, args=("0.0",), daemon=True)

    def connected() -> set[str]:
        asking.start()
        asking.join(0.5)  # it is heard meanwhile, unless it has to wait until the look is over
        return set()

    found.tick(connected)
    asking.join(CALL_S)
    assert not say("0.0", Listen(serial=0)).is_active
    ask("1.0")
    assert say("1.0", Listen(serial=0)).is_active, "two of three have asked it to decide"


def test_a_ring_goes_on_where_the_coordinator_is_lost_with_half_of_it_and_all_others_ask_to_be_let_in() -> None:
    found, say = directly(settings(), lambda: 0.0, is_standby=True)
    decree = Decree(ballot=(1, 1), standings=(holder("0.0"), holder("1.0")))
    vote = Rejoining(standing=holder("1.0"), decree=decree, promised=decree.ballot)
    say("1.0", Enter(part=ring_part(0), expected=2, rejoining=vote))
    say("3.0", Enter(part=ring_part(1), expected=2))
    idle = Count(term=0, is_active=False, ballot=(0, 0), members=[], committed=0, present=[], ended="", parts={})
    found.hear_of(idle)
    assert not say("1.0", Listen(serial=0)).is_active, "the first of its two members may live"
    say("0.1", Enter(part=ring_part(0), expected=2))
    found.hear_of(idle.model_copy(update={"parts": {ring_part(0): 3}}))
    assert not say("1.0", Listen(serial=0)).is_active, "the other coordinator decides for this ring"
    found.hear_of(idle)
    assert say("1.0", Listen(serial=0)).is_active
    assert not say("3.0", Listen(serial=0)).is_active


def test_too_few_in_all_rings_together_end_the_job_once_nobody_comes() -> None:
    now_s = 0.0
    wanted = Settings(bounds=Bounds(least=3, most=4), expected=4, silence=patient(1e9), patience_s=60.0)
    found, say = directly(wanted, lambda: now_s)
    names = ("0.0", "1.0", "2.0", "3.0")

    def stand(name: str) -> None:
        proposal = say(name, Listen(serial=0)).order.proposal
        say(name, Stand(ballot=proposal.ballot, standing=Standing(member=name, has_state=True)))

    for slot, name in enumerate(names):
        say(name, Enter(part=ring_part(slot % 2), expected=2))
    for name in names:
        stand(name)

    def wait(seconds: float, *there: str) -> None:
        nonlocal now_s
        for _ in range(int(seconds * 5)):
            now_s += 0.2
            for name in there:
                say(name, Heartbeat(beat=Beat()))
            found.tick(lambda: set(there))

    wait(100.0, *names)
    assert found.ended == "", "all are there"
    for name in ("2.0", "3.0"):
        found.hung_up(peer(name))
    stand("0.0")
    stand("1.0")
    wait(59.0, "0.0", "1.0")
    assert found.ended == "", "others may come"
    wait(3.0, "0.0", "1.0")
    assert found.ended == "workers left: 2 in 2 rings, expected at least 3, and no other came within 60 s"
    orders = {name: say(name, Listen(serial=0)).order for name in ("0.0", "1.0")}
    assert {name: order.heir for name, order in orders.items() if order.is_end} == {"0.0": "0.0", "1.0": "1.0"}


def test_names_of_parts_are_checked(authority: wire.Authority, headquarters: Headquarters) -> None:
    member = Member(authority, headquarters.port, "0.0")
    with pytest.raises(ValueError, match="part"):
        member.enter("ring 1\n")
    trust = wire.Tls(authority.issue("coordinator", "1"))
    stranger = wire.Client.connect("127.0.0.1", headquarters.port, trust, role="coordinator")
    with pytest.raises(RemoteError, match="role of a member"):
        stranger.call(Enter(part=LOBBY), timeout_s=CALL_S)
