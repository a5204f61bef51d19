"""Waiting for other threads and processes by looking again and again, without taking the processor from them."""

import time
from collections.abc import Callable

DEADLINE_S = 300.0
"""What takes longer hangs: a busy machine needs many times what an idle one does. pytest's own limit, which does not
say what never came, is longer."""
_PAUSE_PER_LOOK = 4.0
"""A look that costs much takes a fifth of the time at most."""
_MAX_PAUSE_S = 1.0


def wait_until(
    holds: Callable[[], object],
    what: str | Callable[[], object] = "what is waited for",
    limit_s: float = DEADLINE_S,
    pause_s: float = 0.02,
) -> None:
    """Return once a condition holds.

    Args:
        holds: Looks at the condition.
        what: Says what is missing, for the error.
        limit_s: Time after which waiting fails.
        pause_s: Least time between two looks.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        began_s = time.monotonic()
        if holds():
            return
        assert began_s < deadline_s, f"not within {limit_s} s: {what if isinstance(what, str) else what()}"
        cost_s = time.monotonic() - began_s
        time.sleep(max(pause_s, min(_PAUSE_PER_LOOK * cost_s, _MAX_PAUSE_S)))
