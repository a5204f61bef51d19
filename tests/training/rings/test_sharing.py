"""Shares in rings follow measured speeds where all rings meet."""

from collections.abc import Callable

from ringweave.planning.balancing import Speed
from ringweave.training.rings.ring_formation import RingShares
from ringweave.training.timing import HostTimeline, StepTimer
from tests.clock import Clock


class Told:
    """A control that hears other ranks say fixed things, and this one, rank 1, what it measured."""

    def __init__(self, others: Speed) -> None:
        self._others = others

    def start_speed_exchange(self, own: Speed | None) -> Callable[[], list[Speed] | None]:
        return lambda: [self._others, own, self._others, self._others] if own else None


class Silent:
    """Nobody in the ring has measured anything."""

    def start_speed_exchange(self, own: Speed | None) -> Callable[[], list[Speed] | None]:
        return lambda: None


def test_a_rank_that_became_slow_gets_less():
    clock, changes = Clock(), []
    timer = StepTimer(HostTimeline(clock))
    control = Told(Speed(s_per_sample=0.01, noise=0.01))
    shares = RingShares((64, 64, 64, 64), timer, control, lambda *change: changes.append(change))
    shares.join_ring((0, 1), Silent())
    assert shares.ring_shares == (64, 64)
    shares.rebalance_at_barrier()
    assert not changes  # nothing is known yet
    for _ in range(20):
        shares.begin_batch()
        shares.count_batch()
        timer.record_samples(64)
        clock.now_s += 64 * 0.04
        timer.gradients_ready()
        clock.now_s += 100.0  # the push, and the wait for its answer
    shares.begin_batch()
    shares.rebalance_at_barrier()
    [(num_batches, change)] = changes
    assert num_batches == 20
    assert change.shares == (79, 19, 79, 79)
    assert shares.ring_shares == (79, 19)


def test_nobody_gets_more_than_its_memory_takes():
    clock, changes = Clock(), []
    timer = StepTimer(HostTimeline(clock))
    control = Told(Speed(s_per_sample=0.01, noise=0.01))
    caps = (70, 64, 256, 256)
    shares = RingShares((64, 64, 64, 64), timer, control, lambda *change: changes.append(change), caps=caps)
    shares.join_ring((0, 1), Silent())
    for _ in range(20):
        shares.begin_batch()
        shares.count_batch()
        timer.record_samples(64)
        clock.now_s += 64 * 0.04
        timer.gradients_ready()
    shares.begin_batch()
    shares.rebalance_at_barrier()
    [(_, change)] = changes
    assert change.shares[0] == 70
    assert sum(change.shares) == 256


class Within:
    """A ring of two, in which this rank is the second one."""

    def start_speed_exchange(self, own: Speed | None) -> Callable[[], list[Speed] | None]:
        return lambda: [Speed(s_per_sample=0.01, noise=0.01), own] if own else None


def compute(shares: RingShares, timer: StepTimer, clock: Clock, num_batches: int, fixed_s: float = 0.0) -> None:
    for _ in range(num_batches):
        shares.begin_batch()
        own = shares.ring_shares[1]
        shares.count_shard()
        shares.count_batch()
        timer.record_samples(own)
        clock.now_s += own * 0.04 + fixed_s
        timer.gradients_ready()


def test_within_a_ring_shares_change_between_two_steps():
    clock, changes = Clock(), []
    timer = StepTimer(HostTimeline(clock))
    control = Told(Speed(s_per_sample=0.01, noise=0.01))
    shares = RingShares((64, 64, 64, 64), timer, control, lambda *change: changes.append(change))
    shares.join_ring((0, 1), Within())
    compute(shares, timer, clock, 12)
    assert shares.ring_shares == (103, 25)
    assert [change.shares for _, change in changes] == [(103, 25, 64, 64)]
    shares.begin_batch()
    shares.rebalance_at_barrier()
    assert shares.ring_shares == (79, 19), "where all meet, by the speeds of all"
    compute(shares, timer, clock, 12)
    assert shares.ring_shares == (79, 19)


def test_after_a_large_change_where_all_meet_a_ring_need_not_wait_for_the_next_one():
    """What a quarter of the samples takes was not known before; with fixed work it is more than a quarter."""
    clock, changes = Clock(), []
    timer = StepTimer(HostTimeline(clock))
    control = Told(Speed(s_per_sample=0.01, noise=0.01))
    shares = RingShares((64, 64, 64, 64), timer, control, lambda *change: changes.append(change))
    shares.join_ring((0, 1), Silent())
    compute(shares, timer, clock, 12, fixed_s=0.3)
    shares.join_ring((0, 1), Within())
    shares.begin_batch()
    shares.rebalance_at_barrier()
    assert [change.shares for _, change in changes] == [(80, 17, 80, 79)]
    compute(shares, timer, clock, 10, fixed_s=0.3)
    assert len(changes) == 2
    assert shares.ring_shares[1] < 17


def test_tickets_that_are_drawn_ahead_keep_their_shares():
    """A change holds from the first ticket on that no rank can have drawn."""
    clock, changes = Clock(), []
    timer = StepTimer(HostTimeline(clock))
    control = Told(Speed(s_per_sample=0.01, noise=0.01))
    note = lambda *change: changes.append(change)  # noqa: E731 - as above
    shares = RingShares((64, 64, 64, 64), timer, control, note, num_prefetched=4)
    shares.join_ring((0, 1), Within())
    for _ in range(4):
        assert shares.ring_shares == (64, 64)
        shares.count_shard()
    while not changes:
        drawn = shares.ring_shares
        compute(shares, timer, clock, 1)
    assert drawn == (64, 64)
    first, change = changes[0]
    assert first == shares._num_batches - 1 + 4
    shares.begin_pass()
    assert shares.ring_shares == (64, 64), "the change holds from a later batch on"
    for _ in range(4):
        shares.count_shard()
    assert shares.ring_shares == change.shares[:2]
