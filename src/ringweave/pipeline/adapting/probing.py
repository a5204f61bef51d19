"""Rates of the links between neighbouring stages, timed again and again with the receiver waiting.

Links that share no stage are timed at the same time, so that all take two turns. Of some messages the fastest counts:
whatever else runs makes a message slower, nothing makes it faster than its link.
"""

import time
from collections.abc import Callable

from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.profiling.links import Probe

LEAST_BYTES, MOST_BYTES = 64 * 1024, 2**20
"""Of a probe: what crosses in training, within these limits."""
ROUNDS = 3


class Prober:
    """Times the links of one pipeline."""

    def __init__(self, pipeline: Pipeline, clock: Callable[[], float] = time.perf_counter) -> None:
        largest = max(boundary.forward_bytes for boundary in pipeline.boundaries[1:])
        self.num_bytes = min(max(largest, LEAST_BYTES), MOST_BYTES)
        """Of a message."""
        self._stage, self._num_links = pipeline.stage, pipeline.layout.num_stages - 1
        self._probe = Probe(pipeline.groups.pipeline, pipeline.device, clock)

    def probe(self) -> list[float]:
        """Seconds of a message on each link, its slower direction, where this rank sends; 0 elsewhere.

        All ranks of a pipeline call it at the same time.
        """
        found = [0.0] * self._num_links
        for parity in (0, 1):
            for link in range(parity, self._num_links, 2):
                if self._stage in (link, link + 1):
                    ways = ((link, link + 1), (link + 1, link))
                    found[link] = max(self._fastest_s(src, dst) for src, dst in ways)
        return found

    def _fastest_s(self, src: int, dst: int) -> float:
        return min(self._probe.exchange(self._stage, src, dst, self.num_bytes) for _ in range(ROUNDS))
