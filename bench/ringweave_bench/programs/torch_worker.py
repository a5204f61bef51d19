"""A worker that measures a backend of torch.distributed, named by the variable RINGWEAVE_BENCH_BACKEND."""

import os
import sys
from typing import Any

import numpy as np
import serving  # pyrefly: ignore - found beside this file, which is run by path
import torch
import torch.distributed as dist


class TorchCollectives:
    """torch.distributed, in place as DDP uses it."""

    in_place = True

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(os.environ["RINGWEAVE_BENCH_BACKEND"])
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.version = f"torch {torch.__version__}"

    def wrap(self, array: np.ndarray) -> Any:
        """Return a tensor over the same memory."""
        return torch.from_numpy(array)

    def barrier(self) -> None:
        dist.barrier()

    def allreduce(self, source: Any, result: Any) -> None:
        """Block until the tensor holds the sum."""
        dist.all_reduce(source)

    def reduce_scatter(self, source: Any, result: Any) -> None:
        """Block until the result holds this rank's block of the sum."""
        dist.reduce_scatter_tensor(result, source)

    def allgather(self, source: Any, result: Any) -> None:
        """Block until the result holds the blocks of all ranks."""
        dist.all_gather_into_tensor(result, source)

    def broadcast(self, source: Any, result: Any) -> None:
        """Block until the tensor holds that of rank 0."""
        dist.broadcast(source, 0)

    def schedules(self) -> dict[str, int]:
        """Return the counts of ringweave's group; empty for other backends."""
        count = getattr(dist.group.WORLD, "collectives_by_schedule", None)
        return {name: row["collectives"] for name, row in count().items()} if count else {}

    def close(self) -> None:
        dist.destroy_process_group()


if __name__ == "__main__":
    serving.main(TorchCollectives, sys.argv[1:])
