"""Checkpoints of rings that lose no members: the same file, for any number of workers and of rings."""

import signal
from pathlib import Path
from typing import Any

import pytest

from ringweave.param_server.data_shards import remaining_spans
from ringweave.testing.ranks import Ranks
from ringweave.training.checkpoints import store
from tests.fakes.elastic_job import ElasticJob
from tests.param_server.ring.test_rings import TIMEOUT_S, serving
from tests.polling import wait_until
from tests.training.rings.checkpoints import saving_functions
from tests.training.rings.checkpoints.test_killed_jobs import LEAST_STEP, check_goes_on, order_of
from tests.training.rings.elastic import ring_functions
from tests.training.rings.elastic.ring_functions import BATCH, NUM_SAMPLES

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


def run(folder: Path, num_ranks: int, *settings: Any) -> list[dict[str, Any]]:
    keys = folder / "second run"
    with serving(keys, num_ranks) as (server, _):
        where = (server.port, str(keys / "keys"))
        with Ranks(saving_functions.train_together, num_ranks, *where, *settings, timeout_s=TIMEOUT_S) as ranks:
            return ranks.values(timeout_s=TIMEOUT_S)


def killed_run(folder: Path, local_steps: int) -> store.CheckpointFile:
    """Four ranks in two rings, killed in the midst of an epoch; the newest checkpoint."""
    with serving(folder, 4) as (server, _):
        settings = (server.port, str(folder / "keys"), str(folder), 10**6, 2, local_steps, 2, 0.02)
        with Ranks(saving_functions.train_together, 4, *settings, timeout_s=TIMEOUT_S) as ranks:
            wait_until(
                lambda: sum(saved.train_step >= LEAST_STEP for saved in store.list_checkpoints(folder)) >= 2,
                "two checkpoints",
            )
            for rank in range(4):
                ranks.signal(rank, signal.SIGKILL)
            assert [each.exit_code for each in ranks.outcomes()] == [-signal.SIGKILL] * 4
    return store.list_checkpoints(folder)[0]


def check_account(values: list[dict[str, Any]], saved: store.CheckpointFile, state: dict[str, Any]) -> None:
    order = order_of(state["epoch"], state["seed"])
    rest = [
        place for first, count in remaining_spans(state["done"], NUM_SAMPLES) for place in range(first, first + count)
    ]
    epoch, samples = (state["epoch"], [order[each] for each in rest]) if rest else (state["epoch"] + 1, order)
    for at, wanted in ((epoch, samples), (epoch + 1, order)):
        told = [said for value in values for said in value["told"] if said[:2] == ("drawn", at)]
        assert sorted(sample for _, _, each in told for sample in each) == sorted(wanted)
    for value in values:
        assert value["loaded"] == saved.train_step
        assert [each.epoch for each in value["accounts"][:2]] == [epoch, epoch + 1]
        assert all(each.is_exact for each in value["accounts"])
        assert value["told"][0][3] < 0.8 * saving_functions.loss_of(ring_functions.make_model())
        assert value["loss"] < value["told"][0][3]


@pytest.mark.parametrize("local_steps", [0, 3], ids=["every step is pushed", "local steps"])
def test_killed_ranks_go_on_as_another_number_in_other_rings_elastic_or_not(tmp_path: Path, local_steps: int) -> None:
    saved = killed_run(tmp_path, local_steps)
    state = store.read_checkpoint(saved).parts["loader"]
    values = run(tmp_path, 3, str(tmp_path), state["epoch"] + 6, 3, local_steps)
    check_account(values, saved, state)
    saved = store.list_checkpoints(tmp_path)[0]
    state = store.read_checkpoint(saved).parts["loader"]
    assert saved.train_step <= NUM_SAMPLES // BATCH * (state["epoch"] + 1)
    settings = (str(tmp_path), state["epoch"] + 6, 1, local_steps)
    with ElasticJob(saving_functions.train, 2, *settings, services=("server",)) as job:
        check_goes_on(job, 2, saved, state)


def test_a_pass_that_was_broken_off_is_over_and_a_checkpoint_is_loaded_before_the_first_one(tmp_path: Path) -> None:
    with serving(tmp_path, 2) as (server, _):
        where = (server.port, str(tmp_path / "keys"), str(tmp_path / "checkpoints"))
        with Ranks(saving_functions.break_off, 2, *where, timeout_s=TIMEOUT_S) as ranks:
            values = ranks.values(timeout_s=TIMEOUT_S)
    for before, state, error in values:
        assert before == 0
        assert (state["epoch"], state["done"]) == (1, [])
        assert "checkpoint to go on from: 'one after the first pass has begun', expected it before" in error
