"""One reading of the state, which is given up when nobody waits for it, or nothing more will come of it.

A donor that is stopped keeps its connection: for the kernel it is there. That it is no member any more is known within
a second, from the next epoch.
"""

import math
import threading
import time
from collections.abc import Callable

from ringweave.comm.asking import in_time
from ringweave.errors import ConnectionLostError, explain
from ringweave.wire import Client

_LATE_S = 5.0
"""How long a donor that has gone on to another epoch may take to offer the state of the one before; if it heard of the
next one first, it never does."""


class Reading:
    """Of one newcomer from one donor."""

    def __init__(
        self, is_given_up: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`is_given_up`: nobody waits for it any more, beside what is said here."""
        self._is_given_up, self._clock = is_given_up, clock
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._has_begun, self._has_ended = False, False
        self._late_s = math.inf

    def run(self, pull: Callable[[], None]) -> None:
        """Read, in a thread that is left behind if it is given up.

        Raises:
            Exception: What `pull` raised.
            ConnectionLostError: It was given up; nothing is taken over any more.
        """
        try:
            in_time(pull, math.inf, self._is_over, "ringweave pull")
        except TimeoutError:
            with self._lock:  # what is being taken over is taken over first
                self._has_ended, client = True, self._client
            if client is not None:
                client.hang_up()
            raise _given_up() from None

    # The thread that reads.

    def attend(self, client: Client) -> None:
        """By this connection.

        Raises:
            ConnectionLostError: It was given up meanwhile.
        """
        with self._lock:
            if self._is_over():
                raise _given_up()
            self._client = client

    def begin(self) -> None:
        """The donor has said what the state is made of."""
        self._has_begun = True

    def take_over(self, load: Callable[[], None]) -> None:
        """All of it is there.

        Raises:
            ConnectionLostError: It was given up meanwhile.
        """
        with self._lock:
            if self._is_over():
                raise _given_up()
            load()

    # Any other.

    def give_up(self) -> None:
        """Nothing will come any more."""
        self._has_ended = True

    def hurry(self) -> None:
        """The donor may have gone on without offering it."""
        self._late_s = min(self._late_s, self._clock() + _LATE_S)

    def _is_over(self) -> bool:
        is_late = not self._has_begun and self._clock() > self._late_s
        return self._has_ended or is_late or self._is_given_up()


def _given_up() -> ConnectionLostError:
    return ConnectionLostError(
        explain(
            "state of the job",
            got="a member that is to give it and does not",
            expected="one that goes on",
            do="Read it from another one",
        )
    )
