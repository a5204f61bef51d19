"""One round: all ranks run a few collectives, and every value is checked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringweave.errors import CommunicationError, explain
from ringweave_bench.bench_cluster import BenchCluster
from ringweave_bench.system_session import SystemSession

_BYTES_PER_ROUND = 2_000_000
_MAX_CALLS = 20
_ANSWER_TIMEOUT_S = 60.0
_SLOWEST_BYTES_PER_S = 5e6
_TIMEOUT_BOUNDS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRound:
    """Result of one round of one system."""

    seconds: float
    """Time of one collective on the slowest rank; the average if a round has several."""
    processor_s: float
    """Processor seconds of one collective, of all ranks together."""
    bytes_on_links: dict[str, int] = field(default_factory=dict)
    """Link -> bytes of all the round's collectives and of one barrier, headers included."""
    schedules: dict[str, int] = field(default_factory=dict)
    """Schedule -> rank 0's collectives since its start; empty if the system does not report it."""


def calls_per_round(num_bytes: int) -> int:
    """Return the collectives of a round: one, but up to 20 small ones, which are below a clock's resolution."""
    return max(1, min(_MAX_CALLS, _BYTES_PER_ROUND // num_bytes))


def alternate_systems(num_rounds: int, systems: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (round, system): A B C, C B A, A B C, ... so that none always follows the same one."""
    for index in range(num_rounds):
        for name in systems if index % 2 == 0 else reversed(systems):
            yield index, name


def round_timeout_s(num_bytes: int, bound_s: float) -> float:
    """Return the time after which a round counts as hung."""
    calls = calls_per_round(num_bytes)
    return round(_ANSWER_TIMEOUT_S + calls * (_TIMEOUT_BOUNDS * bound_s + num_bytes / _SLOWEST_BYTES_PER_S), 1)


def prepare_buffers(session: SystemSession, collective: str, num_bytes: int) -> None:
    """Make buffers for messages of this size: that of all blocks together.

    Raises:
        PeerError: A rank failed.
    """
    calls = calls_per_round(num_bytes)
    order = {"do": "prepare", "collective": collective, "bytes": num_bytes, "calls": calls}
    session.request(order, _ANSWER_TIMEOUT_S)


def play_round(session: SystemSession, bench_cluster: BenchCluster, round_index: int, limit_s: float) -> BenchmarkRound:
    """Fill the inputs, time the collectives, check the results; all ranks finish each part before the next.

    Raises:
        PeerError: A rank failed.
        CommunicationError: A result is wrong.
    """
    session.request({"do": "fill", "round": round_index}, _ANSWER_TIMEOUT_S)
    before = bench_cluster.bytes_on_links()
    answers = session.request({"do": "run"}, limit_s)
    after = bench_cluster.bytes_on_links()
    checks = session.request({"do": "check", "round": round_index}, _ANSWER_TIMEOUT_S)
    for rank, check in enumerate(checks):
        if check["wrong"]:
            raise CommunicationError(_wrong_value_text(session, rank, round_index, check["wrong"]))
    return BenchmarkRound(
        seconds=max(answer["seconds"] for answer in answers),
        processor_s=sum(answer["processor_s"] for answer in answers),
        bytes_on_links={link: count - before[link] for link, count in after.items()},
        schedules=checks[0]["schedules"],
    )


def _wrong_value_text(session: SystemSession, rank: int, round_index: int, wrong: dict[str, float]) -> str:
    return explain(
        f"result of {session.system.name} ({session.knob.name}) in element {wrong['element']:.0f}",
        got=wrong["got"],
        expected=f"{wrong['expected']:g}; {wrong['num_wrong']:.0f} elements are wrong",
        do="Do not trust this system here: its times are not reported",
        where=f"rank {rank}, round {round_index}",
    )
