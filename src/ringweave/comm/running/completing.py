"""Threads that resolve futures, so that what users chain on one collective may wait for another."""

import queue
import threading
from collections.abc import Callable


class Completer:
    """Runs callbacks, each in a thread that nothing else needs: a new one whenever all others are busy."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` soon."""
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
        self._calls.put(call)

    def close(self, timeout_s: float) -> None:
        """Let the threads end, waiting at most so long for each."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            with self._lock:
                self._num_idle += 1
