"""Ring allreduce: scatter-reduce, then allgather, each rank sending only to its right neighbour.

Source: Baidu Research's ring allreduce for deep learning (2017), after Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009).
"""

from collections.abc import Sequence

import numpy as np

from ringweave.errors import ScheduleError, explain
from ringweave.schedules.joining import then
from ringweave.schedules.schedule import Collective, How, Kind, Round, Rounds, Schedule


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
    return then("ring", ring_reduce_scatter(num_ranks, order), ring_allgather(num_ranks, order))


def ring_reduce_scatter(num_ranks: int, order: Sequence[int] | None = None, first: int = 0) -> Schedule:
    """The first half of a ring: place n of the ring first sends chunk n + `first`, then what it merged last.

    Args:
        num_ranks: Size of the group, N.
        order: The ring as ranks; None is the order of the ranks.
        first: The chunk that place 0 sends first; with -1 place n comes to own chunk n.

    Returns:
        A reduce-scatter of N equal chunks and N-1 rounds, after which place n owns chunk (n + `first` + 1) mod N.

    Raises:
        ScheduleError: `order` does not name every rank once.
    """
    return _half("reduce-scatter", num_ranks, order, first, owned=first + 1)


def ring_allgather(num_ranks: int, order: Sequence[int] | None = None, first: int = 1) -> Schedule:
    """The second half: place n of the ring first sends chunk n + `first`, its own, then what arrived last.

    Args:
        num_ranks: Size of the group, N.
        order: The ring as ranks; None is the order of the ranks.
        first: The chunk that place 0 owns; with 1 it goes on where `ring_reduce_scatter` ends.

    Returns:
        An allgather of N equal chunks and N-1 rounds.

    Raises:
        ScheduleError: `order` does not name every rank once.
    """
    return _half("allgather", num_ranks, order, first, owned=first)


def _half(kind: Kind, num_ranks: int, order: Sequence[int] | None, first: int, *, owned: int) -> Schedule:
    """In round i place n sends chunk n + `first` - i; place n owns chunk n + `owned`, before or after."""
    at_place = ranks_in_order("ring order", num_ranks, order)
    right, one_chunk = np.roll(at_place, -1), np.ones_like(at_place)
    how = np.full_like(at_place, How.REDUCE if kind == "reduce-scatter" else How.COPY, np.uint8)
    twice_round = np.tile(np.arange(num_ranks, dtype=np.int32), 2)  # a slice of it is the chunks of all places

    def make(index: int) -> Round:
        chunk_of_place_0 = (first - index) % num_ranks
        return Round(at_place, right, twice_round[chunk_of_place_0 : chunk_of_place_0 + num_ranks], one_chunk, how)

    owners = tuple(np.roll(at_place, owned).tolist())
    return Schedule(f"ring {kind}", Collective(kind, owners), num_ranks, (1,) * num_ranks, Rounds(num_ranks - 1, make))


def ranks_in_order(what: str, num_ranks: int, order: Sequence[int] | None) -> np.ndarray:
    """`order` as a column, or the order of the ranks.

    Raises:
        ScheduleError: It does not name every rank once.
    """
    ranks = Round.of(range(num_ranks) if order is None else order, 0, 0, How.COPY).src
    if not np.array_equal(np.sort(ranks), np.arange(num_ranks)):
        raise ScheduleError(
            explain(
                what,
                got=ranks.tolist(),
                expected=f"every rank from 0 to {num_ranks - 1} once",
                do=f"List the ranks in the order of the {what.split(maxsplit=1)[0]}",
            )
        )
    return ranks
