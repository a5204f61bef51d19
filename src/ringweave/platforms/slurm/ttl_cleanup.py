"""Main program of the Slurm job that removes a finished job after its TTL; it needs one CPU for a minute.

python -m ringweave.platforms.slurm.ttl_cleanup LEASE_S FENCE_S JOB_FOLDER ID
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ringweave.jobs import advance
from ringweave.platforms.slurm.allocation import AllocationMonitor
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.lease import SlurmTimeouts
from ringweave.platforms.slurm.registry import SlurmJobRegistry

TTL_MARGIN_S = 0.01
"""Margin after the end of a TTL, against rounding."""
CLEANUP_RETRY_S = 5.0
"""Retry interval while something of the job still holds it."""


def remove_after_ttl(
    registry: SlurmJobRegistry,
    monitor: AllocationMonitor,
    name: str,
    job_id: str,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for the end of the TTL and remove the job, unless it runs again or another job has its name."""
    while True:
        entry = registry.find_by_name(name)
        at_s = None if entry is None or entry.id != job_id else advance.ttl_expiry_s(entry.job, entry.job.record)
        if at_s is None:
            return
        if clock() >= at_s:
            if monitor.refresh(name) is None:
                return
            sleep(CLEANUP_RETRY_S)
        else:
            sleep(at_s - clock() + TTL_MARGIN_S)


def main(root: Path, job_id: str, timeouts: SlurmTimeouts) -> None:
    """Remove the job of a folder after its TTL."""
    registry = SlurmJobRegistry(root.parent.parent)
    monitor = AllocationMonitor(registry, SlurmClient(), environ=os.environ, timeouts=timeouts)
    remove_after_ttl(registry, monitor, root.name, job_id)


if __name__ == "__main__":
    main(Path(sys.argv[3]), sys.argv[4], SlurmTimeouts(lease_s=float(sys.argv[1]), fence_s=float(sys.argv[2])))
