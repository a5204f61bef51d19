"""Stages of several devices against one process: gradients, losses and parameters are the same to 1e-9."""

import pytest

from ringweave.testing.ranks import run_ranks
from tests.pipeline import wide_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCHEDULES = ["gpipe", "1f1b", "1f1b-overlap"]
CASES = [
    ("1:8 0:8", (3,), "mean"),
    ("0:3+1:5 2:8", (3,), "mean"),
    ("0:8 1:1+2:7", (2,), "mean"),
    ("0:8 2:3+1:5", (2,), "sum"),
    ("0:3+2:5 1:6+3:2", (3,), "mean"),
    ("1:2+3:6 0:8 2:8", (2, 4), "mean"),
    ("0:2+1:3+2:3 3:4+4:4", (4,), "mean"),
]


@pytest.mark.parametrize(("devices", "splits", "reduction"), CASES)
def test_unequal_devices_of_a_stage_train_as_one_process(devices: str, splits: tuple[int, ...], reduction: str) -> None:
    num_ranks = devices.count(":")
    alone, losses = wide_functions.train_alone(reduction=reduction)
    for by_schedule in run_ranks(wide_functions.train_wide, num_ranks, devices, splits, SCHEDULES, reduction):
        assert len(by_schedule) == len(SCHEDULES)
        for held, their_losses, of_microbatches in by_schedule:
            assert held
            for index, values in held.items():
                assert values == pytest.approx(alone[index], rel=1e-9, abs=1e-12)
            assert their_losses == pytest.approx(losses, rel=1e-9)
            assert len(of_microbatches) == wide_functions.NUM_MICROBATCHES


def test_replicas_of_a_pipeline_of_wide_stages() -> None:
    alone, losses = wide_functions.train_alone(num_replicas=2)
    for by_schedule in run_ranks(wide_functions.train_wide, 6, "0:3+1:5 2:8", (3,), ["1f1b"]):
        held, their_losses, _ = by_schedule[0]
        for index, values in held.items():
            assert values == pytest.approx(alone[index], rel=1e-9, abs=1e-12)
        assert their_losses == pytest.approx(losses, rel=1e-9)


def test_samples_change_between_two_steps() -> None:
    alone, losses = wide_functions.train_alone()
    found = run_ranks(wide_functions.train_wide, 3, "0:3+1:5 2:8", (3,), ["1f1b"], "mean", "0:6+1:2 2:8")
    for by_schedule in found:
        held, their_losses, _ = by_schedule[0]
        for index, values in held.items():
            assert values == pytest.approx(alone[index], rel=1e-9, abs=1e-12)
        assert their_losses == pytest.approx(losses, rel=1e-9)


def test_gradients_add_up_and_are_the_same_on_all_devices_of_a_stage() -> None:
    alone = run_ranks(wide_functions.wide_gradients, 1, "0:8", (), "1f1b")[0]
    first, second, last = run_ranks(wide_functions.wide_gradients, 3, "0:3+1:5 2:8", (3,), "1f1b-overlap")
    assert first == second
    for index, values in {**first, **last}.items():
        assert values == pytest.approx(alone[index], rel=1e-9, abs=1e-12)


def test_wide_stages_that_do_not_fit_are_refused() -> None:
    texts = run_ranks(wide_functions.wide_errors, 3)[0]
    assert texts == [
        "samples of devices: 7, expected 8, as many as a microbatch has. "
        "Give the devices of each stage as many, or change the batch size or the number of microbatches.",
        "number of workers: 3, expected a multiple of 2, the number of devices in all stages. "
        "Start as many workers, or cut the model into another number of stages.",
        "stages: 2, expected 3, one more than there are splits. Give one of the two.",
        "devices of stages: '0:8 1:4+2:4', expected those of 0:3+1:5 2:8. "
        "Change samples and splits only; other devices need another start.",
        "samples of devices: 7, expected 8, as a microbatch has. Share these.",
    ]


def test_a_block_that_moves_samples_to_another_dimension_is_refused() -> None:
    assert run_ranks(wide_functions.transposed_error, 3)[0] == (
        "tensor between blocks: [(6, 2)], expected 2 of the rows of [(6, 6)] for 2 samples. "
        "Give each stage one device. [boundary behind block 1]"
    )


def test_blocks_move_between_stages_of_several_devices() -> None:
    """Each device of the new stage gets a copy; samples change on the way, also without a block that moves."""
    alone, _ = wide_functions.train_alone()
    moves = [((5,), ""), ((2,), "0:6+1:2 2:8"), ((2,), "0:1+1:7 2:8")]
    found = run_ranks(wide_functions.train_moving, 3, "0:3+1:5 2:8", moves)
    together: dict[int, list[float]] = {}
    for held, outcomes, devices in found:
        assert [outcome.splits for outcome in outcomes] == [splits for splits, _ in moves]
        assert all(outcome.is_done for outcome in outcomes), [outcome.cause for outcome in outcomes]
        assert devices == "0:1+1:7 2:8"
        together |= held
        for index, values in held.items():
            assert values == pytest.approx(alone[index], rel=1e-9, abs=1e-12)
    assert together.keys() == alone.keys()
    assert [sorted(held) for held, _, _ in found] == [[0, 1], [0, 1], [3, 4, 5]]


def test_samples_follow_the_measured_speeds_of_a_stages_devices() -> None:
    """By a clock that computing alone moves on: rank 0's device becomes three times slower than its neighbour."""
    found = run_ranks(wide_functions.follow_speeds, 3, 60, 28, 3.0, backend="gloo")
    assert all(each == found[0] for each in found)
    devices, splits, outcomes = found[0]
    assert (devices, splits) == ("0:2+1:6 2:8", (1,))
    assert any(outcome.is_done for outcome in outcomes)
