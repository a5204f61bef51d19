"""Where the native backend is the fastest: it is kept through noise, and tried again when rates change."""

from collections.abc import Mapping

import pytest

from ringweave.planning.autotune.tuning_messages import message_class
from ringweave.schedules import NATIVE
from tests.planning.adapting.advising_functions import SIZE, World, steps_until_changed

NARROW = """
name: narrow
nodes:
- {name: a, switch: r0, nic: 200Mbit/s, devices: 1, count: 4}
- {name: b, switch: r1, nic: 200Mbit/s, devices: 1, count: 4}
switches: [{name: r0, uplink: 190Mbit/s}, {name: r1, uplink: 190Mbit/s}]
latency: 50us
"""
UPLINKS = ("r0->core", "core->r0", "r1->core", "core->r1")


def narrow(noise: float, tuned: Mapping[str, str] | None = None) -> World:
    """Two racks where a native backend that needs 0.8 of a ring's time wins while the uplinks are as the file says."""
    world = World(NARROW, noise=noise, tuned=tuned)
    world.host_factor = 0.8
    return world


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("tuned", [None, {message_class(SIZE): NATIVE}], ids=["tried", "known"])
def test_where_the_host_library_won_other_rates_begin_trials_again(
    noise: float, tuned: Mapping[str, str] | None
) -> None:
    """The plan's own best stays the same one; what it is better than has changed."""
    world = narrow(noise, tuned)
    assert [world.step()[0] for _ in range(60)][-1] == NATIVE
    world.rates = dict.fromkeys(UPLINKS, 190e6 / 8 / 4)
    slow_s = world.seconds(NATIVE, SIZE)
    assert steps_until_changed(world) <= 20
    taken = [world.step()[0] for _ in range(60)]
    assert NATIVE in taken  # it is tried again
    best_s = world.where.plan(world.rates).choose(SIZE).predicted_s
    assert best_s / world.seconds(taken[-1], SIZE) >= 0.9
    (change,) = world.of_kind("plan_changed")
    assert change["old_s"] == pytest.approx(slow_s, rel=0.1)  # what was measured, times what a ring takes more
    world.rates = {}
    for _ in range(100):
        world.step()
    assert world.seconds(world.step()[0], SIZE) <= 1.1 * world.seconds(NATIVE, SIZE)
    assert len(world.of_kind("plan_changed")) <= 2


def test_a_host_library_that_won_is_kept_through_noise() -> None:
    world = narrow(noise=0.1)
    taken = [world.step()[0] for _ in range(1000)]
    assert set(taken[100:]) == {NATIVE}
    assert len(world.of_kind("schedule_tuned")) == 1
    assert world.num_surveys == 0


def test_trials_do_not_begin_again_where_the_host_library_is_still_expected_to_win() -> None:
    """No schedule gains on a library that takes half a ring's time, on uplinks that are a little slower."""
    world = narrow(noise=0.02)
    world.host_factor = 0.5
    for _ in range(60):
        world.step()
    world.rates = dict.fromkeys(UPLINKS, 190e6 / 8 * 0.6)
    for _ in range(200):
        world.step()
    assert world.num_surveys > 0
    assert world.adviser.rates
    assert world.of_kind("plan_changed") == []
