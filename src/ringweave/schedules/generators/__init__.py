"""Generators of schedules, one module per algorithm, and their catalogue by the names that users type.

Rounds are computed on demand. The name `native` is no schedule: the native backend (Gloo, NCCL) runs the collective.
"""

import difflib
from collections.abc import Callable

from ringweave.environment import NATIVE
from ringweave.errors import UsageError
from ringweave.schedules.generators import direct, halving_doubling, hierarchical, multi_level, parameter_server, ring
from ringweave.schedules.schedule import CollectiveKind, Schedule


def _one_rank_per_node(num_ranks: int) -> list[list[int]]:
    return [[rank] for rank in range(num_ranks)]


def _single_domain_schedule(num_ranks: int) -> Schedule:
    ranks = tuple(range(num_ranks))
    return multi_level.multi_level(multi_level.Domain(ranks, ranks), (1,) * num_ranks)


_ALLREDUCE_GENERATORS: dict[str, Callable[[int], Schedule]] = {
    "ring": ring.ring,
    "leader-matrix": lambda num_ranks: hierarchical.leader_matrix(_one_rank_per_node(num_ranks)),
    "hierarchical": lambda num_ranks: hierarchical.hierarchical(_one_rank_per_node(num_ranks)),
    "ps": parameter_server.parameter_server,
    "direct": direct.direct,
    "multi-level": _single_domain_schedule,
    "halving-doubling": halving_doubling.halving_doubling,
}

SCHEDULE_NAMES: tuple[str, ...] = (*_ALLREDUCE_GENERATORS, NATIVE)
"""All names that `--schedule` accepts."""


def schedule_names(kind: CollectiveKind) -> tuple[str, ...]:
    """Return the names of the schedules that plans have for a collective, without `native`."""
    return tuple(_ALLREDUCE_GENERATORS) if kind == "allreduce" else ("ring", "direct", "multi-level")


def check_schedule_name(name: str, where: str = "") -> str:
    """Return `name` if it is a schedule's.

    Raises:
        UsageError: No such schedule; the text suggests the nearest one.
    """
    if name in SCHEDULE_NAMES:
        return name
    close = difflib.get_close_matches(name, SCHEDULE_NAMES, n=1)
    fix = f"Did you mean {close[0]!r}?" if close else "Name one of them"
    raise UsageError("schedule", got=name, expected=f"one of {', '.join(SCHEDULE_NAMES)}", do=fix, where=where)


def generate(name: str, num_ranks: int) -> Schedule:
    """Return the allreduce of that name for a group of `num_ranks`, without knowledge of its topology.

    Each rank counts as a node of its own: a group for leader-matrix and hierarchical, a member of one domain for
    multi-level. All ranks have the same share.

    Raises:
        UsageError: No such schedule, or `native`, which is none.
    """
    check_schedule_name(name)
    if name == NATIVE:
        raise UsageError(
            "schedule",
            got=name,
            expected="one that is planned here",
            do="'native' names the native backend, which plans its messages itself",
        )
    return _ALLREDUCE_GENERATORS[name](num_ranks)
