"""Whether a coordinator that was given up decides after all: asked while its members wait for the other one."""

import threading
from contextlib import suppress

from ringweave.errors import WireError
from ringweave.membership.connecting import Connector
from ringweave.membership.messages import JOB, Ask, Count

_EVERY_S = 0.5


class Question:
    """Asked again and again, in a thread of its own, since who waits for an election must not miss its end."""

    def __init__(self, connector: Connector, at: int, *, part: str, least_term: int, patience_s: float) -> None:
        """Asks nothing yet.

        Args:
            connector: Connects to coordinators.
            at: Number of the one that is asked.
            part: Of the job, whose membership is meant.
            least_term: Of an earlier term it is of the past.
            patience_s: How long an answer may take.
        """
        self._connector, self._at, self._part, self._least_term = connector, at, part, least_term
        self._patience_s = patience_s
        self._ended, self._is_yes = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_yes(self) -> bool:
        """It decides, in no earlier term."""
        return self._is_yes.is_set()

    def start_once(self) -> None:
        """Ask from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ringweave question", daemon=True)
            self._thread.start()

    def __enter__(self) -> "Question":
        return self

    def __exit__(self, *_: object) -> None:
        """Ask no more; what is under way ends by itself, within a patience or two."""
        self._ended.set()

    def _run(self) -> None:
        while not (self._ended.is_set() or self.is_yes):
            with suppress(WireError):  # it is down, or out of reach
                if self._ask():
                    self._is_yes.set()
            self._ended.wait(_EVERY_S)

    def _ask(self) -> bool:
        with self._connector.connect_anew(self._at, self._patience_s) as client:
            count = client.call(Ask(), timeout_s=self._patience_s).message
        assert isinstance(count, Count), "the class of the reply"
        term = count.parts.get(self._part, 0) if self._part != JOB else count.term if count.is_active else 0
        return term >= self._least_term
