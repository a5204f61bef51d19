"""Elections of hosts: single rules, and random worlds in virtual time with cuts and restarts."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.platforms.hosts.quorum_election import (
    ELECTION_STAGGER_S,
    ELECTION_TIMEOUT_S,
    GONE_TIMEOUT_S,
    LEASE_S,
    Ballot,
    Leadership,
    is_quorum,
)


@pytest.mark.parametrize(
    ("present", "voters", "expected"),
    [
        ({0}, [0], True),
        ({0}, [0, 1], True),
        ({1}, [0, 1], False),
        ({0, 1}, [0, 1, 2], True),
        ({2}, [0, 1, 2], False),
        ({0, 3}, [0, 1, 2, 3], True),
        ({1, 2}, [0, 1, 2, 3], False),
        ({2, 3}, [2, 3, 4], True),
        ({0, 1}, [2, 3, 4], False),
    ],
)
def test_a_quorum_is_a_majority_or_half_with_the_first(present: set[int], voters: list[int], expected: bool) -> None:
    assert is_quorum(present, voters) is expected


@given(st.integers(1, 7), st.data())
def test_two_quorums_have_a_host_in_common(count: int, data: st.DataObject) -> None:
    voters = list(range(count))
    one, other = (data.draw(st.sets(st.sampled_from(voters))) for _ in range(2))
    if is_quorum(one, voters) and is_quorum(other, voters):
        assert one & other


def follower(index: int, *, leader: int | None = 0) -> Leadership:
    """A host of three in the first term, which has just heard from the leader."""
    return Leadership(index, (0, 1, 2), Ballot(term=1, voted_for=0), 0.0, leader)


def test_followers_stand_one_after_the_other() -> None:
    first, second = follower(1), follower(2)
    assert not first.should_stand(ELECTION_TIMEOUT_S - 0.01)
    assert first.should_stand(ELECTION_TIMEOUT_S)
    assert not second.should_stand(ELECTION_TIMEOUT_S)
    assert second.should_stand(ELECTION_TIMEOUT_S + ELECTION_STAGGER_S)


def test_a_leader_that_is_gone_is_not_waited_for() -> None:
    host = follower(1)
    host.mark_leader_gone(2)
    assert not host.should_stand(GONE_TIMEOUT_S)
    host.mark_leader_gone(0)
    assert host.should_stand(GONE_TIMEOUT_S)


def test_nobody_votes_while_it_hears_its_leader() -> None:
    host = follower(1)
    assert not host.grant_vote(2, 2, (1, 1), (1, 1), LEASE_S - 0.01)
    assert host.grant_vote(2, 2, (1, 1), (1, 1), LEASE_S)
    assert host.ballot == Ballot(term=2, voted_for=2)


def test_a_vote_needs_a_newer_term_and_no_older_entry() -> None:
    host = follower(1)
    assert not host.would_vote(1, 2, (1, 1), (1, 1), 9.0)
    assert not host.would_vote(2, 2, (1, 1), (1, 2), 9.0)
    assert host.would_vote(2, 2, (1, 2), (1, 2), 9.0)
    assert host.ballot.term == 1


def test_a_voter_votes_once_in_a_term() -> None:
    host = follower(1)
    assert host.grant_vote(2, 2, (1, 1), (1, 1), 9.0)
    assert not host.grant_vote(2, 0, (1, 1), (1, 1), 19.0)
    assert host.grant_vote(2, 2, (1, 1), (1, 1), 19.0)


def test_a_leader_without_a_quorum_does_not_act() -> None:
    leader = follower(0)
    leader.note_contact(1, 5.0)
    assert leader.holds_lease(5.0 + LEASE_S - 0.01)
    assert not leader.holds_lease(5.0 + LEASE_S)


def test_a_leader_that_hears_of_a_newer_term_follows() -> None:
    leader = follower(0)
    assert leader.accept_leader(2, 1, 3.0)
    assert (leader.is_leader, leader.leader, leader.ballot.term) == (False, 1, 2)
    assert not leader.accept_leader(1, 0, 3.0)


@dataclass
class VirtualHost:
    """A host with what it has on its disk."""

    leadership: Leadership
    version: tuple[int, int] = (1, 1)


@dataclass
class VirtualWorld:
    """Hosts whose messages arrive at once, or never where a connection is cut."""

    hosts: list[VirtualHost]
    now_s: float = 0.0
    cuts: set[frozenset[int]] = field(default_factory=set)
    leaders: dict[int, int] = field(default_factory=dict)
    """Term -> its leader."""
    committed: tuple[int, int] = (1, 1)

    def reaches(self, one: int, other: int) -> bool:
        return one == other or frozenset((one, other)) not in self.cuts

    def tick(self, index: int) -> None:
        """Let one host do what its service does in a tick."""
        host = self.hosts[index]
        if host.leadership.is_leader:
            self._lead(index, host)
        elif host.leadership.should_stand(self.now_s):
            self._campaign(index, host)

    def _lead(self, index: int, host: VirtualHost) -> None:
        term = host.leadership.ballot.term
        for other, peer in enumerate(self.hosts):
            if other == index or not self.reaches(index, other):
                continue
            if not peer.leadership.accept_leader(term, index, self.now_s):
                host.leadership.step_down(peer.leadership.ballot.term)
                return
            host.leadership.note_contact(other, self.now_s)

    def commit(self, index: int) -> None:
        """Let a leader write the next version."""
        host = self.hosts[index]
        self._lead(index, host) if host.leadership.is_leader else None
        if not host.leadership.holds_lease(self.now_s):
            return
        host.version = (host.leadership.ballot.term, host.version[1] + 1)
        saved = {index}
        for other, peer in enumerate(self.hosts):
            accepts = other != index and self.reaches(index, other)
            if accepts and peer.leadership.accept_leader(host.leadership.ballot.term, index, self.now_s):
                peer.version = max(peer.version, host.version)
                saved.add(other)
        if is_quorum(saved, host.leadership.voters):
            assert host.version > self.committed, "a committed entry was replaced by an older one"
            self.committed = host.version

    def _campaign(self, index: int, host: VirtualHost) -> None:
        term, version = host.leadership.ballot.term + 1, host.version
        others = [other for other in range(len(self.hosts)) if other != index and self.reaches(index, other)]
        willing = [
            other
            for other in others
            if self.hosts[other].leadership.would_vote(term, index, version, self.hosts[other].version, self.now_s)
        ]
        if not is_quorum({index, *willing}, host.leadership.voters):
            host.leadership.postpone_election(self.now_s)
            return
        host.leadership.stand(self.now_s)
        host.leadership.finish_election(self.now_s)
        for other in others:
            if self.hosts[other].leadership.grant_vote(term, index, version, self.hosts[other].version, self.now_s):
                host.leadership.count_vote(term, other, self.now_s)
        if host.leadership.is_leader:
            assert self.leaders.setdefault(term, index) == index, "two leaders in one term"
            assert host.version >= self.committed, "a leader lacks a committed entry"

    def restart(self, index: int) -> None:
        """Restart a host with what is on its disk."""
        host = self.hosts[index]
        voters, ballot = host.leadership.voters, host.leadership.ballot
        host.leadership = Leadership(index, voters, ballot, self.now_s, 0 if ballot.term <= 1 else None)


Step = tuple[str, int, int]


def steps(count: int) -> st.SearchStrategy[list[Step]]:
    """Random steps of a world."""
    kinds = st.sampled_from(("round", "round", "tick", "cut", "isolate", "mend", "commit", "commit", "restart"))
    return st.lists(st.tuples(kinds, st.integers(0, count - 1), st.integers(0, count - 1)), max_size=80)


@given(st.integers(2, 5).flatmap(lambda count: st.tuples(st.just(count), steps(count))))
@settings(max_examples=300, deadline=None)
def test_random_worlds_have_one_leader_a_term_and_lose_no_entry(world: tuple[int, list[Step]]) -> None:
    count, todo = world
    voters = tuple(range(count))
    made = [VirtualHost(Leadership(index, voters, Ballot(term=1, voted_for=0), 0.0, 0)) for index in voters]
    virtual = VirtualWorld(hosts=made, leaders={1: 0})
    for kind, one, other in todo:
        if kind == "tick":
            virtual.tick(one)
        elif kind == "round":
            virtual.now_s += 3.0
            for index in range(count):
                virtual.tick((one + index) % count)
        elif kind == "isolate":
            virtual.cuts |= {frozenset((one, each)) for each in range(count) if each != one}
        elif kind == "commit":
            virtual.commit(one)
        elif kind == "restart":
            virtual.restart(one)
        elif one != other:
            (virtual.cuts.add if kind == "cut" else virtual.cuts.discard)(frozenset((one, other)))


def test_a_host_that_was_cut_off_deposes_nobody() -> None:
    voters = (0, 1, 2)
    made = [VirtualHost(Leadership(index, voters, Ballot(term=1, voted_for=0), 0.0, 0)) for index in voters]
    world = VirtualWorld(hosts=made, leaders={1: 0}, cuts={frozenset((0, 2)), frozenset((1, 2))})
    for _ in range(40):
        world.now_s += 1.0
        for index in voters:
            world.tick(index)
    world.cuts.clear()
    for index in (0, 2, 1, 0):
        world.tick(index)
    assert [host.leadership.ballot.term for host in world.hosts] == [1, 1, 1]
    assert world.hosts[0].leadership.is_leader
