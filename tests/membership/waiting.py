"""Waiting for what other threads and processes do."""

import threading
from collections.abc import Callable


def wait_until(is_it: Callable[[], bool]) -> None:
    """Return once it holds; five minutes are enough for anything."""
    waiting = threading.Event()
    for _ in range(6000):
        if is_it():
            return
        waiting.wait(0.05)
    raise AssertionError("it never came to be")
