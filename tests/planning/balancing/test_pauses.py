"""What throttled work takes, however its pauses fall."""

import pytest

from ringweave.planning.balancing import steady_state_s
from ringweave.topology.cgroups import CpuQuota

QUOTA = CpuQuota(cores=0.175, period_s=0.04, num_throttled=1)


def wall_s(begin_s: float, work_s: float, left: float) -> float:
    """What work takes that begins so long after a period's begin, with this part of the period's quota left."""
    slice_s = QUOTA.cores * QUOTA.period_s
    now_s, left_s = begin_s, left * slice_s
    while True:
        end_s = (now_s // QUOTA.period_s + 1) * QUOTA.period_s
        done_s = min(work_s, left_s, end_s - now_s)
        work_s -= done_s
        if work_s < 1e-12:
            return now_s + done_s - begin_s
        now_s, left_s = end_s + 1e-12, slice_s


@pytest.mark.parametrize("work_s", [0.015, 0.03, 0.06])
def test_equal_work_takes_equally_long_wherever_it_begins(work_s: float) -> None:
    walls = [wall_s(at * QUOTA.period_s / 10, work_s, left) for at in range(10) for left in (0.0, 0.5, 1.0)]
    assert max(walls) > 1.25 * min(walls), "the wall tells them apart"
    assert {round(steady_state_s(each, work_s, QUOTA), 9) for each in walls} == {round(work_s / QUOTA.cores, 9)}


def test_what_pauses_do_not_explain_counts() -> None:
    pause_s = QUOTA.period_s * (1 - QUOTA.cores)
    assert steady_state_s(1.0, 0.035, QUOTA) == pytest.approx(1.0 - 2 * pause_s), "somebody else had most of the quota"
    assert steady_state_s(0.05, 0.035, QUOTA) == pytest.approx(0.05 + 2 * pause_s), "two slices at once, and no more"


def test_whole_processors_leave_no_doubt() -> None:
    assert steady_state_s(0.3, 0.2, CpuQuota(cores=2.0, period_s=0.1, num_throttled=3)) == 0.3
