"""What real processes measure."""

from typing import Any

import torch
from torch import nn

from ringweave.pipeline import Pipeline, Settings, profiling
from ringweave.pipeline.virtual import TimedBlock, VirtualDevice
from tests.pipeline.adapting.adapting_functions import Ticks
from tests.pipeline.pipeline_functions import make_optimizer

SPEEDS, WORK_S = (1.0, 0.5), 0.02


def measure() -> dict[str, Any]:
    """A profile of two kinds of blocks on two devices, by their own clock; links, and what is predicted from both."""
    import torch.distributed as dist

    torch.manual_seed(0)
    ticks = Ticks()
    device = VirtualDevice(SPEEDS[dist.get_rank()], clock=ticks, sleep=ticks.sleep)
    timed = [TimedBlock(nn.Linear(8, 8), WORK_S, 2 * WORK_S, device) for _ in range(3)]
    blocks: list[nn.Module] = [*timed, nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))]
    pipeline = Pipeline(blocks, nn.MSELoss(), make_optimizer, torch.empty(12, 8), Settings(num_microbatches=3))
    before = {index: str(pipeline.blocks[index].state_dict()) for index in pipeline.blocks.held}
    drawn = torch.get_rng_state()
    profile = profiling.profile(pipeline, make_optimizer, rounds=3, clock=ticks)
    links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, 1000, rounds=2)
    return {
        "profile": profile,
        "links": links,
        "is_untouched": before == {index: str(pipeline.blocks[index].state_dict()) for index in pipeline.blocks.held}
        and torch.equal(drawn, torch.get_rng_state()),
        "step_s": profiling.predict(profile, links, pipeline.layout.splits, pipeline.order).step_s,
        "best": profiling.partition(profile, links, num_microbatches=3).splits,
    }
