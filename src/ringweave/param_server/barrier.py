"""Barrier of all rings, which have no process group in common: the server records arrivals and texts. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ringweave.errors import TrainingError

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
    passed_over: tuple[int, ...] = ()
    """Rings that may live and were not waited for: they lose their grants."""


@dataclass(slots=True)
class RingBarrier:
    """Barriers of all rings of a job, numbered from 1; not thread-safe."""

    last: list[int]
    """Last barrier at which each ring has arrived."""
    epochs: list[int]
    """Epoch that ended for each ring with it."""
    texts: dict[int, dict[int, str]] = field(default_factory=dict)
    """Barrier -> ring -> its text."""
    results: dict[int, BarrierResult] = field(default_factory=dict)
    last_result: int = 0

    @classmethod
    def of_rings(cls, num_rings: int) -> "RingBarrier":
        """Return the barriers before any arrival."""
        return cls([0] * num_rings, [0] * num_rings)

    def restart_point(self, ring: int) -> tuple[int, int]:
        """Return (barriers of passes that the ring has completed, the epoch that comes next) for a ring that restarts.

        A ring that lost all its members may have missed passes: it goes through them, and finds them used up.
        """
        last, epoch = self.last[ring], self.epochs[ring]
        completed = last - last % BARRIERS_PER_PASS
        return completed, epoch + 1 if last and last == completed else epoch

    def arrive(self, ring: int, number: int, text: str, epoch: int = 0) -> None:
        """Note the arrival of a ring at the end of a pass over that epoch.

        A repeated arrival, as of a new representative, changes nothing.

        Raises:
            TrainingError: It has skipped a barrier.
        """
        next_number = self.last[ring] + 1
        if number > next_number:
            expected = f"{next_number}, the next one, or one before it again"
            do = "Ask for the ring's assignment again"
            raise TrainingError(f"barrier of ring {ring}", got=number, expected=expected, do=do)
        if number < next_number:
            return
        self.last[ring], self.epochs[ring] = number, epoch
        self.texts.setdefault(number, {}).setdefault(ring, text)

    def missing_rings(self, number: int) -> set[int]:
        """Return the rings that a barrier waits for, unless they are gone; none once it has a result.

        A ring that an earlier barrier has passed over is not among them until it has arrived there.
        """
        return {ring for ring, last in enumerate(self.last) if self.last_result <= last < number}

    def result_of(
        self,
        number: int,
        gone: Collection[int],
        ring_progress: Mapping[int, str] | None = None,
        absent: Collection[int] = (),
    ) -> BarrierResult | None:
        """Return the text of each ring, once all have arrived except those that are gone or absent; None before.

        The result is the same for all rings that ask. For rings that are gone, and for absent ones, which are passed
        over, it has the text of their last push. It is empty for a barrier that is long past.
        """
        if number <= self.last_result:
            return self.results.get(number, BarrierResult(number=number, texts={}))
        missing = self.missing_rings(number) - {*gone}
        if not missing <= {*absent}:
            return None
        late = {ring for ring, last in enumerate(self.last) if last < number}
        late_texts = {ring: text for ring, text in (ring_progress or {}).items() if ring in late and text}
        texts = {**late_texts, **self.texts.get(number, {})}
        self.record_result(BarrierResult(number=number, texts=texts, passed_over=tuple(sorted(missing))))
        return self.results[number]

    def record_result(self, result: BarrierResult) -> bool:
        """Record the result of a barrier, made here or by a server that this one follows; False if it was known."""
        if result.number in self.results or result.number <= self.last_result - _NUM_RESULTS_KEPT:
            return False
        self.last_result, self.results[result.number] = max(result.number, self.last_result), result
        for old in [each for each in (*self.results, *self.texts) if each <= self.last_result - _NUM_RESULTS_KEPT]:
            self.results.pop(old, None)
            self.texts.pop(old, None)
        self.texts.pop(result.number, None)
        return True
