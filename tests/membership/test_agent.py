"""Members' agents and two coordinators over real connections, without anything that trains."""

from datetime import timedelta

import pytest

from ringweave import wire
from ringweave.membership import agent as agents
from ringweave.membership.agent import Agent
from ringweave.membership.messages import Count
from ringweave.membership.rules.follower import Out
from ringweave.membership.rules.records import Decree, Standing
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.rules.signs import Beat
from ringweave.testing.elastic import Headquarters, patient
from ringweave.wire.security.authority import utc_now
from tests.membership.tunnel import Tunnel
from tests.membership.waiting import wait_until


class Still:
    """Stands wherever it is asked to, at once."""

    def __init__(self, member: str) -> None:
        self.member = member
        self.decrees: list[Decree] = []
        self.outs: list[Out] = []

    def freeze(self, *, is_urgent: bool) -> Standing:
        del is_urgent
        return self.standing()

    def standing(self) -> Standing:
        return Standing(member=self.member, has_state=bool(self.decrees))

    def form(self, decree: Decree) -> None:
        self.decrees.append(decree)

    def end(self, out: Out) -> None:
        self.outs.append(out)


class Job:
    """So many members, a coordinator and its standby; the last member reaches the coordinator through a tunnel."""

    def __init__(self, num_members: int, authority: wire.Authority | None = None) -> None:
        authority = authority or wire.Authority("test")
        wanted = Settings(bounds=Bounds(least=1, most=4), expected=num_members, recovery_s=60.0, silence=patient(60.0))
        self.headquarters = [Headquarters(authority, wanted, is_standby=is_standby) for is_standby in (False, True)]
        self.tunnel = Tunnel(self.headquarters[0].port)
        places = [("127.0.0.1", each.port) for each in self.headquarters]
        through = [("127.0.0.1", self.tunnel.port), places[1]]
        self.members = [Still(f"{slot}.0") for slot in range(num_members)]
        self.agents = [
            Agent(
                each.member,
                through if each is self.members[-1] else places,
                wire.Tls(authority.issue("worker", each.member)),
                each,
                Beat,
            ).start()
            for each in self.members
        ]
        wait_until(lambda: all(each.decrees for each in self.members))

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for each in self.headquarters:
            each.close()
        self.tunnel.close()


def test_an_accusation_that_the_coordinator_did_not_live_to_hear_is_heard_by_the_standby() -> None:
    job = Job(3)
    first = job.members[0].decrees[0]
    job.headquarters[0].close()
    job.agents[1].accuse(first.ballot, [])
    wait_until(lambda: all(len(each.decrees) > 1 for each in job.members))
    assert {each.decrees[-1].members for each in job.members} == {("0.0", "1.0", "2.0")}
    assert job.members[0].decrees[-1].ballot[0] % 2 == 0, "a term of the standby's"
    assert [each.outs for each in job.members] == [[], [], []]
    job.close()


def test_who_wants_to_leave_does_though_the_coordinator_did_not_live_to_hear_it() -> None:
    job = Job(3)
    job.headquarters[0].close()
    job.agents[2].leave(is_finished=False)
    wait_until(lambda: bool(job.headquarters[1].decrees))
    job.close()


def test_who_has_finished_is_known_to_have() -> None:
    job = Job(2)
    for agent in job.agents:
        agent.leave(is_finished=True)
        agent.close()
    wait_until(lambda: job.headquarters[0].service.ended != "")
    assert job.headquarters[0].service.ended == "all workers are done"
    assert [why for _, why in job.headquarters[0].those_lost] in (["", ""], ["", "all workers are done"])
    job.close()


def test_thirty_days_after_the_begin_a_newcomer_is_let_in_and_members_can_go_to_the_standby() -> None:
    """Coordinators and members show what they got at the begin; certificates of seven days let nobody in any more."""
    now = [utc_now() - timedelta(days=30)]
    authority = wire.Authority("test", clock=lambda: now[0])
    job, newcomer = Job(2, authority), Still("2.0")
    now[0] = utc_now()
    places = [("127.0.0.1", each.port) for each in job.headquarters]
    agent = Agent("2.0", places, wire.Tls(authority.issue("worker", "2.0")), newcomer, Beat).start()
    wait_until(lambda: bool(newcomer.decrees))
    assert newcomer.decrees[0].members == ("0.0", "1.0", "2.0")
    job.headquarters[0].close()
    agent.accuse(newcomer.decrees[0].ballot, [])
    wait_until(lambda: bool(job.headquarters[1].decrees))
    assert [each.outs for each in (*job.members, newcomer)] == [[], [], []]
    agent.close()
    job.close()


def test_who_hears_nothing_any_more_begins_with_the_other_coordinator() -> None:
    """Nobody hangs up where a node is cut off, or its coordinator stopped."""
    job = Job(1)
    job.tunnel.silence()
    wait_until(lambda: bool(job.headquarters[1].decrees))
    assert job.tunnel.num_connections == 1, "the one that is silent was not asked again"
    assert [len(each.decrees) for each in job.members] == [1], "training goes on"
    job.close()


def test_who_went_without_need_comes_back_to_the_coordinator_that_the_others_have_not_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "_TAKE_OVER_S", 400.0)
    job = Job(2)
    second = job.headquarters[1]
    job.tunnel.silence()
    wait_until(lambda: "1.0" in second.connected())
    job.tunnel.mend()
    wait_until(lambda: "1.0" not in second.connected())
    job.agents[1].accuse(job.members[1].decrees[0].ballot, [])
    wait_until(lambda: all(len(each.decrees) > 1 for each in job.members))
    assert {each.decrees[-1].members for each in job.members} == {("0.0", "1.0")}
    assert job.members[1].decrees[-1].ballot[0] % 2 == 1, "a term of the first one's"
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

    def freeze(self, *, is_urgent: bool) -> Standing:
        self._fail("freeze")
        return super().freeze(is_urgent=is_urgent)

    def form(self, decree: Decree) -> None:
        self._fail("form")
        super().form(decree)

    def beat(self) -> Beat:
        self._fail("beat")
        return Beat()


@pytest.mark.parametrize("where", ["freeze", "form", "beat"])
def test_a_member_whose_agent_fails_hears_so_and_holds_nobody_up(where: str) -> None:
    authority = wire.Authority("test")
    wanted = Settings(bounds=Bounds(least=1, most=4), expected=1, silence=patient(60.0))
    headquarters = Headquarters(authority, wanted)
    member = Failing("0.0", where)
    trust = wire.Tls(authority.issue("worker", "0.0"))
    agent = Agent("0.0", [("127.0.0.1", headquarters.port)], trust, member, member.beat).start()
    wait_until(lambda: bool(member.outs))
    assert member.outs == [Out(reason=f"its agent failed: KeyError('{where}')", is_end=False)]
    agent.close()
    headquarters.close()


def test_a_coordinator_whose_time_is_over_is_left_for_the_other_one() -> None:
    job = Job(2)
    count = Count(term=2, is_active=True, ballot=(2, 1), members=[], committed=0, present=[], ended="")
    job.headquarters[0].service.hear_of(count)
    for agent, each in zip(job.agents, job.members, strict=True):
        agent.accuse(each.decrees[-1].ballot, [])
    wait_until(lambda: all(len(each.decrees) > 1 for each in job.members))
    assert [each.outs for each in job.members] == [[], []]
    job.close()
