"""A worker for the tests of sessions: one rank, alone, that behaves as its last argument says."""

import os
import sys
import threading

import numpy as np
import serving  # pyrefly: ignore - on the PYTHONPATH that the test gives


class Alone:
    """Sums over one rank; `wrong` spoils an element, `dies` and `hangs` do so in the allreduce."""

    rank, world_size, in_place, version = 0, 1, False, "fake 1.0"

    def __init__(self, manner: str) -> None:
        self._manner = manner
        if manner == "refuses":
            raise ValueError("no network here")

    def wrap(self, array: np.ndarray) -> np.ndarray:
        return array

    def barrier(self) -> None:
        pass

    def allreduce(self, source: np.ndarray, result: np.ndarray) -> None:
        if self._manner == "dies":
            print("I cannot go on", file=sys.stderr, flush=True)
            os._exit(7)
        if self._manner == "hangs":
            threading.Event().wait()
        result[:] = source
        if self._manner == "wrong":
            result[3] += 1

    def schedules(self) -> dict[str, int]:
        return {"ring": 1}

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serving.main(lambda: Alone(sys.argv[-1]), sys.argv[1:-1])
