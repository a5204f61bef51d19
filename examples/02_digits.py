"""Learns to read handwritten digits (scikit-learn's, 8 by 8 pixels) on every worker at once.

An ordinary PyTorch script: torchrun --nproc-per-node 4 examples/02_digits.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential, functional
from torch.nn.parallel import DistributedDataParallel

from support import files, processes, progress

BATCH, NUM_TEST, EXPECTED_ACCURACY = 120, 360, 0.95


def train(steps: int) -> float:
    """Returns the share of the test images that the trained model reads right."""
    torch.manual_seed(0)  # on every rank: all shuffle, start and draw alike
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    (test, rest), images = torch.randperm(len(labels)).tensor_split([NUM_TEST]), images.float() / 16
    model = DistributedDataParallel(Sequential(Linear(64, 512), ReLU(), Linear(512, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    share = processes.share_of(BATCH, dist.get_rank(), dist.get_world_size())
    with progress.progress_bar(total=steps * BATCH, hidden=dist.get_rank() > 0) as bar:
        for _ in range(steps):
            rows = rest[torch.randint(len(rest), (BATCH,))[share]]
            loss = functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.update(BATCH)

    test = test[dist.get_rank() :: dist.get_world_size()]
    num_right = (model(images[test]).argmax(dim=1) == labels[test]).sum()
    dist.all_reduce(num_right)
    return num_right.item() / NUM_TEST


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="train steps")
    parser.add_argument("--out", type=Path, help="folder where run.json notes the accuracy")
    options = parser.parse_args()
    processes.default_to_one()
    dist.init_process_group()
    accuracy, writes = train(options.steps), dist.get_rank() == 0
    processes.leave()
    if writes:
        print(f"test accuracy: {accuracy:.1%} (measured)")
    if writes and options.out:
        files.merge_into_json(options.out / "run.json", {"test_accuracy": accuracy})
    if accuracy <= EXPECTED_ACCURACY:
        raise SystemExit(
            f"test accuracy is {accuracy:.1%}, expected more than {EXPECTED_ACCURACY:.0%}. Try more --steps."
        )
