"""Steps before the first one: what a sum takes, with a model that is left as it was."""

import statistics
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ringweave.testing.ranks import run_ranks
from ringweave.training import Local
from ringweave.training.mode_choice import step_benchmark
from tests.training.choosing import rehearsal_functions
from tests.training.choosing.test_forecasting import said


@pytest.mark.distributed
@pytest.mark.slow
def test_all_ranks_hear_the_same_time_and_compute_shares_by_their_speeds() -> None:
    heard, are_same, shares, calls = zip(*run_ranks(rehearsal_functions.rehearse, 3, 1000), strict=True)
    times_s = {each["reducing_s"] for of_rank in heard for each in of_rank}
    assert len(times_s) == 1
    assert 0 < times_s.pop() < 20
    assert {(each["serving_s"], each["exchanging_s"]) for of_rank in heard for each in of_rank} == {(0.0, 0.0)}
    benchmarked_s = [[each["benchmarked_s"] for each in of_rank] for of_rank in heard]
    assert benchmarked_s[0] == benchmarked_s[1] == benchmarked_s[2]
    assert all(len(steps_s) >= 3 and min(steps_s) > 0 for steps_s in benchmarked_s[0])
    balanced_s = {each["balanced_s"] for of_rank in heard for each in of_rank}
    assert len(balanced_s) == 1
    assert balanced_s.pop() > max(statistics.median(steps_s) * 5 for steps_s in benchmarked_s[0]), "a whole step"
    rounds_s = [[each["rounds_s"] for each in of_rank] for of_rank in heard]
    assert rounds_s[0] == rounds_s[1] == rounds_s[2]
    (num_rounds,) = {len(of_rank) for of_rank in rounds_s[0]}
    assert num_rounds >= 3
    assert all(min(of_rank) > 0 for of_rank in rounds_s[0])
    assert calls == (["connected", *["once"] * (num_rounds + 1), "closed"],) * 3
    assert all(are_same)
    assert shares == (10, 10, 5)


@pytest.mark.distributed
@pytest.mark.slow
def test_who_cannot_compute_its_share_keeps_nobody_waiting() -> None:
    heard, are_same, shares, calls = zip(*run_ranks(rehearsal_functions.rehearse, 3, 9), strict=True)
    assert [each["reducing_s"] for of_rank in heard for each in of_rank] == [None] * 9
    assert [each["benchmarked_s"] for of_rank in heard for each in of_rank] == [None] * 9
    assert all(are_same)
    assert shares == (10, 0, 5)
    assert calls == ([], [], []), "no rounds either"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("inner_steps", "round_steps"), [(8, 4), (1, 1)])
def test_sites_try_inner_steps_and_rounds(inner_steps: int, round_steps: int) -> None:
    local = Local(inner_steps=inner_steps, fragments=2)
    heard, are_same = zip(*run_ranks(rehearsal_functions.try_sites, 3, local, 1000), strict=True)
    assert all(are_same)
    assert heard[0] == heard[1] == heard[2]
    (common,) = {(each["outer_exchange_s"], each["round_s"], each["round_steps"]) for each in heard[0]}
    assert min(common) > 0
    assert common[2] == round_steps
    assert all(each["inner_step_s"] > 0 for each in heard[0])
    step_s = 2 / sum(1 / max(each["inner_step_s"] for each in site) for site in (heard[0][:2], heard[0][2:]))
    assert common[1] > 0.5 * round_steps * step_s


@pytest.mark.distributed
@pytest.mark.slow
def test_sites_with_a_rank_that_cannot_compute_have_no_times() -> None:
    heard, are_same = zip(*run_ranks(rehearsal_functions.try_sites, 3, Local(), 1), strict=True)
    assert all(are_same)
    assert {each["round_steps"] for of_rank in heard for each in of_rank} == {None}


def test_what_was_not_tried_is_not_rehearsed() -> None:
    heard = [{"trial_s": [0.01], "cap": None}, {"trial_s": None, "cap": None}]
    model, loader = nn.Linear(2, 2), DataLoader(TensorDataset(torch.ones(2, 2)))
    triple, no_messages = (model, torch.optim.SGD(model.parameters()), loader), Any
    found = step_benchmark.benchmark_steps(heard, triple, no_messages, rehearsal_functions.server_of([]))
    nothing = dict.fromkeys(("reducing_s", "balanced_s", "serving_s", "exchanging_s", "benchmarked_s", "rounds_s"))
    assert found == [{**each, **nothing} for each in heard]


def test_a_start_does_not_pass_for_a_usual_step() -> None:
    assert step_benchmark._median_step_s([[9.0, 5.0, 1.0, 1.2, 1.1], [9.0, 5.0, 1.0, 1.0, 1.1]]) == pytest.approx(1.1)


def test_very_large_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    step_benchmark._copy_optimizer_step(optimizer)()
    monkeypatch.setattr(step_benchmark, "_MAX_MESSAGE_BYTES", 8)
    assert step_benchmark._copy_optimizer_step(optimizer)() is None
    assert not optimizer.state


def test_the_last_to_come_says_what_a_sum_takes() -> None:
    assert step_benchmark._median_collective_s([[0.5, 0.1, 0.9], [0.1, 0.3, 0.2]]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("others", "mode", "num_rings", "is_open", "expected"),
    [
        ({}, "balanced", None, True, True),
        ({}, "balanced", 2, True, True),
        ({}, "balanced", None, False, False),
        ({}, "ps-hra", None, False, True),
        ({}, "ps-hra", 2, False, False),
        ({}, "ps", None, False, False),
        ({"is_served": False}, "balanced", None, True, False),
        ({"loses_state": True}, "balanced", None, True, False),
    ],
)
def test_only_what_may_change_the_mode_or_the_rings_is_rehearsed(
    others: dict[str, bool], mode: str, num_rings: int | None, is_open: bool, expected: bool
) -> None:
    heard = said([[0.01]] * 2, **others)
    assert step_benchmark.is_useful(heard, mode, num_rings, is_open=is_open) is expected


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, 12),
        ({"balanced_s": None}, 0),
        ({"balanced_s": 0.09}, 0),
        ({"num_bytes": 2**30}, 0),
        ({"batch_samples": 8000, "balanced_s": 1.0}, 4),
        ({"batch_samples": 16000, "balanced_s": 2.0}, 0),
    ],
)
def test_rounds_are_rehearsed_where_they_may_be_the_fastest_and_are_short(
    others: dict[str, float | None], expected: int
) -> None:
    """Of one rank alone, predicted: 0.102 s for a hundred samples."""
    heard = said([[0.001]] * 8, **{"num_bytes": 4000, "balanced_s": 0.1, **others})
    assert step_benchmark._count_rounds(heard) == expected
