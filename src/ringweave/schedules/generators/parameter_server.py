"""Synchronous parameter server as a star: all ranks send to one, which adds and sends the result to all."""

import numpy as np

from ringweave.errors import ScheduleError
from ringweave.schedules.compose import compose_allreduce
from ringweave.schedules.schedule import Collective, LazyRounds, ReceiveOp, Round, Schedule


def parameter_server(num_ranks: int, root: int = 0) -> Schedule:
    """Allreduce through one rank, like a parameter server that waits for all workers.

    A rank's chunk can be written only once per round, so the message is cut into as many chunks as there are workers:
    in each round every worker sends another one.

    Args:
        num_ranks: Size of the group, N; one rank needs no round.
        root: The server's rank; the others, in the order of the ranks, are the workers.

    Returns:
        A schedule named `ps` of N-1 equal chunks and 2(N-1) rounds: in round t worker j sends chunk (j+t) mod (N-1) to
        the root; after N-1 rounds the root sends worker j chunk (j+t) mod (N-1).

    Raises:
        ScheduleError: `root` is no rank of the group.

    Cost:
        The root sends and receives N-1 messages' worth, every other rank one.
    """
    num_workers = max(1, num_ranks - 1)
    workers = np.array([rank for rank in range(num_ranks) if rank != _checked_root(root, num_ranks)], np.int32)
    server, ones = np.full_like(workers, root), np.ones_like(workers)
    twice_round = np.tile(np.arange(num_workers, dtype=np.int32), 2)

    def half(how: ReceiveOp) -> Schedule:
        hows = np.full_like(workers, how, np.uint8)
        src, dst = (workers, server) if how == ReceiveOp.REDUCE else (server, workers)

        def make(index: int) -> Round:
            return Round(src, dst, twice_round[index : index + num_workers], ones, hows)

        collective = Collective("reduce" if how == ReceiveOp.REDUCE else "broadcast", root=root)
        return Schedule("star", collective, num_ranks, (1,) * num_workers, LazyRounds(num_ranks - 1, make))

    return compose_allreduce("ps", half(ReceiveOp.REDUCE), half(ReceiveOp.COPY))


def _checked_root(root: int, num_ranks: int) -> int:
    if num_ranks >= 1 and not 0 <= root < num_ranks:
        raise ScheduleError("root", got=root, expected=f"ranks 0..{num_ranks - 1}", do="Name a rank of the group")
    return root
