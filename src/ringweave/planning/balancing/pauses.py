"""What work takes where the kernel allows it a quota of processor time, wherever the pauses for it happen to fall."""

from ringweave.topology.cgroups import Quota

_PAUSES = 2
"""Who has waited has what is left of this period's quota and all of the next one's, and works through both without a
pause; who begins late in a period pauses once more than its work demands."""


def steady_s(wall_s: float, worked_s: float, quota: Quota) -> float:
    """Seconds that throttled work takes on average.

    The work of a step lasts a few periods, so that its time on the wall says as much about when it began as about the
    work: of eight ranks with equal quotas, some seemed twice as fast as others for many steps (measured). Processor
    time over the quota does not, and is what steps in a row take. Whoever shares the quota (loader workers) makes the
    wall time longer than that, which counts as far as pauses do not explain it.

    Args:
        wall_s: What it has taken.
        worked_s: Processor time in it.
        quota: Of the control group that has throttled it.
    """
    doubt_s = _PAUSES * quota.period_s * max(0.0, 1 - quota.cores)
    return min(max(worked_s / quota.cores, wall_s - doubt_s), wall_s + doubt_s)
