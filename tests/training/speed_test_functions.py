"""The speed test on real ranks."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore

from ringweave.training.speed_test import Referee, SpeedTest, measure


def run_test(num_rings: int, delays_s: list[float | None], timeout_s: float) -> SpeedTest | None:
    """Each rank takes as long as it is told; None never reports. Who takes any time comes after those who take none."""
    rank = dist.get_rank()
    store = PrefixStore("speed/", dist.distributed_c10d._get_default_store())
    referee = Referee(store, rank, dist.get_world_size(), timeout_s=timeout_s)
    delay_s = delays_s[rank]
    if delay_s is None:
        return None
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def trial(module: nn.Module) -> torch.Tensor:
        time.sleep(delay_s)
        if delay_s:  # however long a busy machine makes the others take
            store.wait([f"arrival/{sum(each == 0 for each in delays_s)}"])
        return module(torch.ones(2, 4)).sum()

    dist.barrier(group=dist.new_group([r for r, d in enumerate(delays_s) if d is not None], backend="gloo"))
    referee.report(measure(model, trial))
    return referee.form_rings(num_rings)
