"""Connections to the coordinators of a job; the next one is made while it is still in doubt whether it is needed."""

import threading
from collections.abc import Sequence

from ringweave import wire
from ringweave.errors import WireError


class Connector:
    """Connects to coordinators by their number; `prepare` and `forget` in one thread, the others in any."""

    def __init__(self, addresses: Sequence[tuple[str, int]], trust: wire.Trust) -> None:
        self._addresses, self.trust = list(addresses), trust
        self._lock = threading.Lock()
        self._spare: _Spare | None = None

    def address(self, at: int) -> tuple[str, int]:
        """Where coordinator `at` listens; numbers go round."""
        return self._addresses[at % len(self._addresses)]

    def prepare(self, at: int, patience_s: float) -> None:
        """Begin to connect to it, unless that is done already; nobody waits for it."""
        with self._lock:
            if self._spare is None:
                self._spare = _Spare(self, at, patience_s)

    def forget(self) -> None:
        """What was prepared is not needed."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.forget()

    def connect(self, at: int, patience_s: float) -> wire.Client:
        """The connection that was prepared, or else a new one; each step of it may take so long.

        Raises:
            WireError: It cannot be reached.
        """
        with self._lock:
            spare, self._spare = self._spare, None
        found = spare.take(patience_s) if spare is not None and self.address(spare.at) == self.address(at) else None
        return found or self.connect_anew(at, patience_s)

    def connect_anew(self, at: int, patience_s: float) -> wire.Client:
        """A new connection.

        Raises:
            WireError: It cannot be reached.
        """
        limits, (host, port) = wire.Limits(handshake_s=patience_s), self.address(at)
        return wire.Client.connect(host, port, self.trust, role="coordinator", limits=limits, timeout_s=patience_s)


class _Spare:
    """One that is being prepared, in a thread of its own."""

    def __init__(self, connector: Connector, at: int, patience_s: float) -> None:
        self.at = at
        self._connector, self._patience_s = connector, patience_s
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._client: wire.Client | None = None
        self._is_needed = True
        threading.Thread(target=self._run, name="ringweave spare", daemon=True).start()

    def _run(self) -> None:
        try:
            client = self._connector.connect_anew(self.at, self._patience_s)
        except WireError:
            client = None
        with self._lock:
            self._client, is_needed = client, self._is_needed
        self._ended.set()
        if client is not None and not is_needed:
            client.close()

    def take(self, patience_s: float) -> wire.Client | None:
        """It, once it is there; None if it came to nothing, or is broken."""
        self._ended.wait(patience_s)
        with self._lock:
            client, self._is_needed = self._client, False
        return client if client is not None and client.broken is None else None

    def forget(self) -> None:
        """It is closed, now or when it is there."""
        with self._lock:
            client, self._is_needed = self._client, False
        if client is not None:
            client.close()
