"""Which schedules there are, by the names that users type."""

import difflib
from collections.abc import Callable

from ringweave.errors import UsageError, explain
from ringweave.schedules.generators.direct import direct
from ringweave.schedules.generators.domains import Domain
from ringweave.schedules.generators.halving_doubling import halving_doubling
from ringweave.schedules.generators.hierarchical import hierarchical
from ringweave.schedules.generators.leader_matrix import leader_matrix
from ringweave.schedules.generators.multi_level import multi_level
from ringweave.schedules.generators.parameter_server import parameter_server
from ringweave.schedules.generators.ring import ring
from ringweave.schedules.schedule import Schedule

HOST = "host"
"""Not a schedule: the message goes to the library underneath (Gloo, NCCL)."""


def _nodes_of_one(num_ranks: int) -> list[list[int]]:
    return [[rank] for rank in range(num_ranks)]


def _flat_domain(num_ranks: int) -> Schedule:
    ranks = tuple(range(num_ranks))
    return multi_level(Domain(ranks, ranks), (1,) * num_ranks)


_ALLREDUCE: dict[str, Callable[[int], Schedule]] = {
    "ring": ring,
    "leader-matrix": lambda num_ranks: leader_matrix(_nodes_of_one(num_ranks)),
    "hierarchical": lambda num_ranks: hierarchical(_nodes_of_one(num_ranks)),
    "ps": parameter_server,
    "direct": direct,
    "multi-level": _flat_domain,
    "halving-doubling": halving_doubling,
}

NAMES: tuple[str, ...] = (*_ALLREDUCE, HOST)
"""Every name that `--schedule` takes."""


def check_name(name: str, where: str = "") -> str:
    """`name` itself if it can be asked for.

    Raises:
        UsageError: No such schedule; the text suggests the nearest one.
    """
    if name in NAMES:
        return name
    close = difflib.get_close_matches(name, NAMES, n=1)
    mend = f"Did you mean {close[0]!r}?" if close else "Name one of them"
    raise UsageError(explain("schedule", got=name, expected=f"one of {', '.join(NAMES)}", do=mend, where=where))


def generate(name: str, num_ranks: int) -> Schedule:
    """The allreduce of that name for a group of `num_ranks` of which nothing else is known.

    Each rank counts as a node of its own: a group for leader-matrix and hierarchical, a member of one domain for
    multi-level, and all have the same share.

    Raises:
        UsageError: No such schedule, or `host`, which is none.
    """
    check_name(name)
    if name == HOST:
        raise UsageError(
            explain(
                "schedule",
                got=name,
                expected="one that is planned here",
                do="'host' names the library underneath, which plans its messages itself",
            )
        )
    return _ALLREDUCE[name](num_ranks)
