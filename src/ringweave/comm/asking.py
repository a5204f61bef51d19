"""Calls into torch that wait for others, who may be on a node that is cut off, or stopped."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_LOOK_S = 0.02
_Found = TypeVar("_Found")


def in_time(call: Callable[[], _Found], limit_s: float, is_given_up: Callable[[], bool], name: str) -> _Found:
    """What comes of a call.

    In a thread that can be left behind: torch waits for a silent store without end, and nobody can end a wait of Gloo's
    constructor.

    Args:
        call: Asks for something.
        limit_s: How long it may take; infinite where it has a limit of its own.
        is_given_up: Whether nobody waits for it any more.
        name: Of the thread.

    Raises:
        Exception: What the call raised.
        TimeoutError: It did not answer within `limit_s`, or was given up.
    """
    found: queue.SimpleQueue[tuple[_Found] | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put((call(),))
        except Exception as error:
            found.put(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    deadline_s, is_last = time.monotonic() + limit_s, False
    while not is_last:
        is_last = is_given_up() or time.monotonic() > deadline_s
        with contextlib.suppress(queue.Empty):
            outcome = found.get(timeout=_LOOK_S)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome[0]
    raise TimeoutError(f"no answer within {limit_s:g} s, or it was given up")
