"""Pipelines of virtual devices for benches: blocks that wait, on devices of given speeds."""

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ringweave.pipeline import Pipeline, Settings
from ringweave_bench.virtual_device import TimedBlock, VirtualDevice

WIDTH, SAMPLES = 32, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Properties of a pipeline of virtual devices."""

    work_s: tuple[float, ...]
    """Forward seconds of each block on a device of speed 1; backward takes twice that."""
    speeds: tuple[float, ...]
    """Speed of each device."""
    schedule: str
    num_microbatches: int
    splits: tuple[int, ...] | None = None
    """None: as many blocks on each device."""
    width: int = WIDTH
    """Float32 numbers per sample between blocks."""
    samples: int = SAMPLES
    """Samples per microbatch."""
    wire: str = "exact"
    """Format of what passes from stage to stage."""


def make_optimizer(block: nn.Module) -> torch.optim.Optimizer:
    """Plain and cheap."""
    return torch.optim.SGD(block.parameters(), lr=1e-3)


def make_pipeline(setting: Setting) -> Pipeline:
    """Make this rank's part of the pipeline; all ranks make the same call."""
    torch.manual_seed(0)
    device = VirtualDevice(setting.speeds[int(os.environ["RANK"])])
    blocks = [
        TimedBlock(nn.Linear(setting.width, setting.width), work_s, 2 * work_s, device) for work_s in setting.work_s
    ]
    settings = Settings(
        num_microbatches=setting.num_microbatches,
        schedule=setting.schedule,
        splits=setting.splits,
        wire=setting.wire,
        device=CPU,
    )
    return Pipeline(blocks, nn.MSELoss(), make_optimizer, batch(setting), settings)


def batch(setting: Setting) -> torch.Tensor:
    """Inputs; targets may be the same."""
    return torch.ones(setting.num_microbatches * setting.samples, setting.width)


def step_times(pipeline: Pipeline, setting: Setting, num_steps: int, warm_ups: int = 1) -> list[float]:
    """Measured seconds of train steps, after some that are not counted: in the first one torch connects the stages."""
    x = batch(setting)
    found = []
    for _ in range(warm_ups + num_steps):
        begun_s = time.perf_counter()
        pipeline.train_step(x, target=x)
        found.append(time.perf_counter() - begun_s)
    return found[warm_ups:]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many per cent of the values are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def commit() -> str:
    """Return the environment with the sources' paths."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()


CPU = torch.device("cpu")
