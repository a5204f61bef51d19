"""Two servers and a register: in any order of messages, silences, stops and deaths, nothing acknowledged is lost."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.param_server.leadership import FailoverRules, LeadershipRecord, Reachability
from tests import effort

LEASE_S = 2.0


def joined(own: int = 0, now_s: float = 0.0) -> FailoverRules:
    """A leader with a standby."""
    succession = FailoverRules(own, lease_s=LEASE_S)
    succession.adopt(succession.first_record(), now_s)
    succession.adopt(succession.record_with_standby(1 - own), now_s)
    return succession


def test_a_leader_without_a_standby_needs_no_lease():
    succession = FailoverRules(0, lease_s=LEASE_S)
    assert not succession.has_lease(0.0)
    succession.adopt(succession.first_record(), 0.0)
    assert succession.has_lease(1e6)


def test_a_leader_with_one_answers_only_as_long_as_it_hears_from_it():
    succession = joined()
    assert succession.has_lease(LEASE_S - 0.01)
    assert not succession.has_lease(LEASE_S)
    succession.note_heard(1.0)
    assert succession.has_lease(LEASE_S + 0.5)
    succession.note_heard(0.5)  # an answer to what was asked earlier
    assert succession.has_lease(LEASE_S + 0.5)


def test_a_standby_waits_longer_and_not_for_what_it_slept_through():
    claim = joined().record
    assert claim is not None
    standby = FailoverRules(1, lease_s=LEASE_S)
    standby.adopt(claim, 0.0)
    assert not any(standby.is_silent(0.5 * number) for number in range(5))
    assert standby.is_silent(2.6)
    standby.adopt(claim, 10.0)
    assert not standby.is_silent(60.0)
    assert not standby.is_silent(61.0)


def test_who_is_no_member_may_not_go_on():
    leader, claim = joined(), joined().record
    assert claim is not None
    alone = leader.record_without_other(claim)
    assert alone == LeadershipRecord(number=2, term=0, leader=0, members=(0,))
    standby = FailoverRules(1, lease_s=LEASE_S)
    assert standby.record_without_other(claim) is None  # it has nothing
    standby.adopt(claim, 0.0)
    assert standby.record_without_other(alone) is None
    assert standby.record_without_other(claim) == LeadershipRecord(number=2, term=1, leader=1, members=(1,))


def test_who_cannot_tell_the_other_one_anything_answers_nothing_before_its_next_claim():
    leader = joined()
    leader.note_heard(1.0)
    leader.note_standby_lost()
    assert not leader.has_lease(1.0)
    leader.note_heard(1.5)  # what was still on its way
    assert not leader.has_lease(1.5)
    assert leader.record is not None
    alone = leader.record_without_other(leader.record)
    assert alone is not None
    leader.note_record_pending()
    assert not leader.has_lease(1.5)
    leader.adopt(alone, 1.5)
    assert leader.has_lease(100.0)


def test_who_does_not_know_whether_its_claim_is_registered_answers_nothing():
    leader = FailoverRules(0, lease_s=LEASE_S)
    leader.adopt(leader.first_record(), 0.0)
    leader.note_record_pending()  # to take the other one in: the register failed halfway
    assert not leader.has_lease(0.0)


def test_rings_tell_who_should_go_on():
    leader = joined()
    claim = leader.record
    assert claim is not None
    standby = FailoverRules(1, lease_s=LEASE_S)
    standby.adopt(claim, 0.0)

    def first_s(server: FailoverRules, reach: Reachability, *, is_other_gone: bool = False) -> float | None:
        times = (0.125 * number for number in range(1, 200))
        found = (at_s for at_s in times if server.should_go_on(at_s, reach, is_other_gone=is_other_gone))
        return next(found, None)

    assert first_s(leader, Reachability.MOST) == LEASE_S
    assert first_s(standby, Reachability.MOST) == LEASE_S * 1.25
    doubting = [first_s(server, Reachability.SOME) for server in (leader, standby)]
    assert doubting == [LEASE_S * 3 + 0.125, LEASE_S * 3.75 + 0.125]
    for server in (leader, standby):
        assert first_s(server, Reachability.NONE) is None
        assert first_s(server, Reachability.NONE, is_other_gone=True) is None
        assert first_s(server, Reachability.SOME, is_other_gone=True) == 0.125
        assert first_s(server, Reachability.MOST, is_other_gone=True) == 0.125


class RegisterFailsError(Exception):
    """Whether the claim is in it is not known."""


@dataclass
class Server:
    """One server of the world below: what it has applied, and what it believes."""

    own: int
    succession: FailoverRules
    log: list[int] = field(default_factory=list)
    has_link: bool = False
    is_deposed: bool = False


class World:
    """Servers that do what `standby.leadership` does, one move after the other; whom rings hear is left to chance."""

    def __init__(self) -> None:
        self.register: list[LeadershipRecord] = []
        self.failing = ""
        self.servers = [Server(own=own, succession=FailoverRules(own, lease_s=LEASE_S)) for own in (0, 1)]
        self.acknowledged: list[int] = []
        self._append_record(self.servers[0], self.servers[0].succession.first_record())

    def _append_record(self, server: Server, claim: LeadershipRecord) -> None:
        """Register it; who fails finds out later."""
        server.succession.note_record_pending()
        if self.failing == "before":
            raise RegisterFailsError
        if claim.number == len(self.register):
            self.register.append(claim)
        if self.failing == "after":
            raise RegisterFailsError
        if self.register[claim.number] == claim:
            server.succession.adopt(claim, 0.0)

    def move(self, what: str, own: int, push: int) -> None:
        server, other = self.servers[own], self.servers[1 - own]
        leads = server.succession.leads and not server.is_deposed
        if what in FAILURES:
            self.failing = FAILURES[what]
        elif what == "restart":
            self.servers[own] = Server(own=own, succession=FailoverRules(own, lease_s=LEASE_S))
        elif what == "join" and leads and other.succession.record is None:
            self._record_standby(server, other)
        elif what in ("push", "push lost") and leads:
            self._push(server, other, push, is_lost=what == "push lost")
        elif what == "silence" and server.succession.record is not None and not server.is_deposed:
            self._separate(server)
            self._settle_leadership(server)

    def _record_standby(self, server: Server, other: Server) -> None:
        self._separate(server)
        self._settle_leadership(server)
        if server.is_deposed or not server.succession.has_lease(0.0):
            return
        other.log = list(server.log)
        other.succession.adopt(self.register[-1], 0.0)
        try:
            self._append_record(server, server.succession.record_with_standby(other.own))
        except RegisterFailsError:
            return
        server.has_link = len(server.succession.record.members) == 2 if server.succession.record else False

    def _push(self, server: Server, other: Server, push: int, *, is_lost: bool) -> None:
        if server.has_link:
            follows = other.succession.record is not None and not other.succession.leads and not other.is_deposed
            if follows:
                other.log.append(push)
            if is_lost or not follows:  # the standby may have it: that is not known
                self._separate(server)
        if not server.succession.has_lease(0.0):
            self._settle_leadership(server)
        if server.succession.leads and not server.is_deposed and server.succession.has_lease(0.0):
            server.log.append(push)
            self.acknowledged.append(push)

    def _separate(self, server: Server) -> None:
        if server.has_link:
            server.has_link = False
            server.succession.note_standby_lost()

    def _settle_leadership(self, server: Server) -> None:
        if server.succession.leads and server.succession.has_lease(0.0):
            return
        for _ in range(3):
            claim = server.succession.record_without_other(self.register[-1])
            if claim is None:
                server.is_deposed = True
                return
            try:
                self._append_record(server, claim)
            except RegisterFailsError:
                return
            if server.succession.leads and server.succession.has_lease(0.0):
                return


FAILURES = {"register fails": "before", "register fails late": "after", "register is repaired": ""}
MOVES = st.tuples(
    st.sampled_from(["join", "join", "push", "push", "push lost", "silence", "restart", *FAILURES]),
    st.integers(0, 1),
)


@settings(max_examples=effort.share_of(800))
@given(st.lists(MOVES, min_size=20, max_size=60))
def test_whoever_may_go_on_has_all_that_was_acknowledged(moves):
    world = World()
    for push, (what, own) in enumerate(moves):
        world.move(what, own, push)
        newest = world.register[-1]
        for member in newest.members:
            server = world.servers[member]
            if server.succession.record is None or server.is_deposed:
                continue  # it has died, and knows that it has nothing
            assert set(world.acknowledged) <= set(server.log)
        able = [each for each in world.servers if each.succession.leads and not each.is_deposed]
        # One that was stopped and does not know it: it asks its standby first, which refuses, or the register.
        assert all(each.has_link or not each.succession.has_lease(0.0) for each in able if newest.leader != each.own)
