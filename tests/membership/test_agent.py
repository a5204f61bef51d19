"""Members' agents and two coordinators over real connections, without anything that trains."""

from datetime import timedelta

import pytest

from ringweave import rpc
from ringweave.membership import client
from ringweave.membership.client import MembershipClient
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus, StopTraining
from ringweave.membership.messages import CoordinatorStatus
from ringweave.membership.settings import MemberBounds, MembershipSettings
from ringweave.rpc.tls import utc_now
from tests.fakes.elastic_job import InProcessCoordinator, fixed_timeout_policy
from tests.membership.tunnel import Tunnel
from tests.polling import wait_until


class Still:
    """Stands wherever it is asked to, at once."""

    def __init__(self, member: str) -> None:
        self.member = member
        self.memberships: list[Membership] = []
        self.outs: list[StopTraining] = []

    def pause_training(self, *, is_urgent: bool) -> MemberStatus:
        del is_urgent
        return self.current_status()

    def current_status(self) -> MemberStatus:
        return MemberStatus(member=self.member, has_state=bool(self.memberships))

    def begin_generation(self, membership: Membership) -> None:
        self.memberships.append(membership)

    def stop_training(self, out: StopTraining) -> None:
        self.outs.append(out)


class Job:
    """So many members, a coordinator and its standby; the last member reaches the coordinator through a tunnel."""

    def __init__(self, num_members: int, authority: rpc.CertificateAuthority | None = None) -> None:
        authority = authority or rpc.CertificateAuthority("test")
        wanted = MembershipSettings(
            bounds=MemberBounds(min_members=1, max_members=4),
            expected=num_members,
            takeover_wait_s=60.0,
            heartbeat_timeout=fixed_timeout_policy(60.0),
        )
        self.coordinators = [
            InProcessCoordinator(authority, wanted, is_standby=is_standby) for is_standby in (False, True)
        ]
        self.tunnel = Tunnel(self.coordinators[0].port)
        places = [("127.0.0.1", each.port) for each in self.coordinators]
        through = [("127.0.0.1", self.tunnel.port), places[1]]
        self.members = [Still(f"{slot}.0") for slot in range(num_members)]
        self.agents = [
            MembershipClient(
                each.member,
                through if each is self.members[-1] else places,
                rpc.TlsAuthentication(authority.issue("worker", each.member)),
                each,
                Heartbeat,
            ).start()
            for each in self.members
        ]
        wait_until(lambda: all(each.memberships for each in self.members))

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for each in self.coordinators:
            each.close()
        self.tunnel.close()


def test_an_accusation_that_the_coordinator_did_not_live_to_hear_is_heard_by_the_standby() -> None:
    job = Job(3)
    first = job.members[0].memberships[0]
    job.coordinators[0].close()
    job.agents[1].report_failure(first.generation_id, [])
    wait_until(lambda: all(len(each.memberships) > 1 for each in job.members))
    assert {each.memberships[-1].members for each in job.members} == {("0.0", "1.0", "2.0")}
    assert job.members[0].memberships[-1].generation_id[0] % 2 == 0, "a term of the standby's"
    assert [each.outs for each in job.members] == [[], [], []]
    job.close()


def test_who_wants_to_leave_does_though_the_coordinator_did_not_live_to_hear_it() -> None:
    job = Job(3)
    job.coordinators[0].close()
    job.agents[2].leave_membership(is_finished=False)
    wait_until(lambda: bool(job.coordinators[1].memberships))
    job.close()


def test_who_has_finished_is_known_to_have() -> None:
    job = Job(2)
    for agent in job.agents:
        agent.leave_membership(is_finished=True)
        agent.close()
    wait_until(lambda: job.coordinators[0].service.end_reason != "")
    assert job.coordinators[0].service.end_reason == "all workers are done"
    assert [why for _, why in job.coordinators[0].lost_members] in (["", ""], ["", "all workers are done"])
    job.close()


def test_thirty_days_after_the_begin_a_newcomer_is_let_in_and_members_can_go_to_the_standby() -> None:
    """Coordinators and members show what they got at the begin; certificates of seven days let nobody in any more."""
    now = [utc_now() - timedelta(days=30)]
    authority = rpc.CertificateAuthority("test", clock=lambda: now[0])
    job, newcomer = Job(2, authority), Still("2.0")
    now[0] = utc_now()
    places = [("127.0.0.1", each.port) for each in job.coordinators]
    agent = MembershipClient(
        "2.0", places, rpc.TlsAuthentication(authority.issue("worker", "2.0")), newcomer, Heartbeat
    ).start()
    wait_until(lambda: bool(newcomer.memberships))
    assert newcomer.memberships[0].members == ("0.0", "1.0", "2.0")
    job.coordinators[0].close()
    agent.report_failure(newcomer.memberships[0].generation_id, [])
    wait_until(lambda: bool(job.coordinators[1].memberships))
    assert [each.outs for each in (*job.members, newcomer)] == [[], [], []]
    agent.close()
    job.close()


def test_who_hears_nothing_any_more_begins_with_the_other_coordinator() -> None:
    """Nobody hangs up where a node is cut off, or its coordinator stopped."""
    job = Job(1)
    job.tunnel.silence()
    wait_until(lambda: bool(job.coordinators[1].memberships))
    assert job.tunnel.num_connections == 1, "the one that is silent was not asked again"
    assert [len(each.memberships) for each in job.members] == [1], "training goes on"
    job.close()


def test_who_went_without_need_comes_back_to_the_coordinator_that_the_others_have_not_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_TAKEOVER_WAIT_S", 400.0)
    job = Job(2)
    second = job.coordinators[1]
    job.tunnel.silence()
    wait_until(lambda: "1.0" in second.connected_members())
    job.tunnel.mend()
    wait_until(lambda: "1.0" not in second.connected_members())
    job.agents[1].report_failure(job.members[1].memberships[0].generation_id, [])
    wait_until(lambda: all(len(each.memberships) > 1 for each in job.members))
    assert {each.memberships[-1].members for each in job.members} == {("0.0", "1.0")}
    assert job.members[1].memberships[-1].generation_id[0] % 2 == 1, "a term of the first one's"
    assert [each.outs for each in job.members] == [[], []]
    job.close()


class Failing(Still):
    """Cannot say where it stands, or takes no order, or knows nothing of itself."""

    def __init__(self, member: str, where: str) -> None:
        super().__init__(member)
        self._where = where

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise KeyError(where)

    def pause_training(self, *, is_urgent: bool) -> MemberStatus:
        self._fail("freeze")
        return super().pause_training(is_urgent=is_urgent)

    def begin_generation(self, membership: Membership) -> None:
        self._fail("form")
        super().begin_generation(membership)

    def heartbeat(self) -> Heartbeat:
        self._fail("beat")
        return Heartbeat()


@pytest.mark.parametrize("where", ["freeze", "form", "beat"])
def test_a_member_whose_agent_fails_hears_so_and_holds_nobody_up(where: str) -> None:
    authority = rpc.CertificateAuthority("test")
    wanted = MembershipSettings(
        bounds=MemberBounds(min_members=1, max_members=4), expected=1, heartbeat_timeout=fixed_timeout_policy(60.0)
    )
    headquarters = InProcessCoordinator(authority, wanted)
    member = Failing("0.0", where)
    trust = rpc.TlsAuthentication(authority.issue("worker", "0.0"))
    agent = MembershipClient("0.0", [("127.0.0.1", headquarters.port)], trust, member, member.heartbeat).start()
    wait_until(lambda: bool(member.outs))
    assert member.outs == [StopTraining(reason=f"its membership client failed: KeyError('{where}')", is_end=False)]
    agent.close()
    headquarters.close()


def test_a_coordinator_whose_time_is_over_is_left_for_the_other_one() -> None:
    job = Job(2)
    count = CoordinatorStatus(
        term=2, is_active=True, generation_id=(2, 1), members=[], committed=0, present=[], ended=""
    )
    job.coordinators[0].service.update_from_other(count)
    for agent, each in zip(job.agents, job.members, strict=True):
        agent.report_failure(each.memberships[-1].generation_id, [])
    wait_until(lambda: all(len(each.memberships) > 1 for each in job.members))
    assert [each.outs for each in job.members] == [[], []]
    job.close()
