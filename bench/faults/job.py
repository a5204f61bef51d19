"""A job to be hurt: learns digits with `ringweave.prepare`, and goes on from its last checkpoint when started again.

ringweave chaos examples/clusters/unequal-nics.yaml --random kill,pause --every 15 -- bench/faults/job.py {disk}
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential, functional
from torch.utils.data import DataLoader, TensorDataset

import ringweave


def main() -> None:
    """Train until enough steps are done; loss and steps are printed at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--mode", default="sync")
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    samples = TensorDataset(images.float() / 16, labels)
    model = Sequential(Linear(64, options.width), ReLU(), Linear(options.width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples, batch_size=256, shuffle=True)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader, options.mode)
    checkpoints = ringweave.Checkpoints(options.folder / "checkpoints", model=model, optimizer=optimizer, loader=loader)
    train_step, loss = checkpoints.load(), torch.tensor(0.0)
    while train_step < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            train_step += 1
            if train_step % options.checkpoint_every == 0:
                checkpoints.save(train_step)
            if train_step >= options.steps:
                break
    if dist.get_rank() == 0:
        print(f"{train_step} train steps, loss of the last batch on rank 0: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
