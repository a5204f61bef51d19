"""Shares that follow speeds, in virtual time: `python bench/unequal/virtual.py`. Seconds, no lab, no torch.

Eight ranks under CPU quotas of 40 ms periods, which begin at another time on each, as in the table of unequal workers,
with the product's estimators and rules, and the delays of its exchanges. A step has work by the sample, fixed work, and
noise that lasts: the logarithm of its factor has the standard deviation `sd` and, from step to step, the correlation
`memory`. `--wall` measures without knowing the quota. Printed is the speed
beside that of fixed shares in proportion to the quotas (simulated): before the speeds change, in the ten steps after
it, and from then on; and how often shares changed in each. With `--stall` a step takes a rank four times as long now
and then, as in the table's row.
"""

import argparse
import itertools
import math
import random
from dataclasses import dataclass, field

from rows import CORES, ROWS, WITHIN_STEPS

from ringweave.planning.balancing import Rebalancer, Speed, SpeedEstimator, apportion, steady_state_s
from ringweave.topology.cgroups import CpuQuota

PERIOD_S = 0.04
EXCHANGE_EVERY = 2
BATCH = 2048
SAMPLE_S, FIXED_S = 0.085e-3, 3e-3
"""Core-seconds of a sample and of a step beside: about those of the table's model."""
REDUCING_S = 0.02


@dataclass(kw_only=True, slots=True)
class Ranks:
    """Eight ranks that train together; each step ends when the slowest is done."""

    quotas: tuple[float, ...]
    """Cores of each rank."""
    shares: tuple[int, ...]
    draw: random.Random
    sd: float
    memory: float
    stall: float = 0.0
    knows_quota: bool = True
    now_s: float = 0.0
    levels: list[float] = field(default_factory=lambda: [0.0] * 8)
    periods: list["Periods"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.periods = [Periods(offset_s=self.draw.random() * PERIOD_S) for _ in self.quotas]

    def step(self) -> list[float]:
        """Seconds that each rank has computed, as its timer gives them."""
        fresh = math.sqrt(1 - self.memory**2)
        self.levels = [self.memory * level + fresh * self.draw.gauss(0, self.sd) for level in self.levels]
        took_s = []
        for periods, quota, share, level in zip(self.periods, self.quotas, self.shares, self.levels, strict=True):
            stalled = 4.0 if self.draw.random() < self.stall else 1.0
            work_s = (SAMPLE_S * share * stalled + FIXED_S) * math.exp(level)
            wall_s = periods.ends_s(self.now_s, work_s, quota) - self.now_s
            known = CpuQuota(cores=quota, period_s=PERIOD_S, num_throttled=1)
            took_s.append((wall_s, steady_state_s(wall_s, work_s, known) if self.knows_quota else wall_s))
        self.now_s += max(wall_s for wall_s, _ in took_s) + REDUCING_S
        return [seconds for _, seconds in took_s]


@dataclass(kw_only=True, slots=True)
class Periods:
    """Remaining CPU time of one rank's periods, which begin at its own times."""

    offset_s: float
    number: int = -1
    left_s: float = 0.0

    def ends_s(self, begin_s: float, work_s: float, quota: float) -> float:
        """When so much work is done that can begin then."""
        now_s = begin_s
        while True:
            number = math.floor((now_s - self.offset_s) / PERIOD_S + 1e-9)
            if number != self.number:
                self.number, self.left_s = number, quota * PERIOD_S
            next_s = self.offset_s + (number + 1) * PERIOD_S
            does_s = min(work_s, self.left_s, next_s - now_s)
            self.left_s -= does_s
            work_s -= does_s
            if work_s <= 1e-12:
                return now_s + does_s
            now_s = next_s


class Balanced:
    """The rules of mode balanced, with the delays that they have in training."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.rebalancer = ranks, Rebalancer()
        self.estimators = [SpeedEstimator() for _ in ranks.quotas]
        self.said: list[Speed | None] = []
        self.num_steps, self.num_changes = 0, 0

    def train(self, num_steps: int) -> float:
        """Seconds of so many steps."""
        began_s = self.ranks.now_s
        for _ in range(num_steps):
            self._border()
            took_s = self.ranks.step()
            self.num_steps += 1
            for estimator, share, seconds in zip(self.estimators, self.ranks.shares, took_s, strict=True):
                estimator.observe(share, seconds)
        return self.ranks.now_s - began_s

    def _border(self) -> None:
        if self.num_steps % EXCHANGE_EVERY:
            return
        known = [speed for speed in self.said if speed]
        if (
            known
            and len(known) == len(self.said)
            and (change := self.rebalancer.propose_change(self.ranks.shares, known, None, EXCHANGE_EVERY))
        ):
            self.ranks.shares = change.shares
            self.num_changes += 1
        self.said = [estimator.speed for estimator in self.estimators]


def quotas_of(speeds: tuple[float, ...]) -> tuple[float, ...]:
    """Cores of each rank, as the table gives them."""
    return tuple(CORES * speed / sum(speeds) for speed in speeds)


def fixed_s(quotas: tuple[float, ...], num_steps: int, seed: int, sd: float, memory: float, stall: float) -> float:
    """Seconds of a step with the shares that fit the quotas, in the same noise."""
    speeds = [Speed(s_per_sample=1 / quota, overhead_samples=FIXED_S / SAMPLE_S) for quota in quotas]
    shares, draw = apportion(BATCH, speeds), random.Random(seed)
    ranks = Ranks(quotas=quotas, shares=shares, draw=draw, sd=sd, memory=memory, stall=stall)
    for _ in range(num_steps):
        ranks.step()
    return ranks.now_s / num_steps


def main() -> None:
    """Print a line for each kind of noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=[name for name, row in ROWS.items() if row.later_speeds], default="changed")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--stall", type=float, default=0.0, help="probability of a step that takes four times as long")
    parser.add_argument("--wall", action="store_true", help="without the quota")
    parser.add_argument("--before", type=int, default=24, help="steps before the change")
    parser.add_argument("--after", type=int, default=24, help="steps after it")
    options = parser.parse_args()
    row = ROWS[options.row]
    assert row.later_speeds, "rows that change"
    first, later = quotas_of(row.speeds), quotas_of(row.later_speeds)
    lengths = (options.before, WITHIN_STEPS, options.after - WITHIN_STEPS)
    print("sd, memory: speed beside fixed shares, changes of shares; before, ten steps after, from then on (simulated)")
    for sd, memory in itertools.product((0.0, 0.05, 0.1, 0.25), (0.0, 0.9)):
        found = [[0.0, 0.0] for _ in lengths]
        for seed in range(options.seeds):
            speeds = [Speed(s_per_sample=1.0)] * len(first)
            shares, draw = apportion(BATCH, speeds), random.Random(seed)
            noise = {"sd": sd, "memory": memory, "stall": options.stall, "knows_quota": not options.wall}
            ranks = Ranks(quotas=first, shares=shares, draw=draw, **noise)
            training = Balanced(ranks)
            for place, (quotas, count) in enumerate(zip((first, later, later), lengths, strict=True)):
                training.ranks.quotas = quotas
                changes = training.num_changes
                best_s = fixed_s(quotas, 200, seed, sd, memory, options.stall) * count
                found[place][0] += best_s / training.train(count) / options.seeds
                found[place][1] += (training.num_changes - changes) / options.seeds
        print(f"{sd:g}, {memory:g}: " + "; ".join(f"{speed:.3f}, {changes:.1f}" for speed, changes in found))


if __name__ == "__main__":
    main()
