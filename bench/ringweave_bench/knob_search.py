"""Search of each peer's best knob by trying all: a comparison with a badly configured peer is worthless."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave.cli.echo import ProgressPrinter
from ringweave.errors import LaunchError, PeerError
from ringweave.units import format_bytes
from ringweave_bench import rounds
from ringweave_bench.system_session import SessionFactory, SystemSession
from ringweave_bench.systems import SYSTEMS, Knob, RankShape

_MAX_ROUNDS = 25
_MIN_SEARCH_S = 1.0
"""Time that a knob may use at a size even after its rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobAttempt:
    """Result of one knob at one size."""

    system: str
    knob: Knob
    num_bytes: int
    seconds: tuple[float, ...]

    def document(self, order: str) -> dict[str, Any]:
        return {
            "system": self.system,
            "knob": self.knob.name,
            "order": order,
            "bytes": self.num_bytes,
            "median_s": statistics.median(self.seconds),
            "rounds": len(self.seconds),
        }


class KnobSearch:
    """Tries knobs on one layout of ranks."""

    def __init__(
        self,
        session_factory: SessionFactory,
        node_of_rank: tuple[str, ...],
        limits_s: Mapping[int, float],
        num_rounds: int,
        collective: str,
    ) -> None:
        """`limits_s`: message size -> longest time of a round."""
        self._session_factory, self._node_of_rank = session_factory, node_of_rank
        self._limits_s, self._num_rounds, self._collective = limits_s, num_rounds, collective
        self.attempts: list[KnobAttempt] = []
        self.notes: list[str] = []

    def best_knobs(
        self, systems: Sequence[str], shape: RankShape, progress: ProgressPrinter
    ) -> dict[tuple[str, int], Knob]:
        """Return (system, size) -> the knob with the least median.

        A system with one knob, or any without search rounds, takes its default untried. A knob that fails is noted
        and left out; a system whose knobs all fail is missing from the result.

        Raises:
            CommunicationError: A sum was wrong.
        """
        chosen: dict[tuple[str, int], Knob] = {}
        for name in systems:
            knobs = SYSTEMS[name].knobs(shape)
            if len(knobs) == 1 or not self._num_rounds:
                chosen.update({(name, size): knobs[0] for size in self._limits_s})
                continue
            for knob in knobs:
                progress.print_step(f"trying {name}: {knob.name}")
                self._try_knob(name, knob, progress)
            chosen.update(choose_knobs([attempt for attempt in self.attempts if attempt.system == name]))
        return chosen

    def _try_knob(self, name: str, knob: Knob, progress: ProgressPrinter) -> None:
        try:
            with self._session_factory.open_session(SYSTEMS[name], knob, self._node_of_rank) as session:
                for size, limit_s in self._limits_s.items():
                    rounds.prepare_buffers(session, self._collective, size)
                    attempt = KnobAttempt(
                        system=name, knob=knob, num_bytes=size, seconds=self._play_rounds(session, limit_s)
                    )
                    self.attempts.append(attempt)
                    progress.print_step(f"  {format_bytes(size)}: {statistics.median(attempt.seconds) * 1e3:.4g} ms")
        except (LaunchError, PeerError) as error:
            self.attempts = [each for each in self.attempts if (each.system, each.knob) != (name, knob)]
            self.notes.append(f"knob left out: {error_first_line(error)}")
            progress.print_step(f"  {self.notes[-1]}")

    def _play_rounds(self, session: SystemSession, limit_s: float) -> tuple[float, ...]:
        """Play the requested rounds; more if they are short, since short rounds scatter most."""
        rounds.play_round(session, self._session_factory.bench_cluster, 0, limit_s)
        seconds: list[float] = []
        began_s = time.monotonic()
        while len(seconds) < self._num_rounds or (
            len(seconds) < _MAX_ROUNDS and time.monotonic() - began_s < _MIN_SEARCH_S
        ):
            seconds.append(
                rounds.play_round(session, self._session_factory.bench_cluster, len(seconds) + 1, limit_s).seconds
            )
        return tuple(seconds)


def choose_knobs(attempts: Sequence[KnobAttempt]) -> dict[tuple[str, int], Knob]:
    """Return (system, size) -> the knob with the least median of those tried."""
    best: dict[tuple[str, int], KnobAttempt] = {}
    for attempt in attempts:
        key = attempt.system, attempt.num_bytes
        if key not in best or statistics.median(attempt.seconds) < statistics.median(best[key].seconds):
            best[key] = attempt
    return {key: attempt.knob for key, attempt in best.items()}


def error_first_line(error: Exception) -> str:
    """Return the error's first line, without the log of a program."""
    return str(error).split("\n", maxsplit=1)[0]
