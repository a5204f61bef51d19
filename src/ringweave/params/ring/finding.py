"""Which of a job's parameter servers leads: a connection to that one, and another one when it does not any more.

A server that was killed is missed at once, since its connections break. One that stands still or is cut off keeps them:
so where there are two, each is asked again and again whether it leads, on a connection of its own. That is also how a
ring shows that it is there: to servers that do not hear each other, and, where it may lose members, to the only one.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringweave import wire
from ringweave.errors import ConnectionLostError, WireError, explain
from ringweave.params.messages import Enter, Entered

CALL_S = 3.0
WATCH_S = 0.2
"""How often each is asked."""
_KNOWN_S = 1.0
"""What a server said so long ago it may not say any more."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a server has answered, and when."""

    entered: Entered
    at_s: float


class Servers:
    """The servers of a job, as a ring sees them; for any number of threads."""

    def __init__(
        self, connects: Sequence[Callable[[], wire.Client]], *, term: int = 0, is_missed: bool = False
    ) -> None:
        """Connects when it is first asked to.

        Args:
            connects: Each connects to one server; the one that leads at the start comes first.
            term: Of the only server, where there is but one; else they are asked.
            is_missed: The server misses this ring when nothing is heard of it: it is asked too where there is but one.
        """
        self._connects, self._term, self._is_missed = list(connects), term, is_missed
        self._connecting = threading.Lock()
        self._changed = threading.Condition()
        self._at = 0
        self._client: wire.Client | None = None
        self._said: dict[int, _Said] = {}
        self._reason: WireError | None = None
        self._stop = threading.Event()
        self._watchers: list[threading.Thread] = []

    def leader(self) -> tuple[wire.Client, int]:
        """A connection to the server that leads, and its term.

        Raises:
            WireError: None answers that does.
        """
        with self._connecting:
            with self._changed:
                if self._client is not None:
                    return self._client, self._term
                if self._is_missed:
                    self._watch()
            at, term = (0, self._term) if len(self._connects) == 1 else self._wait_leader()
            try:
                client = self._connects[at]()
            except WireError:
                with self._changed:
                    self._said.pop(at, None)
                raise
            with self._changed:
                self._client, self._at, self._term = client, at, term
            return client, term

    def drop(self, client: wire.Client) -> None:
        """That connection is of no use any more."""
        with self._changed:
            if self._client is client:
                self._client = None
        client.close()

    def close(self) -> None:
        """Hang up; the next call connects again."""
        with self._changed:
            client, self._client = self._client, None
            watchers, self._watchers = self._watchers, []
            self._stop.set()
        if client is not None:
            client.close(is_awaited=True)  # whoever connects next is no peer too many
        deadline_s = time.monotonic() + 2 * CALL_S
        for watcher in watchers:
            watcher.join(max(0.0, deadline_s - time.monotonic()))

    def _wait_leader(self) -> tuple[int, int]:
        """Index and term of the server that leads."""
        with self._changed:
            self._watch()
            self._changed.wait_for(lambda: self._known() is not None, CALL_S)
            found, reason = self._known(), self._reason
        if found is None:
            got, do = f"none ({reason})" if reason else "only standbys", "Look at the servers' logs"
            text = explain("parameter server that leads", got=got, expected="one", do=do)
            raise ConnectionLostError(text) from reason
        return found

    def _known(self) -> tuple[int, int] | None:
        """The one of the latest term, by what they said lately. With the lock held."""
        since_s = time.monotonic() - _KNOWN_S
        leading = [(at, each.entered) for at, each in self._said.items() if each.entered.leads and each.at_s > since_s]
        return max(((at, entered.term) for at, entered in leading), key=lambda pair: pair[1], default=None)

    def _watch(self) -> None:
        """Ask each, from now on. With the lock held."""
        if not self._watchers:
            self._stop, self._said, self._reason = threading.Event(), {}, None
            for at in range(len(self._connects)):
                watcher = threading.Thread(
                    target=self._watch_on, args=(at, self._stop), name="params leader", daemon=True
                )
                self._watchers.append(watcher)
                watcher.start()

    def _watch_on(self, at: int, stop: threading.Event) -> None:
        asked: wire.Client | None = None
        while not stop.is_set():
            try:
                asked = asked or self._connects[at]()
                entered = _entered(asked)
            except WireError as error:
                asked = None
                self._hear(at, None, error)
            else:
                self._hear(at, entered, None)
            stop.wait(WATCH_S)
        if asked is not None:
            asked.close()

    def _hear(self, at: int, entered: Entered | None, reason: WireError | None) -> None:
        """A server has answered, or has not; one that leads in a later term than the present one takes its place."""
        client: wire.Client | None = None
        with self._changed:
            if entered is None:
                self._said.pop(at, None)
                self._reason = reason
            else:
                self._said[at] = _Said(entered, time.monotonic())
                if entered.leads and entered.term > self._term and at != self._at:
                    client, self._client = self._client, None
            self._changed.notify_all()
        if client is not None:
            client.hang_up()  # it may be cut off: a goodbye would have to wait


def _entered(client: wire.Client) -> Entered:
    try:
        entered = client.call(Enter(), timeout_s=CALL_S).message
    except WireError:
        client.close()
        raise
    assert isinstance(entered, Entered), "the class of the reply"
    return entered
