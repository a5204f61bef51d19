"""Faults at random from a seed."""

import dataclasses
import math

import pytest

from ringweave.errors import UsageError
from ringweave_bench.chaos import fault_script
from ringweave_bench.chaos.fault_script import FaultTargets

TARGETS = FaultTargets(num_workers=4, nodes=["a0", "b0"], link_rates={"a0->r0": 5e7, "r0->a0": 5e7})
TIMES = {"every_s": 1.0, "until_s": 200.0, "lasts_s": 2.0, "calm_s": 1.0}


def test_the_same_seed_draws_the_same_and_another_one_others() -> None:
    def draw(seed: int) -> str:
        times = {"every_s": 15.0, "until_s": 600.0, "lasts_s": 10.0, "calm_s": 20.0}
        return fault_script.faults_text(fault_script.draw_faults(fault_script.KINDS, TARGETS, seed=seed, **times))

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    found = fault_script.parse_faults(draw(7), TARGETS)
    assert {fault.kind for fault in found} == set(fault_script.KINDS)
    assert found[0].at_s == 20.0
    assert found[-1].at_s <= 600.0
    assert 20 <= len(found) <= 70, "about one every 15 s"


def test_moments_are_drawn_from_those_that_are_wanted() -> None:
    targets = dataclasses.replace(TARGETS, moments=["bucket", "commit"])
    times = {"every_s": 1.0, "until_s": 200.0, "lasts_s": 0.0, "calm_s": 1.0}
    found = {fault.moment for fault in fault_script.draw_faults(["kill"], targets, seed=1, **times)}
    assert found == {"commit", "bucket 0", "bucket 1", "bucket 2", "bucket 3"}
    targets = dataclasses.replace(targets, num_buckets=2)
    found = {fault.moment for fault in fault_script.draw_faults(["kill"], targets, seed=1, **times)}
    assert found == {"commit", "bucket 0", "bucket 1"}, "of a job that has no more"


def test_a_moment_that_there_is_not() -> None:
    targets = dataclasses.replace(TARGETS, moments=["comit"])
    expected = r"moment of fault: 'comit', expected forward, backward, .*\. Did you mean \"commit\"\?"
    with pytest.raises(UsageError, match=expected):
        fault_script.draw_faults(["kill"], targets, seed=0, every_s=1, until_s=2, lasts_s=1, calm_s=0)


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(UsageError, match=r"kind of fault: 'kil', expected kill, pause, .*\. Did you mean \"kill\"\?"):
        fault_script.draw_faults(["kil"], TARGETS, seed=0, every_s=1, until_s=2, lasts_s=1, calm_s=0)


def test_services_are_hit_as_often_as_each_worker_and_at_no_moment_of_a_step() -> None:
    targets = dataclasses.replace(TARGETS, moments=["commit"], services=["coordinator", "server"])
    times = {**TIMES, "until_s": 3000.0}
    found = fault_script.draw_faults(["kill", "pause"], targets, seed=1, **times)
    share = sum(fault.hits_service for fault in found) / len(found)
    assert share == pytest.approx(2 / 6, abs=0.05)
    assert {fault.target for fault in found} == {"0", "1", "2", "3", "coordinator", "server"}
    assert {fault.moment for fault in found if fault.kind == "kill"} == {"", "commit"}
    assert fault_script.parse_faults(fault_script.faults_text(found), TARGETS) == found


def test_without_services_a_seed_draws_what_it_always_drew() -> None:
    found = fault_script.draw_faults(["kill", "pause"], TARGETS, seed=3, **{**TIMES, "every_s": 60.0})
    assert list(map(str, found)) == [
        "at 1s kill worker 1",
        "at 28.72s pause worker 0 for 2s",
        "at 84.54s pause worker 2 for 2s",
        "at 132.56s kill worker 3",
        "at 179.28s pause worker 3 for 2s",
    ]


def test_a_service_that_there_is_not() -> None:
    targets = dataclasses.replace(TARGETS, services=["serve"])
    with pytest.raises(
        UsageError, match=r"service to hit: 'serve', expected coordinator, .*\. Did you mean \"server\"\?"
    ):
        fault_script.draw_faults(["kill"], targets, seed=0, **TIMES)


def test_no_kind_at_all() -> None:
    with pytest.raises(
        UsageError, match=r"kinds of faults: 'none', expected some of kill, pause, .*\. Name some: --rand"
    ):
        fault_script.draw_faults([], TARGETS, seed=0, **TIMES)


@pytest.mark.parametrize(
    ("name", "seconds", "least"),
    [
        ("every", 0.0, "0.01"),
        ("every", -4.0, "0.01"),
        ("every", math.nan, "0.01"),
        ("lasts", -3.0, "0"),
        ("calm", -1.0, "0"),
        ("until", math.inf, "0"),
    ],
)
def test_times_that_cannot_be(name: str, seconds: float, least: str) -> None:
    option = "for" if name == "until" else name
    with pytest.raises(
        UsageError, match=rf"--{option}: .*, expected {least} or more seconds\. Give a number of seconds"
    ):
        fault_script.draw_faults(["kill"], TARGETS, seed=0, **{**TIMES, f"{name}_s": seconds})
