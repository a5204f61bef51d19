"""Stages on several ranks against all blocks on one: every bit is the same."""

import itertools

import pytest

from ringweave.testing.ranks import run_ranks
from tests.pipeline import pipeline_functions
from tests.pipeline.pipeline_functions import Case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCHEDULES = ["gpipe", "1f1b", "1f1b-overlap"]
PARTITIONS = [(1, 3), (2, 4), (0, 3), (2, 2), (3, 5)]
UNEQUAL_WIDTHS = (pipeline_functions.FEATURES, 16, 8, 12, 16)


def test_every_partition_and_schedule_has_the_bits_of_one_device() -> None:
    (alone, losses, held_out) = run_ranks(pipeline_functions.train, 1, Case())[0]
    cases = [Case(schedule=name, splits=splits) for name, splits in itertools.product(SCHEDULES, PARTITIONS)]
    found = run_ranks(pipeline_functions.train_all, 3, cases)
    for case, by_rank in zip(cases, zip(*found, strict=True), strict=True):
        together: dict[int, str] = {}
        for bits, their_losses, their_held_out in by_rank:
            together |= bits
            assert their_losses == losses, case
            assert their_held_out == held_out, case
        assert together == alone, case


@pytest.mark.parametrize("widths", [Case().widths, UNEQUAL_WIDTHS], ids=["same boundaries", "other boundaries"])
def test_a_partition_that_changes_after_every_step_has_the_bits_of_one_that_stays(widths: tuple[int, ...]) -> None:
    """With the same boundaries torch's stages stay; with others they are made anew."""
    case = Case(schedule="1f1b-overlap", splits=(2, 4), num_steps=6, widths=widths)
    (alone, losses) = run_ranks(pipeline_functions.change_partition, 1, Case(num_steps=6, widths=widths), [])[0]
    found = run_ranks(pipeline_functions.change_partition, 3, case, [(1, 3), (0, 5), (4, 4), (2, 3)])
    together: dict[int, str] = {}
    for bits, their_losses in found:
        together |= bits
        assert their_losses == losses
    assert together == alone


def test_partitions_that_cannot_be_taken() -> None:
    first, second = run_ranks(pipeline_functions.repartition_wrongly, 2)
    assert first[0] == (
        "splits: (1, 2), expected 1 splits. A pipeline keeps its number of stages; leave one empty if need be."
    )
    assert first[1] == (
        "blocks of the new stage: [2, 3], expected blocks that are held. "
        "Move their values and optimizer state here first. [rank 0]"
    )
    assert len(second) == 1
