"""Ring allreduce: scatter-reduce, then allgather, each rank sending only to its right neighbour.

Source: Baidu Research's ring allreduce for deep learning (2017), after Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009).
"""

from collections.abc import Sequence

import numpy as np

from ringweave.errors import ScheduleError
from ringweave.schedules.schedule import Collective, How, Round, Rounds, Schedule


def ring(num_ranks: int, order: Sequence[int] | None = None) -> Schedule:
    """Allreduce round a ring: the rank at place n of the ring first sends chunk n to the right.

    Args:
        num_ranks: Size of the group, N; one rank needs no round.
        order: The ring as ranks from place 0 to place N-1; None is the order of the ranks.

    Returns:
        A schedule of N equal chunks and 2(N-1) rounds. After the first N-1 rounds place n holds the complete sum of
        chunk (n+1) mod N; in the others complete chunks travel on in the same direction and overwrite.

    Raises:
        ScheduleError: `order` does not name every rank once.

    Cost:
        Every rank sends 2(N-1)/N of the message in 2(N-1) rounds.
    """
    at_place = np.arange(num_ranks, dtype=np.int32) if order is None else np.asarray(order, dtype=np.int32)
    if len(at_place) != num_ranks or not np.array_equal(np.sort(at_place), np.arange(num_ranks)):
        raise ScheduleError(
            f"ring order: {list(at_place[:8])!r}, expected every rank from 0 to {num_ranks - 1} once. "
            "List the ranks in the order of the ring."
        )
    places, right = np.arange(num_ranks, dtype=np.int32), np.roll(at_place, -1)

    def make(index: int) -> Round:
        reducing = index < num_ranks - 1
        first = places - index if reducing else places + 1 - (index - (num_ranks - 1))
        return Round.of(at_place, right, first % num_ranks, How.REDUCE if reducing else How.COPY)

    rounds = Rounds(2 * (num_ranks - 1), make)
    return Schedule("ring", Collective("allreduce"), num_ranks, (1,) * num_ranks, rounds)
