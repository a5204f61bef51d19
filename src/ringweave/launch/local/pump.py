"""One thread that reads what all workers print."""

import os
import selectors
import threading
from collections import deque
from typing import IO

from ringweave.launch.local.merging import MergedStream

IDLE_S = 0.1
CHUNK_BYTES = 64 * 1024


class Pump:
    """Reads pipes until all have ended.

    A thread of its own, so that a terminal which does not take output delays neither the supervision nor Ctrl-C.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._added: deque[tuple[IO[bytes], MergedStream, threading.Event]] = deque()
        self._draining, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def add(self, pipe: IO[bytes], stream: MergedStream) -> threading.Event:
        """Read this pipe too, from now on. The event is set once it has ended and the stream has all of it."""
        has_ended = threading.Event()
        self._added.append((pipe, stream, has_ended))
        return has_ended

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Wait until all pipes have ended, then stop reading even if some have not."""
        self._draining.set()
        if self._thread.ident is None:
            self._take_added()
            self._run_end()
            return
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._take_added()
            if self._draining.is_set() and not self._selector.get_map():
                break
            ready = {key.fd for key, _ in self._selector.select(IDLE_S)}
            for key in list(self._selector.get_map().values()):
                self._pass_on(key, key.fd in ready)
        self._run_end()

    def _take_added(self) -> None:
        while self._added:
            pipe, *rest = self._added.popleft()
            self._selector.register(pipe, selectors.EVENT_READ, (pipe, *rest))

    def _run_end(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._end(key)
        self._selector.close()

    def _pass_on(self, key: selectors.SelectorKey, is_ready: bool) -> None:
        received = os.read(key.fd, CHUNK_BYTES) if is_ready else b""
        if is_ready and not received:
            self._end(key)
        else:
            _, stream, _ = key.data
            stream.feed(received)

    def _end(self, key: selectors.SelectorKey) -> None:
        pipe, stream, has_ended = key.data
        self._selector.unregister(pipe)
        stream.end()
        pipe.close()
        has_ended.set()
