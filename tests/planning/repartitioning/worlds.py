"""A pipeline that trains on virtual time: what a controller sees, and what its rulings make of it."""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ringweave.planning.repartition import (
    LinkProbeScheduler,
    MeasurementWindow,
    PipelineConditions,
    PipelineWorkload,
    RepartitionController,
    RepartitionDecision,
    RepartitionPolicy,
)

LATE_STEPS = 2
"""From a window's end until all ranks have heard what follows: their numbers, and rank 0's word, travel with losses."""
PROBE_S = 0.02
EVEN = PipelineConditions(speeds=(1.0,) * 4, rates=(1e9,) * 3)
Truth = Callable[[int], PipelineConditions]
"""Conditions of a train step."""


def workload(num_blocks: int = 12, num_devices: int = 4, **changes) -> PipelineWorkload:
    found = PipelineWorkload(
        forward_s=((0.01,) * num_blocks,),
        backward_s=((0.02,) * num_blocks,),
        num_devices=num_devices,
        num_microbatches=4,
        forward_bytes=(1e6,) * num_blocks,
        backward_bytes=(1e6,) * num_blocks,
        state_bytes=(3e6,) * num_blocks,
        gradient_bytes=(1e6,) * num_blocks,
    )
    return replace(found, **changes)


@functools.lru_cache(maxsize=4096)
def step_s(work: PipelineWorkload, splits: tuple[int, ...], conditions: PipelineConditions) -> float:
    return work.step_s(splits, conditions)


@functools.lru_cache(maxsize=256)
def best_step_s(work: PipelineWorkload, conditions: PipelineConditions) -> tuple[tuple[int, ...], float]:
    """Of all partitions, by brute force."""
    cuts = itertools.combinations(range(1, work.num_blocks), work.num_devices - 1)
    return min(((splits, step_s(work, splits, conditions)) for splits in cuts), key=lambda pair: pair[1])


@dataclass
class World:
    """Train steps under a truth that the controller only measures."""

    controller: RepartitionController
    work: PipelineWorkload
    truth: Truth
    policy: RepartitionPolicy
    rng: random.Random
    noise: float = 0.0
    is_step_noisy: bool = True
    """False: only computing and links are; simulating thousands of different steps takes long."""
    redrawn_every: int = 1
    """Steps between two draws of the noise."""
    fails: Callable[[int], bool] = lambda _: False
    """Whether a move that would hold from a step on fails."""
    surcharge_s: Callable[[tuple[int, ...]], float] = lambda _: 0.0
    """What a partition takes beyond what any model knows."""
    splits: tuple[int, ...] = ()
    step: int = 0
    steps: list[tuple[tuple[int, ...], float]] = field(default_factory=list)
    """Partition and true noiseless seconds of each step."""
    rulings: list[tuple[int, RepartitionDecision]] = field(default_factory=list)
    num_looks: int = 0
    """Windows behind which links were timed."""
    _factors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.splits = self.controller.splits
        self._lookout = LinkProbeScheduler(self.work, self.policy)

    def run(self, num_steps: int) -> None:
        """Train; windows begin anew behind a move."""
        window: list[tuple] = []
        move_in, ruling, end = 0, None, self.step + num_steps
        while self.step < end:
            window.append(self._one_step())
            if move_in:
                move_in -= 1
                if not move_in:
                    self._finish(ruling)
                    window = []
            elif len(window) == self.policy.window_steps:
                ruling = self._tell(window)
                window = []
                if ruling.is_move:
                    self.rulings.append((self.step, ruling))
                    move_in = LATE_STEPS + 1

    def moves(self) -> list[int]:
        return [step for step, _ in self.rulings]

    def _finish(self, ruling: RepartitionDecision | None) -> None:
        assert ruling is not None
        if self.fails(self.step):
            self.controller.record_move_outcome(self.step, is_done=False, why="the test says so")
            return
        self.splits = ruling.splits
        self.controller.record_move_outcome(self.step, is_done=True, pause_s=0.01)

    def _one_step(self) -> tuple:
        if not self._factors or self.step % self.redrawn_every == 0:
            self._factors = [1 + self.rng.uniform(-self.noise, self.noise) for _ in range(2 * self.work.num_devices)]
        true = self.truth(self.step)
        speeds = tuple(s * f for s, f in zip(true.speeds, self._factors, strict=False))
        rates = tuple(r * f for r, f in zip(true.rates, self._factors[len(speeds) :], strict=False))
        seen = PipelineConditions(speeds=speeds, rates=rates)
        more_s = self.surcharge_s(self.splits)
        self.steps.append((self.splits, step_s(self.work, self.splits, true) + more_s))
        compute = [s / v for s, v in zip(self.work.profiled_s(self.splits), speeds, strict=True)]
        self.step += 1
        return compute, step_s(self.work, self.splits, seen if self.is_step_noisy else true) + more_s, rates

    def _tell(self, window: list[tuple]) -> RepartitionDecision:
        compute, steps, rates = zip(*window, strict=True)
        told = MeasurementWindow(
            first_step=self.step - len(window),
            compute_s=tuple(zip(*compute, strict=True)),
            step_s=steps,
        )
        if self._lookout.is_due(told, self.splits, self.controller.conditions):
            told = replace(told, rates=tuple((rate,) for rate in rates[-1]))
            self._lookout.record_probe(told, self.splits, self.controller.conditions, PROBE_S)
            self.num_looks += 1
        assert MeasurementWindow.parse(str(told)) == told
        ruling = self.controller.observe(told)
        assert RepartitionDecision.parse(str(ruling)) == ruling
        return ruling


def world(
    work: PipelineWorkload, truth: Truth, *, policy: RepartitionPolicy | None = None, seed: int = 0, **settings
) -> World:
    """Begins with the best partition for the truth at step 0."""
    policy = policy or RepartitionPolicy()
    first = truth(0)
    splits = settings.pop("splits", None) or best_step_s(work, first)[0]
    controller = RepartitionController(work, splits, settings.pop("believed", first), policy)
    return World(controller, work, truth, policy, random.Random(seed), **settings)


def changing(at: dict[int, PipelineConditions]) -> Truth:
    """From each of these steps on, those conditions."""

    def truth(step: int) -> PipelineConditions:
        return at[max(first for first in at if first <= step)]

    return truth


def slowed(device: int, factor: float) -> PipelineConditions:
    return PipelineConditions(speeds=tuple(1 / factor if i == device else 1.0 for i in range(4)), rates=EVEN.rates)


def cut(link: int, factor: float, rate: float = 2e8) -> PipelineConditions:
    return PipelineConditions(speeds=EVEN.speeds, rates=tuple(rate / factor if i == link else rate for i in range(3)))
