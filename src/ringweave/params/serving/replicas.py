"""How a server makes sure that it leads, and that what it acknowledges outlives it."""

from collections.abc import Sequence
from typing import Protocol

from ringweave.errors import RefusedError, explain
from ringweave.params.messages import Leave, Meet, Pause, Push
from ringweave.params.rules import Answer, Ticket

Fact = Ticket | Leave | Pause | Meet | Answer
"""What a ring is given or says beside pushing and pulling, once it is booked."""


class Replica(Protocol):
    """Where a server makes sure that it leads, and that another one knows what it is about to acknowledge.

    What is said of a job returns once the standby has it, or there is none any more; and raises LeadershipError if this
    server does not lead any more: then nothing may be acknowledged.
    """

    @property
    def term(self) -> int:
        """Of the server that leads, as far as this one knows."""
        ...

    @property
    def answers(self) -> bool:
        """This one leads, and may say so."""
        ...

    def check_term(self, term: int) -> None:
        """Refuse a message that is meant for a server of another term, or that this one may not answer now."""
        ...

    def started(self) -> None:
        """The job has begun."""
        ...

    def pushing(self, push: Push, buffers: Sequence[memoryview]) -> None:
        """This push is applied next."""
        ...

    def granted(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        """The ring is given the parameters of that version, so many train steps ahead.

        `is_between_pushes`: nobody applies a push until this returns, so it need not wait for one who takes a standby
        in, and must not.
        """
        ...

    def noted(self, fact: Fact) -> None:
        """This is in the books."""
        ...


class Alone:
    """A server without a standby, of one term from begin to end."""

    def __init__(self, term: int = 0) -> None:
        self.term = term
        self.answers = True

    def check_term(self, term: int) -> None:
        """See Replica.

        Raises:
            RefusedError: Another term is meant.
        """
        if term != self.term:
            raise RefusedError(
                explain(
                    "term of the parameter server",
                    got=term,
                    expected=f"{self.term}, that of this one",
                    do="Ask which server leads now, and join again",
                )
            )

    def started(self) -> None:
        """Nobody has to know."""

    def pushing(self, push: Push, buffers: Sequence[memoryview]) -> None:
        """Likewise."""

    def granted(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        """Likewise."""

    def noted(self, fact: Fact) -> None:
        """Likewise."""
