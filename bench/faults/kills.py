"""Seconds that survivors stall when a member is killed at a random moment of a step, and until its replacement trains.

    python bench/faults/kills.py --workers 8 --kills 50 --seed 1

Real processes on this machine, one job: at a random time within a step a random member gets SIGKILL; its replacement is
started at once, and the next kill follows when it has trained some steps. A survivor's stall is its longest step around
the kill less the median step. The parameters' checksums of all members are compared step by step. Prints one JSON
document.
"""

import argparse
import itertools
import json
import random
import signal
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.testing.elastic import ElasticJob, say

_AROUND_S = 15.0
_STEPS_BETWEEN = 8


def train(width: int, num_samples: int) -> None:
    """Until it is killed."""
    torch.manual_seed(0)
    inputs = torch.randn(num_samples, width)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    data = DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True)), batch_size=num_samples // 16, shuffle=True)
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, mode="sync")
    step = loader.state_dict()["epoch"] * len(loader) + loader.state_dict()["position"] // loader.batch_size
    for _ in loader.epochs(10**9):
        for given, wanted in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(given), wanted).backward()
            optimizer.step()
            say((step, sum(float(each.detach().double().sum()) for each in model.parameters())))
            step += 1


def kill_one(job: ElasticJob, alive: list[str], draw: random.Random) -> dict[str, Any]:
    """Kill one, start its replacement, and wait until that has trained."""
    victim = draw.choice(alive)
    watched = next(member for member in alive if member != victim)
    last = job.said(watched)[-1][0][0]
    job.wait_said(watched, lambda said: said[0] > last)
    time.sleep(draw.random() * 0.3)  # the moment within a step
    killed_s = time.monotonic()
    job.signal(victim, signal.SIGKILL)
    slot, incarnation = map(int, victim.split("."))
    newcomer = job.start(slot, incarnation + 1)
    trained_s = job.wait_said(newcomer, lambda _: True)
    first = job.said(newcomer)[0][0][0]
    alive[alive.index(victim)] = newcomer
    for member in alive:
        job.wait_said(member, lambda said: said[0] >= first + _STEPS_BETWEEN)
    stalls_s, checks = [], {}
    for member in [each for each in alive if each != newcomer]:
        said = job.said(member)
        steps = [word[0] for word, _ in said]
        if steps != list(range(steps[0], steps[0] + len(steps))):
            raise AssertionError(f"{member} lost a step: {steps}")
        times_s = [at_s for _, at_s in said]
        gaps_s = [(after - before, after) for before, after in itertools.pairwise(times_s)]
        usual_s = statistics.median(gap for gap, _ in gaps_s[-200:])
        near = [gap for gap, at_s in gaps_s if killed_s <= at_s <= min(killed_s + _AROUND_S, trained_s)]
        stalls_s.append(max(near, default=usual_s) - usual_s)
    for member in alive:
        for (step, check), _ in job.said(member):
            if checks.setdefault(step, check) != check:
                raise AssertionError(f"parameters differ after step {step}")
    return {"victim": victim, "stall_s": round(max(stalls_s), 3), "back_s": round(trained_s - killed_s, 3)}


def main() -> None:
    """So many kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=512, help="of the model's layers; its square sets the bytes")
    options = parser.parse_args()
    draw, found = random.Random(options.seed), []
    with ElasticJob(train, options.workers, options.width, 64 * options.workers) as job:
        alive = list(job.members)
        for member in alive:
            job.wait_said(member, lambda said: said[0] >= _STEPS_BETWEEN)
        for _ in range(options.kills):
            found.append(kill_one(job, alive, draw))
    stalls_s = sorted(each["stall_s"] for each in found)
    summary = {
        "kind": "measured",
        "workers": options.workers,
        "kills": len(found),
        "steps_lost": 0,
        "stall_p50_s": round(statistics.median(stalls_s), 3),
        "stall_p95_s": stalls_s[min(len(stalls_s) - 1, round(0.95 * len(stalls_s)))],
        "stall_max_s": stalls_s[-1],
        "back_p50_s": statistics.median(each["back_s"] for each in found),
    }
    print(json.dumps({**summary, "each": found}, indent=2))


if __name__ == "__main__":
    main()
