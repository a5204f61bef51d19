import pytest

from ringweave.errors import TrainingError
from ringweave.params.rules import local_steps


def test_slow_rings_compute_fewer_steps():
    assert local_steps.by_speed(8, [4.0, 2.0, 1.0, 0.1]) == (8, 4, 2, 1)


def test_a_speed_of_nothing_is_refused():
    with pytest.raises(
        TrainingError, match=r"local steps: \(8, \[1.0, 0.0\]\), expected at least one step, and a posi"
    ):
        local_steps.by_speed(8, [1.0, 0.0])
