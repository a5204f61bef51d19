"""A job in rings under faults: learns digits in mode ps-hra or local, and writes when each of its steps was done.

ringweave run --elastic 2:8 --workers 8 --mode ps-hra bench/faults/ring_job.py --checks FOLDER
"""

import argparse
import os
import time
from pathlib import Path

import torch
import xxhash
from job import BATCH, make, mean_loss, read
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave import environment
from ringweave.training import Asynchronous, Local
from ringweave.training.rings.ring_progress import RingCursor


def parse() -> argparse.Namespace:
    """Parse the job's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=Path, required=True, help="folder for what each process says of its steps")
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--rings", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument(
        "--repeat", type=int, default=1, help="so many times the data in an epoch: rings meet at its end"
    )
    parser.add_argument("--pause-s", type=float, default=0.0, help="sleep in every step: time that needs no processor")
    parser.add_argument("--inner-steps", type=int, default=0, help="of mode local; 0: the mode has none")
    return parser.parse_args()


def main() -> None:
    """Train, and write a line for each step: its time on the clock that all processes share, and a checksum.

    In mode local a line is of an outer step.
    """
    options = parse()
    torch.set_num_threads(1)
    images, labels = (each.repeat(options.repeat, *[1] * (each.dim() - 1)) for each in read())
    bare = model = make(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)
    asynchronous, local = Asynchronous(rings=options.rings), Local(inner_steps=options.inner_steps or None)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader, asynchronous=asynchronous, local=local)
    options.checks.mkdir(parents=True, exist_ok=True)
    member = os.environ[environment.MEMBER]
    latest: int | None = None
    with (options.checks / f"{member}.txt").open("a", encoding="ascii") as file:

        def write_push(place: RingCursor, epoch: int, num_pushed: int) -> None:
            digest = xxhash.xxh3_64()
            for each in bare.parameters():
                digest.update(each.detach().numpy().data)
            file.write(f"{time.monotonic():.6f} {place.ring} {num_pushed} {epoch} {digest.hexdigest()}\n")
            file.flush()

        for epoch in loader.epochs(options.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                time.sleep(options.pause_s)
                optimizer.step()
                progress = loader.source.membership.progress
                if options.inner_steps and progress.samples.num_batches:
                    continue  # no push is due
                latest = progress.cursor.num_pushed + (progress.cursor.pending is not None)
                write_push(progress.cursor, epoch, latest)
            place = loader.source.membership.progress.cursor
            if latest is not None and place.num_pushed > latest:  # the rest, which is pushed before rings meet
                write_push(place, epoch, latest := place.num_pushed)
            account = loader.account
            if account is not None:
                counts = [each.num_samples for each in (account.expected, account.total, account.lost)]
                file.write(f"account {account.epoch} {' '.join(map(str, counts))}\n")
                file.flush()
        file.write(f"loss {mean_loss(bare)}\n")


if __name__ == "__main__":
    main()
