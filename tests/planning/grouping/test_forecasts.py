"""What each mode is predicted to take, against arithmetic that can be done by hand."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.planning import mode_forecast
from ringweave.planning.mode_forecast import ModeForecast, StepWorkload, WorkerRates

FAST, SLOW = WorkerRates(sample_s=[0.001]), WorkerRates(sample_s=[0.004])
WORK = StepWorkload(batch_samples=800, num_bytes=0)


def by_mode(found: tuple[ModeForecast, ...]) -> dict[str, ModeForecast]:
    return {each.mode: each for each in found}


def test_one_slow_worker_makes_all_wait_unless_it_gets_less():
    found = by_mode(mode_forecast.forecast_modes([FAST] * 7 + [SLOW], WORK))
    assert found["sync"].step_s == pytest.approx(0.4)
    assert found["balanced"].step_s == pytest.approx(800 / 7250, rel=0.02)  # 3.62 times as fast
    assert mode_forecast.choose_forecast(tuple(found.values())).mode == "balanced"


def test_who_has_little_memory_gets_no_more_than_it_takes():
    work = dataclasses.replace(WORK, caps=(800,) * 7 + (10,))
    found = by_mode(mode_forecast.forecast_modes([FAST] * 8, work, [tuple((rank,) for rank in range(8))]))
    assert found["balanced"].step_s == pytest.approx(0.113)
    assert found["ps"].computing_s == pytest.approx(0.113)


def test_equal_workers_train_in_the_simplest_way():
    found = mode_forecast.forecast_modes([FAST] * 8, WORK, [((0, 1, 2, 3), (4, 5, 6, 7))])
    assert [each.mode for each in found] == ["sync", "balanced", "ps-hra"]
    assert mode_forecast.choose_forecast(found).mode == "sync"


def test_rings_must_promise_more_than_predictions_are_good_for():
    rings = [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))]

    def chosen(balanced_s: float, pairs_s: float, alone_s: float, least_gain: float = 0.1) -> str:
        pairs, alone = (
            ModeForecast(mode=mode, step_s=each_s, computing_s=0.0, rings=way)
            for mode, each_s, way in (("ps-hra", pairs_s, rings[0]), ("ps", alone_s, rings[1]))
        )
        balanced = ModeForecast(mode="balanced", step_s=balanced_s, computing_s=0.0)
        return mode_forecast.choose_forecast([balanced, pairs, alone], least_gain).mode

    assert chosen(1.09, 2.0, 1.0) == "balanced"
    assert chosen(1.11, 1.02, 1.0) == "ps-hra", "as good as equal"
    assert chosen(1.11, 1.04, 1.0) == "ps", "rings beside rings have the same errors"
    assert chosen(1.06, 2.0, 1.0, least_gain=0.05) == "ps"


def test_rehearsed_rounds_are_what_each_rank_alone_takes_and_mend_other_rings():
    """Rounds of 100 samples take 0.12 s where their parts say 0.1."""
    pairs, alone = ((0, 1), (2, 3), (4, 5), (6, 7)), tuple((rank,) for rank in range(8))
    work = dataclasses.replace(WORK, epoch_samples=8000)
    found = mode_forecast.forecast_modes([FAST] * 8, work, [pairs, alone])
    turned = by_mode(mode_forecast.with_benchmarked_rounds(found, work, [0.0012] * 8))
    worth = 0.98 / (1 + 800 / 8000)
    assert turned["ps"].step_s == pytest.approx(0.12 / worth)
    assert turned["ps-hra"].step_s == pytest.approx(1.2 * by_mode(found)["ps-hra"].step_s)
    assert turned["balanced"] == by_mode(found)["balanced"]
    exact_only = mode_forecast.forecast_modes([FAST] * 8, work)
    assert mode_forecast.with_benchmarked_rounds(exact_only, work, [0.0012] * 8) == exact_only


def test_a_benchmarked_step_is_what_balanced_takes():
    found = by_mode(mode_forecast.with_benchmarked_step(mode_forecast.forecast_modes([FAST] * 8, WORK), 0.25))
    assert (found["sync"].step_s, found["balanced"].step_s) == (pytest.approx(0.1), 0.25)


def test_random_stalls_are_what_rings_are_for():
    stalling = WorkerRates(sample_s=[0.001] * 7 + [0.004])
    rings = tuple((rank,) for rank in range(8))
    found = by_mode(mode_forecast.forecast_modes([stalling] * 8, WORK, [rings]))
    none_stalls = (7 / 8) ** 8
    assert found["sync"].step_s == pytest.approx(0.1 * (none_stalls + 4 * (1 - none_stalls)))
    assert found["ps"].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(0.1 * 11 / 8)
    assert found["sync"].step_s / found["ps"].step_s == pytest.approx(2.16 * mode_forecast.SAMPLE_WORTH, rel=0.01)
    assert mode_forecast.choose_forecast(tuple(found.values())).mode == "ps"


def test_a_slow_link_holds_up_its_own_ring_only():
    work = StepWorkload(batch_samples=800, num_bytes=22e6, server_bytes_per_s=50e6)
    workers = [WorkerRates(sample_s=[0.001], rate_bytes_per_s=50e6)] * 7 + [
        WorkerRates(sample_s=[0.001], rate_bytes_per_s=5e6)
    ]
    rings = mode_forecast.rings_by_rate([each.rate_bytes_per_s for each in workers])
    assert rings == ((0, 1, 2, 3, 4, 5, 6), (7,))
    found = mode_forecast.forecast_modes(workers, work, [rings])
    chosen = mode_forecast.choose_forecast(found)
    assert (chosen.mode, chosen.rings) == ("ps-hra", rings)
    assert found[0].step_s / chosen.step_s > 1.5


def test_rings_that_crowd_the_server_are_as_fast_as_its_link():
    work = StepWorkload(batch_samples=8, num_bytes=50e6, server_bytes_per_s=50e6)
    workers = [WorkerRates(sample_s=[1e-9], rate_bytes_per_s=1e12)] * 8
    found = by_mode(mode_forecast.forecast_modes(workers, work, [tuple((rank,) for rank in range(8))]))
    assert found["ps"].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(8, rel=0.01)  # eight pushes, a second each


def test_rings_that_push_more_than_the_server_computes_wait_for_it():
    work = StepWorkload(batch_samples=8, num_bytes=1e6, server_processing_s=0.5)
    workers = [WorkerRates(sample_s=[0.001], rate_bytes_per_s=1e9)] * 8
    alone, halves = tuple((rank,) for rank in range(8)), ((0, 1, 2, 3), (4, 5, 6, 7))
    found = by_mode(mode_forecast.forecast_modes(workers, work, [alone, halves]))
    assert found["ps"].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(
        4, rel=0.01
    )  # eight exchanges, half a second each
    assert found["ps-hra"].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(1, rel=0.05)  # two
    assert found["balanced"].step_s < 0.01  # which needs no server


def test_an_allreduce_takes_its_bound():
    def took_s(*rates: float, **uplinks: float) -> float:
        paths = [{name: uplinks[name]} for name in "ab" for _ in range(2)] if uplinks else [{}] * len(rates)
        workers = [
            WorkerRates(sample_s=[1.0], rate_bytes_per_s=rate, uplinks=path)
            for rate, path in zip(rates, paths, strict=True)
        ]
        return mode_forecast.predicted_allreduce_s(workers, 1e6)

    assert took_s(1e6, 1e6, 1e6, 1e6) == pytest.approx(1.5)
    assert took_s(4e6, 4e6, 4e6, 1e6) == pytest.approx(1.0)
    assert took_s(1e6) == 0
    assert took_s(math.inf, math.inf) == 0
    assert took_s(1e6, 1e6, 1e6, 1e6, a=0.5e6, b=1e9) == pytest.approx(2.0)
    assert took_s(1e6, 1e6, 1e6, 1e6, a=2e6, b=2e6) == pytest.approx(1.5)


def test_what_a_benchmarked_sum_took_beyond_links_is_put_down_to_who_computes_slowly():
    workers = [WorkerRates(sample_s=[each_s], rate_bytes_per_s=1e6) for each_s in (1.0, 1.0, 4.0, 4.0)]
    found = mode_forecast.with_benchmarked_allreduce(workers, 1e6, allreduce_s=1.5 + 0.3)
    assert [each.reduce_overhead_s for each in found] == pytest.approx([0.04, 0.04, 0.16, 0.16])
    assert mode_forecast.predicted_allreduce_s(found, 1e6) == pytest.approx(1.8), "what was measured"
    assert mode_forecast.predicted_allreduce_s(found[:2], 1e6) == pytest.approx(1.0 + 0.04)
    assert mode_forecast.predicted_allreduce_s(found[2:], 1e6) == pytest.approx(1.0 + 0.16)
    assert mode_forecast.with_benchmarked_allreduce(workers, 1e6, allreduce_s=1.0) == workers, (
        "no faster than links can"
    )


def test_where_no_rate_is_known_a_benchmarked_sum_tells_it():
    workers = [WorkerRates(sample_s=[1.0])] * 4
    found = mode_forecast.with_benchmarked_allreduce(workers, 1e6, allreduce_s=0.3)
    assert mode_forecast.predicted_allreduce_s(found, 1e6) == pytest.approx(0.3)
    assert mode_forecast.predicted_allreduce_s(found[:2], 1e6) == pytest.approx(0.2)


def test_pushes_and_broadcasts_pass_the_same_processors():
    workers = [WorkerRates(sample_s=[0.1], rate_bytes_per_s=1e6, reduce_overhead_s=0.4) for _ in range(4)]
    work = StepWorkload(batch_samples=4, num_bytes=1e6, server_bytes_per_s=1e9)
    found = by_mode(mode_forecast.forecast_modes(workers, work, [((0, 1), (2, 3))]))
    # Computed, summed by two, exchanged by the first, broadcast to the other one.
    expected_s = 0.1 + (1.0 + 0.4) + (2.0 + 0.4) + (1.0 + 0.4)
    assert found["ps-hra"].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(expected_s)


R0, R1, S0 = {"r0": 5e6, "s0": 2e6}, {"r1": 4e6, "s0": 2e6}, {"r2": 3e6}


def test_what_nodes_say_to_each_other_passes_uplinks_that_they_do_not_share():
    assert mode_forecast.crossed_uplinks([R0, R0]) == {}
    assert mode_forecast.crossed_uplinks([R0, R1]) == {"r0": 5e6, "r1": 4e6}
    assert mode_forecast.crossed_uplinks([R0, R1, S0]) == {"r0": 5e6, "s0": 2e6, "r1": 4e6, "r2": 3e6}
    assert mode_forecast.crossed_uplinks([R0, {}]) == R0


def test_rings_by_switches_are_those_of_the_nearest_and_of_the_topmost():
    assert mode_forecast.rings_by_switch([R0, R1, R0, S0, {}]) == (((0, 2), (1,), (3,), (4,)), ((0, 1, 2), (3,), (4,)))
    assert mode_forecast.rings_by_switch([{}, {}]) == (((0, 1),), ((0, 1),))


def test_rings_beyond_an_uplink_share_it_on_their_way_to_the_server():
    work = StepWorkload(batch_samples=800, num_bytes=5e6, server_bytes_per_s=1e9, server_uplinks={"r0": 5e6})
    near, far = (WorkerRates(sample_s=[0.001], rate_bytes_per_s=1e9, uplinks={name: 5e6}) for name in ("r0", "r1"))
    alone = tuple((rank,) for rank in range(8))
    found = by_mode(mode_forecast.forecast_modes([near] * 4 + [far] * 4, work, [alone]))["ps"]
    # Rounds of those beside the server take 0.11 s; the others' of 2.1 s push 4 / 2.1 times a second where 1 may pass.
    assert found.step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(800 / (4 * 100 / 0.11 + 4 * 100 / 4))
    assert found.computing_s == pytest.approx(0.1)


def test_a_ring_over_two_racks_is_as_fast_as_what_is_between_them():
    work = StepWorkload(batch_samples=800, num_bytes=5e6, server_bytes_per_s=1e9)
    near, far = (WorkerRates(sample_s=[0.001], rate_bytes_per_s=1e9, uplinks={name: 5e6}) for name in ("r0", "r1"))
    across = by_mode(mode_forecast.forecast_modes([near, far] * 4, work, [((0, 1, 2, 3), (4, 5, 6, 7))]))
    assert across["sync"].step_s == pytest.approx(0.1 + 1.0)
    # Reduced, exchanged by the first, and broadcast, each over the uplinks.
    assert across["ps-hra"].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(0.1 + 1.0 + 2.0 + 1.0)


@given(st.lists(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=3), min_size=1, max_size=4))
def test_the_slowest_is_as_slow_as_all_cases_say(values):
    cases = [max(case) for case in itertools.product(*values)]
    assert mode_forecast.expected_slowest_s(values) == pytest.approx(sum(cases) / len(cases))


def test_a_forecast_is_a_line():
    found = mode_forecast.forecast_modes([FAST] * 2, WORK, [((0,), (1,))])
    assert str(found[0]) == "sync 0.4 s, 0.4 s of it computing"
    assert str(found[2]) == "ps 0.408 s, 0.4 s of it computing, rings [[0], [1]]"


def test_links_that_are_not_known_are_of_one_kind():
    assert mode_forecast.rings_by_rate([math.inf] * 3) == ((0, 1, 2),)


def test_with_local_steps_pushes_are_fewer_and_under_way_meanwhile():
    workers = [WorkerRates(sample_s=[0.001], rate_bytes_per_s=50e6)] * 2
    rings = ((0,), (1,))
    waiting = StepWorkload(batch_samples=200, num_bytes=5e6, server_bytes_per_s=50e6)
    pushing = dataclasses.replace(waiting, local_steps=4)
    assert by_mode(mode_forecast.forecast_modes(workers, waiting, [rings]))[
        "ps"
    ].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(0.3)
    assert by_mode(mode_forecast.forecast_modes(workers, pushing, [rings]))[
        "ps"
    ].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(0.1)
    slow = dataclasses.replace(pushing, num_bytes=50e6)  # two pushes of a second each on the server's link
    assert by_mode(mode_forecast.forecast_modes(workers, slow, [rings]))[
        "ps"
    ].step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(0.5)


def test_rings_wait_for_one_that_would_be_too_far_behind():
    work = StepWorkload(batch_samples=800, num_bytes=4.5e6, server_bytes_per_s=1e9, local_steps=4)
    workers = [WorkerRates(sample_s=[0.001], rate_bytes_per_s=50e6)] * 7 + [
        WorkerRates(sample_s=[0.001], rate_bytes_per_s=5e6)
    ]
    alone = tuple((rank,) for rank in range(8))
    unbound = by_mode(mode_forecast.forecast_modes(workers, work, [alone]))["ps"]
    bound = by_mode(
        mode_forecast.forecast_modes(workers, dataclasses.replace(work, max_pushes_ahead=lambda _: 18), [alone])
    )["ps"]
    # A round of the slow link takes 1.8 s, those of the others 0.4 s; in two of them they push 63 times.
    assert unbound.step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(800 / (7 * 400 / 0.4 + 400 / 1.8))
    assert bound.step_s * mode_forecast.SAMPLE_WORTH == pytest.approx(800 / (7 * 400 / 1.4 + 400 / 1.8))


def test_rings_wait_for_each_other_at_the_end_of_an_epoch():
    workers = [WorkerRates(sample_s=[0.001])] * 2
    halves = [((0,), (1,))]
    endless, short = (
        by_mode(
            mode_forecast.forecast_modes(
                workers, StepWorkload(batch_samples=8, num_bytes=1, epoch_samples=each), halves
            )
        )
        for each in (math.inf, 32)
    )
    assert short["ps"].step_s == pytest.approx(endless["ps"].step_s * (1 + 1 / 4))
    assert short["balanced"].step_s == endless["balanced"].step_s


def test_who_pushes_needs_its_processor_for_that():
    work = StepWorkload(batch_samples=8, num_bytes=1e6, server_bytes_per_s=1e7)
    workers = [
        WorkerRates(sample_s=[each_s], rate_bytes_per_s=1e7, reduce_overhead_s=0.01) for each_s in (0.001, 0.002)
    ]
    found = mode_forecast.with_benchmarked_exchange(workers, work.num_bytes, 0.3, work.server_bytes_per_s)
    assert [each.push_overhead_s for each in found] == pytest.approx([0.1, 0.2])  # links take 0.2 s of it
    alone = [((0,), (1,))]
    before, after = (by_mode(mode_forecast.forecast_modes(each, work, alone))["ps"].step_s for each in (workers, found))
    assert after > before


def test_of_thousands_that_may_stall_one_nearly_always_does():
    assert mode_forecast.expected_slowest_s([[1.0] * 7 + [4.0]] * 3000) == pytest.approx(4.0)
    assert mode_forecast.expected_slowest_s([[1.0] * 7 + [4.0]] * 2) == pytest.approx(1 + 3 * (1 - (7 / 8) ** 2))
