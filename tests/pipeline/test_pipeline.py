"""Stages on several ranks against all blocks on one: every bit is the same."""

import itertools

import pytest

from ringweave.testing.ranks import run_ranks
from tests.pipeline import order_functions, pipeline_functions
from tests.pipeline.pipeline_functions import Case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WAIT_S = 300.0
"""For ranks that train many times, on a busy machine."""
SCHEDULES = ["gpipe", "1f1b", "1f1b-overlap"]
PARTITIONS = [(1, 3), (2, 4), (0, 3), (2, 2), (3, 5)]
ORDERS = [
    ((2,), "0F0,0F1,0B0,0B1 1F1,1B1,1F0,1B0"),
    ((1, 3), "0F0,0F1,0F2,0B0,0B1,0B2 1F2,1F0,1F1,1B1,1B2,1B0 2F1,2B1,2F0,2F2,2B2,2B0"),
]
UNEQUAL_WIDTHS = (pipeline_functions.FEATURES, 16, 8, 12, 16)


@pytest.mark.timeout(WAIT_S + 120)
def test_every_partition_and_schedule_has_the_bits_of_one_device() -> None:
    (alone, losses, held_out) = run_ranks(pipeline_functions.train, 1, Case())[0]
    cases = [Case(schedule=name, splits=splits) for name, splits in itertools.product(SCHEDULES, PARTITIONS)]
    found = run_ranks(pipeline_functions.train_all, 3, cases, wait_s=WAIT_S)
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


def test_replicas_train_as_one_process_on_the_whole_batch() -> None:
    alone, _ = pipeline_functions.train_plainly(5)
    for held, _ in run_ranks(pipeline_functions.train_replicas, 4, (2,), 2, 5):
        assert held
        for index, values in held.items():
            assert values == pytest.approx(alone[index], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_add_up_as_in_a_plain_loop(reduction: str) -> None:
    """Three batches before an update, and microbatches that are no power of two."""
    alone, losses = pipeline_functions.accumulate_plainly(reduction)
    for by_schedule in run_ranks(pipeline_functions.accumulate, 3, (1, 3), 1, SCHEDULES, reduction):
        for held, their_losses in by_schedule:
            _check_close(held, alone)
            assert their_losses == pytest.approx(losses, rel=1e-12)


def test_batches_add_up_with_replicas() -> None:
    """What was averaged once is not averaged again with the next batch."""
    for reduction in ("mean", "sum"):
        alone, losses = pipeline_functions.accumulate_plainly(reduction)
        for ((held, their_losses),) in run_ranks(pipeline_functions.accumulate, 4, (2,), 2, ["1f1b"], reduction):
            _check_close(held, alone)
            assert their_losses == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(("splits", "order"), ORDERS, ids=["two stages", "three stages"])
def test_every_stage_may_take_microbatches_in_an_order_of_its_own(splits: tuple[int, ...], order: str) -> None:
    """What arrives, losses and outputs are those of the microbatch that they are taken for."""
    num_stages, text = len(splits) + 1, order.replace(" ", "\n")
    alone = order_functions.run_plainly(len(order.split(maxsplit=1)[0].split(",")) // 2)
    found = run_ranks(order_functions.run, num_stages, text, splits)
    for each in found:
        _check_close(each.gradients, {index: alone.gradients[index] for index in each.gradients})
        assert each.losses == pytest.approx(alone.losses, rel=1e-12)
        assert each.held_out == pytest.approx(alone.held_out, rel=1e-12)
    assert found[-1].output == pytest.approx(alone.output, rel=1e-9, abs=1e-12)
    assert all(each.output is None for each in found[:-1])


def _check_close(held: dict[int, list[float]], alone: dict[int, list[float]]) -> None:
    assert held
    for index, values in held.items():
        assert values == pytest.approx(alone[index], rel=1e-9, abs=1e-12)


def test_one_verdict_on_infinite_gradients_for_all_stages() -> None:
    (alone, scale) = run_ranks(pipeline_functions.scale_losses, 1, ())[0]
    assert scale == 2.0**9, "halved once"
    together: dict[int, str] = {}
    for bits, their_scale in run_ranks(pipeline_functions.scale_losses, 2, (2,)):
        together |= bits
        assert their_scale == scale
    assert together == alone


def test_outputs_come_from_the_last_stage() -> None:
    alone = run_ranks(pipeline_functions.outputs, 1, ())[0]
    assert run_ranks(pipeline_functions.outputs, 2, (3,)) == [None, alone]


def test_batches_of_another_form_are_refused() -> None:
    first, second = run_ranks(pipeline_functions.give_wrong_batches, 1)[0]
    assert first == (
        "batch, input 0: (23, 6), expected samples in its first dimension, a multiple of 4, "
        "the number of microbatches. Choose another batch size."
    )
    assert second == (
        "batch: {'input 0': (28, 6)}, expected {'input 0': (24, 6)}, as in the example. "
        "Drop an incomplete last batch (drop_last=True), and give the same side inputs. [rank 0]"
    )
