import pytest

from ringweave.errors import TrainingError
from ringweave.planning.balancing import Speed
from ringweave.training.options import Asynchronous
from ringweave.training.rings.ring_formation import find_better_rings, form_rings, relative_speeds


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
    assert form_rings(speeds, mode, num_rings) == expected


def test_local_steps_are_not_negative():
    with pytest.raises(TrainingError, match=r"local_steps: -1, expected 0 or more\. Leave it out to push every step"):
        Asynchronous(local_steps=-1)


def test_there_is_a_ring_at_least():
    with pytest.raises(TrainingError, match=r"rings: 0, expected 1 or more\. Leave it out for one of each kind"):
        Asynchronous(rings=0)


def said(*pairs: tuple[float, list[float] | None]) -> list[dict]:
    return [{"speed": speed, "trial_s": trial_s} for speed, trial_s in pairs]


def test_speeds_are_those_of_the_file_unless_trials_contradict_it():
    assert relative_speeds(said((1.0, [0.010]), (1.0, [0.015]), (0.5, [0.021]))) == [1.0, 1.0, 0.5]
    assert relative_speeds(said((1.0, [0.01]), (1.0, [0.01]), (1.0, [0.05]))) == [100, 100, 20]
    assert relative_speeds(said((1.0, [0.01]), (0.3, None))) == [1.0, 0.3]


def measured(*s_per_sample: float, noise: float = 0.02) -> list[Speed]:
    return [Speed(s_per_sample=each_s, noise=noise) for each_s in s_per_sample]


def test_rings_are_formed_anew_when_workers_are_no_longer_in_those_of_their_speed():
    rings = ((0, 1), (2, 3))
    assert find_better_rings(rings, measured(1.0, 1.0, 4.0, 4.0), None) is None
    assert find_better_rings(rings, measured(1.0, 4.0, 1.0, 4.0), None) == ((0, 2), (1, 3))
    assert find_better_rings(rings, measured(1.0, 1.05, 1.1, 1.0), None) is None, "all are of one kind"


def test_rings_stay_where_speeds_are_not_certain():
    rings = ((0, 1), (2, 3))
    assert find_better_rings(rings, measured(1.0, 1.4, 1.0, 1.4), None) is not None
    assert find_better_rings(rings, measured(1.0, 1.4, 1.0, 1.4, noise=0.5), None) is None


def test_as_many_rings_as_are_asked_for():
    assert find_better_rings(((0, 1, 2), (3,)), measured(1.0, 1.0, 4.0, 16.0), 2) == ((0, 1), (2, 3))
