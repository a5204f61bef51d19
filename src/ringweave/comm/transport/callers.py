"""Those who call at a door: they are taken in at once, and all are listened to until one has said who it is."""

import math
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_HELLO_S = 10.0
"""How long a caller may take to say who it is: a process on a busy machine may stand still in between."""
_MAX_SILENT = 256
"""Callers that are listened to at a time; more of them wait in the kernel."""


@dataclass(slots=True)
class _Caller:
    """A connection by which nobody has said all of its hello yet."""

    sock: socket.socket
    until_s: float
    """When it is hung up on."""
    said: bytes = b""


class Callers:
    """The callers of one lane; nobody has to wait for another one that is silent."""

    def __init__(self, listeners: Sequence[socket.socket], hello_bytes: int, clock: Callable[[], float]) -> None:
        """Every caller is to say `hello_bytes` bytes first."""
        self._listeners = tuple(listeners)
        self._hello_bytes = hello_bytes
        self._clock = clock
        self._silent: dict[int, _Caller] = {}

    def wait_hello(self, timeout_s: float) -> tuple[bytes, socket.socket] | None:
        """What a caller said, and the connection to it, which does not block; None if none has within `timeout_s`.

        It may return sooner than that where somebody called but said nothing.

        Raises:
            OSError: The listeners were shut down.
            ValueError: They were closed.
        """
        for descriptor in self._wait_ready(timeout_s):
            caller = self._silent.get(descriptor) or self._take_in(descriptor)
            if self._has_said(caller):
                return caller.said, caller.sock
        now_s = self._clock()
        for caller in [each for each in self._silent.values() if each.until_s <= now_s]:
            self._forget(caller).close()
        return None

    def close(self) -> None:
        """Hang up on all."""
        for caller in list(self._silent.values()):
            self._forget(caller).close()

    def socks(self) -> list[socket.socket]:
        """The connections to those who have not said who they are; from any thread."""
        return [caller.sock for caller in list(self._silent.values())]

    def _wait_ready(self, timeout_s: float) -> list[int]:
        """Descriptors of callers that say something, and of listeners where somebody calls."""
        poller = select.poll()  # select.select fails in a process with more than 1023 descriptors
        for descriptor in self._silent:
            poller.register(descriptor, select.POLLIN)
        if len(self._silent) < _MAX_SILENT:
            for listener in self._listeners:
                poller.register(listener, select.POLLIN)
        return [descriptor for descriptor, _ in poller.poll(math.ceil(1000 * timeout_s))]

    def _take_in(self, descriptor: int) -> _Caller:
        """Answer at the listener with this descriptor."""
        listener = next((each for each in self._listeners if each.fileno() == descriptor), None)
        if listener is None:
            raise ValueError("the door was closed")
        sock, _ = listener.accept()
        sock.setblocking(False)
        caller = self._silent[sock.fileno()] = _Caller(sock, self._clock() + _HELLO_S)
        return caller

    def _has_said(self, caller: _Caller) -> bool:
        """Listen, and tell whether that was all of its hello; who has hung up is forgotten."""
        try:
            more = caller.sock.recv(self._hello_bytes - len(caller.said))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        caller.said += more
        if not more:
            self._forget(caller).close()
            return False
        if len(caller.said) < self._hello_bytes:
            return False
        self._forget(caller)
        return True

    def _forget(self, caller: _Caller) -> socket.socket:
        self._silent.pop(caller.sock.fileno(), None)  # another thread may have closed all
        return caller.sock
