"""A job under faults: learns digits with `ringweave.prepare`, and continues from its last checkpoint after a restart.

ringweave chaos examples/clusters/unequal-nics.yaml --random kill,pause --every 15 -- bench/faults/job.py {disk}
"""

import argparse
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave import environment
from ringweave.planning.balancing import SampleAccount

BATCH = 256
NUM_SAMPLES = 6 * BATCH
"""Whole batches: a train step is the same number of samples always. What follows in the file is held out."""
NUM_HELD_OUT = 261
BUCKET_MB = 0.06
"""Less than a message that is summed alone, and than the first layer's weights: a step of width 384 has three sums, so
that a worker can die inside each of them. The last layer, which is small, is summed with what comes before it."""


def read(*, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of one part or the other.

    It is the file of scikit-learn's digits, without its import, which takes as long as torch's.
    """
    found = importlib.util.find_spec("sklearn")
    assert found is not None, "scikit-learn is there"
    assert found.submodule_search_locations is not None, "it is a package"
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    num_before, num_rows = (NUM_SAMPLES, NUM_HELD_OUT) if held_out else (0, NUM_SAMPLES)
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=num_before, max_rows=num_rows))
    return table[:, :-1].float() / 16, table[:, -1].long()


class Halves(nn.Module):
    """A square linear layer in two parts, each of which computes half of the outputs: each is a bucket of its own.

    One layer more would do that too, but samples that are rightly missing would tell more on the loss of a deeper
    network: after 400 steps up to 1.0 % instead of 0.36 (measured), where the bar of mixed.py is 0.5.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width // 2), nn.Linear(width, width - width // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to (batch, width)."""
        return torch.cat((self.first(x), self.second(x)), dim=-1)


def make(width: int) -> nn.Module:
    """The network, the same on all ranks."""
    torch.manual_seed(0)
    inner = [nn.Linear(64, width), nn.ReLU(), Halves(width), nn.ReLU()]
    return nn.Sequential(*inner, nn.Linear(width, 10))


@torch.no_grad()
def mean_loss(model: nn.Module, *, held_out: bool = True) -> float:
    """Return the loss on one part of the samples."""
    images, labels = read(held_out=held_out)
    return functional.cross_entropy(model(images), labels).item()


class Checks:
    """Writes each process's samples and parameter checksums of each train step, to compare processes later."""

    def __init__(self, folder: Path | None, model: nn.Module) -> None:
        """Without a folder it writes nothing."""
        self._folder, self._model = folder, model
        self._file: TextIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            member = os.environ.get(environment.MEMBER) or os.environ.get("RANK", "0")
            self._file = (folder / f"{member}-{os.getpid()}.txt").open("a", encoding="ascii")

    def drawn(self, reduction: int, indices: torch.Tensor, epoch: int) -> None:
        """Write the samples that this process computes: how many, and the sum of a number for each."""
        account = SampleAccount.from_indices(indices.numpy())
        self._say(f"drawn {reduction} {account.num_samples} {account.fingerprint} {epoch}")

    def done(self, reduction: int) -> None:
        """Write the checksum of all parameters after this reduction, and the time."""
        if self._file is None:
            return
        digest = xxhash.xxh3_64()
        for each in self._model.parameters():
            digest.update(each.detach().numpy().data)
        self._say(f"done {reduction} {digest.hexdigest()} {time.time():.3f}")

    def _say(self, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{line}\n")
            self._file.flush()

    def logged(self, reduction: int, value: float) -> None:
        """Write the value that an allreduce of the script's own gave after this reduction."""
        self._say(f"logged {reduction} {value.hex()}")

    def end(self, train_step: int) -> None:
        """Write the losses on held-out and on training samples to a file."""
        if self._folder is None:
            return
        found = {"train_step": train_step}
        for name, is_held_out in (("held_out_loss", True), ("training_loss", False)):
            found[name] = mean_loss(self._model, held_out=is_held_out)
        (self._folder / "end.json").write_text(json.dumps(found), encoding="ascii")


def parse() -> argparse.Namespace:
    """Parse the job's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--fresh", action="store_true", help="do not look for a checkpoint")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--s-per-sample", type=float, default=0.0, help="sleep for so long a sample, as if a device computed it"
    )
    parser.add_argument("--log", action="store_true", help="log the mean loss in every step, by an allreduce")
    parser.add_argument("--checks", type=Path, help="folder for the check of the parameters after each step")
    return parser.parse_args()


def log_mean(reduction: int, loss: torch.Tensor, checks: Checks, *, is_on: bool) -> None:
    """Log the mean of the workers' losses, as trainers do: by an allreduce of the script's own."""
    if is_on:
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        checks.logged(reduction, mean.item())


def main() -> None:
    """Train until enough steps are done; loss and steps are printed at the end."""
    options = parse()
    images, labels = read()
    bare = model = make(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    samples = TensorDataset(images, labels, torch.arange(NUM_SAMPLES))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = ringweave.prepare(
        model, optimizer, loader, options.mode, ddp={"bucket_cap_mb": BUCKET_MB}
    )
    checkpoints = ringweave.Checkpoints(options.folder / "checkpoints", model=model, optimizer=optimizer, loader=loader)
    if not options.fresh:
        checkpoints.load()
    state, loss = loader.state_dict(), torch.tensor(0.0)
    train_step = state["epoch"] * len(loader) + state["position"] // BATCH
    checks = Checks(options.checks, bare)
    is_elastic = environment.MEMBER in os.environ
    while train_step < options.steps:
        for x, y, indices in loader:
            own = indices if loader.fraction else indices[:0]
            reduction = (loader.num_train_steps if is_elastic else train_step) + 1
            checks.drawn(reduction, own, loader.state_dict()["epoch"])
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            time.sleep(options.s_per_sample * len(own))
            loss.backward()
            optimizer.step()
            log_mean(reduction, loss, checks, is_on=options.log)
            checks.done(reduction)
            if is_elastic and loader.misses_samples:
                continue  # those of a lost worker: they are the next batch, of the same step
            train_step += 1
            if train_step % options.checkpoint_every == 0:
                checkpoints.save(reduction)
            if train_step >= options.steps:
                break
    if dist.get_rank() == 0:
        print(f"{train_step} train steps, loss of the last batch on rank 0: {loss.item():.4f}")
        checks.end(train_step)
    if not is_elastic:  # an elastic job's group is not the script's
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
