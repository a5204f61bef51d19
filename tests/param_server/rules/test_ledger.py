"""The books under any order of events: bounded staleness, each push once, nobody waits for ever."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.errors import ExpiredGrantError, TrainingError
from ringweave.param_server.versions import Ledger, StalenessPolicy
from tests import effort


class Play:
    """Rings that compute for random times on a virtual clock; grants are given as soon as the ledger allows them."""

    def __init__(self, policy: StalenessPolicy, rounds: int) -> None:
        self.ledger, self.rounds = Ledger(policy), rounds
        self.overlaps = policy.overlaps
        self.waiting: set[int] = set()
        self.computing: list[tuple[float, int, int]] = []
        self.computed = [0] * policy.num_rings
        self.staleness: list[int] = []
        self.now_s = 0.0
        self.held_while_paused: set[tuple[int, int]] = set()
        """(ring, base) of what rings had that were paused then."""
        self.late: list[int] = []
        """Staleness of what they came back with."""

    def run(self, draw_s, draw_pause=lambda ring: False) -> None:
        self.draw_pause = draw_pause
        rings = range(self.ledger.policy.num_rings)
        self.waiting.update(rings)
        self.draw_s = draw_s
        self.settle()
        while self.computing:
            self.now_s, _, ring = heapq.heappop(self.computing)
            self.computed[ring] += 1
            self.settle()

    def begin(self, ring: int) -> None:
        compute_s = self.draw_s(ring)
        if self.draw_pause(ring):
            self.ledger.pause(ring)
            self.held_while_paused.update((ring, base) for base in self.ledger.ring_grants[ring].grants)
            compute_s *= 30
        heapq.heappush(self.computing, (self.now_s + compute_s, len(self.staleness), ring))

    def settle(self) -> None:
        """Push what is computed and granted, grant what is asked for, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for ring in sorted(self.waiting):
                if self.ledger.can_grant(ring):
                    first = self.ledger.base_version(ring) is None and ring not in self.ledger.pushed
                    self.ledger.grant(ring)
                    self.waiting.discard(ring)
                    changed = True
                    if first or not self.overlaps:
                        self.begin(ring)
            for ring, computed in enumerate(self.computed):
                pushed = self.ledger.pushed[ring].sequence if ring in self.ledger.pushed else 0
                if computed > pushed and ring not in self.waiting:
                    self.push(ring, pushed + 1)
                    changed = True

    def push(self, ring: int, sequence: int) -> None:
        base = self.ledger.base_version(ring)
        assert base is not None
        receipt = self.ledger.push(ring, sequence, base)
        is_late = (ring, base) in self.held_while_paused
        (self.late if is_late else self.staleness).append(receipt.staleness_versions)
        assert self.ledger.push(ring, sequence, base).is_repeat
        if sequence == self.rounds:
            self.ledger.leave(ring)
            return
        self.waiting.add(ring)
        if self.overlaps:
            self.begin(ring)


@pytest.mark.parametrize("overlaps", [False, True])
@given(data=st.data(), num_rings=st.integers(1, 7), rounds=st.integers(1, 25))
@settings(max_examples=effort.share_of(300))
def test_no_push_is_older_than_the_bound_and_every_ring_ends(data, num_rings, rounds, overlaps):
    policy = StalenessPolicy(num_rings=num_rings, overlaps=overlaps)
    speeds = data.draw(st.lists(st.sampled_from([1.0, 1.1, 4.0, 50.0]), min_size=num_rings, max_size=num_rings))
    jitter = data.draw(st.randoms(use_true_random=False))
    play = Play(policy, rounds)
    play.run(lambda ring: speeds[ring] * jitter.choice([0.5, 1, 1, 9]))
    assert [each.sequence for each in play.ledger.pushed.values()] == [rounds] * num_rings
    assert play.ledger.version == rounds * num_rings == len(play.staleness)
    assert max(play.staleness) <= policy.max_versions


@pytest.mark.parametrize("overlaps", [False, True])
@given(data=st.data(), num_rings=st.integers(2, 6), rounds=st.integers(1, 20))
@settings(max_examples=effort.share_of(300))
def test_a_paused_ring_takes_nobody_else_beyond_the_bound(data, num_rings, rounds, overlaps):
    policy = StalenessPolicy(num_rings=num_rings, overlaps=overlaps)
    speeds = data.draw(st.lists(st.sampled_from([1.0, 4.0, 50.0]), min_size=num_rings, max_size=num_rings))
    jitter = data.draw(st.randoms(use_true_random=False))
    play = Play(policy, rounds)
    play.run(lambda ring: speeds[ring] * jitter.choice([0.5, 1, 1, 9]), lambda ring: jitter.random() < 0.1)
    assert [each.sequence for each in play.ledger.pushed.values()] == [rounds] * num_rings
    assert max(play.staleness, default=0) <= policy.max_versions


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_fastest_ring_waits_at_the_bound(overlaps):
    policy = StalenessPolicy(num_rings=2, overlaps=overlaps)
    play = Play(policy, 40)
    play.run(lambda ring: (1.0, 1000.0)[ring])
    assert max(play.staleness) in (policy.max_versions, policy.max_versions - 1, policy.max_versions - 2)
    assert play.now_s > 5 * 1000  # the fast ring has waited for the slow one again and again


@pytest.mark.parametrize("num_rings", [2, 4, 6])
def test_rings_of_equal_speed_are_one_version_each_old(num_rings):
    play = Play(StalenessPolicy(num_rings=num_rings), 30)
    play.run(lambda ring: 1.0)
    assert play.staleness[num_rings:-num_rings] == [num_rings - 1] * (28 * num_rings)


def test_one_ring_is_never_stale():
    play = Play(StalenessPolicy(num_rings=1), 10)
    play.run(lambda ring: 1.0)
    assert play.staleness == [0] * 10


def test_a_push_that_came_before_changes_nothing():
    ledger = Ledger(StalenessPolicy(num_rings=1))
    ledger.push(0, 1, ledger.grant(0))
    again = ledger.push(0, 1, 0)
    assert again.is_repeat
    assert again.version == ledger.version == 1


def test_a_gap_is_refused():
    ledger = Ledger(StalenessPolicy(num_rings=1))
    base = ledger.grant(0)
    with pytest.raises(TrainingError, match=r"push 2 of ring 0: 2, expected 1, the next one, or the one before it aga"):
        ledger.push(0, 2, base)


def test_a_push_without_a_grant_is_refused():
    ledger = Ledger(StalenessPolicy(num_rings=2))
    with pytest.raises(ExpiredGrantError, match=r"push 1 of ring 1: 'no grant', expected one\. Take the parameters ag"):
        ledger.push(1, 1, 0)


def test_a_push_on_other_parameters_is_refused():
    ledger = Ledger(StalenessPolicy(num_rings=1))
    ledger.grant(0)
    with pytest.raises(TrainingError, match=r"base version of push 1 of ring 0: 3, expected 0\. Take the parameters"):
        ledger.push(0, 1, 3)


def test_a_ring_that_left_holds_nobody_up():
    ledger = Ledger(StalenessPolicy(num_rings=2))
    ledger.grant(1)
    for sequence in range(1, 9):
        assert ledger.can_grant(0)
        ledger.push(0, sequence, ledger.grant(0))
    assert not ledger.can_grant(0)
    ledger.leave(1)
    assert ledger.can_grant(0)


def test_a_ring_that_is_not_there_is_refused():
    with pytest.raises(TrainingError, match=r"ring: 2, expected 0 to 1\. Join a ring that there is"):
        Ledger(StalenessPolicy(num_rings=2)).grant(2)


def test_goes_on_from_a_snapshot():
    ledger = Ledger(StalenessPolicy(num_rings=2))
    ledger.push(1, 1, ledger.grant(1))
    later = Ledger(ledger.policy, version=ledger.version, pushed=ledger.pushed)
    assert later.push(1, 1, 0).is_repeat
    assert later.push(1, 2, later.grant(1)).version == 2
