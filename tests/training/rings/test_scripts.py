"""What scripts do in the modes with a server: accumulate, clip, schedule, scale; a real server, real processes."""

from pathlib import Path

import pytest

from ringweave.testing.ranks import Ranks
from tests.param_server.ring.test_rings import TIMEOUT_S, serving
from tests.training.rings import ring_training
from tests.training.training_functions import Case

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]

CASES = {
    "uneven last batch": Case(num_steps=40),
    "accumulation, clipping and schedule": Case(accumulate=3, clips=True, schedules=True, num_steps=42),
    "accumulation without communication": Case(accumulate=2, uses_no_sync=True, num_steps=40),
    "sum": Case(reduction="sum", num_steps=40),
}


def run(folder: Path, function: object, num_ranks: int, *settings: object) -> list:
    with (
        serving(folder, num_ranks) as (server, _),
        Ranks(function, num_ranks, server.port, str(folder / "keys"), *settings, timeout_s=TIMEOUT_S) as ranks,
    ):
        return ranks.values(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_in_one_ring_weights_equal_those_of_one_process(tmp_path, case):
    assert max(run(tmp_path, ring_training.distance_in_one_ring, 2, case)) < 1e-9


def test_in_two_rings_sums_are_sums_of_whole_batches(tmp_path):
    for part, num_rings in run(tmp_path, ring_training.sum_in_two_rings, 2):
        assert num_rings == 2
        assert part == pytest.approx(1, abs=0.05)


def test_what_the_server_would_go_on_without_is_refused(tmp_path):
    state = "state of the optimizer: 'of steps that it has taken', expected none: in this mode the optimizer is the"
    ahead = "batches that rank 1 loads ahead (num_workers x prefetch_factor): 2, expected 0 as on rank 0"
    for first, second, third in run(tmp_path, ring_training.refusals, 2):
        assert first.startswith(state)
        assert second.startswith(ahead)
        assert third == first


def test_a_model_that_was_under_ddp_belongs_to_its_ring(tmp_path):
    assert run(tmp_path, ring_training.wrapped_before, 2) == [(1, True)] * 2


def test_a_scaler_leaves_a_step_out_on_all_ranks_of_a_ring(tmp_path):
    assert max(run(tmp_path, ring_training.distance_with_scaler, 2, 12)) < 1e-9


def test_a_ring_clips_what_it_pushes(tmp_path):
    """No train step of plain SGD is longer than what each ring clips to, whatever rings leave out or accumulate."""
    num_epochs, max_norm = 2, 1e-3
    for moved, num_steps, is_exact in run(tmp_path, ring_training.clip_in_two_rings, 3, num_epochs, max_norm):
        assert is_exact
        assert 0.1 * max_norm < moved <= num_epochs * num_steps * max_norm * (1 + 1e-6)


def test_auto_parts_its_one_ring_when_ranks_begin_to_stall(tmp_path):
    for rings, are_exact in run(tmp_path, ring_training.stall_in_one_ring, 2, 2):
        assert are_exact
        assert rings[0] == ((0, 1),)
        assert sorted(rings[1]) == sorted(rings[2]) == [(0,), (1,)]
