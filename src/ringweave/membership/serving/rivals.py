"""What one coordinator hears of the other: which term it decides in, if it does."""

import threading
from collections.abc import Callable
from contextlib import suppress

from ringweave import wire
from ringweave.errors import WireError
from ringweave.membership.messages import Ask, Count

_EVERY_S = 1.0
_CALL_S = 3.0


class Rival:
    """Asks the other coordinator again and again; one that decided in an older term hears so that it is of the past."""

    def __init__(self, place: tuple[str, int], trust: wire.Trust, hear: Callable[[Count], object]) -> None:
        """`place` is where the other one listens; `hear` is told what it says."""
        self._place, self._trust, self._hear = place, trust, hear
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringweave rival", daemon=True)

    def __enter__(self) -> "Rival":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_CALL_S)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            with suppress(WireError):  # it is down, or out of reach: then there is nothing to hear
                self._ask_on()

    def _ask_on(self) -> None:
        host, port = self._place
        with wire.Client.connect(host, port, self._trust, role="coordinator", timeout_s=_CALL_S) as client:
            while not self._stop.is_set():
                count = client.call(Ask(), timeout_s=_CALL_S).message
                assert isinstance(count, Count), "the class of the reply"
                self._hear(count)
                self._stop.wait(_EVERY_S)
