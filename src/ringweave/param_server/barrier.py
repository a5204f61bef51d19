"""Barrier of all rings, which have no process group in common: the server records arrivals and texts. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ringweave.errors import TrainingError, explain

BARRIERS_PER_PASS = 2
"""Barriers after each pass: at its end, and when all have taken the same parameters."""
_NUM_RESULTS_KEPT = 2
"""Number of barriers whose results are kept: a ring asks again only for the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BarrierResult:
    """Result of a barrier, the same for all rings that ask."""

    number: int
    texts: dict[int, str]
    """Ring -> its text at the barrier, or the text of its last push."""


class RingBarrier:
    """Barriers of all rings of a job, numbered from 1; not thread-safe."""

    def __init__(self, num_rings: int) -> None:
        """Start with no arrivals."""
        self._last = [0] * num_rings
        self._epochs = [0] * num_rings
        self._texts: dict[int, dict[int, str]] = {}
        self._results: dict[int, dict[int, str]] = {}
        self._last_result = 0

    def to_state(self) -> dict[str, Any]:
        """Return the whole state as JSON values, for another server."""
        kept = {"texts": self._texts, "results": self._results}
        texts = {
            name: [[number, sorted(by_ring.items())] for number, by_ring in each.items()] for name, each in kept.items()
        }
        return {"last": self._last, "epochs": self._epochs, "last_result": self._last_result, **texts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RingBarrier":
        barrier = cls(len(state["last"]))
        barrier._last, barrier._epochs, barrier._last_result = (
            list(state["last"]),
            list(state["epochs"]),
            state["last_result"],
        )
        barrier._texts, barrier._results = (
            {number: dict(by_ring) for number, by_ring in state[name]} for name in ("texts", "results")
        )
        return barrier

    def restart_point(self, ring: int) -> tuple[int, int]:
        """Return (barriers of passes that the ring has completed, the epoch that comes next) for a ring that restarts.

        A ring that lost all its members may have missed passes: it goes through them, and finds them used up.
        """
        last, epoch = self._last[ring], self._epochs[ring]
        completed = last - last % BARRIERS_PER_PASS
        return completed, epoch + 1 if last and last == completed else epoch

    def arrive(self, ring: int, number: int, text: str, epoch: int = 0) -> None:
        """Note the arrival of a ring at the end of a pass over that epoch.

        A repeated arrival, as of a new representative, changes nothing.

        Raises:
            TrainingError: It has skipped a barrier.
        """
        next_number = self._last[ring] + 1
        if number > next_number:
            expected = f"{next_number}, the next one, or one before it again"
            do = "Ask for the ring's assignment again"
            raise TrainingError(explain(f"barrier of ring {ring}", got=number, expected=expected, do=do))
        if number < next_number:
            return
        self._last[ring], self._epochs[ring] = number, epoch
        self._texts.setdefault(number, {}).setdefault(ring, text)

    def result_of(
        self, number: int, gone: Collection[int], ring_progress: Mapping[int, str] | None = None
    ) -> dict[int, str] | None:
        """Return the text of each ring, once all have arrived except those that are gone; None before.

        The result is the same for all rings that ask. For rings that are gone it has the text of their last push. It is
        empty for a barrier that is long past.
        """
        if number <= self._last_result:
            return self._results.get(number, {})
        if any(last < number and ring not in gone for ring, last in enumerate(self._last)):
            return None
        missing_texts = {
            ring: text for ring, text in (ring_progress or {}).items() if self._last[ring] < number and text
        }
        self.record_result(BarrierResult(number=number, texts={**missing_texts, **self._texts.get(number, {})}))
        return self._results[number]

    def record_result(self, result: BarrierResult) -> None:
        """Record the result of a barrier, made here or by another server that this one follows."""
        if result.number in self._results or result.number <= self._last_result - _NUM_RESULTS_KEPT:
            return
        self._last_result, self._results[result.number] = max(result.number, self._last_result), dict(result.texts)
        for old in [each for each in (*self._results, *self._texts) if each <= self._last_result - _NUM_RESULTS_KEPT]:
            self._results.pop(old, None)
            self._texts.pop(old, None)
        self._texts.pop(result.number, None)
