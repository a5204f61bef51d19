"""A worker that measures an MPI library through mpi4py, started by that library's mpiexec."""

import sys
from typing import Any

import mpi4py  # pyrefly: ignore - lives in the environment of the MPI library
import numpy as np
import serving  # pyrefly: ignore - found beside this file, which is run by path

# One thread calls MPI: the library need not lock.
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI  # noqa: E402 # pyrefly: ignore


class MpiCollectives:
    """Collectives on MPI_COMM_WORLD, with separate buffers, which is the faster way for MPI."""

    in_place = False

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank, self.world_size = self._world.rank, self._world.size
        self.version = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())

    def wrap(self, array: np.ndarray) -> Any:
        """Return a buffer that mpi4py takes without looking at the type again."""
        return [array, MPI.FLOAT]

    def barrier(self) -> None:
        self._world.Barrier()

    def allreduce(self, source: Any, result: Any) -> None:
        self._world.Allreduce(source, result)

    def reduce_scatter(self, source: Any, result: Any) -> None:
        self._world.Reduce_scatter_block(source, result)

    def allgather(self, source: Any, result: Any) -> None:
        self._world.Allgather(source, result)

    def broadcast(self, source: Any, result: Any) -> None:
        self._world.Bcast(source, 0)

    def schedules(self) -> dict[str, int]:
        """Return nothing, since MPI reports no schedules."""
        return {}

    def close(self) -> None:
        MPI.Finalize()


if __name__ == "__main__":
    serving.main(MpiCollectives, sys.argv[1:])
