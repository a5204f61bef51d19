from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringweave.schedules import ReceiveOp, Round
from ringweave.schedules.verification import RaceDetector

OPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6
)


@given(st.lists(OPS, min_size=1, max_size=4), st.booleans())
def test_one_detector_over_many_rounds_finds_what_pairs_show(
    rounds: list[list[tuple[int, int, int, int]]], single: bool
) -> None:
    detector = RaceDetector(4)
    for ops in rounds:
        cells = [(s, d, f + i) for s, d, f, n in ops for i in range(1 if single else n)]
        written = Counter((d, c) for _, d, c in cells)
        read = {(s, c) for s, _, c in cells}
        twice = {place for place, times in written.items() if times > 1}
        src, dst, first, count = zip(*ops, strict=True)
        race = detector.find_race(Round.of(src, dst, first, ReceiveOp.COPY, 1 if single else count))
        assert (race is not None) == bool(twice or read & set(written))
        if race is not None:
            expected = twice if race.what == "is written twice" else read & set(written)
            assert (race.rank, race.chunk) in expected


def test_columns_that_a_generator_changes_in_place_are_looked_at_again() -> None:
    detector = RaceDetector(3)
    src, dst, chunk = (np.array(column, np.int32) for column in ([0, 2], [1, 0], [0, 1]))
    ops = Round.of(src, dst, chunk, ReceiveOp.COPY)
    assert detector.find_race(ops) is None
    src[1] = 1
    dst[1] = 2
    chunk[1] = 0
    assert detector.find_race(ops) is not None
