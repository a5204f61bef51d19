import pytest

from ringweave.errors import TrainingError
from ringweave.training.rings.forming import rings_of, speeds_of
from ringweave.training.rings.settings import Asynchronous


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


def said(*pairs: tuple[float, list[float] | None]) -> list[dict]:
    return [{"speed": speed, "trial_s": trial_s} for speed, trial_s in pairs]


def test_speeds_are_those_of_the_file_unless_trials_contradict_it():
    assert speeds_of(said((1.0, [0.010]), (1.0, [0.015]), (0.5, [0.021]))) == [1.0, 1.0, 0.5]
    assert speeds_of(said((1.0, [0.01]), (1.0, [0.01]), (1.0, [0.05]))) == [100, 100, 20]
    assert speeds_of(said((1.0, [0.01]), (0.3, None))) == [1.0, 0.3]
