"""Unequal parts of a batch, changing over time, against one process on the whole batch: float64, 100 steps, AdamW.

Of every day only the first case takes so many steps, all others four passes over the data.
"""

import dataclasses
import statistics

import pytest
import torch

from ringweave.testing.ranks import run_ranks
from tests import effort
from tests.training import training_functions
from tests.training.training_functions import Case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHARES = [(1, 2, 9), (4, 4, 4), (7, 4, 1)]
WHOLE, DAILY_STEPS = "uneven last batch", 16
CASES = {
    WHOLE: Case(),
    "last batch of one sample": Case(num_samples=49),
    "last batch dropped": Case(drop_last=True),
    "accumulation": Case(accumulate=3),
    "accumulation without communication": Case(accumulate=3, uses_no_sync=True),
    "sum": Case(reduction="sum"),
    "sum, accumulation": Case(reduction="sum", accumulate=2),
    "clipping and schedule": Case(clips=True, schedules=True),
    "a term of the loss without samples": Case(has_regularizer=True),
    "loader with workers": Case(num_workers=1, num_samples=100, num_steps=17),
    "stream": Case(streams=True),
    "tokens, by sample": Case(weighs="sample"),
    "tokens, by batch": Case(weighs="batch"),
    "tokens, by batch, accumulation": Case(weighs="batch", accumulate=3, uses_no_sync=True),
    "tokens, by batch, stream": Case(weighs="batch", streams=True),
    "little memory": Case(fitting=3, clips=True, schedules=True, has_regularizer=True),
    "little memory, sum, accumulation": Case(fitting=2, reduction="sum", accumulate=3, uses_no_sync=True),
    "little memory, tokens": Case(fitting=3, weighs="batch"),
    "hook of the script": Case(hook="allreduce", accumulate=2, uses_no_sync=True),
    "hook of the script that compresses": Case(hook="PowerSGD"),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_of_one_process(name: str) -> None:
    case = CASES[name]
    if name != WHOLE:
        num_steps = max(DAILY_STEPS, effort.share_of(case.num_steps))
        case = dataclasses.replace(case, num_steps=min(case.num_steps, num_steps))
    for distance, is_accounted in run_ranks(training_functions.distance_from_one_process, 3, case, SHARES):
        assert distance < 1e-9
        assert is_accounted


def test_ranks_with_little_memory_wait_for_no_gradient_of_unused_parameters() -> None:
    (first, weights), (other, same) = run_ranks(training_functions.train_with_unused, 2, 3)
    assert first
    assert other
    assert weights == same


def test_a_wrong_weight_would_show() -> None:
    """The check can fail: parts of unequal size that count the same lead elsewhere."""
    case = dataclasses.replace(CASES[WHOLE], num_steps=20)
    for distance, _ in run_ranks(training_functions.distance_without_weights, 3, case, SHARES):
        assert distance > 1e-3


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_a_rank_that_is_slow_gets_less_and_nothing_else_differs_from_one_process(
    dtype: torch.dtype, most: float
) -> None:
    """100 steps in mode `balanced`; float64 is what is promised."""
    found = run_ranks(training_functions.train_balanced, 3, 2, 5e-3, 100, dtype)
    assert all(each.shares == found[0].shares for each in found), "all ranks change at the same step"
    shares = found[0].shares
    assert shares[0] == (16, 16, 16)
    fast, other, slow = (statistics.median(of_rank) for of_rank in zip(*shares[-9:], strict=True))
    assert min(fast, other) > 2.5 * slow
    assert {sum(each) for each in shares} == {48}
    print(
        f"{dtype}: {max(each.weights for each in found):.2g} of weights, {found[0].held_out_loss:.2g} of held-out loss"
    )
    assert max(each.weights for each in found) < most
    assert max(each.held_out_loss for each in found) < most


def test_mixed_precision_skips_an_update_on_all_ranks() -> None:
    assert max(run_ranks(training_functions.scale_gradients, 3, 12, False)) < 1e-9
    assert max(run_ranks(training_functions.scale_gradients, 3, 12, True)) < 0.1, "bfloat16 rounds to 8 bits"


@pytest.mark.parametrize("first", [2, 4, 7])
def test_resumed_in_the_midst_and_at_the_end_of_an_epoch(first: int) -> None:
    run_ranks(training_functions.resume, 2, first, 6)


def test_a_model_with_buffers_and_an_evaluation() -> None:
    run_ranks(training_functions.batch_norm, 3, 12)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("batch", "batch_samples of rank 1: 13, expected 12 as on rank 0. Give prepare the same model, data and "),
        ("mode", "mode of rank 1: 'balanced', expected 'sync' as on rank 0. Give prepare the same model, data and "),
    ],
)
def test_ranks_that_prepare_different_things_are_told_so(what: str, text: str) -> None:
    for said in run_ranks(training_functions.prepare_differently, 2, what):
        assert said == text + "options on all ranks."
