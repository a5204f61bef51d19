"""Ring allreduce: scatter-reduce, then allgather, each rank sending only to its right neighbour.

Source: Baidu Research's ring allreduce for deep learning (2017), after Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009).
"""

from collections.abc import Sequence

import numpy as np

from ringweave.errors import ScheduleError, explain
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
    at_place = Round.of(range(num_ranks) if order is None else order, 0, 0, How.COPY).src
    if not np.array_equal(np.sort(at_place), np.arange(num_ranks)):
        raise ScheduleError(
            explain(
                "ring order",
                got=at_place.tolist(),
                expected=f"every rank from 0 to {num_ranks - 1} once",
                do="List the ranks in the order of the ring",
            )
        )
    right, one_chunk = np.roll(at_place, -1), np.ones_like(at_place)
    hows = {how: np.full_like(at_place, how, np.uint8) for how in How}
    twice_round = np.tile(np.arange(num_ranks, dtype=np.int32), 2)  # a slice of it is the chunks of all places

    def make(index: int) -> Round:
        how = How.REDUCE if index < num_ranks - 1 else How.COPY
        chunk_of_place_0 = -index % num_ranks
        chunks = twice_round[chunk_of_place_0 : chunk_of_place_0 + num_ranks]
        return Round(at_place, right, chunks, one_chunk, hows[how])

    rounds = Rounds(2 * (num_ranks - 1), make)
    return Schedule("ring", Collective("allreduce"), num_ranks, (1,) * num_ranks, rounds)
