"""A coordinator over real connections, and what it makes of the ways in which they end."""

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ringweave import rpc
from ringweave.errors import RemoteError
from ringweave.membership.coordinator import Coordinator
from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import KEPT_INCARNATIONS, Membership, MemberStatus
from ringweave.membership.messages import HeartbeatReport, Join, MembershipWatch, StatusReport, WatchUpdate
from ringweave.membership.service import (
    CoordinatorListener,
    CoordinatorService,
    OtherCoordinatorPoller,
    make_coordinator_set,
)
from ringweave.membership.settings import MemberBounds, MembershipSettings
from ringweave.rpc import RpcCall
from tests.fakes.elastic_job import InProcessCoordinator, fixed_timeout_policy
from tests.membership.serving.asking import CALL_S, count
from tests.polling import wait_until


@pytest.fixture
def headquarters(authority: rpc.CertificateAuthority) -> Iterator[InProcessCoordinator]:
    found = InProcessCoordinator(authority, settings())
    yield found
    found.close()


def settings() -> MembershipSettings:
    return MembershipSettings(
        bounds=MemberBounds(min_members=1, max_members=4), expected=2, heartbeat_timeout=fixed_timeout_policy(60.0)
    )


def client(authority: rpc.CertificateAuthority, port: int, name: str, role: str = "worker") -> rpc.RpcClient:
    trust = rpc.TlsAuthentication(authority.issue(role, name))
    return rpc.RpcClient.connect("127.0.0.1", port, trust, role="coordinator", timeout_s=CALL_S)


def members(authority: rpc.CertificateAuthority, port: int) -> list[rpc.RpcClient]:
    """Two members of the first epoch."""
    found = [client(authority, port, name) for name in ("0.0", "1.0")]
    for each in found:
        each.call(Join(), timeout_s=CALL_S)
    for name, each in zip(("0.0", "1.0"), found, strict=True):
        each.call(StatusReport(generation_id=(1, 1), status=MemberStatus(member=name)), timeout_s=CALL_S)
    return found


def test_who_hangs_up_is_dead_and_who_says_goodbye_is_not(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    first, second = members(authority, headquarters.port)
    asker = client(authority, headquarters.port, "0", role="worker")
    assert count(asker).members == ["0.0", "1.0"]
    first.close()
    wait_until(lambda: "0.0" not in headquarters.connected_members())
    first = client(authority, headquarters.port, "0.0")
    first.call(HeartbeatReport(heartbeat=Heartbeat()), timeout_s=CALL_S)
    assert count(asker).present == ["0.0", "1.0"], "it went, and has come back"
    second.abort()
    wait_until(lambda: count(asker).present == ["0.0"])
    assert headquarters.lost_members == [("1.0", "its connection to the coordinator broke")]
    for each in (first, asker):
        each.close()


def test_who_is_not_known_any_more_hears_that_nobody_decides_for_it(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    """It stood still while the coordinator stepped down and decided again, and asks anew then."""
    known, stranger = members(authority, headquarters.port)[0], client(authority, headquarters.port, "2.0")
    told = [each.call(MembershipWatch(revision=0), timeout_s=CALL_S).message for each in (known, stranger)]
    assert [each.is_active for each in told if isinstance(each, WatchUpdate)] == [True, False]
    for each in (known, stranger):
        each.close()


def test_nobody_but_a_worker_becomes_a_member(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    with (
        client(authority, headquarters.port, "0", role="coordinator") as other,
        pytest.raises(RemoteError, match="role of a member: 'coordinator', expected worker"),
    ):
        other.call(Join(), timeout_s=CALL_S)


def test_a_coordinator_that_was_replaced_hears_of_it_from_the_one_that_took_over(
    authority: rpc.CertificateAuthority, headquarters: InProcessCoordinator
) -> None:
    left = members(authority, headquarters.port)
    standby = InProcessCoordinator(authority, settings(), is_standby=True)
    membership = Membership(generation_id=(1, 1), statuses=(MemberStatus(member="0.0"), MemberStatus(member="1.0")))
    voters = [client(authority, standby.port, name) for name in ("0.0", "1.0")]
    trust = rpc.TlsAuthentication(authority.issue("coordinator", "0"))
    with OtherCoordinatorPoller(("127.0.0.1", standby.port), trust, headquarters.service.update_from_other):
        assert count(left[0]).is_active
        for name, each in zip(("0.0", "1.0"), voters, strict=True):
            status = MemberStatus(member=name, has_state=True)
            each.call(Join(rejoining=Rejoin(status=status, membership=membership, promised=(2, 0))), timeout_s=CALL_S)
        assert count(voters[0]).term == 4, "even, and greater than what they have promised"
        wait_until(lambda: not count(left[0]).is_active)
    for each in (*left, *voters):
        each.close()
    standby.close()


@pytest.mark.parametrize("is_found", [False, True])
def test_a_coordinator_that_takes_over_looks_for_who_has_not_come_and_gives_up_whom_it_does_not_find(
    is_found: bool,
) -> None:
    statuses = tuple(
        MemberStatus(member=f"{rank}.0", has_state=True, address=f"10.0.0.{rank} 4711") for rank in range(3)
    )
    membership, now_s = Membership(generation_id=(1, 1), statuses=statuses), [10.0]
    sought, can_answer = list[Mapping[str, str]](), threading.Event()

    def seek(places: Mapping[str, str]) -> Mapping[str, bool]:
        sought.append(places)
        can_answer.wait()
        return {} if is_found else dict.fromkeys(places, False)

    wanted = MembershipSettings(bounds=MemberBounds(min_members=1, max_members=4), expected=3)
    coordinator = Coordinator(wanted, now_s=now_s[0], index=1, is_standby=True)
    service = CoordinatorService(coordinator, clock=lambda: now_s[0], find_unreachable=seek)

    def say(member: str, message: rpc.RpcMessage) -> None:
        peer = rpc.Identity(job="j", role="worker", name=member)
        service.dispatch(RpcCall(peer=peer, message=message, buffers=(), deadline_s=math.inf))

    for status in statuses[:2]:
        beat = Heartbeat(is_waiting=True, no_progress_s=1.0)
        asking = Rejoin(
            status=status, membership=membership, lost_s=1.0, patience_s=2.0, is_settled=False, heartbeat=beat
        )
        say(status.member, Join(rejoining=asking))
    proposal = coordinator.directive_for("0.0").proposal
    assert proposal is not None
    for status in statuses[:2]:
        say(status.member, StatusReport(generation_id=proposal.generation_id, status=status))
    now_s[0] += 0.05
    can_answer.set()
    if is_found:
        wait_until(lambda: len(sought) > 3, "it looks again as long as somebody is awaited")
        assert coordinator.membership == membership
        say("2.0", Join(rejoining=Rejoin(status=statuses[2], membership=membership, lost_s=1.0)))
    else:
        wait_until(lambda: coordinator.membership is not None and coordinator.membership.members == ("0.0", "1.0"))
    wait_until(lambda: not any(each.name == "ringweave seeking" for each in threading.enumerate()))
    assert all(each == {"2.0": "10.0.0.2 4711"} for each in sought)
    assert ("2.0" in coordinator.present) == is_found


def test_of_a_slot_with_many_deaths_the_newest_members_are_remembered() -> None:
    job: Any = make_coordinator_set(settings(), index=0, is_standby=False, listener=CoordinatorListener())
    handlers = {each.message: each.handle for each in job.handlers()}

    def ask(name: str, message: rpc.RpcMessage) -> Any:
        peer = rpc.Identity(job="job", role="worker", name=name)
        return handlers[type(message)](RpcCall(peer=peer, message=message, buffers=(), deadline_s=math.inf))

    ask("0.0", Join())
    for number in range(200):
        ask(f"1.{number}", Join())
        told = ask(f"1.{number}", MembershipWatch(revision=0))
        assert told.is_active
    assert len(job._part_of) == 1 + KEPT_INCARNATIONS
    assert len(job.services()[0][1]._directives) <= KEPT_INCARNATIONS
    for dead in ("1.3", "1.198"):
        told = ask(dead, MembershipWatch(revision=0))
        assert (told.is_active, told.directive.is_evicted) == (True, True), dead
