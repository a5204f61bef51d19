"""The adviser in a world that follows the formula: what is chosen, when, and what happens when a rate changes."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ringweave import topology
from ringweave.planning.autotune.link_survey import SurveyHistory
from ringweave.planning.autotune.tuner import (
    MAX_AGE_S,
    MAX_PERIOD,
    MIN_PERIOD,
    NEVER,
    Autotuner,
    GroupPlacement,
    message_class,
    pick_candidates,
)
from ringweave.planning.autotune.tuning_messages import TuningReport
from ringweave.schedules import NATIVE
from ringweave.telemetry import EVENT_KINDS, verdict
from tests.planning.adapting.advising_functions import NIC, SIZE, TEXT, World, cut, steps_until_changed
from tests.telemetry.examples import example

QUIET = ("throttled_s", "collections_s", "major_faults", "memory_stall_s", "disk_stall_s", "input_s", "update_s")


def test_it_tries_the_best_beside_the_host_library_and_keeps_the_fastest() -> None:
    world = World(noise=0.02)
    taken = [world.step()[0] for _ in range(30)]
    names = pick_candidates(world.plan, SIZE)
    assert names[-1] == NATIVE
    assert len(names) == 4
    assert names[0] == world.plan.choose(SIZE).schedule
    assert set(taken) == set(names)
    assert len(set(taken[-10:])) == 1
    assert world.seconds(taken[-1], SIZE) <= 1.04 * min(world.seconds(name, SIZE) for name in names)
    (tuned,) = world.of_kind("schedule_tuned")
    assert tuned["schedule"] == taken[-1]
    assert tuned["predicted_s"][NATIVE] is None
    assert all(seconds > 0 for seconds in tuned["measured_s"].values())
    assert 4 < tuned["trials"] < 30
    seconds = [world.seconds(name, SIZE) for name in taken[: tuned["trials"]]]
    assert tuned["trials_s"] == pytest.approx(sum(seconds), rel=0.1)


@pytest.mark.parametrize(("num_steps", "is_named"), [(40, True), (400, False)])
def test_the_verdict_names_the_trials_of_a_run_that_they_cost_much(num_steps: int, is_named: bool) -> None:
    world = World()
    world.host_factor, world.compute_s = 12.0, 0.5
    events: list[dict[str, Any]] = []
    taken = [world.step()]
    for _ in range(num_steps - 1):
        taken.append(world.step())
        wall_s = taken[-1][1] + world.compute_s
        shares = {"wall_s": wall_s, "compute_s": world.compute_s, "exchange_s": taken[-1][1], "steps": 1}
        for rank in range(2):
            window = example("steps_measured", time=world.now_s, rank=rank, forward_s=0.25, **shares)
            events.append(window | dict.fromkeys(QUIET, 0.0))
    (tuned,) = world.of_kind("schedule_tuned")
    events.append({"time": 0.0, "kind": "schedule_tuned", "rank": 0, "group": "g", **tuned})
    trials = [seconds for _, seconds in taken[: tuned["trials"]]]
    best_s = taken[-1][1]
    found = [loss for loss in verdict.find_losses(events) if loss.cause == "trials"]
    assert bool(found) is is_named
    if is_named:
        whole_s = world.now_s - taken[0][1] - world.compute_s
        assert found[0].cost == pytest.approx((sum(trials) - len(trials) * best_s) / whole_s, rel=0.01)
        assert f"{len(trials)} trials of schedules took {sum(trials):.3g} s of {whole_s:.3g} s" in found[0].text()


def test_what_simulations_say_is_tried_beside_the_plans_own_choice() -> None:
    world = World()
    by_formula = pick_candidates(world.plan, SIZE)
    world.estimates = {"direct": 1.0, "ps": 1.5, "ring": 2.0, "leader-matrix": 3.0, "hierarchical": 4.0}
    taken = [world.step()[0] for _ in range(4)]
    assert taken == [by_formula[0], "direct", "ps", NATIVE]
    for _ in range(40):
        world.step()
    assert world.num_estimates == 1  # for all trials of the class


def test_nothing_is_simulated_for_a_class_that_needs_no_trials() -> None:
    world = World(tuned={message_class(SIZE): "direct"})
    for _ in range(40):
        world.step()
    assert world.num_estimates == 0


def test_candidates_are_those_of_the_formula_where_nothing_was_simulated() -> None:
    plan = World().plan
    best = [choice.schedule for choice in plan.choices(SIZE)]
    assert pick_candidates(plan, SIZE) == pick_candidates(plan, SIZE, {})
    assert set(pick_candidates(plan, SIZE)) <= {plan.choose(SIZE).schedule, *best[:3], NATIVE}


def test_by_default_the_simulator_is_asked_and_the_ring_is_tried_where_the_formula_has_it_fourth() -> None:
    """Two ranks a node, 1 MB: measured in the lab, a ring takes 78 ms and the formula's three 113, 126 and 156."""
    cluster = topology.load("examples/clusters/two-ranks-a-node.yaml")
    nodes = tuple(node.name for node in cluster.nodes for _ in node.devices)
    where = GroupPlacement(cluster=cluster, nodes=nodes)
    plan = where.plan({})
    assert "ring" not in pick_candidates(plan, 10**6)
    tried = []
    adviser = Autotuner(where, plan)
    for _ in range(4):
        tried.append(adviser.decide(TuningReport(num_bytes=10**6, trial_s=0.1), 0.0).schedule)
    assert "ring" in tried
    assert plan.choose(10**6).schedule in tried


def test_a_host_library_that_is_faster_is_taken() -> None:
    world = World()
    world.host_factor = 0.5
    assert [world.step()[0] for _ in range(30)][-1] == NATIVE


def test_what_an_earlier_run_found_is_not_tried_again() -> None:
    world = World(tuned={message_class(SIZE): "direct"})
    assert {world.step()[0] for _ in range(20)} == {"direct"}
    assert world.of_kind("schedule_tuned") == []


@pytest.mark.parametrize("tuned", [{}, {message_class(SIZE): "direct"}], ids=["here", "in an earlier run"])
def test_what_won_a_day_ago_is_tried_again(tuned: Mapping[str, str]) -> None:
    """Its trials may have been disturbed; what changes slowly sets off no alarm."""
    world = World(tuned=tuned)
    world.host_factor = 3.0
    before = [world.step()[0] for _ in range(60)][-1]
    assert before != NATIVE
    world.host_factor = 0.3
    world.now_s += MAX_AGE_S * 0.9
    assert {world.step()[0] for _ in range(60)} == {before}
    world.now_s += MAX_AGE_S * 0.2
    taken = [world.step()[0] for _ in range(60)]
    assert set(pick_candidates(world.plan, SIZE)) <= set(taken)
    assert set(taken[-10:]) == {NATIVE}
    assert [fields["schedule"] for fields in world.of_kind("schedule_tuned")][-1] == NATIVE


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_nic_at_a_quarter_is_planned_around_within_20_steps_and_back_again(noise: float) -> None:
    world = World(noise=noise)
    for _ in range(40):
        world.step()
    usual_s = world.seconds(world.step()[0], SIZE)
    cut(world)
    slow_s = world.seconds(world.step()[0], SIZE)
    assert steps_until_changed(world) <= 20
    taken = [world.step()[0] for _ in range(40)]
    fresh = world.where.plan(world.rates)
    best_s = fresh.choose(SIZE).predicted_s
    assert best_s / world.seconds(taken[-1], SIZE) >= 0.9
    assert world.seconds(taken[-1], SIZE) < slow_s
    (change,) = world.of_kind("plan_changed")
    assert set(change["rates"]) == set(NIC)
    assert change["why"].startswith("collectives are slower: ")
    assert change["new_s"] < change["old_s"]
    world.rates = {}
    assert steps_until_changed(world) <= 20
    assert world.plan == world.where.plan({})
    tuned_before = len(world.of_kind("schedule_tuned"))
    assert world.seconds([world.step()[0] for _ in range(20)][-1], SIZE) <= usual_s * 1.03
    assert len(world.of_kind("schedule_tuned")) == tuned_before  # it was tried before, with these very rates


@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_a_plan_that_goes_round_a_slow_node_is_left_when_that_is_over_though_it_gains_little(noise: float) -> None:
    world, size = World(noise=noise), 5_000_000
    for _ in range(40):
        world.step(size)
    cut(world)
    assert steps_until_changed(world, num_bytes=size) <= 20
    slow_s = world.seconds([world.step(size)[0] for _ in range(40)][-1], size)
    world.rates, world.seconds = {}, lambda name, num_bytes: 0.88 * slow_s  # type: ignore[method-assign]
    assert steps_until_changed(world, num_bytes=size) <= 20
    assert world.plan == world.where.plan({})
    assert world.of_kind("plan_changed")[-1]["why"] == "some links were slow: is it over?"


TRUE = {name: 25e6 for node in range(8) for name in (f"a-{node}->core", f"core->a-{node}")}
BUSY = TRUE | {"a-0->core": 5e6, "core->a-0": 5e6}
"""As probing saw the network while another job used the NIC of one node."""


def test_a_link_that_probing_found_slow_is_believed_to_be_faster_once_it_is() -> None:
    world = World(probed=BUSY)
    for _ in range(40):
        world.step()
    assert world.of_kind("plan_changed") == []
    world.rates = TRUE
    assert steps_until_changed(world) <= 20
    (change,) = world.of_kind("plan_changed")
    assert change["rates"] == {name: pytest.approx(25e6, rel=0.15) for name in ("a-0->core", "core->a-0")}
    assert world.plan == world.where.plan(change["rates"])
    before = world.num_surveys
    while world.now_s < 1000:
        world.step()
    assert world.num_surveys == before  # nothing is slow: nothing to look after


@pytest.mark.parametrize("tuned", [{}, {message_class(SIZE): "ring"}], ids=["tried", "known"])
def test_what_is_faster_than_links_that_were_probed_is_looked_into_once(tuned: Mapping[str, str]) -> None:
    """The other job had ended before this one began: nothing changes while it runs."""
    world = World(probed=BUSY, tuned=tuned)
    world.rates = TRUE
    taken = [world.step() for _ in range(80)]
    assert world.num_surveys == len(world.of_kind("plan_changed")) == (0 if tuned else 1)
    if not tuned:
        assert taken[-1][1] < 1.1 * World().plan.choose(SIZE).predicted_s


def test_no_link_is_believed_to_be_faster_than_a_cluster_file_says() -> None:
    world = World()
    for _ in range(40):
        world.step()
    world.rates = dict.fromkeys(NIC, 100e6) | {name: 50e6 for name in TRUE if name not in NIC}
    for _ in range(60):
        world.step()
    assert world.num_surveys == 0
    assert world.of_kind("plan_changed") == []
    assert world.adviser.rates == {}


def test_noise_of_ten_per_cent_changes_nothing() -> None:
    world = World(noise=0.1)
    for _ in range(1500):
        world.step()
    assert world.num_surveys == 0
    assert world.of_kind("plan_changed") == []


def test_a_drift_that_costs_less_than_a_survey_is_not_surveyed() -> None:
    """Collectives of 66 kB take 4 ms longer, of which 150 cost the 0.6 s that four phases of a survey take."""
    world = World(noise=0.02, tuned={message_class(66_000): "ring"})
    for _ in range(600):
        world.step(66_000)
    slower_s = 0.004
    honest = world.seconds
    world.seconds = lambda name, num_bytes: honest(name, num_bytes) + slower_s  # type: ignore[method-assign]
    assert honest("ring", 66_000) < 3 * slower_s
    for _ in range(100):
        world.step(66_000)
    assert world.num_surveys == 0
    for _ in range(2000):
        world.step(66_000)
    assert world.num_surveys >= 1


def test_a_job_that_slows_itself_down_is_surveyed_less_and_less() -> None:
    world = World(tuned={message_class(SIZE): "ring"})
    factor = 1.0
    honest = world.seconds
    world.seconds = lambda name, num_bytes: honest(name, num_bytes) * factor  # type: ignore[method-assign]
    for _ in range(40):  # every 20 collectives it takes another time, and the network has nothing to do with it
        factor = 1.6 if factor == 1.0 else 1.0
        for _ in range(20):
            world.step()
    assert world.of_kind("plan_changed") == []
    assert world.num_surveys >= 2
    assert world.num_surveys * 1.0 <= 0.02 * world.now_s + 4


@pytest.mark.parametrize("is_shared", [True, False])
def test_groups_that_follow_each_other_share_a_history_of_surveys(is_shared: bool) -> None:
    """Each group slows itself down after 20 collectives; alone, each of them would be surveyed."""
    history, now_s, num_surveys = SurveyHistory(), 0.0, 0
    for _ in range(20):
        world = World(tuned={message_class(SIZE): "ring"}, history=history if is_shared else None)
        world.now_s = now_s
        for _ in range(20):
            world.step()
        honest = world.seconds
        world.seconds = lambda name, num_bytes, honest=honest: 1.6 * honest(name, num_bytes)  # type: ignore[method-assign]
        for _ in range(20):
            world.step()
        now_s, num_surveys = world.now_s, num_surveys + world.num_surveys
    assert num_surveys <= 0.02 * now_s + 4 if is_shared else num_surveys == 20


def test_the_next_group_begins_with_the_slow_links_that_this_one_has_found_and_notes_when_that_is_over() -> None:
    first = World(history=(history := SurveyHistory()))
    for _ in range(40):
        first.step()
    cut(first)
    steps_until_changed(first)
    assert set(history.rates) == set(NIC)
    second = World(history=history)
    second.now_s = first.now_s
    assert (str(second.plan), second.adviser.rates) == (str(first.plan), first.adviser.rates)
    cut(second)
    for _ in range(40):
        second.step()
    assert second.of_kind("plan_changed") == []
    second.rates = {}
    steps_until_changed(second, most=2000)
    assert (second.adviser.rates, history.rates) == ({}, {})
    assert str(second.plan) == str(World().plan)


def test_rates_of_links_that_a_group_does_not_have_are_left_out() -> None:
    rates = {"a-1->core": 1e6, "b-1->core": 2e6}
    assert World().where.rates_of_links(rates) == {"a-1->core": 1e6}
    assert World("name: one\nnodes: [{name: a-1, nic: 1Gbit/s, devices: 2}]\n").where.rates_of_links(rates) == {}


def test_a_slow_link_is_looked_at_now_and_then_even_if_nothing_shows() -> None:
    world = World()
    for _ in range(40):
        world.step()
    cut(world)
    steps_until_changed(world)
    before, started_s = world.num_surveys, world.now_s
    while world.now_s < started_s + 450:
        world.step()
    assert 3 <= world.num_surveys - before <= 5  # 1 s each, 1 % of the time


def test_one_node_is_tuned_and_left_alone() -> None:
    world = World("name: one\nnodes: [{name: a, nic: 1Gbit/s, devices: 4}]\n")
    while not world.of_kind("schedule_tuned"):
        world.step(10**7)
    assert world._settled[message_class(10**7)][1] > NEVER / 2


def test_reports_are_rarer_where_collectives_are_short() -> None:
    periods = {}
    for size in (10**5, 10**8):
        world = World(tuned={message_class(size): "ring"})
        ruling = world.adviser.decide(TuningReport(num_bytes=size), 0.0)
        periods[size] = ruling.next_in
    assert MIN_PERIOD == periods[10**8] < periods[10**5] <= MAX_PERIOD


GIGABIT = TEXT.replace("200Mbit/s", "1Gbit/s")


@pytest.mark.parametrize(
    ("buckets", "compute_s", "most"),
    [(1, 0.05, 20), (2, 0.0, 20), (4, 0.0, 10), (1, 0.0, 32)],
    ids=["one bucket, 50 ms of work", "two buckets", "four buckets", "nothing else at all"],
)
def test_small_buckets_are_planned_around_as_well(buckets: int, compute_s: float, most: int) -> None:
    """1 MB takes 15 ms. What counts is the time from one collective to the next: reports are a share of it."""
    size = 10**6
    for head_start in range(0, 24, 3):  # wherever between two reports it happens
        world = World(GIGABIT)
        world.compute_s = compute_s
        for _ in range(80 + head_start):
            world.step(size)
        world.rates = dict.fromkeys(NIC, 125e6 / 4)
        assert steps_until_changed(world, num_bytes=size) <= most * buckets


def test_every_note_is_an_event() -> None:
    world = World()
    for _ in range(40):
        world.step()
    cut(world)
    steps_until_changed(world)
    assert {kind for kind, _ in world.notes} == {"plan_made", "schedule_tuned", "plan_changed"}
    for kind, fields in world.notes:
        assert {"rank", "group", *fields} == set(EVENT_KINDS[kind].fields)
        json.dumps(fields)
