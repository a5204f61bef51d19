"""The job of job.py under torchft, its steps counted in the same way, for the comparison in goodput.py.

As shipped (0.2.0), all survivors of a kill end by an assertion in its DistributedDataParallel on Gloo. --mended puts
a hook in that returns the bucket, since the step is dropped anyway. Time limits are short, since the defaults of
a minute are for other machines. Each worker is a replica of its own, with its part of the batch.

A replica that has loaded the state of another one reports it like a loaded checkpoint: its steps continue from the
others' step, though all may have restarted by then.
"""

import argparse
import logging
import os
import time
from datetime import timedelta

import job
import torch
from torch.nn import functional
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from ringweave import environment
from ringweave.telemetry import EventLog
from ringweave_bench.chaos import kill_requests


def mended(manager: Manager, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of a bucket, or the bucket as it is if the step is lost."""
    work = manager.allreduce(bucket.buffer())
    if work.wait():
        future = getattr(work.get_future(), "_fut", None)
        if future is not None:
            return future
    given: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    given.set_result(bucket.buffer())
    return given


class Place:
    """Maps a replica's own steps to train steps of the job."""

    def __init__(self, log: EventLog, rank: int, num_workers: int) -> None:
        self._log, self._rank, self._num_workers = log, rank, num_workers
        self._count = self._base = 0

    def count(self, *_: object) -> None:
        self._count += 1

    def compare(self, train_step: int) -> None:
        """Write an event if the job is at another step than its own: it has loaded the state of another replica."""
        base = train_step - self._count
        if base == self._base:
            return
        self._base, world = base, {"saved_world_size": self._num_workers, "world_size": self._num_workers}
        self._log.write("checkpoint_loaded", rank=self._rank, train_step=base, path="another replica", **world)


def main() -> None:
    """Train until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--s-per-sample", type=float, default=0.0, help="as in job.py")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    images, labels = job.read()
    network = job.make(options.width)
    rank, num_workers = int(os.environ[kill_requests.RANK_VARIABLE]), int(os.environ["NUM_WORKERS"])
    log = EventLog(os.environ[environment.EVENTS])
    inner = torch.optim.AdamW(network.parameters(), lr=1e-4)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=4)),
        min_replica_size=1,
        load_state_dict=lambda state: (
            network.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": network.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"worker_{rank}",
        timeout=timedelta(seconds=8),
        quorum_timeout=timedelta(seconds=20),
        connect_timeout=timedelta(seconds=5),
    )
    if options.mended:
        DistributedDataParallel._comm_hook = staticmethod(mended)
    parallel, optimizer = DistributedDataParallel(manager, network), Optimizer(manager, inner)
    place = Place(log, rank, num_workers)
    inner.register_step_post_hook(place.count)
    own = job.BATCH // num_workers
    draw = torch.Generator().manual_seed(rank)
    while True:
        before = manager.current_step()
        chosen = torch.randint(job.NUM_SAMPLES, (own,), generator=draw)
        optimizer.zero_grad()
        loss = functional.cross_entropy(parallel(images[chosen]), labels[chosen])
        time.sleep(options.s_per_sample * own)
        loss.backward()
        optimizer.step()
        place.compare(manager.current_step())
        there = manager.num_participants()
        if manager.current_step() > before and there < num_workers and manager.participating_rank() == 0:
            lost = (num_workers - there) * own
            log.write("samples_lost", rank=0, reduction=before, members=[], samples=there * own, lost=lost)


if __name__ == "__main__":
    main()
