"""How long verifying and hashing a ring of 10,000 ranks takes, and how much memory: 60 s and 2 GiB are allowed.

Run: `python bench/verify_10000.py [num_ranks]`. Needs no torch.
"""

import resource
import sys
import time
from collections.abc import Callable

from ringweave import schedules


def main(num_ranks: int) -> None:
    """Print one line per measurement: seconds by the clock, seconds of CPU, peak memory of the process so far."""
    ring = schedules.generate("ring", num_ranks)
    _measure(f"verify ring({num_ranks})", lambda: schedules.verify(ring, exact=False))
    _measure(f"digest ring({num_ranks})", lambda: ring.digest)


def _measure(what: str, do: Callable[[], object]) -> None:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    do()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{what}: {wall_s:.1f} s, {cpu_s:.1f} s of CPU, peak {peak_bytes / 2**30:.2f} GiB", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
