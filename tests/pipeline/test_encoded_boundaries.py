"""Stages that exchange encoded tensors, beside stages that exchange exact ones."""

import statistics
from dataclasses import replace

import pytest

from ringweave.testing.ranks import run_ranks
from tests.pipeline import pipeline_functions, wide_functions
from tests.pipeline.pipeline_functions import Case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE = Case(splits=(1, 3), num_microbatches=2, num_steps=24, schedule="1f1b-overlap")
UNEQUAL_WIDTHS = (pipeline_functions.FEATURES, 16, 8, 12, 16)


@pytest.mark.parametrize("schedule", ["1f1b-overlap", pytest.param("gpipe", marks=pytest.mark.thorough)])
def test_losses_stay_close_and_the_bytes_are_those_of_the_profile(schedule: str) -> None:
    case, losses, num_bytes = replace(CASE, schedule=schedule), {}, {}
    for wire in ("exact", "bf16", "int8"):
        found = run_ranks(pipeline_functions.train_counting_bytes, 3, replace(case, wire=wire), [])
        assert all(each[0] == found[0][0] for each in found)
        losses[wire] = statistics.fmean(found[0][0])
        if wire != "exact":
            assert all(sent == planned for _, counted in found for sent, planned in counted)
        num_bytes[wire] = sum(planned for _, counted in found for _, planned in counted)
    assert 0 < abs(losses["bf16"] - losses["exact"]) < 0.005 * losses["exact"]
    assert 0 < abs(losses["int8"] - losses["exact"]) < 0.01 * losses["exact"]
    assert num_bytes["int8"] < num_bytes["bf16"] < 0.55 * num_bytes["exact"]


def test_exact_is_what_it_was() -> None:
    plain = run_ranks(pipeline_functions.train, 3, replace(CASE, num_steps=4))
    assert run_ranks(pipeline_functions.train, 3, replace(CASE, num_steps=4, wire="exact")) == plain


@pytest.mark.parametrize("widths", [CASE.widths, UNEQUAL_WIDTHS], ids=["same boundaries", "other boundaries"])
def test_cuts_that_move_after_every_step_keep_the_loss_and_the_bytes(widths: tuple[int, ...]) -> None:
    case = replace(CASE, widths=widths, wire="int8", splits=(2, 4))
    exact = run_ranks(pipeline_functions.train_counting_bytes, 3, replace(case, wire="exact"), [])[0][0]
    found = run_ranks(pipeline_functions.train_counting_bytes, 3, case, [(1, 3), (1, 5), (4, 4), (2, 3)])
    assert all(sent == planned for _, counted in found for sent, planned in counted)
    assert statistics.fmean(found[0][0]) == pytest.approx(statistics.fmean(exact), rel=0.01)


def test_devices_of_a_stage_encode_their_own_pieces() -> None:
    exact, coded = (
        run_ranks(wide_functions.train_wide, 3, "0:4+1:4 2:8", (2,), ["1f1b-overlap"], "mean", "", wire)
        for wire in ("exact", "bf16")
    )
    for ((_, losses, held_out),), ((_, their_losses, their_held_out),) in zip(exact, coded, strict=True):
        assert their_losses != losses
        assert their_losses == pytest.approx(losses, rel=0.01)
        assert their_held_out == pytest.approx(held_out, rel=0.02)


def test_formats_that_ranks_or_stages_lack() -> None:
    for texts in run_ranks(pipeline_functions.disagree_about_wires, 2):
        assert texts == [
            "wire format between stages: 'int8', expected bf16, as on another rank. Give all ranks the same "
            "Settings(wire=...) and --wire.",
            "wire format between stages: 'int4', expected one of exact, bf16, int8. Give another one as "
            "Settings(wire=...), which --wire does not change.",
        ]
