"""Training that goes on with another number of ranks, or on other disks, computes what it would have computed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ringweave.testing.ranks import run_ranks
from ringweave.training.checkpoints import store
from tests.fakes.elastic_job import ElasticJob
from tests.training.checkpoints import rank_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


def samples(results: list[dict[str, Any]]) -> list[int]:
    return list(itertools.chain.from_iterable(result["seen"] for result in results))


def check_rest(before: list[dict[str, Any]], after: list[dict[str, Any]], num_steps: int) -> None:
    """After so many steps the others have trained on the rest of the epoch, and come to what one process does."""
    assert {(result["done"], result["epoch"]) for result in after} == {(num_steps, 0)}
    assert len(samples(before)) == num_steps * rank_functions.BATCH
    assert sorted(samples(before) + samples(after)) == list(range(rank_functions.NUM_SAMPLES))
    assert all(result["exact"] for result in after)
    assert all(result["weights"] == after[0]["weights"] for result in after)
    difference = torch.tensor(after[0]["weights"]) - torch.tensor(rank_functions.weights_of_one_process())
    assert difference.abs().max() < 1e-9


@pytest.mark.parametrize(("first", "then"), [(3, 2), (2, 3)])
def test_another_number_of_ranks_goes_on_with_the_next_sample(tmp_path: Path, first: int, then: int) -> None:
    before = run_ranks(rank_functions.go_on, first, tmp_path, 4)
    after = run_ranks(rank_functions.go_on, then, tmp_path, None)
    check_rest(before, after, 4)


def run_elastic(num_workers: int, folder: Path, num_steps: int | None, mode: str) -> list[dict[str, Any]]:
    with ElasticJob(rank_functions.go_on, num_workers, folder, num_steps, mode) as job:
        outcomes = [job.outcome(member) for member in job.members]
        assert [each.error for each in outcomes] == [""] * num_workers
        return [each.value for each in outcomes]


@pytest.mark.parametrize("mode", ["balanced", "sync"])
def test_what_an_elastic_job_has_saved_another_number_of_workers_goes_on_with_elastic_or_not(
    tmp_path: Path, mode: str
) -> None:
    before = run_elastic(3, tmp_path, 4, mode)
    check_rest(before, run_elastic(2, tmp_path, None, mode), 4)
    check_rest(before, run_ranks(rank_functions.go_on, 2, tmp_path, None, mode), 4)


def test_ranks_that_cannot_reach_the_disk_get_the_state_from_one_that_can(tmp_path: Path) -> None:
    before = run_ranks(rank_functions.go_on_apart, 2, tmp_path, 3)
    assert [saved.rank for saved in store.list_checkpoints(tmp_path / "disk-of-1")] == [1]
    after = run_ranks(rank_functions.go_on_apart, 3, tmp_path, None)
    assert {result["done"] for result in after} == {3}
    assert all(result["weights"] == after[0]["weights"] for result in after)
    assert sorted(samples(before) + samples(after)) == list(range(rank_functions.NUM_SAMPLES))


def test_what_is_saved_before_the_first_batch_has_the_place_that_was_loaded(tmp_path: Path) -> None:
    before = run_ranks(rank_functions.go_on, 2, tmp_path, 4)
    assert run_ranks(rank_functions.load_and_save, 2, tmp_path) == [4, 4]
    after = run_ranks(rank_functions.go_on, 2, tmp_path, None)
    assert sorted(samples(before) + samples(after)) == list(range(rank_functions.NUM_SAMPLES))


def test_each_rank_has_random_numbers_of_its_own_and_they_go_on(tmp_path: Path) -> None:
    saved = run_ranks(rank_functions.draw_saving, 2, tmp_path, 1)
    assert saved[0] != saved[1]
    assert run_ranks(rank_functions.draw_loading, 2, tmp_path, 5) == saved
    anew = run_ranks(rank_functions.draw_loading, 3, tmp_path, 5)
    assert saved[0] not in anew, "with other ranks they begin anew"
