"""When shares change: what is measured, heard and decided at the borders of steps."""

from typing import Any

from ringweave.planning.balancing import ShareChange, Speed
from ringweave.training.balancer import EXCHANGE_INTERVAL, ShareBalancer
from ringweave.training.timing import HostTimeline, StepTimer
from tests.training.fakes import FakeControl

FAST, SLOW = Speed(s_per_sample=1.0), Speed(s_per_sample=4.0)


def make(control: Any, **settings: Any) -> tuple[ShareBalancer, list[tuple[int, ShareChange]]]:
    changes: list[tuple[int, ShareChange]] = []
    timer = StepTimer(HostTimeline())
    return ShareBalancer((10, 10), timer, control, on_change=lambda *found: changes.append(found), **settings), changes


def test_shares_follow_what_is_heard() -> None:
    control = FakeControl(0, 2)
    balancer, changes = make(control)
    balancer.pass_step_boundary(0)
    balancer.pass_step_boundary(1)
    control.speeds = [FAST, SLOW]
    balancer.pass_step_boundary(2)
    assert changes == [], "nobody had measured enough"
    balancer.pass_step_boundary(3)
    assert balancer.latest == (10, 10), "on their way"
    balancer.pass_step_boundary(4)
    assert balancer.latest == (16, 4)
    assert changes == [(4, ShareChange(shares=(16, 4), before_s=40.0, after_s=16.0))]
    assert [balancer.shares_of(number) for number in (3, 4, 99)] == [(10, 10), (16, 4), (16, 4)]
    assert control.num_exchanges == 3
    for number in range(5, 12):
        balancer.pass_step_boundary(number)
    assert len(changes) == 1, "what is heard again changes nothing"
    assert control.num_exchanges == 12 // EXCHANGE_INTERVAL


def test_what_is_loaded_ahead_keeps_its_shares() -> None:
    control = FakeControl(0, 2)
    control.speeds = [FAST, SLOW]
    balancer, changes = make(control, num_prefetched=5)
    for number in range(4):
        balancer.pass_step_boundary(number)
    assert changes[0][0] == 7
    assert [balancer.shares_of(number) for number in (1, 6, 7)] == [(10, 10), (10, 10), (16, 4)]
    control.speeds = [SLOW, FAST]
    for number in range(4, 7):
        balancer.pass_step_boundary(number)
    assert [balancer.shares_of(number) for number in (6, 7, 10, 11)] == [(10, 10), (16, 4), (16, 4), (4, 16)]


def test_memory_limits_shares() -> None:
    control = FakeControl(0, 2)
    control.speeds = [FAST, SLOW]
    balancer, _ = make(control, caps=[12, 20])
    for number in range(60):  # a fifth of a step is to be gained, which is believed when it was seen for a while
        balancer.pass_step_boundary(number)
    assert balancer.latest == (12, 8)


def test_in_mode_sync_nothing_is_exchanged() -> None:
    balancer, changes = make(None)
    for number in range(6):
        balancer.pass_step_boundary(number)
    assert (balancer.latest, changes) == ((10, 10), [])


def test_ranks_that_come_from_other_rings_change_shares_at_the_same_step() -> None:
    """They have counted different numbers of batches; else one would compute samples that another one has."""
    found = []
    for num_batches in (6, 7):
        control = FakeControl(0, 2)
        control.speeds = [FAST, SLOW]
        balancer, changes = make(None)
        balancer.reset_shares(num_batches, (10, 10), control)
        for number in range(num_batches, num_batches + 6):
            balancer.pass_step_boundary(number)
        found.append(changes[0][0] - num_batches)
    assert found[0] == found[1]
