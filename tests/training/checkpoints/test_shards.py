"""Checkpoints of sharded models: saved by some ranks, gone on from by others, whole or damaged."""

from pathlib import Path

import pytest

from ringweave.testing.ranks import run_ranks
from ringweave.training.checkpoints import store
from tests.training import sharded_functions
from tests.training.training_functions import Case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE = Case(num_steps=9)
FIRST, SECOND = 5, 4


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of the same steps in one process that is never stopped."""
    folder = str(tmp_path_factory.mktemp("alone"))
    (found,) = run_ranks(sharded_functions.losses_of, 1, CASE, None, folder, FIRST + SECOND, 0)
    return found


def check_same(found: list[list[float]], wanted: list[float]) -> None:
    assert all(each == found[0] for each in found)
    assert found[0] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        pytest.param((4,), (4,), marks=pytest.mark.thorough),
        ((4,), (3,)),
        pytest.param((2, 2), (2,), marks=pytest.mark.thorough),
        ((2,), (2, 2)),
        ((4,), None),
        (None, (3,)),
    ],
    ids=["same", "4 on 3", "2 x 2 on 2", "2 on 2 x 2", "4 on one that is not sharded", "one that is not sharded on 3"],
)
def test_losses_go_on_as_if_nothing_had_happened(
    tmp_path: Path, losses: list[float], saved_by: tuple[int, ...] | None, loaded_by: tuple[int, ...] | None
) -> None:
    def num_ranks(shape: tuple[int, ...] | None) -> int:
        return 1 if shape is None else shape[0] * shape[-1] ** (len(shape) - 1)

    folder = str(tmp_path)
    found = run_ranks(sharded_functions.losses_of, num_ranks(saved_by), CASE, saved_by, folder, FIRST, SECOND)
    check_same(found, losses[:FIRST])
    assert len(store.list_shards(tmp_path)) == (num_ranks(saved_by) if saved_by else 0)
    found = run_ranks(sharded_functions.losses_of, num_ranks(loaded_by), CASE, loaded_by, folder, FIRST, SECOND)
    check_same(found, losses[FIRST:])


def test_a_step_that_is_not_complete_or_damaged_is_passed_over(tmp_path: Path, losses: list[float]) -> None:
    folder, shape = str(tmp_path), (2,)
    run_ranks(sharded_functions.losses_of, 2, CASE, shape, folder, 3, 6)
    run_ranks(sharded_functions.losses_of, 2, CASE, shape, folder, 6, 3)
    run_ranks(sharded_functions.losses_of, 2, CASE, shape, folder, 9, 0)
    steps = [files[0].train_step for files in store.complete_sets(tmp_path)]
    assert steps == [9, 6, 3]
    newest, middle, _ = store.complete_sets(tmp_path)
    newest[1].path.unlink()
    middle[1].path.write_bytes(middle[1].path.read_bytes()[:-8] + b"\1" * 8)
    found = run_ranks(sharded_functions.losses_of, 2, CASE, shape, folder, 9, 0, False)
    check_same(found, losses[3:])


def test_only_complete_checkpoints_count_among_those_that_are_kept(tmp_path: Path) -> None:
    kept = run_ranks(sharded_functions.steps_that_are_kept, 2, str(tmp_path), 7)
    assert kept[0] == kept[1] == [7, 6, 5]
    left = {saved.train_step for saved in store.list_shards(tmp_path)}
    assert left - {4} == {5, 6, 7}, "and perhaps 4 of the rank that was the first to end"


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path: Path) -> None:
    run_ranks(sharded_functions.losses_of, 2, CASE, (2,), str(tmp_path / "0"), FIRST, SECOND)
    text = "sharded checkpoint of step 5: 'not all of its files on rank 1', expected a folder that all ranks reach"
    for said in run_ranks(sharded_functions.load_elsewhere, 2, CASE, str(tmp_path)):
        assert text in said
