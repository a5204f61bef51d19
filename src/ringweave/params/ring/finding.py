"""Which of a job's parameter servers leads: a connection to that one, and another one when it does not any more.

A server that was killed is missed at once, since its connections break. One that stands still keeps them: so while a
ring waits for an answer it asks the other server now and then whether that one leads by now.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence

from ringweave import wire
from ringweave.errors import ConnectionLostError, WireError, explain
from ringweave.params.messages import Enter, Entered

CALL_S = 3.0
WATCH_S = 0.2
"""How often the others are asked."""


class Servers:
    """The servers of a job, as a ring sees them; for any number of threads."""

    def __init__(self, connects: Sequence[Callable[[], wire.Client]], *, term: int = 0) -> None:
        """Connects when it is first asked to.

        Args:
            connects: Each connects to one server; the one that leads at the start comes first.
            term: Of the only server, where there is but one; else they are asked.
        """
        self._connects, self._term = list(connects), term
        self._lock = threading.Lock()
        self._at = 0
        self._client: wire.Client | None = None
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def leader(self) -> tuple[wire.Client, int]:
        """A connection to the server that leads, and its term.

        Raises:
            WireError: None answers that does.
        """
        with self._lock:
            if self._client is None:
                self._client = self._connects[0]() if len(self._connects) == 1 else self._search()
                self._watch()
            return self._client, self._term

    def drop(self, client: wire.Client) -> None:
        """That connection is of no use any more."""
        with self._lock:
            if self._client is client:
                self._client = None
        client.close()

    def close(self) -> None:
        """Hang up; the next call connects again."""
        with self._lock:
            client, self._client = self._client, None
            watcher, self._watcher = self._watcher, None
            self._stop.set()
        if client is not None:
            client.close()
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(2 * CALL_S)

    def _search(self) -> wire.Client:
        reason: WireError | None = None
        for number in range(len(self._connects)):
            at = (self._at + number) % len(self._connects)
            try:
                client = self._connects[at]()
                entered = _entered(client)
            except WireError as error:
                reason = error
                continue
            if entered.leads:
                self._at, self._term = at, entered.term
                return client
            client.close()
        got = f"none ({reason})" if reason else "only standbys"
        do = "Look at the servers' logs"
        raise ConnectionLostError(explain("parameter server that leads", got=got, expected="one", do=do)) from reason

    def _watch(self) -> None:
        """With the lock held."""
        if len(self._connects) > 1 and self._watcher is None:
            self._stop = threading.Event()
            self._watcher = threading.Thread(
                target=self._watch_on, args=(self._stop,), name="params leader", daemon=True
            )
            self._watcher.start()

    def _watch_on(self, stop: threading.Event) -> None:
        asked: dict[int, wire.Client] = {}
        while not stop.wait(WATCH_S):
            for at in set(range(len(self._connects))) - {self._at}:
                self._ask(at, asked)
        for client in asked.values():
            client.close()

    def _ask(self, at: int, asked: dict[int, wire.Client]) -> None:
        """Let go of the present server if that one leads in a later term."""
        try:
            if at not in asked:
                asked[at] = self._connects[at]()
            entered = _entered(asked[at])
        except WireError:
            with contextlib.suppress(KeyError):
                asked.pop(at).close()
            return
        with self._lock:
            is_later = entered.leads and entered.term > self._term
            client = self._client if is_later and at != self._at else None
            if client is not None:
                self._client, self._at = None, at
        if client is not None:
            client.close()
            asked.pop(at).close()


def _entered(client: wire.Client) -> Entered:
    try:
        entered = client.call(Enter(), timeout_s=CALL_S).message
    except WireError:
        client.close()
        raise
    assert isinstance(entered, Entered), "the class of the reply"
    return entered
