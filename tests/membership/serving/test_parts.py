"""Memberships of parts of a job: what happens in one stops no other."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ringweave import rpc
from ringweave.errors import RemoteError
from ringweave.membership import service
from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.membership.messages import (
    STARTUP_RENDEZVOUS,
    WHOLE_JOB,
    CoordinatorStatus,
    HeartbeatReport,
    Join,
    LeaveMembership,
    MembershipWatch,
    StatusReport,
    WatchUpdate,
    part_of_ring,
)
from ringweave.membership.service import CoordinatorListener
from ringweave.membership.settings import MemberBounds, MembershipSettings
from ringweave.rpc import RpcCall
from tests.fakes.elastic_job import InProcessCoordinator, fixed_timeout_policy
from tests.membership.rules.table import holder
from tests.membership.serving.asking import CALL_S, count
from tests.polling import wait_until

Say = Callable[[str, rpc.RpcMessage], Any]


@pytest.fixture
def headquarters(authority: rpc.CertificateAuthority) -> Iterator[InProcessCoordinator]:
    found = InProcessCoordinator(authority, settings())
    yield found
    found.close()


def settings() -> MembershipSettings:
    return MembershipSettings(
        bounds=MemberBounds(min_members=1, max_members=4), expected=4, heartbeat_timeout=fixed_timeout_policy(60.0)
    )


class Member:
    """A process of the job."""

    def __init__(self, authority: rpc.CertificateAuthority, port: int, name: str) -> None:
        self.name = name
        trust = rpc.TlsAuthentication(authority.issue("worker", name))
        self.client = rpc.RpcClient.connect("127.0.0.1", port, trust, role="coordinator", timeout_s=CALL_S)

    def enter(self, part: str, expected: int = 2) -> None:
        self.client.call(Join(part=part, expected=expected), timeout_s=CALL_S)

    def told(self) -> WatchUpdate:
        found = self.client.call(MembershipWatch(revision=0), timeout_s=CALL_S).message
        assert isinstance(found, WatchUpdate)
        return found

    def report_status(self, *, has_state: bool) -> None:
        """For whatever is proposed."""
        wait_until(lambda: self.told().directive.proposal is not None)
        proposal = self.told().directive.proposal
        assert proposal is not None
        status = MemberStatus(member=self.name, has_state=has_state)
        self.client.call(StatusReport(generation_id=proposal.generation_id, status=status), timeout_s=CALL_S)


def two_rings(authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator) -> dict[str, Member]:
    """Four members in two rings, whose first epochs have begun."""
    members = {name: Member(authority, headquarters.port, name) for name in ("0.0", "1.0", "2.0", "3.0")}
    for slot, each in enumerate(members.values()):
        each.enter(STARTUP_RENDEZVOUS, expected=4)
        each.enter(part_of_ring(slot % 2))
    for each in members.values():
        each.report_status(has_state=False)
    return members


def members_of(headquarters: InProcessCoordinator, part: str) -> list[tuple[str, ...]]:
    return [membership.members for membership in headquarters.memberships_by_part.get(part, [])]


def test_only_the_ring_that_loses_a_member_forms_anew(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    members = two_rings(authority, headquarters)
    wait_until(lambda: all(members_of(headquarters, part_of_ring(ring)) for ring in range(2)))
    members["2.0"].client.abort()
    members["0.0"].report_status(has_state=True)
    wait_until(lambda: len(members_of(headquarters, part_of_ring(0))) == 2)
    assert members_of(headquarters, part_of_ring(0)) == [("0.0", "2.0"), ("0.0",)]
    assert members_of(headquarters, part_of_ring(1)) == [("1.0", "3.0")]
    assert members["1.0"].told().directive.proposal is None, "the other ring heard nothing of it"
    assert members_of(headquarters, WHOLE_JOB) == [], "there is no membership of all"


def test_a_ring_of_which_nobody_is_left_begins_again_with_whoever_comes(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    members = two_rings(authority, headquarters)
    wait_until(lambda: all(members_of(headquarters, part_of_ring(ring)) for ring in range(2)))
    for name in ("0.0", "2.0"):
        members[name].client.abort()
    wait_until(lambda: {member for member, _ in headquarters.lost_members} >= {"0.0", "2.0"})
    later = Member(authority, headquarters.port, "0.1")
    later.enter(part_of_ring(0))
    later.report_status(has_state=False)
    wait_until(lambda: members_of(headquarters, part_of_ring(0))[-1] == ("0.1",))
    assert members_of(headquarters, part_of_ring(1)) == [("1.0", "3.0")]


def test_a_member_of_a_ring_that_began_again_is_not_let_back(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    members = two_rings(authority, headquarters)
    wait_until(lambda: all(members_of(headquarters, part_of_ring(ring)) for ring in range(2)))
    membership = headquarters.memberships_by_part[part_of_ring(0)][0]
    for name in ("0.0", "2.0"):
        members[name].client.abort()
    wait_until(lambda: {member for member, _ in headquarters.lost_members} >= {"0.0", "2.0"})
    back = Member(authority, headquarters.port, "2.0")
    status = MemberStatus(member="2.0", has_state=True)
    rejoining = Rejoin(status=status, membership=membership, promised=membership.generation_id, is_settled=True)
    back.client.call(Join(part=part_of_ring(0), rejoining=rejoining), timeout_s=CALL_S)
    assert back.told().directive.is_evicted


def test_parts_are_counted_with_the_terms_they_are_decided_in(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    members = two_rings(authority, headquarters)
    members["0.0"].client.call(
        HeartbeatReport(heartbeat=Heartbeat(progress=1, is_waiting=False, cpu_s=0.0)), timeout_s=CALL_S
    )
    counted = count(members["0.0"].client)
    assert counted.parts == {STARTUP_RENDEZVOUS: 1, part_of_ring(0): 1, part_of_ring(1): 1}
    assert counted.members == []


def test_a_coordinator_that_hears_of_a_later_one_decides_for_that_part_no_more(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    members = two_rings(authority, headquarters)
    counted = count(members["0.0"].client)
    headquarters.service.update_from_other(
        counted.model_copy(update={"is_active": False, "parts": {part_of_ring(0): 2}})
    )
    assert not members["0.0"].told().is_active
    assert members["1.0"].told().is_active


def test_all_is_over_when_all_parts_are(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    members = two_rings(authority, headquarters)
    for name, each in members.items():
        assert headquarters.service.end_reason == ""
        status = MemberStatus(member=name, has_state=True)
        each.client.call(LeaveMembership(status=status, is_finished=True), timeout_s=CALL_S)
    wait_until(lambda: headquarters.service.end_reason != "")
    assert headquarters.service.end_reason == "all workers are done"


def test_the_standby_takes_over_for_one_ring_at_a_time(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    two_rings(authority, headquarters)
    wait_until(lambda: all(members_of(headquarters, part_of_ring(ring)) for ring in range(2)))
    membership = headquarters.memberships_by_part[part_of_ring(0)][0]
    standby = InProcessCoordinator(authority, settings(), is_standby=True)
    members = {name: Member(authority, standby.port, name) for name in membership.members}
    for name, each in members.items():
        status = MemberStatus(member=name, has_state=True)
        rejoining = Rejoin(status=status, membership=membership, promised=(2, 0), is_settled=True)
        each.client.call(Join(part=part_of_ring(0), rejoining=rejoining), timeout_s=CALL_S)
    wait_until(lambda: members["0.0"].told().is_active)
    order = members["0.0"].told().directive
    assert order.membership is not None
    assert order.membership.members == membership.members, "the same epoch goes on"
    counted = count(members["0.0"].client)
    assert list(counted.parts) == [part_of_ring(0)], "the other ring has not asked it to"
    standby.close()


def directly(
    wanted: MembershipSettings, clock: Callable[[], float], *, is_standby: bool = False
) -> tuple[service.CoordinatorSet, Say]:
    """Coordinators without a server, and how a member says something to them."""
    found = service.make_coordinator_set(
        wanted,
        index=int(is_standby),
        is_standby=is_standby,
        listener=CoordinatorListener(),
        clock=clock,
    )
    calls = {each.message: each.handle for each in found.handlers()}

    def say(name: str, message: rpc.RpcMessage) -> Any:
        return calls[type(message)](RpcCall(peer=peer(name), message=message, buffers=(), deadline_s=float("inf")))

    return found, say


def peer(name: str) -> rpc.Identity:
    return rpc.Identity(job="test", role="worker", name=name)


def test_who_asks_a_standby_while_it_looks_who_is_connected_has_its_vote_counted() -> None:
    found, say = directly(settings(), lambda: 0.0, is_standby=True)
    names = ("0.0", "1.0", "2.0")
    membership = Membership(
        generation_id=(1, 1), statuses=tuple(MemberStatus(member=name, has_state=True) for name in names)
    )

    def ask(name: str) -> None:
        status = MemberStatus(member=name, has_state=True)
        say(name, Join(rejoining=Rejoin(status=status, membership=membership, promised=membership.generation_id)))

    asking = threading.Thread(target=ask, args=("0.0",), daemon=True)

    def connected() -> set[str]:
        asking.start()
        asking.join(0.5)  # it is heard meanwhile, unless it has to wait until the look is over
        return set()

    found.tick(connected)
    asking.join(CALL_S)
    assert not say("0.0", MembershipWatch(revision=0)).is_active
    ask("1.0")
    assert say("1.0", MembershipWatch(revision=0)).is_active, "two of three have asked it to decide"


def test_a_ring_goes_on_where_the_coordinator_is_lost_with_half_of_it_and_all_others_ask_to_be_let_in() -> None:
    found, say = directly(settings(), lambda: 0.0, is_standby=True)
    membership = Membership(generation_id=(1, 1), statuses=(holder("0.0"), holder("1.0")))
    vote = Rejoin(status=holder("1.0"), membership=membership, promised=membership.generation_id)
    say("1.0", Join(part=part_of_ring(0), expected=2, rejoining=vote))
    say("3.0", Join(part=part_of_ring(1), expected=2))
    idle = CoordinatorStatus(
        term=0, is_active=False, generation_id=(0, 0), members=[], committed=0, present=[], ended="", parts={}
    )
    found.update_from_other(idle)
    assert not say("1.0", MembershipWatch(revision=0)).is_active, "the first of its two members may live"
    say("0.1", Join(part=part_of_ring(0), expected=2))
    found.update_from_other(idle.model_copy(update={"parts": {part_of_ring(0): 3}}))
    assert not say("1.0", MembershipWatch(revision=0)).is_active, "the other coordinator decides for this ring"
    found.update_from_other(idle)
    assert say("1.0", MembershipWatch(revision=0)).is_active
    assert not say("3.0", MembershipWatch(revision=0)).is_active


def test_too_few_in_all_rings_together_end_the_job_once_nobody_comes() -> None:
    now_s = 0.0
    wanted = MembershipSettings(
        bounds=MemberBounds(min_members=3, max_members=4),
        expected=4,
        heartbeat_timeout=fixed_timeout_policy(1e9),
        member_wait_s=60.0,
    )
    found, say = directly(wanted, lambda: now_s)
    names = ("0.0", "1.0", "2.0", "3.0")

    def stand(name: str) -> None:
        proposal = say(name, MembershipWatch(revision=0)).directive.proposal
        say(name, StatusReport(generation_id=proposal.generation_id, status=MemberStatus(member=name, has_state=True)))

    for slot, name in enumerate(names):
        say(name, Join(part=part_of_ring(slot % 2), expected=2))
    for name in names:
        stand(name)

    def wait(seconds: float, *there: str) -> None:
        nonlocal now_s
        for _ in range(int(seconds * 5)):
            now_s += 0.2
            for name in there:
                say(name, HeartbeatReport(heartbeat=Heartbeat()))
            found.tick(lambda: set(there))

    wait(100.0, *names)
    assert found.end_reason == "", "all are there"
    for name in ("2.0", "3.0"):
        found.peer_exited(peer(name))
    stand("0.0")
    stand("1.0")
    wait(59.0, "0.0", "1.0")
    assert found.end_reason == "", "others may come"
    wait(3.0, "0.0", "1.0")
    assert found.end_reason == "workers left: 2 in 2 rings, expected at least 3, and no other came within 60 s"
    orders = {name: say(name, MembershipWatch(revision=0)).directive for name in ("0.0", "1.0")}
    assert {name: order.final_checkpoint_owner for name, order in orders.items() if order.is_end} == {
        "0.0": "0.0",
        "1.0": "1.0",
    }


def test_names_of_parts_are_checked(authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator) -> None:
    member = Member(authority, headquarters.port, "0.0")
    with pytest.raises(ValueError, match="part"):
        member.enter("ring 1\n")
    trust = rpc.TlsAuthentication(authority.issue("coordinator", "1"))
    stranger = rpc.RpcClient.connect("127.0.0.1", headquarters.port, trust, role="coordinator")
    with pytest.raises(RemoteError, match="role of a member"):
        stranger.call(Join(part=STARTUP_RENDEZVOUS), timeout_s=CALL_S)
