"""The few things a script must know about the processes that train together."""

import os
import time

import torch
import torch.distributed as dist

ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def default_to_one() -> None:
    """Lets `python script.py`, without a launcher, train as a world of one process."""
    if "RANK" not in os.environ:
        os.environ.update(ALONE)


def pick_device() -> torch.device:
    """Returns this process's own GPU, as the current one, where there are enough on this node, else the CPU."""
    local_rank, local_world_size = (
        int(os.environ.get(name, ALONE[name])) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if torch.cuda.device_count() < local_world_size:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)  # for what names no device, such as a barrier of NCCL
    return torch.device("cuda", local_rank)


def share_of(batch: int, global_rank: int, world_size: int) -> slice:
    """Returns the part of a global batch that is this rank's, the same size for every rank.

    Raises:
        ValueError: the batch does not divide evenly, so that the mean over ranks would not be the mean over samples.
    """
    if batch % world_size:
        raise ValueError(
            f"batch is {batch}, expected a multiple of the world size {world_size}. "
            f"Choose --batch {batch // world_size * world_size or world_size}. [--batch]"
        )
    num_samples = batch // world_size
    return slice(global_rank * num_samples, (global_rank + 1) * num_samples)


def leave() -> None:
    """Leaves the world, and lets Gloo's threads let go of the last collective before the interpreter ends.

    One that does so later aborts the process with "terminate called without an active exception", and
    `destroy_process_group` does not join them where DDP has trained (pytorch/pytorch, issue 190489).
    """
    dist.destroy_process_group()
    time.sleep(0.2)
