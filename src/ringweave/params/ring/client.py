"""A ring's connection to the parameter server: pushes once, pulls, and takes samples, also across lost connections."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from typing_extensions import Buffer

from ringweave import wire
from ringweave.errors import ConnectionLostError, DeadlineError, WireError
from ringweave.params.messages import (
    Ask,
    Leave,
    Option,
    Pull,
    Pulled,
    Push,
    Pushed,
    Regroup,
    Setup,
    Start,
    Status,
    Take,
    Taken,
)

_T = TypeVar("_T")
_BREATH_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What a ring pushes."""

    sequence: int
    base_version: int
    content: Literal["gradient", "change"]
    num_samples: int
    batch_share: float
    absent: list[int] = field(default_factory=list)
    options: list[dict[str, Option]] = field(default_factory=list)


class RingClient:
    """Speaks for one ring; for one thread at a time.

    A connection that breaks is made again, and the call is repeated: the server applies no push twice.
    """

    def __init__(
        self,
        connect: Callable[[], wire.Client],
        ring: int,
        *,
        term: int = 0,
        patience_s: float = 1800.0,
        reconnect_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects at the first call.

        Args:
            connect: Connects to the server that leads now.
            ring: Index of the ring.
            term: Of that server.
            patience_s: How long an answer may take; a pull also waits for the slowest ring.
            reconnect_s: How long the server may be out of reach, counted from when a connection broke that had stood
                for as long, or from the first failure of a call.
            clock: Gives seconds.
            sleep: Waits between two attempts to connect.
        """
        self._connect, self._ring, self._term = connect, ring, term
        self._patience_s, self._reconnect_s = patience_s, reconnect_s
        self._clock, self._sleep = clock, sleep
        self._client: wire.Client | None = None
        self._num_tickets = 0

    def start(self, setup: Setup, parameters: Sequence[Buffer]) -> None:
        """Begin the job; rank 0 does so."""
        self._call(
            lambda client: client.call(Start(term=self._term, setup=setup), parameters, timeout_s=self._patience_s)
        )

    def pull(self, after_sequence: int, into: Sequence[Buffer]) -> int:
        """Fetch the parameters; their version."""
        message = Pull(term=self._term, ring=self._ring, after_sequence=after_sequence)
        return _version(self._call(lambda client: client.call(message, timeout_s=self._patience_s, into=into)))

    def exchange(self, round_: Round, content: Sequence[Buffer], into: Sequence[Buffer]) -> tuple[Pushed, int]:
        """Push, and fetch the parameters that follow, in one round trip.

        Returns:
            What became of the push, and the version of the parameters.
        """
        push = Push(
            term=self._term,
            ring=self._ring,
            sequence=round_.sequence,
            base_version=round_.base_version,
            content=round_.content,
            num_samples=round_.num_samples,
            batch_share=round_.batch_share,
            absent=round_.absent,
            options=round_.options,
        )
        pull = Pull(term=self._term, ring=self._ring, after_sequence=round_.sequence)

        def once(client: wire.Client) -> tuple[Pushed, int]:
            pushing = client.start(push, content, timeout_s=self._patience_s)
            pulling = client.start(pull, timeout_s=self._patience_s, into=into)
            try:
                pushed = pushing.wait().message
            except WireError:
                pulling.cancel()
                raise
            assert isinstance(pushed, Pushed), "the class of the reply"
            return pushed, _version(pulling.wait())

        return self._call(once)

    def take(self, epoch: int, num_samples: int, epoch_samples: int) -> tuple[int, int]:
        """The samples that the ring computes next, as (first, how many); none when the epoch is used up."""
        self._num_tickets += 1
        message = Take(
            term=self._term,
            ring=self._ring,
            number=self._num_tickets,
            epoch=epoch,
            num_samples=num_samples,
            epoch_samples=epoch_samples,
        )
        taken = self._call(lambda client: client.call(message, timeout_s=self._patience_s)).message
        assert isinstance(taken, Taken), "the class of the reply"
        return taken.first, taken.num_samples

    def regroup(self, rings: Sequence[Sequence[int]]) -> None:
        """Have other rings from here on; all of them rest, and each has new clients afterwards."""
        message = Regroup(term=self._term, ring=self._ring, rings=[list(ring) for ring in rings])
        self._call(lambda client: client.call(message, timeout_s=self._patience_s))

    def status(self) -> Status:
        """What the server has done."""
        status = self._call(lambda client: client.call(Ask(), timeout_s=self._patience_s)).message
        assert isinstance(status, Status), "the class of the reply"
        return status

    def leave(self, *, is_for_good: bool) -> None:
        """The ring computes nothing until it pulls again; or never again, and the connection ends."""
        message = Leave(term=self._term, ring=self._ring, is_for_good=is_for_good)
        self._call(lambda client: client.call(message, timeout_s=self._patience_s))
        if is_for_good:
            self.close()

    def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _call(self, do: Callable[[wire.Client], _T]) -> _T:
        """Do it, again on a new connection if one breaks.

        Raises:
            WireError: The server refused or failed, or was out of reach for too long.
        """
        began_s = self._clock()
        failing_since_s: float | None = None
        while True:
            tried_s = self._clock()
            try:
                if self._client is None:
                    self._client = self._connect()
                return do(self._client)
            except (ConnectionLostError, DeadlineError):
                self.close()
                now_s = self._clock()
                if failing_since_s is None or now_s - tried_s >= self._reconnect_s:
                    failing_since_s = now_s
                if now_s - failing_since_s >= self._reconnect_s or now_s - began_s >= self._patience_s:
                    raise
                self._sleep(_BREATH_S)


def _version(answer: wire.Answer) -> int:
    assert isinstance(answer.message, Pulled), "the class of the reply"
    return answer.message.version
