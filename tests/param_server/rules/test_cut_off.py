"""Nodes of servers that are cut off, on virtual time: the one that most rings reach goes on, within three seconds."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.param_server.leadership import LEASE_S, FailoverRules, LeadershipRecord, RingReachability
from tests import effort

TICK_S = 0.1
RENEW_S = 0.3
ASK_S = 0.2
CUT_S = 5.0
BAR_S = 3.0


@dataclass
class Server:
    """One of the two, on the node of its number."""

    own: int
    succession: FailoverRules = field(init=False)
    audience: RingReachability = field(default_factory=lambda: RingReachability(LEASE_S / 2))
    is_deposed: bool = False
    is_other_gone: bool = False

    def __post_init__(self) -> None:
        self.succession = FailoverRules(self.own)


@dataclass
class Ring:
    """Its representative asks both servers, each again once it has answered, or after a while."""

    node: int
    phases_s: tuple[float, float]
    next_s: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self.next_s = dict(enumerate(self.phases_s))


class World:
    """Servers on nodes 0 and 1, and rings; a node is cut off at `CUT_S`."""

    def __init__(self, rings: list[Ring], victim: int, way: str, renew_s: float) -> None:
        self._victim, self._way = victim, way
        self.rings, self.servers = rings, [Server(0), Server(1)]
        self.register: list[LeadershipRecord] = []
        self._now_s, self._num_ticks = 0.0, 0
        self._renew_s: float | None = renew_s
        leader, standby = (each.succession for each in self.servers)
        self.register += [leader.first_record()]
        leader.adopt(self.register[0], 0.0)
        self.register += [leader.record_with_standby(1)]
        for each in (leader, standby):
            each.adopt(self.register[1], 0.0)

    def passes(self, source: int, to: int) -> bool:
        if source == to or self._now_s < CUT_S:
            return True
        is_out = source == self._victim and self._way in ("out", "both")
        is_in = to == self._victim and self._way in ("in", "both")
        return not (is_out or is_in)

    def run(self, until_s: float) -> None:
        while self._now_s < until_s:
            self._num_ticks += 1
            self._now_s = self._num_ticks * TICK_S
            for ring in self.rings:
                for server in self.servers:
                    self._ask(ring, server)
            self._renew()
            for server in self.servers:
                self._tick(server)

    def _ask(self, ring: Ring, server: Server) -> None:
        if self._now_s < ring.next_s[server.own]:
            return
        is_heard = self.passes(ring.node, server.own)
        if is_heard:
            server.audience.note_heard(self.rings.index(ring), self._now_s, is_remote=ring.node != server.own)
        is_answered = is_heard and self.passes(server.own, ring.node)
        # A connection that nothing comes back on is of no use, and another one cannot be made.
        ring.next_s[server.own] = self._now_s + ASK_S if is_answered else 1e9

    def _renew(self) -> None:
        leader, standby = self.servers
        if self._renew_s is None or self._now_s < self._renew_s:
            return
        self._renew_s = self._now_s + RENEW_S
        if self.passes(0, 1):
            standby.succession.note_heard(self._now_s)
            if self.passes(1, 0):
                leader.succession.note_heard(self._now_s)
                return
        self._renew_s = self._now_s + LEASE_S  # it waits for the answer

    def _tick(self, server: Server) -> None:
        succession, now_s = server.succession, self._now_s
        if server.is_deposed or (succession.leads and succession.has_lease(now_s)):
            return
        if succession.leads:
            succession.note_standby_lost()
            self._renew_s = None
            self.servers[1 - server.own].is_other_gone |= self.passes(server.own, 1 - server.own)
        elif not succession.is_silent(now_s) and not server.is_other_gone:
            return
        claim = succession.record_without_other(self.register[-1])
        reach = server.audience.reachability(range(len(self.rings)), now_s)
        if claim is None:
            server.is_deposed = True
        elif succession.should_go_on(now_s, reach, is_other_gone=server.is_other_gone):
            self.register.append(claim)
            succession.adopt(claim, now_s)


PHASES = st.floats(0.0, ASK_S)


@settings(max_examples=effort.share_of(1000))
@given(
    nodes=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    phases=st.lists(st.tuples(PHASES, PHASES), min_size=6, max_size=6),
    victim=st.integers(0, 6),
    way=st.sampled_from(["in", "out", "both"]),
    renew_s=st.floats(0.0, RENEW_S),
)
def test_the_server_that_most_rings_reach_goes_on(
    nodes: list[int], phases: list[tuple[float, float]], victim: int, way: str, renew_s: float
) -> None:
    world = World([Ring(node, each) for node, each in zip(nodes, phases, strict=False)], victim, way, renew_s)
    world.run(CUT_S + BAR_S)
    newest = world.register[-1]
    if victim > 1:
        assert len(newest.members) == 2, "the servers hear each other: nothing happens"
        return
    other = 1 - victim
    reaching = [node for node in nodes if node != victim]
    if 2 * len(reaching) > len(nodes) and set(reaching) != {other}:
        assert newest.members == (other,)
        assert world.servers[other].succession.leads
    world.run(60.0)  # rings were not heard of again: who has not gone on by now never does
    able = [each for each in world.servers if each.succession.leads and each.succession.has_lease(60.0)]
    assert [each.own for each in able] in ([], [world.register[-1].leader])
