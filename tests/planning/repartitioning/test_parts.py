"""Estimates, moves, texts, policies, workloads: what the controller is made of."""

import dataclasses
import itertools
import random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import ScheduleError, UsageError
from ringweave.files import file_io
from ringweave.planning.repartition import (
    BlockMove,
    MeasurementWindow,
    PipelineConditions,
    PipelineWorkload,
    RepartitionDecision,
    RepartitionPolicy,
    block_moves,
    predicted_pause_s,
    search_partitions,
    stage_of,
)
from ringweave.planning.repartition.controller import WindowedEstimator, newest_agreeing
from tests.planning.repartitioning.worlds import best_step_s, workload


def test_the_newest_that_agree_count() -> None:
    assert newest_agreeing([1.0] * 7 + [2.0] * 3, 1.15) == [2.0] * 3
    assert newest_agreeing([1.0] * 8 + [2.0] * 2, 1.15) == [1.0] * 8 + [2.0] * 2
    assert newest_agreeing([1.0, 2, 2, 9, 2, 2], 1.15) == [2, 2, 9, 2, 2]
    assert newest_agreeing([1.0, 5.0], 1.15) == [1.0, 5.0]


def test_an_estimator_forgets_what_was_before_a_drift() -> None:
    found = WindowedEstimator(1.0, drift=1.15, num_windows=20)
    assert found.noise == float("inf")
    assert not any(found.observe([1.02] * 10) for _ in range(5))
    assert (found.value, found.noise) == (1.02, 0.0)
    assert found.observe([0.5] * 10)
    assert found.value == 0.5
    assert not found.observe([0.0, float("inf")])
    found.restart_from_value()
    assert (found.value, found.noise) == (0.5, float("inf"))


def test_noise_grows_less_with_windows() -> None:
    rng = random.Random(3)
    found = WindowedEstimator(1.0, drift=1.15, num_windows=20)
    errors = []
    for _ in range(16):
        found.observe([1 + rng.uniform(-0.05, 0.05) for _ in range(10)])
        errors.append(found.noise)
    assert 0.005 < errors[0] < 0.03
    assert errors[-1] < errors[0] / 2
    assert abs(found.value - 1) < 0.01


@given(st.data())
def test_moves_lead_from_one_partition_to_the_other(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(2, 12))
    cuts = st.lists(st.integers(0, num_blocks), min_size=3, max_size=3).map(lambda row: tuple(sorted(row)))
    old, new = data.draw(cuts), data.draw(cuts)
    found = [stage_of(old, block) for block in range(num_blocks)]
    for move in block_moves(old, new, num_blocks):
        assert found[move.block] == move.src
        found[move.block] = move.dst
    assert found == [stage_of(new, block) for block in range(num_blocks)]


def test_the_pause_is_what_does_not_hide_behind_the_step() -> None:
    work = workload(state_bytes=(30.0,) * 12, gradient_bytes=(10.0,) * 12)
    made = (BlockMove(2, 0, 1), BlockMove(5, 1, 3), BlockMove(4, 1, 2))
    conditions = PipelineConditions(speeds=(1.0,) * 4, rates=(10.0, 10.0, 5.0))
    # The link into device 3 carries two blocks: 6 s of state; the last link one at half the rate: 6 s as well.
    assert predicted_pause_s(work, made, conditions, 100.0) == 2.0
    assert predicted_pause_s(work, made, conditions, 4.0) == 2.0 + 2.0
    assert predicted_pause_s(workload(state_bytes=(), gradient_bytes=()), made, conditions, 0.0) == 0.0


def test_the_search_finds_what_brute_force_finds() -> None:
    """Over random speeds and rates: exactly where it may bound all; nearly so where it only looks around."""
    rng = random.Random(11)
    behind = []
    for _ in range(20):
        work = workload(10, forward_s=(tuple(rng.uniform(0.005, 0.03) for _ in range(10)),))
        conditions = PipelineConditions(
            speeds=tuple(rng.uniform(0.3, 2) for _ in range(4)),
            rates=tuple(rng.choice([3e7, 1e8, 1e9]) for _ in range(3)),
        )
        best_s = best_step_s(work, conditions)[1]
        assert search_partitions(work, conditions, (2, 5, 8)).step_s == best_s
        assert search_partitions(work, conditions, (2, 5, 8), max_simulations=60).step_s == best_s
        found = search_partitions(work, conditions, (2, 5, 8), max_simulations=10)
        behind.append(found.step_s / best_s)
        assert found.step_s == work.step_s(found.splits, conditions)
    assert max(behind) < 1.2
    assert sum(ratio < 1.01 for ratio in behind) >= 10


def test_what_cannot_be_the_best_is_not_simulated() -> None:
    """165 partitions, under even and uneven speeds: a fifth of them at most."""
    work = workload()
    for speeds in ((1.0,) * 4, (1.0, 0.5, 1.0, 1.0)):
        conditions = PipelineConditions(speeds=speeds, rates=(1e8,) * 3)
        with mock.patch.object(
            PipelineWorkload, "step_s", autospec=True, side_effect=PipelineWorkload.step_s
        ) as simulated:
            found = search_partitions(work, conditions, (3, 6, 9))
        assert found.step_s == best_step_s(work, conditions)[1]
        assert simulated.call_count <= 33


def test_what_is_refused_is_not_found() -> None:
    work, conditions = workload(), PipelineConditions(speeds=(0.5, 1.0, 1.0, 1.0), rates=(1e9,) * 3)
    best = search_partitions(work, conditions, (3, 6, 9)).splits
    other = search_partitions(work, conditions, (3, 6, 9), rejected={best})
    assert other.splits != best
    assert all(a < b for a, b in itertools.pairwise((0, *other.splits, 12)))


@pytest.mark.parametrize("what", [MeasurementWindow, RepartitionDecision])
def test_texts_that_are_none(what: type[MeasurementWindow] | type[RepartitionDecision]) -> None:
    deep, many, endless = "[" * 100_000, " " * (file_io.MAX_JSON_BYTES + 1), '{"splits": [1e999]}'
    for text in ("", "[]", "{}", '{"splits": 3}', "nonsense", deep, many, endless):
        with pytest.raises(ScheduleError, match=r"expected what another rank sent\. Run the same version of ringweave"):
            what.parse(text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"window_steps": 2}, "window_steps of the policy: 2, expected 3 or more. Correct it, or leave it out."),
        ({"drift": 1.0}, "drift of the policy: 1.0, expected a factor above 1. Correct it, or leave it out."),
        ({"min_gain": -1}, "min_gain of the policy: -1, expected 0 or more. Correct it, or leave it out."),
    ],
)
def test_a_policy_that_means_nothing(changes: dict, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        RepartitionPolicy(**changes)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"coding_s": ((1.0,),)}, "coding_s: how many: 1, expected 12. Give one for each block."),
        ({"forward_bytes": (1.0,)}, "forward_bytes: how many: 1, expected 12. Give one for each block."),
        (
            {"state_bytes": (-1.0,) * 12},
            "state_bytes of block 1: -1.0, expected a finite number, 0 or more. Profile the block again.",
        ),
        (
            {"backward_s": ()},
            "backward_s: how many rows: 0, expected 1, as many as of forward_s. Give a row for each kind of device.",
        ),
    ],
)
def test_a_workload_that_does_not_fit(changes: dict, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(workload(), **changes)
    assert str(caught.value) == text
