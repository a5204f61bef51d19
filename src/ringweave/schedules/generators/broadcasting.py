"""Broadcast and reduce of one root, along a chain for large messages and a binomial tree for small ones."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError, explain
from ringweave.schedules.generators.ring import ranks_in_order
from ringweave.schedules.schedule import Collective, How, Round, Rounds, Schedule


def broadcast(num_ranks: int, root: int = 0, order: Sequence[int] | None = None) -> Schedule:
    """Broadcast along a chain that begins at the root: each rank passes on the whole message.

    Args:
        num_ranks: Size of the group, N.
        root: The rank that has the message.
        order: The chain as a ring of ranks, begun at the root; None is the order of the ranks.

    Returns:
        A schedule of one chunk and N-1 rounds of one operation; segments follow each other along the chain.

    Raises:
        ScheduleError: `order` does not name every rank once, or the root is no rank of the group.

    Cost:
        Every rank but the last sends the message once.
    """
    chain = _from_root("chain order", num_ranks, root, order)
    rounds = Rounds(num_ranks - 1, lambda index: Round.of(chain[index : index + 1], chain[index + 1], 0, How.COPY))
    return Schedule("chain broadcast", Collective("broadcast", root=root), num_ranks, (1,), rounds)


def reduce(num_ranks: int, root: int = 0, order: Sequence[int] | None = None) -> Schedule:
    """Reduce along the chain of `broadcast`, the other way: what a rank merged goes on towards the root."""
    chain = _from_root("chain order", num_ranks, root, order)[::-1]
    rounds = Rounds(num_ranks - 1, lambda index: Round.of(chain[index : index + 1], chain[index + 1], 0, How.REDUCE))
    return Schedule("chain reduce", Collective("reduce", root=root), num_ranks, (1,), rounds)


def binomial_broadcast(num_ranks: int, root: int = 0) -> Schedule:
    """Broadcast in ceil(log2 N) rounds: in each, every rank that has the message sends it to one that has not.

    In round t the ranks fewer than 2^t places after the root send to those 2^t further.

    Raises:
        ScheduleError: The root is no rank of the group.

    Cost:
        The root sends the message in every round.
    """
    ranks = _from_root("tree order", num_ranks, root, None)
    rounds = Rounds(_num_doublings(num_ranks), lambda index: _doubling(ranks, 1 << index, How.COPY))
    return Schedule("binomial broadcast", Collective("broadcast", root=root), num_ranks, (1,), rounds)


def binomial_reduce(num_ranks: int, root: int = 0) -> Schedule:
    """Reduce in ceil(log2 N) rounds: the tree of `binomial_broadcast`, the other way."""
    ranks, last = _from_root("tree order", num_ranks, root, None), _num_doublings(num_ranks) - 1
    rounds = Rounds(last + 1, lambda index: _doubling(ranks, 1 << (last - index), How.REDUCE))
    return Schedule("binomial reduce", Collective("reduce", root=root), num_ranks, (1,), rounds)


def _doubling(ranks: NDArray[np.int32], distance: int, how: How) -> Round:
    far = ranks[distance : 2 * distance]
    near = ranks[: len(far)]
    return Round.of(near, far, 0, how) if how == How.COPY else Round.of(far, near, 0, how)


def _num_doublings(num_ranks: int) -> int:
    return (num_ranks - 1).bit_length()


def _from_root(what: str, num_ranks: int, root: int, order: Sequence[int] | None) -> NDArray[np.int32]:
    """The ranks in order, begun at the root."""
    ranks = ranks_in_order(what, num_ranks, order)
    if num_ranks >= 1 and not 0 <= root < num_ranks:
        expected = f"ranks 0..{num_ranks - 1}"
        raise ScheduleError(explain("root", got=root, expected=expected, do="Name a rank of the group"))
    return np.roll(ranks, -int(np.argmax(ranks == root))) if len(ranks) else ranks
