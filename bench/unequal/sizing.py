"""Samples of a train step of the table: machines differ, and so does one from hour to hour.

    python bench/unequal/sizing.py                   # a few seconds: this machine's numbers

A step of equal workers is to take ten periods of the quotas. In a shorter one the kernel's pauses, which are not part
of a worker's speed, are a large part of the step for the worker with the smallest quota.
"""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from rows import CORES
from torch import nn
from worker import make

from ringweave.lab.cpu_quotas import QUOTA_PERIOD_US

NUM_PERIODS = 10
_COMPUTING = 0.85
"""Part of a step of equal workers that is computing; the rest is Python's, the optimizer's, and sums."""
BATCHES = (2048, 2560, 3072, 3584, 4096, 5120)
_TRIED, _NUM_PASSES = 384, 24


def core_s_per_sample(channels: int) -> float:
    """Seconds of a processor that a sample takes the table's model, while another one computes as well; measured."""
    options = argparse.Namespace(row="equal", seed=0, channels=channels, batch=_TRIED, samples=_TRIED)
    torch.set_num_threads(1)

    def passes(_: int) -> list[float]:
        model, _, samples, _ = make(options)
        images, labels = zip(*(samples[index] for index in range(_TRIED)), strict=True)
        batch, found = (torch.stack(images), torch.stack(labels)), []
        for _ in range(_NUM_PASSES):
            began_s = time.thread_time()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            found.append((time.thread_time() - began_s) / _TRIED)
        return found[_NUM_PASSES // 4 :]

    with ThreadPoolExecutor(2) as pool:
        return statistics.median(each for found in pool.map(passes, range(2)) for each in found)


def batch_of(sample_s: float) -> int:
    """The nearest of the sizes to the one whose step takes ten periods."""
    wanted = _COMPUTING * NUM_PERIODS * QUOTA_PERIOD_US / 1e6 * CORES / sample_s
    return min(BATCHES, key=lambda batch: abs(batch - wanted))


if __name__ == "__main__":
    measured_s = core_s_per_sample(64)
    print(f"{measured_s * 1e6:.1f} microseconds a sample (measured): {batch_of(measured_s)} samples in a step")
