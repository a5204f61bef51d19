"""Two servers and a register: in any order of messages, silences, stops and deaths, nothing acknowledged is lost."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.params.rules.succession import Claim, Succession
from tests import effort

LEASE_S = 2.0


def joined(own: int = 0, now_s: float = 0.0) -> Succession:
    """A leader with a standby."""
    succession = Succession(own, lease_s=LEASE_S)
    succession.hold(succession.first(), now_s)
    succession.hold(succession.joined(1 - own), now_s)
    return succession


def test_a_leader_without_a_standby_needs_no_lease():
    succession = Succession(0, lease_s=LEASE_S)
    assert not succession.has_lease(0.0)
    succession.hold(succession.first(), 0.0)
    assert succession.has_lease(1e6)


def test_a_leader_with_one_answers_only_as_long_as_it_hears_from_it():
    succession = joined()
    assert succession.has_lease(LEASE_S - 0.01)
    assert not succession.has_lease(LEASE_S)
    succession.heard(1.0)
    assert succession.has_lease(LEASE_S + 0.5)
    succession.heard(0.5)  # an answer to what was asked earlier
    assert succession.has_lease(LEASE_S + 0.5)


def test_a_standby_waits_longer_and_not_for_what_it_slept_through():
    claim = joined().claim
    assert claim is not None
    standby = Succession(1, lease_s=LEASE_S)
    standby.hold(claim, 0.0)
    assert not any(standby.is_silent(0.5 * number) for number in range(5))
    assert standby.is_silent(2.6)
    standby.hold(claim, 10.0)
    assert not standby.is_silent(60.0)
    assert not standby.is_silent(61.0)


def test_who_is_no_member_may_not_go_on():
    leader, claim = joined(), joined().claim
    assert claim is not None
    alone = leader.alone(claim)
    assert alone == Claim(number=2, term=0, leader=0, members=(0,))
    standby = Succession(1, lease_s=LEASE_S)
    assert standby.alone(claim) is None  # it has nothing
    standby.hold(claim, 0.0)
    assert standby.alone(alone) is None
    assert standby.alone(claim) == Claim(number=2, term=1, leader=1, members=(1,))


@dataclass
class Server:
    """One server of the world below: what it has applied, and what it believes."""

    own: int
    succession: Succession
    log: list[int] = field(default_factory=list)
    has_link: bool = False
    is_deposed: bool = False
    begun: tuple[str, int] | None = None
    """A claim that it has decided on and not registered yet."""


class World:
    """Servers that do what `standby.leadership` does, one move after the other."""

    def __init__(self) -> None:
        self.register: list[Claim] = []
        self.servers = [Server(own=own, succession=Succession(own, lease_s=LEASE_S)) for own in (0, 1)]
        self.acknowledged: list[int] = []
        self._claim(self.servers[0], self.servers[0].succession.first())

    def _claim(self, server: Server, claim: Claim) -> None:
        if claim.number == len(self.register):
            self.register.append(claim)
            server.succession.hold(claim, 0.0)
        else:
            server.is_deposed = True

    def move(self, what: str, own: int, push: int) -> None:
        server, other = self.servers[own], self.servers[1 - own]
        leads = server.succession.leads and not server.is_deposed
        if what == "restart":
            self.servers[own] = Server(own=own, succession=Succession(own, lease_s=LEASE_S))
        elif what == "join" and leads and other.succession.claim is None:
            other.log = list(server.log)
            other.succession.hold(self.register[-1], 0.0)
            self._claim(server, server.succession.joined(other.own))
            server.has_link = not server.is_deposed
        elif what in ("push", "push lost") and leads:
            self._push(server, other, push, is_lost=what == "push lost")
        elif what == "silence" and server.succession.claim is not None and not server.is_deposed:
            self._go_on(server)

    def _push(self, server: Server, other: Server, push: int, *, is_lost: bool) -> None:
        if server.has_link:
            follows = other.succession.claim is not None and not other.succession.leads and not other.is_deposed
            if follows:
                other.log.append(push)
            if is_lost or not follows:  # the standby may have it: that is not known
                server.has_link = False
                self._go_on(server)
        if server.succession.leads and not server.is_deposed:
            server.log.append(push)
            self.acknowledged.append(push)

    def _go_on(self, server: Server) -> None:
        server.has_link = False
        claim = server.succession.alone(self.register[-1])
        if claim is None:
            server.is_deposed = True
        else:
            self._claim(server, claim)


MOVES = st.tuples(
    st.sampled_from(["join", "join", "push", "push", "push lost", "silence", "restart"]), st.integers(0, 1)
)


@settings(max_examples=effort.share_of(800))
@given(st.lists(MOVES, max_size=60))
def test_whoever_may_go_on_has_all_that_was_acknowledged(moves):
    world = World()
    for push, (what, own) in enumerate(moves):
        world.move(what, own, push)
        newest = world.register[-1]
        for member in newest.members:
            server = world.servers[member]
            if server.succession.claim is None or server.is_deposed:
                continue  # it has died, and knows that it has nothing
            assert set(world.acknowledged) <= set(server.log)
        able = [each.own for each in world.servers if each.succession.leads and not each.is_deposed]
        # One that was stopped and does not know it: it has a standby to ask first, which refuses.
        assert all(world.servers[each].has_link for each in able if newest.leader != each)
