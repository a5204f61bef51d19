"""Learns to read handwritten digits on workers of unequal speed, each with the part of a batch that it can compute.

ringweave lab up examples/clusters/unequal-speeds.yaml          # with sudo, if the kernel gives users no namespaces
ringweave lab run --mode balanced examples/03_unequal.py        # and --mode sync, ps-hra, to compare
ringweave lab down
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential, functional
from torch.utils.data import DataLoader

import ringweave
from support import digits, files, processes

BATCH, NUM_TEST, EXPECTED_ACCURACY = 256, 360, 0.95


def train(epochs: int) -> dict[str, float]:
    """Returns the accuracy on test images, and the samples per second of the last epoch."""
    torch.manual_seed(0)
    test, rest = digits.split(NUM_TEST)
    model = Sequential(Conv2d(1, 32, 3, padding=1), ReLU(), Conv2d(32, 64, 3, padding=1), ReLU(), MaxPool2d(2))
    model = Sequential(model, Flatten(), Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(rest, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
    samples_per_s = 0.0
    for epoch in range(epochs):
        started_s = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        samples_per_s = len(rest) / (time.perf_counter() - started_s)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {samples_per_s:.0f} samples/s (measured), shares {loader.shares}", flush=True)
    held_out = loader.split(DataLoader(test, batch_size=BATCH))  # ranks have unequal parts, so not through DDP
    num_right = torch.tensor(sum(int((model.module(x).argmax(1) == y).sum()) for x, y in held_out))
    dist.all_reduce(num_right)
    return {"test_accuracy": num_right.item() / NUM_TEST, "samples_per_s": samples_per_s}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images")
    parser.add_argument("--out", type=Path, default=Path("runs/unequal"), help="where run.json notes what was found")
    options = parser.parse_args()
    found = train(options.epochs)
    if dist.get_rank() == 0:
        print(f"test accuracy: {found['test_accuracy']:.1%} (measured)")
        files.merge_into_json(options.out / "run.json", found)
    processes.leave()
    if found["test_accuracy"] <= EXPECTED_ACCURACY:
        raise SystemExit(f"test accuracy: expected more than {EXPECTED_ACCURACY:.0%}. Try more --epochs.")
