"""Mode and wire format within a bound on the loss: what is taken on which cluster, and what the reason says."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ringweave.environment import WorkerEnvironment
from ringweave.jobs import modes
from ringweave.planning.balancing import Speed
from ringweave.planning.loss_table import LOCAL_SETTINGS, LossIncrease, LossTable
from ringweave.training import Asynchronous, Local, preparation
from ringweave.training.mode_choice import forecast
from ringweave.training.mode_choice.forecast import BoundedChoice, ElasticWireForecast, LossBound
from ringweave.training.options import Script
from ringweave.training.speed_test import ModelTrial

BALANCED = (modes.BALANCED, "as ever", None)
MB = 10**6
OPEN = LossBound(max_increase=0.01, is_mode_open=True, is_wire_open=True, local=Local())


def upto(highest: float) -> LossIncrease:
    return LossIncrease(lowest=0.0, mean=highest / 2, highest=highest)


TABLE = LossTable(
    wires={"bf16": upto(0.001), "int8": upto(0.004), "int4": upto(0.05)},
    local={(2, "int4", 16): upto(0.02), (2, "int4", 64): upto(0.03), (2, "int4", 256): upto(0.06)},
    local_settings={name: getattr(Local(), name) for name in LOCAL_SETTINGS},
)


def two_sites(nic: float | None = 125 * MB, uplink: float = 1.25 * MB, exact_s: float = 18.0, **others: object) -> list:
    """Reports of two sites of four, of 22 MB and 1 s of computing a step; the allreduce is bound by the uplinks."""
    measured = {"inner_step_s": 1.26, "outer_exchange_s": 0.57, "round_s": 5.06, "round_steps": 4}
    wires_s = {"exact": exact_s, "bf16": 0.5 * exact_s, "int8": 0.26 * exact_s, "int4": 0.14 * exact_s}
    common = {"batch_samples": 80, "num_bytes": 22 * MB, "server_rate": nic, "is_served": False, "optimizer": "AdamW"}
    return [
        {
            **{"trial_s": [0.1], "speed": 1.0, "rate": nic, "node": f"n{rank}", "wires_s": wires_s},
            **{"uplinks": {f"r{rank // 4}": uplink}, "server_uplinks": {}, **common, **measured, **others},
        }
        for rank in range(8)
    ]


def choose(reports: list, bound: LossBound = OPEN, exact: tuple = BALANCED) -> BoundedChoice:
    return forecast.choose_within_bound(exact, reports, bound, TABLE)


@pytest.mark.parametrize(
    ("bound", "mode", "wire", "limit"),
    [
        (0.0005, "balanced", "exact", 0),
        (0.002, "balanced", "bf16", 0),
        (0.01, "balanced", "int8", 0),
        (0.025, "local", "exact", 16),
        (0.04, "local", "exact", 64),
    ],
)
def test_a_thin_uplink_takes_what_the_bound_allows(bound: float, mode: str, wire: str, limit: int) -> None:
    found = choose(two_sites(), replace(OPEN, max_increase=bound))
    assert (found.mode, found.wire, found.max_inner_steps) == (mode, wire, limit)
    assert f"as ever; up to {100 * bound:g} % more loss at equal samples is allowed" in found.reason
    assert f"; chosen: {mode}{'' if wire == 'exact' else f' in {wire}'}" in found.reason
    assert found.reason.count("too much") == sum(each > bound for each in (0.001, 0.004, 0.05, 0.02 if limit else 0.06))


def test_fast_links_stay_exact() -> None:
    found = choose(two_sites(nic=1250 * MB, uplink=1250 * MB, exact_s=0.05), replace(OPEN, max_increase=0.5))
    assert (found.mode, found.wire) == ("balanced", "exact")
    assert "balanced in int8 " in found.reason
    assert "loss +0.00% to +0.40% (measured on other tasks)" in found.reason
    assert " samples/s" in found.reason


def test_one_site_or_steps_that_did_not_run_have_no_local() -> None:
    bound = replace(OPEN, max_increase=0.04)
    alone = choose([{**each, "node": "n0"} for each in two_sites(uplinks={})], bound)
    assert "mode local is not forecast: all workers are in one site" in alone.reason
    assert (alone.mode, alone.wire) == ("balanced", "bf16")  # int8 gains less than a tenth more
    untried = choose(two_sites(round_steps=None), bound)
    assert "mode local is not forecast: a rank could not try inner steps" in untried.reason


def test_local_is_forecast_by_measured_steps_where_no_rate_is_known() -> None:
    reports = two_sites(nic=None, uplinks={}, reducing_s=18.0, balanced_s=19.0, benchmarked_s=[0.1])
    sites = [[0, 1, 2, 3], [4, 5, 6, 7]]
    found = choose(reports, replace(OPEN, max_increase=0.04, local=Local(sites=sites)))
    assert (found.mode, found.max_inner_steps) == ("local", 64)
    assert "local with outer steps every 16 steps 1.26 s" in found.reason


@pytest.mark.parametrize(
    ("fixed", "round_s", "expected_s"),
    [
        (16, 5.06, 1.265),
        (64, 5.06, (5.06 + 12 * 1.26) / 16),
        (4, 5.06, 5.06 - 3 * 1.26),
        (4, 1.28 + 3 * 1.26, 1.28),
        (4, 0.2 + 3 * 1.26, 0.57),
    ],
)
def test_rounds_of_other_lengths_follow_from_the_measured_one(fixed: int, round_s: float, expected_s: float) -> None:
    """As long as an outer step costs the same; no round is shorter than its exchange."""
    reports = two_sites(round_s=round_s)
    found = forecast.forecast_sites(reports, ((0, 1, 2, 3), (4, 5, 6, 7)), Local(inner_steps=fixed), 500)
    assert found.step_s == pytest.approx(expected_s)


def test_in_an_epoch_the_first_round_has_no_exchange_and_the_end_has_one_of_all() -> None:
    reports = [{**each, "num_samples": 8 * each["batch_samples"]} for each in two_sites(round_s=1.5 + 3 * 1.26)]
    found = forecast.forecast_sites(reports, ((0, 1, 2, 3), (4, 5, 6, 7)), Local(inner_steps=4), 500)
    assert 8 * found.step_s == pytest.approx(1.26 + 7 * 1.5 + 4 * 0.57)


def test_settings_or_sites_that_were_not_measured_are_not_taken() -> None:
    bound = replace(OPEN, max_increase=0.04, local=Local(outer_lr=1.0))
    assert (
        "no loss is measured with 2 sites, int4, {'fragments': 4, 'outer_lr': 1.0" in choose(two_sites(), bound).reason
    )
    three = Local(sites=[[0, 1, 2], [3, 4, 5], [6, 7]])
    assert "no loss is measured with 3 sites" in choose(two_sites(), replace(bound, local=three)).reason
    beyond = choose(two_sites(), replace(bound, local=Local(inner_steps=300)))
    assert beyond.mode == "balanced"
    assert "loss unknown for so many steps, too much" in beyond.reason


def test_a_mode_that_is_named_stays_and_only_its_format_is_chosen() -> None:
    found = choose(two_sites(), replace(OPEN, is_mode_open=False, max_increase=0.04))
    assert (found.mode, found.wire) == ("balanced", "int8")
    assert "local" not in found.reason
    named = choose(two_sites(), replace(OPEN, is_mode_open=False), (modes.LOCAL, "the script asks for it", None))
    assert (named.mode, named.wire) == ("local", "exact")
    exact = choose(two_sites(), replace(OPEN, is_wire_open=False))
    assert (exact.mode, exact.wire) == ("balanced", "exact")


def test_without_a_trial_nothing_is_taken() -> None:
    found = choose(two_sites(trial_s=None, trial_problem="the data set is a stream"))
    assert (found.mode, found.wire) == ("balanced", "exact")
    assert (
        "times of computing are unknown; rank 0 could not try out the model (the data set is a stream)" in found.reason
    )


def test_benchmarked_times_scale_the_formats_and_count_the_optimizer() -> None:
    """The allreduce took four times the predicted time: so would that in int8; the rest of the step stays."""
    reports = two_sites(reducing_s=72.0, balanced_s=74.0, benchmarked_s=[0.1])
    found = choose(reports)
    assert "balanced 74 s, 1 s of it computing, 1.08 samples/s" in found.reason
    assert f"balanced in int8 {74 - 0.74 * 72:.3g} s" in found.reason


@pytest.mark.parametrize(("bound", "mode"), [(0.0001, "balanced"), (0.019, "balanced"), (0.02, "ps-hra")])
def test_rings_count_by_the_loss_that_they_cost(bound: float, mode: str) -> None:
    rings = ((0, 1, 2, 3), (4, 5, 6, 7))
    reports = two_sites(uplink=12.5 * MB, exact_s=1.8, server_processing_s=0.0, round_s=99.0)
    found = choose(
        reports,
        replace(OPEN, max_increase=bound, is_wire_open=False, local_steps=8),
        (modes.PS_HRA, "rings are faster", rings),
    )
    assert (found.mode, found.rings, found.wire) == (mode, rings if mode == "ps-hra" else None, "exact")
    assert f"loss +0.00% to +2.00% (measured on other tasks){'' if mode == 'ps-hra' else ', too much'}" in found.reason


def elastic_script(mode: str, wire: str, *, is_wire_open: bool = True) -> Script:
    spec, model = SimpleNamespace(batch_samples=32), nn.Linear(200, 200)
    data = DataLoader(TensorDataset(torch.zeros(8, 200)), batch_size=4)
    options: Any = {"optimizer": None, "settings": Asynchronous(), "spec": spec, "extra_state": {}, "ddp": {}}
    return Script(
        **options,
        model=model,
        loader=data,
        seed=0,
        mode=mode,
        reduction="mean",
        max_samples=None,
        on_failure="drop",
        wire=wire,
        is_wire_open=is_wire_open,
        max_loss_increase=0.01,
    )


@pytest.mark.parametrize(
    ("mode", "resolved", "wire", "is_open"),
    [
        ("auto", "balanced", "exact", True),
        ("auto", "balanced", "auto", True),
        ("sync", "sync", "auto", True),
        ("sync", "sync", "exact", False),
        ("local", "local", "auto", False),
        ("local", "local", "int8", False),
    ],
)
def test_an_elastic_job_without_a_server_chooses_its_format(mode: str, resolved: str, wire: str, is_open: bool) -> None:
    environment = WorkerEnvironment.from_environ({"RINGWEAVE_MEMBER": "1.0"})
    script = elastic_script(mode, wire, is_wire_open=wire in ("exact", "auto"))
    found, reason, wires = preparation._elastic_wire(script, resolved, "first reason", environment)
    of_mode = "; an elastic job does not choose modes local and ps-hra: name them" * (mode == "auto")
    of_wire = "; an elastic job has no choice within a bound in mode local" * (mode == "local" and wire == "auto")
    assert reason == f"first reason{of_mode}{of_wire}"
    assert wires.is_open == is_open
    assert wires.latest == found.wire == ("exact" if wire == "auto" else wire)
    trial_s = wires.status_details().get("trial_s")
    assert trial_s is None if not is_open else trial_s > 0


def test_a_worker_that_replaces_another_one_joins_without_a_trial() -> None:
    environment = WorkerEnvironment.from_environ({"RINGWEAVE_MEMBER": "1.1"})
    _, _, wires = preparation._elastic_wire(elastic_script("sync", "auto"), "sync", "", environment)
    assert wires.status_details() == {"wires": [(0, "exact")], "trial_s": None}


THIN = {"exact": 18.0, "bf16": 9.0, "int8": 4.7, "int4": 2.5}


def elastic_forecast(num_bytes: int = 22 * MB, problem: str = "") -> ElasticWireForecast:
    script, trial = elastic_script("sync", "auto"), ModelTrial(problem=problem)
    return ElasticWireForecast(script, "sync", num_bytes=num_bytes, schedule=None, trial=trial)


def members(*exchanges_s: float, speed_s: float | None = 0.1) -> list[dict[str, Any]]:
    """Members of equal speed, which have waited so long for gradients."""
    speed = None if speed_s is None else list(Speed(s_per_sample=speed_s).to_numbers())
    return [{"speed": speed, "trial_s": None, "exchange_s": each} for each in exchanges_s]


def plan(**wires_s: float) -> Any:
    return SimpleNamespace(allreduce_s_by_wire=lambda num_bytes, schedule: wires_s)


def test_members_choose_by_the_plan_first_and_by_their_waits_later() -> None:
    forecast = elastic_forecast()
    assert forecast.propose(plan(**THIN), members(0.0, 0.0), "exact")[0] == "int8"
    # Links are nine times as fast as described, or the rest hides.
    wire, reason = forecast.propose(plan(**THIN), members(0.6, 0.5, 0.9), "int8")
    assert wire == "int8"
    assert "sync 3.01 s, 1.1 s of it computing" in reason
    assert forecast.propose(plan(**THIN), members(0.6, 0.02, 0.9), "int8")[0] == "exact"
    # Without the thin link nothing gains a tenth.
    wire, reason = forecast.propose(plan(exact=0.05, bf16=0.04), members(0.7, 0.6), "int8")
    assert wire == "exact"
    assert reason.endswith("chosen: sync")


def test_members_without_a_known_speed_count_as_typical_ones_or_keep_the_format() -> None:
    forecast = elastic_forecast(problem="the data set is a stream")
    wire, reason = forecast.propose(plan(**THIN), members(0.0, 0.0, speed_s=None), "bf16")
    assert (wire, reason) == (
        "bf16",
        "; up to 1 % more loss at equal samples is allowed, but times of computing are unknown (the data set is a "
        "stream)",
    )
    tried = [{**members(0.0, speed_s=None)[0], "trial_s": 0.1}, *members(0.0, speed_s=None)]
    assert "sync 19.6 s, 1.6 s of it computing" in forecast.propose(plan(**THIN), tried, "exact")[1]


@pytest.mark.parametrize("wires_s", [{}, {"exact": math.inf}, {"exact": 18.0}])
def test_without_forecasts_of_formats_gradients_stay_exact(wires_s: dict[str, float]) -> None:
    num_bytes = 22 * MB if wires_s else 0
    wire, reason = elastic_forecast(num_bytes).propose(plan(**wires_s or THIN), members(0.0, 0.0), "exact")
    assert wire == "exact"
    assert "wire formats are not forecast: the plan has none; chosen: sync" in reason
