"""A ring's connection to the parameter server: pushes once, pulls, and takes samples, also across lost connections."""

# Longer than a file should be: every call that a ring has for the server is one short method here.

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from typing_extensions import Buffer

from ringweave import wire
from ringweave.errors import ConnectionLostError, DeadlineError, LeadershipError, RemoteError, WireError
from ringweave.params.messages import (
    Ask,
    Leave,
    Meet,
    Met,
    Option,
    Pause,
    Pull,
    Pulled,
    Push,
    Pushed,
    Regroup,
    RehearsalOver,
    Rehearse,
    Rehearsed,
    Seated,
    Seek,
    Setup,
    Speak,
    Start,
    Status,
    Take,
    Taken,
)
from ringweave.params.resuming import CHUNK_BYTES, STATE, Forget, Offer, Restore, Ruled, Snap, Snapped, StartWords
from ringweave.params.ring.finding import Servers
from ringweave.params.rules import Spans
from ringweave.wire import states
from ringweave.wire.pacing import GivingWay

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
    testament: str = ""
    num_batches: int = 1
    pass_number: int = 0
    epoch: int = 0
    spans: Spans = ()


class RingClient:
    """Speaks for one ring. One thread may push while another takes samples: both share the connection.

    A connection that breaks is made again, and the call is repeated: the server applies no push twice. Where there are
    further servers, one of them may lead when the first does not answer any more; calls are repeated there.
    """

    # Longer than a constructor should be: most of it says what each argument is; it only keeps them.
    def __init__(  # noqa: PLR0913 - whom it speaks to and for, and how long it waits
        self,
        servers: Sequence[Callable[[], wire.Client]],
        ring: int,
        *,
        term: int = 0,
        ballot: Callable[[], tuple[int, int]] | None = None,
        is_missed: bool = False,
        patience_s: float = 1800.0,
        reconnect_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects at the first call.

        Args:
            servers: Each connects to one server of the job; the one that leads at the start comes first.
            ring: Index of the ring.
            term: Of the server, where there is but one.
            ballot: Of the epoch of the ring's membership in which this process represents it; the server hears nobody
                of an earlier one. None where rings lose no members.
            is_missed: Nobody waits for the ring when nothing is heard of this client; see `Servers`.
            patience_s: How long an answer may take; a pull also waits for the slowest ring.
            reconnect_s: How long the server may be out of reach, counted from when a connection broke that had stood
                for as long, or from the first failure of a call.
            clock: Gives seconds.
            sleep: Waits between two attempts to connect.
        """
        self._servers, self._ring = Servers(servers, term=term, is_missed=is_missed), ring
        self._patience_s, self._reconnect_s = patience_s, reconnect_s
        self._clock, self._sleep = clock, sleep
        self._num_tickets = 0
        self._ballot = ballot
        self._spoken: tuple[wire.Client, tuple[int, int]] | None = None
        """To whom it was said who speaks, and of which epoch."""

    def start(self, setup: Setup, parameters: Sequence[Buffer]) -> None:
        """Begin the job; rank 0 does so."""

        def once(client: wire.Client, term: int) -> wire.Answer:
            return client.call(Start(term=term, setup=setup), parameters, timeout_s=self._patience_s)

        self._call(once)

    def rehearse(self, setup: Setup, content: Sequence[Buffer], into: Sequence[Buffer]) -> Rehearsed:
        """As a push and a pull, before the job begins and without a trace; what the server has needed so far."""

        def once(client: wire.Client, term: int) -> Rehearsed:
            message = Rehearse(term=term, setup=setup)
            said = client.call(message, content, timeout_s=self._patience_s, into=into).message
            assert isinstance(said, Rehearsed), "the class of the reply"
            return said

        return self._call(once)

    def end_rehearsal(self) -> None:
        """Rehearse no more."""
        self._call(lambda client, term: client.call(RehearsalOver(term=term), timeout_s=self._patience_s))

    def pull(self, after_sequence: int, into: Sequence[Buffer]) -> int:
        """Fetch the parameters; their version."""

        def once(client: wire.Client, term: int) -> int:
            message = Pull(term=term, ring=self._ring, after_sequence=after_sequence)
            return _version(client.call(message, timeout_s=self._patience_s, into=into))

        return self._call_spoken(once)

    def exchange(self, round_: Round, content: Sequence[Buffer], into: Sequence[Buffer]) -> tuple[Pushed, int]:
        """Push, and fetch the parameters that follow, in one round trip.

        Returns:
            What became of the push, and the version of the parameters.
        """

        def once(client: wire.Client, term: int) -> tuple[Pushed, int]:
            pull = Pull(term=term, ring=self._ring, after_sequence=round_.sequence)
            pushing = client.start(self._push(round_, term), content, timeout_s=self._patience_s)
            pulling = client.start(pull, timeout_s=self._patience_s, into=into)
            try:
                pushed = pushing.wait().message
            except WireError:
                pulling.cancel()
                raise
            assert isinstance(pushed, Pushed), "the class of the reply"
            return pushed, _version(pulling.wait())

        return self._call_spoken(once)

    def push(self, round_: Round, content: Sequence[Buffer]) -> Pushed:
        """Push, and fetch nothing: the ring rests afterwards."""

        def once(client: wire.Client, term: int) -> Pushed:
            pushed = client.call(self._push(round_, term), content, timeout_s=self._patience_s).message
            assert isinstance(pushed, Pushed), "the class of the reply"
            return pushed

        return self._call_spoken(once)

    def take(
        self,
        epoch: int,
        num_samples: int,
        epoch_samples: int,
        *,
        least: int = 1,
        number: int | None = None,
        ended_epoch: int | None = None,
    ) -> tuple[int, int]:
        """The samples that the ring computes next, as (first, how many); none when the epoch is used up.

        It gets `least` if there are so many; `number` is that of the ticket among the ring's, where another client may
        have asked for it already; None counts this client's. `ended_epoch` is that of a pass that was broken off.
        """
        self._num_tickets = wanted = self._num_tickets + 1 if number is None else number

        def once(client: wire.Client, term: int) -> tuple[int, int]:
            message = Take(
                term=term,
                ring=self._ring,
                number=wanted,
                epoch=epoch,
                num_samples=num_samples,
                least=least,
                epoch_samples=epoch_samples,
                ended_epoch=ended_epoch,
            )
            taken = client.call(message, timeout_s=self._patience_s).message
            assert isinstance(taken, Taken), "the class of the reply"
            return taken.first, taken.num_samples

        return self._call_spoken(once)

    def pause(self) -> None:
        """The ring forms anew: nobody waits for it until it pushes or pulls."""
        self._call(lambda client, term: client.call(Pause(term=term, ring=self._ring), timeout_s=self._patience_s))

    def meet(self, number: int, epoch: int, said: str) -> dict[int, str]:
        """Wait until all rings that there are have come to the meeting of that number; what each of them said.

        `epoch` is the one that ends with it.
        """

        def once(client: wire.Client, term: int) -> dict[int, str]:
            meet = Meet(term=term, ring=self._ring, number=number, epoch=epoch, said=said)
            met = client.call(meet, timeout_s=self._patience_s).message
            assert isinstance(met, Met), "the class of the reply"
            return {int(ring): each for ring, each in met.said.items()}

        return self._call_spoken(once)

    def seek(self, slot: int, *, begins: bool = False) -> Seated:
        """The rings, once the job has begun, and where that slot's ring stands; `begins`: it has nothing under way."""

        def once(client: wire.Client, term: int) -> Seated:
            seated = client.call(Seek(term=term, slot=slot, begins=begins), timeout_s=self._patience_s).message
            assert isinstance(seated, Seated), "the class of the reply"
            return seated

        return self._call(once)

    def regroup(self, rings: Sequence[Sequence[int]]) -> None:
        """Have other rings from here on; all of them rest, and each has new clients afterwards."""

        def once(client: wire.Client, term: int) -> wire.Answer:
            message = Regroup(term=term, ring=self._ring, rings=[list(ring) for ring in rings])
            return client.call(message, timeout_s=self._patience_s)

        self._call(once)

    def read_snapshot(self) -> dict[str, bytearray] | None:
        """The server's state as it is now (`snapshots.of_buffers`); None where it is for another ring to read it.

        Pushes go on; where others use the links, reading gives way.
        """

        def once(client: wire.Client, term: int) -> dict[str, bytearray] | None:
            snapped = client.call(Snap(term=term, ring=self._ring), timeout_s=self._patience_s).message
            assert isinstance(snapped, Snapped), "the class of the reply"
            if not snapped.is_there:
                return None
            rooms: dict[str, bytearray] = {}

            def place(description: states.Description) -> dict[str, bytearray]:
                rooms.update({piece.name: bytearray(piece.num_bytes) for piece in description.pieces})
                return rooms

            pace = GivingWay(lambda: 0.0, threading.Event())
            states.pull(client, STATE, place, timeout_s=self._patience_s, pace=pace)
            client.call(Forget(term=term, ring=self._ring), timeout_s=self._patience_s)
            return rooms

        return self._call(once)

    def offer(self, train_step: int, check: str) -> Ruled:
        """What all rings go on from, once all have said which checkpoint they have; `check` is empty without one."""

        def once(client: wire.Client, term: int) -> Ruled:
            offer = Offer(term=term, ring=self._ring, train_step=train_step, check=check)
            ruled = client.call(offer, timeout_s=self._patience_s).message
            assert isinstance(ruled, Ruled), "the class of the reply"
            return ruled

        return self._call(once)

    def restore(self, content: bytes, ruled: Ruled, start: StartWords) -> None:
        """Give a snapshot back, that of the checkpoint that all go on from; see `Restore`."""

        def once(client: wire.Client, term: int) -> None:
            for first in range(0, len(content), CHUNK_BYTES):
                piece = Restore(
                    term=term,
                    ring=self._ring,
                    num_bytes=len(content),
                    first_byte=first,
                    train_step=ruled.train_step,
                    check=ruled.check,
                    start=start,
                )
                client.call(piece, [content[first : first + CHUNK_BYTES]], timeout_s=self._patience_s)

        self._call(once)

    def status(self) -> Status:
        """What the server has done."""
        status = self._call(lambda client, _: client.call(Ask(), timeout_s=self._patience_s)).message
        assert isinstance(status, Status), "the class of the reply"
        return status

    def leave(self, *, is_for_good: bool) -> None:
        """The ring computes nothing until it pulls again; or never again, and the connection ends."""

        def once(client: wire.Client, term: int) -> wire.Answer:
            message = Leave(term=term, ring=self._ring, is_for_good=is_for_good)
            return client.call(message, timeout_s=self._patience_s)

        self._call_spoken(once)
        if is_for_good:
            self.close()

    def close(self) -> None:
        """Hang up."""
        self._servers.close()

    def _push(self, round_: Round, term: int) -> Push:
        return Push(
            term=term,
            ring=self._ring,
            sequence=round_.sequence,
            base_version=round_.base_version,
            content=round_.content,
            num_samples=round_.num_samples,
            batch_share=round_.batch_share,
            absent=round_.absent,
            options=round_.options,
            testament=round_.testament,
            num_batches=round_.num_batches,
            pass_number=round_.pass_number,
            epoch=round_.epoch,
            spans=list(round_.spans),
        )

    def _call_spoken(self, do: Callable[[wire.Client, int], _T]) -> _T:
        """As `_call`, after the server has heard who speaks for the ring.

        Raises:
            WireError: As there; RemoteError also where the ring has gone on with another representative.
        """

        def once(client: wire.Client, term: int) -> _T:
            spoken = (client, self._ballot()) if self._ballot else None
            if spoken is not None and spoken != self._spoken:
                client.call(Speak(term=term, ring=self._ring, ballot=spoken[1]), timeout_s=self._patience_s)
                self._spoken = spoken
            return do(client, term)

        return self._call(once)

    def _call(self, do: Callable[[wire.Client, int], _T]) -> _T:
        """Do it, again on a new connection if one breaks.

        Raises:
            WireError: The server refused or failed, or was out of reach for too long.
        """
        began_s = self._clock()
        failing_since_s: float | None = None
        while True:
            tried_s, client = self._clock(), None
            try:
                client, term = self._servers.leader()
                return do(client, term)
            except (ConnectionLostError, DeadlineError, RemoteError) as error:
                if isinstance(error, RemoteError) and error.error != LeadershipError.__name__:
                    raise
                if client is not None:
                    self._servers.drop(client)
                now_s = self._clock()
                if failing_since_s is None or now_s - tried_s >= self._reconnect_s:
                    failing_since_s = now_s
                if now_s - failing_since_s >= self._reconnect_s or now_s - began_s >= self._patience_s:
                    raise
                self._sleep(_BREATH_S)


def _version(answer: wire.Answer) -> int:
    assert isinstance(answer.message, Pulled), "the class of the reply"
    return answer.message.version
