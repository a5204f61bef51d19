"""The leader's connections to its standby."""

import threading
from collections.abc import Callable, Sequence

from ringweave import wire
from ringweave.params.standby.messages import Pushing, Renew

_COPY_S = 3600.0
"""For the standby to read the whole state; one that stops meanwhile is noticed by its heartbeats."""


class Link:
    """One connection for pushes, one for all that must not queue behind them."""

    def __init__(self, connect: Callable[[], wire.Client]) -> None:
        """Connects.

        Raises:
            WireError: The standby cannot be reached.
        """
        self._small = connect()
        try:
            self._large = connect()
        except BaseException:
            self._small.close()
            raise
        self._ended = threading.Event()

    def tell(self, message: wire.Message, buffers: Sequence[memoryview] = ()) -> None:
        """Returns once the standby has it.

        Raises:
            WireError: It has not, or that is not known.
        """
        client = self._large if isinstance(message, Pushing) else self._small
        client.call(message, buffers, timeout_s=_COPY_S)

    def renew(self, timeout_s: float) -> None:
        """Returns if the standby still follows.

        Raises:
            WireError: It does not, or does not answer.
        """
        self._small.call(Renew(), timeout_s=timeout_s)

    def wait_end(self, timeout_s: float) -> bool:
        """Whether it was closed, by then."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Hang up; whoever waits for an answer is told."""
        self._ended.set()
        for client in (self._large, self._small):
            client.close()
