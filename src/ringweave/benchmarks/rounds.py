"""One round: all ranks run a few allreduces, and every value is checked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringweave.benchmarks.places.place import Place
from ringweave.benchmarks.sessions.session import Session
from ringweave.errors import CommunicationError, explain

_CALLS_BYTES = 2_000_000
_MOST_CALLS = 20
_PATIENCE_S = 60.0
_SLOWEST_BYTES_PER_S = 5e6
_TIMES_BOUND = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one round of one system gave."""

    seconds: float
    """Of one allreduce, on the slowest rank; the average where a round has several."""
    bytes_on_links: dict[str, int] = field(default_factory=dict)
    """Link -> bytes of all the round's allreduces and of one barrier, headers included."""
    schedules: dict[str, int] = field(default_factory=dict)
    """Collectives of rank 0 since its start, by schedule, where the system tells."""


def calls_per_round(num_bytes: int) -> int:
    """How many allreduces a round has: one, but up to 20 of small messages, which take less time than a clock tells."""
    return max(1, min(_MOST_CALLS, _CALLS_BYTES // num_bytes))


def turns(num_rounds: int, systems: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Round and system, one after the other: A B C, C B A, A B C, ... so that none always follows the same one."""
    for index in range(num_rounds):
        for name in systems if index % 2 == 0 else reversed(systems):
            yield index, name


def timeout_s(num_bytes: int, bound_s: float) -> float:
    """How long a round may take before it counts as hung."""
    calls = calls_per_round(num_bytes)
    return round(_PATIENCE_S + calls * (_TIMES_BOUND * bound_s + num_bytes / _SLOWEST_BYTES_PER_S), 1)


def prepare(session: Session, num_bytes: int) -> None:
    """Make buffers for messages of this size.

    Raises:
        PeerError: A rank failed.
    """
    session.ask({"do": "prepare", "bytes": num_bytes, "calls": calls_per_round(num_bytes)}, _PATIENCE_S)


def play(session: Session, place: Place, round_index: int, limit_s: float) -> Round:
    """Fill the inputs, time the allreduces, check the sums; each only when all ranks are done with the one before.

    Raises:
        PeerError: A rank failed.
        CommunicationError: A sum is wrong.
    """
    session.ask({"do": "fill", "round": round_index}, _PATIENCE_S)
    before = place.bytes_on_links()
    answers = session.ask({"do": "run"}, limit_s)
    after = place.bytes_on_links()
    checks = session.ask({"do": "check", "round": round_index}, _PATIENCE_S)
    for rank, check in enumerate(checks):
        if check["wrong"]:
            raise CommunicationError(_wrong(session, rank, round_index, check["wrong"]))
    return Round(
        seconds=max(answer["seconds"] for answer in answers),
        bytes_on_links={link: count - before[link] for link, count in after.items()},
        schedules=checks[0]["schedules"],
    )


def _wrong(session: Session, rank: int, round_index: int, wrong: dict[str, float]) -> str:
    return explain(
        f"sum of {session.system.name} ({session.knob.name}) in element {wrong['element']:.0f}",
        got=wrong["got"],
        expected=f"{wrong['expected']:g}; {wrong['num_wrong']:.0f} elements are wrong",
        do="Do not trust this system here: its times are not reported",
        where=f"rank {rank}, round {round_index}",
    )
