"""Shares in rings follow measured speeds where all rings meet."""

from ringweave.planning.balancing import Speed
from ringweave.training.rings.sharing import RingShares
from ringweave.training.timing import HostTimeline, StepTimer


class Exchange:
    def __init__(self, speeds):
        self._speeds = speeds

    def wait(self):
        return self._speeds


class Told:
    """A control that hears other ranks say fixed things, and this one, rank 1, what it measured."""

    def __init__(self, others: Speed) -> None:
        self._others = others

    def start_exchange(self, own: Speed | None) -> Exchange:
        return Exchange([self._others, own, self._others, self._others] if own else None)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rank_that_became_slow_gets_less():
    clock, changes = Clock(), []
    timer = StepTimer(HostTimeline(clock))
    control = Told(Speed(s_per_sample=0.01, noise=0.01))
    shares = RingShares((64, 64, 64, 64), (0, 1), timer, control, lambda *change: changes.append(change))
    assert shares.of_ring == (64, 64)
    shares.meet()
    assert not changes  # nothing is known yet
    for _ in range(20):
        shares.begin()
        shares.give(64)
        clock.now_s += 64 * 0.04
        timer.gradients_ready()
        clock.now_s += 100.0  # the push, and the wait for its answer
    shares.begin()
    shares.meet()
    [(num_batches, change)] = changes
    assert num_batches == 20
    assert change.shares == (79, 19, 79, 79)
    assert shares.of_ring == (79, 19)


def test_nobody_gets_more_than_its_memory_takes():
    clock, changes = Clock(), []
    timer = StepTimer(HostTimeline(clock))
    control = Told(Speed(s_per_sample=0.01, noise=0.01))
    caps = (70, 64, 256, 256)
    shares = RingShares((64, 64, 64, 64), (0, 1), timer, control, lambda *change: changes.append(change), caps=caps)
    for _ in range(20):
        shares.begin()
        shares.give(64)
        clock.now_s += 64 * 0.04
        timer.gradients_ready()
    shares.begin()
    shares.meet()
    [(_, change)] = changes
    assert change.shares[0] == 70
    assert sum(change.shares) == 256
