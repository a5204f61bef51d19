"""Forced schedules on the tensors of real accelerators; skipped where there are none."""

import pytest
import torch

from ringweave.testing.ranks import run_ranks
from tests.comm.running import device_functions

NUM_GPUS = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
RING = {"RINGWEAVE_SCHEDULE": "ring"}

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU and NCCL: there is none here"),
]
by_two = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two GPUs, one for each rank: {NUM_GPUS} here")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=by_two)])
def test_sums_of_a_forced_schedule(num_ranks: int) -> None:
    """One element for two ranks: one of them has no piece in a round."""
    sizes = [1, 2, 1003, 300_001]
    for counters in run_ranks(device_functions.reduce_on_device, num_ranks, sizes, environ=RING):
        assert counters["ring"]["collectives"] == len(sizes) + 3
        assert "native" not in counters


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=by_two)])
def test_without_a_forced_schedule_nccl_does_it(num_ranks: int) -> None:
    for counters in run_ranks(device_functions.reduce_on_device, num_ranks, [1003]):
        assert set(counters) == {"native"}
        assert counters["native"]["collectives"] == 4


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=by_two)])
def test_what_nccl_does_not_send_is_refused_and_the_group_goes_on(num_ranks: int) -> None:
    for text in run_ranks(device_functions.refuse_on_device, num_ranks, environ=RING):
        assert "reduce operation sum on an accelerator: 'torch.uint16', expected a dtype that NCCL sends" in text
