"""Mode `local` among real processes: exactness, accounts, resuming and refusals."""

import math
from pathlib import Path

import pytest
import torch

from ringweave.errors import TrainingError
from ringweave.planning import sites
from ringweave.testing.ranks import run_ranks
from ringweave.training import Local
from tests.training.local import local_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TWO = [[0, 1], [2]]
EXACT: dict = {"wire": "exact", "outer_lr": 1.0, "outer_momentum": 0.0, "inner_lr_factor": 1.0}
AVERAGING = Local(inner_steps=1, sites=[[0], [1]], **EXACT)


def test_one_site_is_bit_identical_to_balanced() -> None:
    local = Local(inner_steps=1, sites=[[0, 1]])
    found = run_ranks(local_functions.weights_in_mode, 2, "local", local)
    assert found == run_ranks(local_functions.weights_in_mode, 2, "balanced", None)
    assert found[0][1]
    by_node = run_ranks(local_functions.weights_in_mode, 2, "local", Local(inner_steps=1))
    assert by_node == found, "without a cluster file, the ranks of one node are one site"


def test_an_outer_step_without_momentum_is_the_mean_of_the_sites() -> None:
    (start, first, after, steps), (_, second, same, _) = run_ranks(local_functions.first_round, 2, AVERAGING)
    assert after == same
    assert steps == 1
    assert sorted(first + second) == list(range(12))
    expected = [(one + other) / 2 for one, other in zip(*map(local_functions.alone, ([first], [second])), strict=True)]
    assert after == pytest.approx(expected, abs=1e-15)
    assert max(abs(one - other) for one, other in zip(start, after, strict=True)) > 1e-3


@pytest.mark.parametrize(("adam", "factor"), [(True, 2**0.5), (False, 1.0)], ids=["AdamW", "SGD"])
def test_two_sites_scale_learning_rates_by_the_optimizer(adam: bool, factor: float) -> None:
    settings = Local(inner_steps=1, sites=[[0], [1]], wire="exact", outer_lr=1.0, outer_momentum=0.0)
    (_, first, after, _), (_, second, _, _) = run_ranks(local_functions.first_round, 2, settings, adam)
    both = [local_functions.alone([each], adam, factor) for each in (first, second)]
    assert after == pytest.approx([(one + other) / 2 for one, other in zip(*both, strict=True)], abs=1e-15)


def test_nesterov_as_in_diloco() -> None:
    settings = Local(inner_steps=1, wire="exact", outer_lr=0.7, outer_momentum=0.9, sites=[[0], [1]])
    (start, first, after, _), (_, second, _, _) = run_ranks(local_functions.first_round, 2, settings)
    both = zip(*map(local_functions.alone, ([first], [second])), strict=True)
    means = [begin - (one + other) / 2 for begin, (one, other) in zip(start, both, strict=True)]
    expected = [begin - 0.7 * (1 + 0.9) * mean for begin, mean in zip(start, means, strict=True)]
    assert after == pytest.approx(expected, abs=1e-14)


def test_sites_of_unequal_size_are_weighted_by_samples() -> None:
    """Two ranks and one: the first site has two thirds of the samples, in inner steps that are twice as large."""
    settings = Local(inner_steps=1, sites=TWO, **EXACT)
    found = run_ranks(local_functions.first_round, 3, settings)
    pair, _, single = (samples for _, samples, _, _ in found)
    assert (len(pair), len(single)) == (8, 4)
    one, other = local_functions.alone([pair]), local_functions.alone([single])
    expected = [2 / 3 * each + 1 / 3 * its for each, its in zip(one, other, strict=True)]
    assert found[0][2] == found[1][2] == found[2][2]
    assert found[0][2] == pytest.approx(expected, abs=1e-14)


def test_a_slow_site_does_fewer_inner_steps_and_no_sample_is_lost() -> None:
    settings = Local(inner_steps=5, sites=[[0], [1]])
    (fast, exact, weights), (slow, also, same) = run_ranks(local_functions.unequal_sites, 2, 4, settings)
    assert all(exact + also)
    assert weights == same
    assert (fast[1:], slow[1:]) == ([30, 30, 30], [10, 10, 10]), "30 ms and 10 ms a step, 40 steps an epoch"


def test_inner_steps_are_derived_from_measured_times() -> None:
    settings = Local(computing_share=0.5, fragments=2, sites=[[0], [1]])
    found = run_ranks(local_functions.derived_inner_steps, 2, settings, 0.1, 0.01)
    assert found[0] == found[1], "all ranks derive the same"
    assert found[0][:2] == [64, 64]
    assert set(found[0][2:]) == {2 * math.ceil(0.1 / (sites.LINK_SHARE * 0.01))}, "for each of two fragments"


@pytest.mark.parametrize("sites", [[[0], [1]], TWO], ids=["two sites of one", "two and one"])
def test_a_resumed_training_ends_with_the_same_bits(sites: list[list[int]], tmp_path: Path) -> None:
    """Weights, inner and outer momentum, and counters; the checkpoint is of the middle of an epoch."""
    settings = Local(inner_steps=4, fragments=2, sites=sites)
    num_ranks = sum(map(len, sites))
    args: dict = {"environ": {"OMP_NUM_THREADS": "1"}}
    whole = run_ranks(local_functions.save_or_resume, num_ranks, tmp_path / "a", settings, None, False, **args)
    run_ranks(local_functions.save_or_resume, num_ranks, tmp_path / "b", settings, (1, 12), False, **args)
    resumed = run_ranks(local_functions.save_or_resume, num_ranks, tmp_path / "b", settings, None, True, **args)
    assert resumed[0]["done"] == 12
    for one, other in zip(whole, resumed, strict=True):
        assert one.pop("done") == 0
        other.pop("done")
        assert one == other
    assert whole[0]["train_steps"] == 24
    assert whole[0]["inner"] != whole[-1]["inner"], "sites have states of their own"
    assert whole[0]["unsent"], "four bits leave something out"
    assert whole[0]["unsent"] != whole[-1]["unsent"]


def test_a_pass_that_one_site_breaks_off_ends_for_all() -> None:
    settings = Local(inner_steps=4, fragments=1, sites=[[0], [1]])
    (few, account, weights), (more, other, same) = run_ranks(local_functions.break_off, 2, settings, (2, 100))
    assert (few, more) == (2, 8), "the other site ends its round, and the next one meanwhile"
    assert not account
    assert not other
    assert weights == same


def test_all_sites_begin_with_rank_0s_weights() -> None:
    found = run_ranks(local_functions.other_first_weights, 3, Local(inner_steps=2, sites=TWO))
    assert found[0] == found[1] == found[2]


def test_sums_and_weights_count_as_means_do() -> None:
    """In sites of one rank and of equal speed; AdamW would hide a wrong factor, SGD does not."""
    settings = Local(inner_steps=2, sites=[[0], [1]])
    for mean, sum_, weighted in run_ranks(local_functions.mean_and_sum, 2, settings):
        assert sum_ == pytest.approx(mean, abs=1e-12)
        assert weighted == pytest.approx(mean, abs=1e-12)


def test_a_hook_of_the_script_is_refused() -> None:
    for text in run_ranks(local_functions.hook_refusal, 2, Local(sites=[[0], [1]])):
        assert text == (
            "communication hook in rings or sites: 'one', expected none. "
            "Leave the hook out, or use mode sync or balanced."
        )


def test_refusals() -> None:
    (text, _) = run_ranks(local_functions.refusal, 2, Local(sites=[[0], [0, 1]]), False)
    assert text.startswith("sites: [[0], [0, 1]], expected each of the ranks 0 to 1 in exactly one site. Name the ")
    (text, _) = run_ranks(local_functions.refusal, 2, Local(sites=[[0], [1]]), True)
    assert text == (
        "data of mode local: 'a stream', expected a data set with an index. "
        "Use mode balanced, or a data set with an index."
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("inner_steps", 0, "1 or more"),
        ("inner_steps", 2.5, "1 or more"),
        ("fragments", 0, "1 or more"),
        ("fragments", "four", "1 or more"),
        ("wire", "int5", "one of exact, bf16, int8, int4, int2, top-k"),
        ("outer_lr", "fast", "more than 0"),
        ("computing_share", 1.0, "between 0 and 1"),
        ("outer_lr", 0.0, "more than 0"),
        ("outer_momentum", 1.0, "0 to below 1"),
        ("inner_lr_factor", 0, "more than 0"),
    ],
)
def test_invalid_settings(name: str, value: object, expected: str) -> None:
    with pytest.raises(TrainingError, match=rf"^{name}: {value!r}, expected {expected}\. Leave it out "):
        Local(**{name: value})  # pyrefly: ignore - that is the point


def test_parameters_of_low_precision_have_precise_outer_ones() -> None:
    from ringweave.training.outer_optimizer import _copy_precise

    assert _copy_precise(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    assert _copy_precise(torch.ones(2, dtype=torch.float64)).dtype == torch.float64
