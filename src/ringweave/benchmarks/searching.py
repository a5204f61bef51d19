"""Every peer's best knob, found by trying all of them: a comparison with a badly set up peer says nothing."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave.benchmarks import rounds
from ringweave.benchmarks.progress import Progress
from ringweave.benchmarks.sessions.opening import Hall
from ringweave.benchmarks.sessions.session import Session
from ringweave.benchmarks.systems import ALL, Knob, Shape
from ringweave.errors import LaunchError, PeerError
from ringweave.units import format_bytes

_MOST_ROUNDS = 25
_LEAST_S = 1.0
"""A knob may take so long at a size even if it has had its rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What one knob gave at one size."""

    system: str
    knob: Knob
    num_bytes: int
    seconds: tuple[float, ...]

    def document(self, order: str) -> dict[str, Any]:
        """For JSON."""
        return {
            "system": self.system,
            "knob": self.knob.name,
            "order": order,
            "bytes": self.num_bytes,
            "median_s": statistics.median(self.seconds),
            "rounds": len(self.seconds),
        }


class Search:
    """Tries knobs on one layout of ranks."""

    def __init__(
        self, hall: Hall, node_of_rank: tuple[str, ...], limits_s: Mapping[int, float], num_rounds: int
    ) -> None:
        """`limits_s`: for each size of a message how long a round may take."""
        self._hall, self._node_of_rank, self._limits_s, self._num_rounds = hall, node_of_rank, limits_s, num_rounds
        self.attempts: list[Attempt] = []
        self.notes: list[str] = []

    def best(self, systems: Sequence[str], shape: Shape, progress: Progress) -> dict[tuple[str, int], Knob]:
        """(system, size) -> the knob with the least median.

        A system with one knob, or any without rounds to search in, takes its default untried. A knob that fails is
        noted and left out; a system of which all fail is missing from the answer.

        Raises:
            CommunicationError: A sum was wrong.
        """
        chosen: dict[tuple[str, int], Knob] = {}
        for name in systems:
            knobs = ALL[name].knobs(shape)
            if len(knobs) == 1 or not self._num_rounds:
                chosen.update({(name, size): knobs[0] for size in self._limits_s})
                continue
            for knob in knobs:
                progress.step(f"trying {name}: {knob.name}")
                self._try(name, knob, progress)
            chosen.update(choose([attempt for attempt in self.attempts if attempt.system == name]))
        return chosen

    def _try(self, name: str, knob: Knob, progress: Progress) -> None:
        try:
            with self._hall.open(ALL[name], knob, self._node_of_rank) as session:
                for size, limit_s in self._limits_s.items():
                    rounds.prepare(session, size)
                    attempt = Attempt(system=name, knob=knob, num_bytes=size, seconds=self._play(session, limit_s))
                    self.attempts.append(attempt)
                    progress.step(f"  {format_bytes(size)}: {statistics.median(attempt.seconds) * 1e3:.4g} ms")
        except (LaunchError, PeerError) as error:
            self.attempts = [each for each in self.attempts if (each.system, each.knob) != (name, knob)]
            self.notes.append(f"knob left out: {first_line(error)}")
            progress.step(f"  {self.notes[-1]}")

    def _play(self, session: Session, limit_s: float) -> tuple[float, ...]:
        """The rounds asked for; more of those that take no time, as short rounds scatter most."""
        rounds.play(session, self._hall.place, 0, limit_s)
        seconds: list[float] = []
        began_s = time.monotonic()
        while len(seconds) < self._num_rounds or (
            len(seconds) < _MOST_ROUNDS and time.monotonic() - began_s < _LEAST_S
        ):
            seconds.append(rounds.play(session, self._hall.place, len(seconds) + 1, limit_s).seconds)
        return tuple(seconds)


def choose(attempts: Sequence[Attempt]) -> dict[tuple[str, int], Knob]:
    """(system, size) -> the knob with the least median of those tried."""
    best: dict[tuple[str, int], Attempt] = {}
    for attempt in attempts:
        key = attempt.system, attempt.num_bytes
        if key not in best or statistics.median(attempt.seconds) < statistics.median(best[key].seconds):
            best[key] = attempt
    return {key: attempt.knob for key, attempt in best.items()}


def first_line(error: Exception) -> str:
    """The error without a program's last words."""
    return str(error).split("\n", maxsplit=1)[0]
