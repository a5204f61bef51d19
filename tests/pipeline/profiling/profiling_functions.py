"""What real processes measure."""

from typing import Any

import torch
from torch import nn

from ringweave.pipeline import Pipeline, Settings, profiling
from ringweave.pipeline.adapting import adapt, build_workload
from ringweave.pipeline.profiling import StageLink
from ringweave_bench.virtual_device import TimedBlock, VirtualDevice
from tests.clock import Clock
from tests.pipeline.pipeline_functions import make_optimizer

NUM = 3
SPEEDS, WORK_S = (1.0, 0.5), 0.02


def measure() -> dict[str, Any]:
    """A profile of two kinds of blocks on two devices, by their own clock; links, and what is predicted from both."""
    import torch.distributed as dist

    torch.manual_seed(0)
    ticks = Clock()
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


def measure_under_autocast() -> profiling.Profile:
    """Of two blocks that give another type than their parameters have; a pipeline of them then adapts and trains."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Linear(8, 8), nn.Linear(8, 8)]
    settings = Settings(num_microbatches=NUM, autocast=torch.bfloat16)
    pipeline = Pipeline(blocks, nn.MSELoss(), make_optimizer, torch.empty(4 * NUM, 8), settings)
    profile = profiling.profile(pipeline, make_optimizer, rounds=1)
    adapt(pipeline, make_optimizer, profile_rounds=1)
    assert pipeline.train_step(torch.ones(4 * NUM, 8), target=torch.zeros(4 * NUM, 8)) > 0
    return profile


def measure_encoded() -> tuple[profiling.Profile, int, tuple[tuple[float, ...], ...]]:
    """Of blocks whose outputs travel in int8; a pipeline of them then adapts and trains; also bytes of a message."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8)]
    settings = Settings(num_microbatches=NUM, wire="int8")
    pipeline = Pipeline(blocks, nn.MSELoss(), make_optimizer, torch.empty(64 * NUM, 8), settings)
    profile = profiling.profile(pipeline, make_optimizer, rounds=2)
    links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, 1000, rounds=1)
    work = build_workload(pipeline, profile, links)
    adapt(pipeline, make_optimizer, profile_rounds=1)
    assert pipeline.train_step(torch.ones(64 * NUM, 8), target=torch.zeros(64 * NUM, 8)) > 0
    return profile, 24 + 8 * 64 + 64 * 64, work.coding_s


def rehearse(schedule: str) -> dict[str, Any]:
    """Overheads by a clock that only waits move on, and by a real one."""
    torch.manual_seed(0)
    ticks = Clock()
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(4)]
    settings = Settings(num_microbatches=NUM, schedule=schedule)
    pipeline = Pipeline(blocks, nn.CrossEntropyLoss(), make_optimizer, torch.empty(4 * NUM, 8), settings)
    links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, 1000, rounds=1)
    x, y = torch.randn(4 * NUM, 8), torch.zeros(4 * NUM, dtype=torch.int64)
    pipeline.train_step(x, target=y)
    before, drawn = str(list(pipeline.blocks[pipeline.blocks.held[0]].state_dict().items())), torch.get_rng_state()
    ideal = profiling.measure_overheads(pipeline, links, rounds=1, clock=ticks, sleep=ticks.sleep)
    real = profiling.measure_overheads(pipeline, links, target=y, rounds=2)
    slow, slept = (StageLink(latency_s=0.01, s_per_byte=0.0),), []
    profiling.measure_overheads(pipeline, (slow, slow), rounds=1, clock=ticks, sleep=slept.append)
    after = str(list(pipeline.blocks[pipeline.blocks.held[0]].state_dict().items()))
    is_untouched = before == after and torch.equal(drawn, torch.get_rng_state())
    pipeline.train_step(x, target=y)
    return {"ideal": ideal, "real": real, "slept_s": set(slept), "is_untouched": is_untouched}
