"""What real processes do in tests of pipelines that adapt."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ringweave.pipeline import Pipeline, Settings
from ringweave.pipeline.adapting import LinkRateProber, PipelineRebalancer, adapt
from ringweave.pipeline.migration import MigrationOutcome
from ringweave.planning.repartition import MeasurementWindow, PipelineConditions, PipelineWorkload, RepartitionPolicy
from ringweave.telemetry import EventLog
from ringweave_bench.virtual_device import TimedBlock, VirtualDevice
from tests.clock import Clock

WIDTH, BLOCKS, MICROBATCHES = 8, 12, 4


@dataclass
class Found:
    """What a rank has in the end."""

    splits: tuple[int, ...]
    outcomes: list[MigrationOutcome]
    computed: list[MeasurementWindow]


def make_optimizer(block: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(block.parameters(), lr=1e-3)


def make_pipeline(device: VirtualDevice, forward_s: float = 0.001) -> Pipeline:
    torch.manual_seed(0)
    inner = [nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)]
    blocks = [TimedBlock(each, forward_s, 2 * forward_s, device) for each in inner]
    settings = Settings(num_microbatches=MICROBATCHES, schedule="1f1b-overlap", device=torch.device("cpu"))
    return Pipeline(blocks, nn.MSELoss(), make_optimizer, torch.empty(2 * MICROBATCHES, WIDTH), settings)


def slow_down(log: str, num_steps: int, at: int, factor: float) -> Found:
    """From a step on rank 0's device takes `factor` times as long."""
    os.environ["RINGWEAVE_RUN_DIR"] = log
    ticks = Clock()
    device = VirtualDevice(clock=ticks, sleep=ticks.sleep)
    pipeline = make_pipeline(device)
    balancer = adapt(pipeline, make_optimizer, RepartitionPolicy(window_steps=4), profile_rounds=1, clock=ticks)
    x = torch.ones(2 * MICROBATCHES, WIDTH)
    for step in range(num_steps):
        if step == at and pipeline.rank == 0:
            device.speed = 1 / factor
        pipeline.train_step(x, target=x)
    return Found(pipeline.layout.splits, balancer.outcomes, [])


class Windows(EventLog):
    """Keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[dict] = []

    def write(self, kind: str, **fields: object) -> None:
        self.events.append({"kind": kind, **fields})


def measure_only(accumulated: int) -> list[dict]:
    """Events of rank 0 under times that nobody waits for: computing is counted by a clock of ticks."""
    ticks = Clock()
    pipeline = make_pipeline(VirtualDevice(clock=ticks, sleep=ticks.sleep))
    work = PipelineWorkload(
        forward_s=((0.001,) * BLOCKS,), backward_s=((0.002,) * BLOCKS,), num_devices=2, num_microbatches=MICROBATCHES
    )
    log = Windows()
    balancer = PipelineRebalancer(
        pipeline,
        work,
        PipelineConditions(speeds=(1.0, 1.0)),
        RepartitionPolicy(window_steps=3, drift=1e6),
        log=log,
        clock=ticks,
    )
    assert (balancer.controller is None) == (pipeline.rank != 0)
    x = torch.ones(2 * MICROBATCHES, WIDTH)
    # Two steps that do not count, two windows, and two in which numbers and rank 0's word travel.
    for _ in range(2 + 6 + 2):
        for _ in range(accumulated):
            pipeline.forward_backward(x, target=x)
            pipeline.evaluate(x, target=x)
        pipeline.optimizer.step()
        pipeline.optimizer.zero_grad()
    return log.events


def probe() -> tuple[list[int], list[list[tuple[float, ...]]]]:
    """(bytes of a message, rates of two probes)."""
    pipeline = make_pipeline(VirtualDevice())
    prober = LinkRateProber(pipeline, (1.0, 1e8, 0.0), drift=1.000001)
    return prober.num_bytes, [prober.probe(), prober.probe()]


class Slower:
    """A clock on which everything takes `factor` times as long."""

    def __init__(self) -> None:
        self.factor, self._at_s, self._now_s = 1.0, time.perf_counter(), 0.0

    def __call__(self) -> float:
        at_s = time.perf_counter()
        self._now_s += (at_s - self._at_s) * self.factor
        self._at_s = at_s
        return self._now_s


def probe_slower(factor: float) -> list[tuple[float, ...]]:
    """Rates of links on which every message suddenly takes longer."""
    clock = Slower()
    prober = LinkRateProber(make_pipeline(VirtualDevice()), (1e8,), drift=1.15, clock=clock)
    clock.factor = factor
    return prober.probe()


def events_of(folder: Path) -> Path:
    return folder / "events.jsonl"
