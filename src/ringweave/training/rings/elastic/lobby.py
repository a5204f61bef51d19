"""How the workers of a job get their places in rings, though any of them may die meanwhile.

All meet in a lobby, a membership of its own, where each says how fast it is. The first of them forms the rings and
begins the job on the parameter server; the others, and whoever comes later, ask the server. If the first one dies, the
lobby has another first, until the server has the job: it takes the first that is begun.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringweave import wire
from ringweave.errors import (
    ConnectionLostError,
    DeadlineError,
    MembershipError,
    RemoteError,
    TrainingError,
    WireError,
    explain,
)
from ringweave.membership.agent import CALL_S, Agent
from ringweave.membership.messages import LOBBY, Ask, Count, Enter
from ringweave.membership.rules.follower import Out
from ringweave.membership.rules.records import Decree, Standing, slot_of
from ringweave.membership.rules.signs import Beat
from ringweave.params.messages import Seated
from ringweave.params.ring.client import RingClient
from ringweave.training.elastic import seams
from ringweave.training.elastic.standing import notes
from ringweave.training.rings.elastic.places import Seat

_LOOK_S = 0.1
Said = dict[str, Any]
Begin = Callable[[Sequence[int], Sequence[Said]], None]
"""(slots, what each of them says of itself): forms rings of them, and begins the job."""


class Lobby:
    """One worker in it; the agent's participant."""

    def __init__(self, member: str, said: Said) -> None:
        """`said` is what the others have to know of it to form rings."""
        self._standing = Standing(member=member, note=json.dumps(said))
        self._lock = threading.Lock()
        self._decree: Decree | None = None
        self._out: Out | None = None

    def freeze(self, *, is_urgent: bool) -> Standing | None:
        """See `agent.Participant`."""
        del is_urgent
        return self._standing

    def standing(self) -> Standing:
        """Likewise."""
        return self._standing

    def form(self, decree: Decree) -> None:
        """Likewise."""
        with self._lock:
            self._decree = decree

    def end(self, out: Out) -> None:
        """Likewise."""
        with self._lock:
            self._out = out

    def duty(self) -> Decree | None:
        """Who is there, if it is for this worker to form the rings.

        Raises:
            MembershipError: It was put out, or the job is over.
        """
        with self._lock:
            if self._out is not None:
                raise seams.error_of(self._out)
            is_first = self._decree is not None and self._decree.members[0] == self._standing.member
            return self._decree if is_first else None


def take_seat(
    lobby: Lobby,
    agent: Agent,
    client: RingClient,
    member: str,
    begin: Begin,
    *,
    why_over: Callable[[], str] = lambda: "",
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Seat, int]:
    """This worker's ring, and how many rings there are; returns once the job has begun on the server.

    Args:
        lobby: Where the others are met.
        agent: Speaks for this worker in the lobby; started here, if the job has not begun yet, and ended.
        client: Asks the server.
        member: This worker's name.
        begin: Forms rings of these slots, by what each of them says, and begins the job.
        why_over: Asks why the job is over, when no server answers; empty while it is not.
        sleep: Waits between two looks.

    Raises:
        MembershipError: The job is over, or has begun without this slot, or no server answers.
    """
    slot, _ = slot_of(member)
    try:
        seated = _seek(client, slot, why_over)
        if not seated.rings:
            with _entered(agent):
                seated = _wait_seated(lobby, client, slot, begin, why_over, sleep)
    finally:
        client.close()
    seat = Seat.of(slot, seated)
    if seat is None:
        slots = sorted(each for ring in seated.rings for each in ring)
        do = "Nothing: the job goes on without it"
        raise MembershipError(explain("job is over for worker", got=slot, expected=f"one of {slots}", do=do))
    return seat, len(seated.rings)


@contextlib.contextmanager
def _entered(agent: Agent) -> Iterator[None]:
    agent.start()
    try:
        yield
    finally:
        agent.leave(is_finished=True)
        agent.close(says_goodbye=True)


def _wait_seated(
    lobby: Lobby,
    client: RingClient,
    slot: int,
    begin: Begin,
    why_over: Callable[[], str],
    sleep: Callable[[float], None],
) -> Seated:
    """Until the job has begun: by this worker, if it is for this one to begin it."""
    done = None
    while not (seated := _seek(client, slot, why_over)).rings:
        decree = lobby.duty()
        if decree is None or decree is done:
            sleep(_LOOK_S)
            continue
        done = decree
        try:
            said = [notes.said_of(each.member, each.note) for each in decree.standings]
            begin([slot_of(each)[0] for each in decree.members], said)
        except RemoteError as error:
            was_faster = error.error == TrainingError.__name__ and bool(_seek(client, slot, why_over).rings)
            if not was_faster:  # what the server refuses of one it refuses of all
                raise
    return seated


def agent_of(
    lobby: Lobby, member: str, addresses: Sequence[tuple[str, int]], trust: wire.Trust, num_workers: int
) -> Agent:
    """Who speaks for a worker in the lobby, where one of them begins the job at the server, and the others wait."""
    enter = Enter(part=LOBBY, expected=num_workers)
    return Agent(member, addresses, trust, lobby, lambda: Beat(is_waiting=True, is_reading=True), enter=enter)


def why_over(addresses: Sequence[tuple[str, int]], trust: wire.Trust) -> str:
    """What the coordinators say of a job that is over; empty if it is not, or none answers."""
    for host, port in addresses:
        with contextlib.suppress(WireError), wire.Client.connect(host, port, trust, role="coordinator") as client:
            count = client.call(Ask(), timeout_s=CALL_S).message
            assert isinstance(count, Count), "the class of the reply"
            if count.ended:
                return count.ended
    return ""


def _seek(client: RingClient, slot: int, why_over: Callable[[], str]) -> Seated:
    try:
        return client.seek(slot)
    except WireError as error:
        if reason := why_over():  # the server has ended with the job
            raise MembershipError(f"job is over: {reason}. Nothing is left to do.") from error
        if not isinstance(error, (ConnectionLostError, DeadlineError)):
            raise
        # It is cut off, or the server is: that is no failure of the script's own.
        raise MembershipError(f"this worker is no member: no parameter server answers: {error}") from error
