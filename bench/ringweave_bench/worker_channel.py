"""Controller's end of the workers' control channels: Unix sockets, visible in every node and not rate-limited."""

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

_BLOCK_BYTES = 64 * 1024


class WorkerChannelError(Exception):
    """A worker is unreachable, or reports a failure; the session turns it into a user's error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHello:
    """First message of a worker, after it has joined its group."""

    rank: int
    world_size: int
    network: int
    """Number of its network namespace."""
    version: str
    """Version of the system under test."""
    process: psutil.Process
    """Handle with the start time, so that a reused process id is never mistaken for it."""


class WorkerChannel:
    """Connection to one worker: JSON documents, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.name = "a worker"

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._connection.fileno()

    def send_document(self, document: dict[str, Any]) -> None:
        """Send one document.

        Raises:
            WorkerChannelError: The worker is gone.
        """
        try:
            self._connection.sendall(json.dumps(document).encode() + b"\n")
        except OSError as error:
            raise WorkerChannelError(f"{self.name} ended") from error

    def read_once(self) -> dict[str, Any] | None:
        """Read once, when there is something to read; return a document if one is complete.

        Raises:
            WorkerChannelError: The worker is gone, or reports a failure.
        """
        try:
            block = self._connection.recv(_BLOCK_BYTES)
        except OSError as error:
            raise WorkerChannelError(f"{self.name} ended") from error
        if not block:
            raise WorkerChannelError(f"{self.name} ended")
        self._rest += block
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        document = json.loads(line)
        if "error" in document:
            raise WorkerChannelError(f"{self.name}: {document['error']}")
        return document

    def close(self) -> None:
        """Close the connection, which ends the worker at once."""
        self._connection.close()


class WorkerListener:
    """Listens for workers' connections; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(1024)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def wait_for_workers(
        self, session: str, world_size: int, timeout_s: float, check_alive: Callable[[], None]
    ) -> list[tuple[WorkerHello, WorkerChannel]]:
        """Return the workers of a session by rank, once all have joined their group.

        Args:
            session: Only workers of this session are accepted.
            world_size: Number of workers.
            timeout_s: Time for all to connect.
            check_alive: Called several times a second; raises if waiting is useless.

        Raises:
            WorkerChannelError: A worker failed, or they did not connect in time.
        """
        deadline_s = time.monotonic() + timeout_s
        greeted: dict[int, tuple[WorkerHello, WorkerChannel]] = {}
        with ExitStack() as on_failure, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while len(greeted) < world_size:
                gone = _error_of(check_alive)
                if time.monotonic() > deadline_s:
                    raise WorkerChannelError(f"{len(greeted)} of {world_size} ranks came within {timeout_s:g} s")
                ready = selector.select(0 if gone else 0.2)
                if gone and not ready:  # its last words have been read, and explain more
                    raise gone
                for key, _ in ready:
                    if key.fileobj is self._socket:
                        connected = WorkerChannel(self._socket.accept()[0])
                        on_failure.callback(connected.close)
                        selector.register(connected, selectors.EVENT_READ)
                    else:
                        self._accept_hello(key.fileobj, selector, session, greeted)
            on_failure.pop_all()
        return [greeted[rank] for rank in sorted(greeted)]

    def _accept_hello(
        self,
        channel: Any,
        selector: selectors.BaseSelector,
        session: str,
        greeted: dict[int, tuple[WorkerHello, WorkerChannel]],
    ) -> None:
        document = channel.read_once()
        if document is None:
            return
        selector.unregister(channel)
        if document["session"] != session:  # of an abandoned session
            channel.close()
            return
        hello = _parse_hello(document)
        channel.name = f"rank {hello.rank}"
        if hello.rank in greeted:
            raise WorkerChannelError(f"two workers say that they are rank {hello.rank}")
        greeted[hello.rank] = hello, channel


def request_all(channels: Sequence[WorkerChannel], order: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Send a request to all workers; return their answers in the same order.

    Raises:
        WorkerChannelError: A worker is gone, reports a failure, or does not answer in time.
    """
    for channel in channels:
        channel.send_document(order)
    deadline_s = time.monotonic() + timeout_s
    answers: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for index, channel in enumerate(channels):
            selector.register(channel, selectors.EVENT_READ, index)
        while len(answers) < len(channels):
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0:
                silent = next(i for i in range(len(channels)) if i not in answers)
                raise WorkerChannelError(f"{channels[silent].name} did not answer within {timeout_s:g} s")
            for key, _ in selector.select(rest_s):
                document = channels[key.data].read_once()
                if document is not None:
                    answers[key.data] = document
                    selector.unregister(key.fileobj)
    return [answers[index] for index in range(len(channels))]


def _error_of(check: Callable[[], None]) -> WorkerChannelError | None:
    try:
        check()
    except WorkerChannelError as error:
        return error
    return None


def _parse_hello(document: dict[str, Any]) -> WorkerHello:
    try:
        process = psutil.Process(document["pid"])
    except psutil.NoSuchProcess as error:
        raise WorkerChannelError(f"rank {document['rank']} ended") from error
    return WorkerHello(
        rank=document["rank"],
        world_size=document["world_size"],
        network=document["network"],
        version=document["version"],
        process=process,
    )
