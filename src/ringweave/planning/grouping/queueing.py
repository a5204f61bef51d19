"""Rings of workers that finish a speed test at about the same time.

Source: Huang & Yang, "A highly scalable distributed machine learning architecture based on Ring All-Reduce" (2022),
algorithm 1. What the text leaves open is decided here:

- k does not divide N: every ring has N // k workers, and the last one takes the remainder as well.
- A worker that never reports: whoever feeds the queue stops waiting for it (`training/speed_test.py`).
"""

from collections import deque

from ringweave.errors import TrainingError, explain

Ring = tuple[int, ...]
"""Workers in the order in which they reported."""


class CompletionQueue:
    """The queue of completions: reports go in, rings come out. Pure, so that any order of events can be tried."""

    def __init__(self, num_workers: int, num_rings: int) -> None:
        if not 1 <= num_rings <= num_workers:
            raise TrainingError(
                explain(
                    "rings",
                    got=num_rings,
                    expected=f"1 to {num_workers}, one worker in each at least",
                    do="Choose fewer rings, or use more workers",
                )
            )
        self._num_workers, self._num_rings = num_workers, num_rings
        self._queue: deque[int] = deque()
        self._reported: set[int] = set()
        self._rings: list[Ring] = []

    @property
    def rings(self) -> tuple[Ring, ...]:
        """Those formed so far, the fastest first."""
        return tuple(self._rings)

    def report(self, worker: int) -> Ring | None:
        """A worker has finished; the ring that this completes, if it does.

        A second report of a worker changes nothing.

        Raises:
            TrainingError: There is no such worker.
        """
        if not 0 <= worker < self._num_workers:
            expected = f"0 to {self._num_workers - 1}"
            raise TrainingError(
                explain("worker that reports", got=worker, expected=expected, do="Look into the log of that worker")
            )
        if worker in self._reported:
            return None
        self._reported.add(worker)
        self._queue.append(worker)
        return self._dequeue(self._wanted) if len(self._queue) >= self._wanted else None

    @property
    def _wanted(self) -> int:
        """Workers of the ring that is formed next."""
        size = self._num_workers // self._num_rings
        is_last = len(self._rings) == self._num_rings - 1
        return self._num_workers - size * (self._num_rings - 1) if is_last else size

    def _dequeue(self, count: int) -> Ring:
        self._rings.append(tuple(self._queue.popleft() for _ in range(count)))
        return self._rings[-1]
