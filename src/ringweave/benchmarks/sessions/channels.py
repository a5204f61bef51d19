"""The controller's end of the workers' channels: Unix sockets, seen by every node of a lab and slowed by no limit."""

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


class ChannelError(Exception):
    """A worker cannot be talked to, or reports that it failed; the session turns it into a user's error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What a worker says when it has joined its group."""

    rank: int
    world_size: int
    network: int
    """Number of the network namespace that it is in."""
    version: str
    """Of the system under test."""
    process: psutil.Process
    """It knows when it began, so a reused id is never mistaken for it."""


class Channel:
    """The line to one worker: JSON documents, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.name = "a worker"

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def say(self, document: dict[str, Any]) -> None:
        """Send one document.

        Raises:
            ChannelError: The worker is gone.
        """
        try:
            self._connection.sendall(json.dumps(document).encode() + b"\n")
        except OSError as error:
            raise ChannelError(f"{self.name} ended") from error

    def read_once(self) -> dict[str, Any] | None:
        """A document if one is complete after one read; to be called when there is something to read.

        Raises:
            ChannelError: The worker is gone, or says that it failed.
        """
        try:
            block = self._connection.recv(_BLOCK_BYTES)
        except OSError as error:
            raise ChannelError(f"{self.name} ended") from error
        if not block:
            raise ChannelError(f"{self.name} ended")
        self._rest += block
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        document = json.loads(line)
        if "error" in document:
            raise ChannelError(f"{self.name}: {document['error']}")
        return document

    def close(self) -> None:
        """Hang up; the worker ends then, whatever it does."""
        self._connection.close()


class Listener:
    """Where workers come to; a context manager."""

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

    def gather(
        self, session: str, world_size: int, timeout_s: float, check_alive: Callable[[], None]
    ) -> list[tuple[Hello, Channel]]:
        """The workers of a session by rank, once all have joined their group.

        Args:
            session: Only workers that name it are let in.
            world_size: How many there are.
            timeout_s: How long they may take.
            check_alive: Called several times a second; raises if it makes no sense to wait.

        Raises:
            ChannelError: A worker failed, or they did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        greeted: dict[int, tuple[Hello, Channel]] = {}
        with ExitStack() as if_it_fails, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while len(greeted) < world_size:
                gone = _raised_by(check_alive)
                if time.monotonic() > deadline_s:
                    raise ChannelError(f"{len(greeted)} of {world_size} ranks came within {timeout_s:g} s")
                ready = selector.select(0 if gone else 0.2)
                if gone and not ready:  # what it said before its end has been read, and tells more
                    raise gone
                for key, _ in ready:
                    if key.fileobj is self._socket:
                        stranger = Channel(self._socket.accept()[0])
                        if_it_fails.callback(stranger.close)
                        selector.register(stranger, selectors.EVENT_READ)
                    else:
                        self._greet(key.fileobj, selector, session, greeted)
            if_it_fails.pop_all()
        return [greeted[rank] for rank in sorted(greeted)]

    def _greet(
        self, channel: Any, selector: selectors.BaseSelector, session: str, greeted: dict[int, tuple[Hello, Channel]]
    ) -> None:
        document = channel.read_once()
        if document is None:
            return
        selector.unregister(channel)
        if document["session"] != session:  # of a session that was given up
            channel.close()
            return
        hello = _hello(document)
        channel.name = f"rank {hello.rank}"
        if hello.rank in greeted:
            raise ChannelError(f"two workers say that they are rank {hello.rank}")
        greeted[hello.rank] = hello, channel


def ask(channels: Sequence[Channel], order: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Give all workers an order; their answers in the same order.

    Raises:
        ChannelError: A worker is gone, says that it failed, or does not answer in time.
    """
    for channel in channels:
        channel.say(order)
    deadline_s = time.monotonic() + timeout_s
    answers: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for index, channel in enumerate(channels):
            selector.register(channel, selectors.EVENT_READ, index)
        while len(answers) < len(channels):
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0:
                silent = next(i for i in range(len(channels)) if i not in answers)
                raise ChannelError(f"{channels[silent].name} did not answer within {timeout_s:g} s")
            for key, _ in selector.select(rest_s):
                document = channels[key.data].read_once()
                if document is not None:
                    answers[key.data] = document
                    selector.unregister(key.fileobj)
    return [answers[index] for index in range(len(channels))]


def _raised_by(check: Callable[[], None]) -> ChannelError | None:
    try:
        check()
    except ChannelError as error:
        return error
    return None


def _hello(document: dict[str, Any]) -> Hello:
    try:
        process = psutil.Process(document["pid"])
    except psutil.NoSuchProcess as error:
        raise ChannelError(f"rank {document['rank']} ended") from error
    return Hello(
        rank=document["rank"],
        world_size=document["world_size"],
        network=document["network"],
        version=document["version"],
        process=process,
    )
