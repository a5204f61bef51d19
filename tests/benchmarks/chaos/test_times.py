"""Events of clocks that jump."""

from typing import Any

import pytest

from ringweave.benchmarks.chaos import times


def event(time: float, kind: str) -> dict[str, Any]:
    return {"time": time, "kind": kind}


@pytest.mark.parametrize("shift_s", [7200.0, -7200.0])
def test_a_time_that_cannot_be_becomes_that_of_the_line_before(shift_s: float) -> None:
    given = [event(10, "train_step_done"), event(10.5 + shift_s, "epoch_begun"), event(11, "train_step_done")]
    assert [each["time"] for each in times.steady(given)] == [10, 10, 11]


def test_times_that_can_be_are_left_alone() -> None:
    given = [
        event(9, "run_started"),
        event(10, "train_step_done"),
        event(10.7, "epoch_begun"),
        event(10.6, "member_lost"),
        event(11, "train_step_done"),
        event(11.5, "run_ended"),
    ]
    assert times.steady(given) == given
