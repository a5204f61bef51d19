"""Removes a job when its TTL is over; a job of Slurm of its own, which needs one CPU for a minute.

python -m ringweave.launch.slurm.sweeping LEASE_S FENCE_S JOB_FOLDER ID
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ringweave.jobs.life import advancing
from ringweave.launch.slurm.asking.commands import Slurm
from ringweave.launch.slurm.leases import Patience
from ringweave.launch.slurm.registry import Registry
from ringweave.launch.slurm.tending import Tending

LATE_S = 0.01
"""So long after the end of a TTL it is certainly over, however its sum was rounded."""
AGAIN_S = 5.0
"""Before the next try where something of the job still holds it."""


def sweep(
    registry: Registry,
    tending: Tending,
    name: str,
    job_id: str,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the TTL is over and see that the job is removed; leave it alone if it runs again, or is another."""
    while True:
        entry = registry.find(name)
        at_s = None if entry is None or entry.id != job_id else advancing.expires_s(entry.job, entry.job.record)
        if at_s is None:
            return
        if clock() >= at_s:
            if tending.tend(name) is None:
                return
            sleep(AGAIN_S)
        else:
            sleep(at_s - clock() + LATE_S)


def main(root: Path, job_id: str, patience: Patience) -> None:
    """Sweep the job of a folder."""
    registry = Registry(root.parent.parent)
    tending = Tending(registry, Slurm(), environ=os.environ, patience=patience)
    sweep(registry, tending, root.name, job_id)


if __name__ == "__main__":
    main(Path(sys.argv[3]), sys.argv[4], Patience(lease_s=float(sys.argv[1]), fence_s=float(sys.argv[2])))
