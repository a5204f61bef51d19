"""How an operator ends: soon, whatever its parts or the API server do.

kopf cancels its tasks once. A watch that was just cut loses a cancellation that comes within two rounds of the event
loop, and kopf then waits for it for ever; so here what is left is cancelled again and again, and a thread ends the
process where even that does not help.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

GRACE_S = 1.0
"""The parts have so long to end by themselves once they are cancelled."""
LIMIT_S = 3.0
"""What is left then is cancelled again and again for so long, and given up."""
AGAIN_S = 0.25
"""From one cancellation of the same task to the next."""
WHOLE_S = GRACE_S + LIMIT_S + 1.0
"""For a part that ends parts of its own in this way."""
PROCESS_S = 10.0
"""A process that is still there so long after its parts began to end is ended by force."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Part = Coroutine[Any, Any, None]


async def until_one_ends(*parts: Part, grace_s: float = GRACE_S, begins: Callable[[], None] = lambda: None) -> None:
    """Run the parts together; when one returns or fails, end the others, and every task that they have begun.

    Args:
        parts: Each runs as a task of its own.
        grace_s: So long they may take to end by themselves.
        begins: Called when the end begins, before anything is cancelled.

    Raises:
        Exception: Of the part that failed first.
    """
    before = asyncio.all_tasks()
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        begins()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=grace_s)
        await end_all_but(before)
    for task in tasks:
        if task in done:
            task.result()


async def end_all_but(kept: set[asyncio.Task[Any]], limit_s: float = LIMIT_S) -> set[asyncio.Task[Any]]:
    """Cancel every other task until it has ended; those that have not after all that time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while left := asyncio.all_tasks() - kept - {asyncio.current_task()}:
        if loop.time() >= deadline_s:
            names = ", ".join(sorted(task.get_name() for task in left))
            logging.getLogger(__name__).warning("given up after %.2g s: %s", limit_s, names)
            return left
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=AGAIN_S)
    return set()


@contextlib.contextmanager
def heard(stop: asyncio.Event) -> Iterator[Callable[[], None]]:
    """Set the event at SIGTERM and SIGINT; yields what hears them anew after somebody else has taken them over."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()

    def hear() -> None:
        for number in _SIGNALS if is_main else ():
            loop.add_signal_handler(number, stop.set)

    hear()
    try:
        yield hear
    finally:
        for number in _SIGNALS if is_main else ():
            loop.remove_signal_handler(number)


def end_process_later(after_s: float = PROCESS_S) -> None:
    """End this process by force after a time, if it is still there; says what it was doing."""

    def end() -> None:
        sys.stderr.write(f"operator: still there {after_s:g} s after it was told to end, ended by force\n")
        faulthandler.dump_traceback()
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
