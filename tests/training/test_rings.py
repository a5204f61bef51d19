import pytest

from ringweave.errors import TrainingError
from ringweave.training.rings.preparing import Asynchronous, rings_of


@pytest.mark.parametrize(
    ("speeds", "mode", "num_rings", "expected"),
    [
        ([1.0] * 4, "ps", None, ((0,), (1,), (2,), (3,))),
        ([1.0] * 5, "ps-hra", None, ((0, 1), (2, 3, 4))),
        ([1.0, 0.25, 1.0, 0.25], "ps-hra", None, ((0, 2), (1, 3))),
        ([1.0, 0.9, 0.5, 0.5, 0.25], "ps-hra", None, ((0, 1), (2, 3), (4,))),
        ([1.0, 0.25, 1.0, 0.25], "ps-hra", 4, ((0,), (2,), (1,), (3,))),
        ([1.0, 0.25, 1.0, 0.25], "ps-hra", 1, ((0, 2, 1, 3),)),
        ([1.0], "ps-hra", None, ((0,),)),
    ],
)
def test_rings_are_of_equal_speed(speeds, mode, num_rings, expected):
    assert rings_of(speeds, mode, num_rings) == expected


def test_local_steps_are_not_negative():
    with pytest.raises(TrainingError, match=r"local_steps: -1, expected 0 or more\. Leave it out to push every step"):
        Asynchronous(local_steps=-1)
