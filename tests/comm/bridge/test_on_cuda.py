"""The bridge on a real GPU, which all ranks share; skipped where there is none."""

import pytest
import torch

from ringweave.testing.ranks import run_ranks
from tests.comm.bridge import cuda_functions

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU: there is none here"),
]
BRIDGE = {"RINGWEAVE_DEVICE_PATH": "bridge"}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["ring", "multi-level"])
def test_sums_by_a_schedule(num_ranks: int, schedule: str) -> None:
    sizes = [1, 2, 1003, 300_001, 5_000_000]
    environ = {"RINGWEAVE_SCHEDULE": schedule}
    for counters in run_ranks(cuda_functions.reduce_on_cuda, num_ranks, sizes, environ=environ):
        assert sum(each["collectives"] for each in counters.values()) == len(sizes) + 4
        assert num_ranks == 1 or counters[schedule]["collectives"] >= 2


def test_ranks_that_share_a_gpu_use_the_bridge() -> None:
    ranks = torch.cuda.device_count() + 1
    for counters in run_ranks(cuda_functions.reduce_on_cuda, ranks, [1003, 5_000_000]):
        assert counters["native"]["collectives"] < 6, "5,000,000 elements go by a schedule"


def test_streams_and_memory() -> None:
    run_ranks(cuda_functions.reduce_behind_a_busy_stream, 2, 50, environ=BRIDGE)


def test_other_collectives_go_by_gloo() -> None:
    for text in run_ranks(cuda_functions.collectives_without_nccl, 2, environ=BRIDGE):
        assert "send by Gloo" in text


def test_ddp_trains_alike_on_all_ranks() -> None:
    losses = run_ranks(cuda_functions.train_by_ddp, 3, 8, environ=BRIDGE)
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1] < losses[0][0]
