from ringweave_bench.knob_search import KnobAttempt, choose_knobs, error_first_line
from ringweave_bench.systems import Knob

DEFAULT, RING = Knob(name="default"), Knob(name="ring", environ={"A": "1"})


def attempt(knob: Knob, num_bytes: int, *seconds: float) -> KnobAttempt:
    return KnobAttempt(system="mpich", knob=knob, num_bytes=num_bytes, seconds=seconds)


def test_the_least_median_is_chosen_for_each_size() -> None:
    tried = [
        attempt(DEFAULT, 4, 1.0, 1.0, 1.0),
        attempt(RING, 4, 0.1, 2.0, 2.0),
        attempt(DEFAULT, 8, 5.0, 5.0, 5.0),
        attempt(RING, 8, 9.0, 4.0, 4.0),
    ]
    assert choose_knobs(tried) == {("mpich", 4): DEFAULT, ("mpich", 8): RING}
    assert choose_knobs([]) == {}


def test_the_first_of_equals_is_kept() -> None:
    assert choose_knobs([attempt(DEFAULT, 4, 1.0), attempt(RING, 4, 1.0)]) == {("mpich", 4): DEFAULT}


def test_documents() -> None:
    found = attempt(RING, 4, 0.1, 2.0, 3.0).document("block")
    assert found == {"system": "mpich", "knob": "ring", "order": "block", "bytes": 4, "median_s": 2.0, "rounds": 3}


def test_notes_are_one_line() -> None:
    assert error_first_line(ValueError("no start. Its last words:\n    boom\n")) == "no start. Its last words:"
