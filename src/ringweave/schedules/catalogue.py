"""Which schedules there are, by the names that users type."""

import difflib
from collections.abc import Callable

from ringweave.errors import UsageError, explain
from ringweave.schedules.generators.ring import ring
from ringweave.schedules.schedule import Schedule

HOST = "host"
"""Not a schedule: the message goes to the library underneath (Gloo, NCCL)."""

_ALLREDUCE: dict[str, Callable[[int], Schedule]] = {"ring": ring}

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
    """The allreduce of that name for a group of `num_ranks`.

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
