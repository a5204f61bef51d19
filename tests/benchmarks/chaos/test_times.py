"""Events of clocks that jump."""

from typing import Any

import pytest

from ringweave_bench.chaos import job_history


def event(time: float, kind: str) -> dict[str, Any]:
    return {"time": time, "kind": kind}


@pytest.mark.parametrize("shift_s", [7200.0, -7200.0])
def test_a_time_that_cannot_be_becomes_that_of_the_line_before(shift_s: float) -> None:
    given = [event(10, "train_step_done"), event(10.5 + shift_s, "generation_begun"), event(11, "train_step_done")]
    assert [each["time"] for each in job_history.correct_times(given)] == [10, 10, 11]


def test_times_that_can_be_are_left_alone() -> None:
    given = [
        event(9, "run_started"),
        event(10, "train_step_done"),
        event(10.7, "generation_begun"),
        event(10.6, "member_lost"),
        event(11, "train_step_done"),
        event(11.5, "run_ended"),
    ]
    assert job_history.correct_times(given) == given
