from fractions import Fraction

import pytest

from ringweave.errors import ScheduleError
from ringweave.schedules import halving_doubling
from tests.schedules.generated import moved


@pytest.mark.parametrize(
    ("num_ranks", "num_rounds"), [(1, 0), (2, 2), (3, 4), (4, 4), (6, 6), (8, 6), (13, 8), (64, 12)]
)
def test_rounds_grow_with_the_logarithm(num_ranks: int, num_rounds: int) -> None:
    schedule = halving_doubling(num_ranks)
    assert len(schedule.rounds) == num_rounds
    assert schedule.num_chunks == 2 ** (num_ranks.bit_length() - 1)


@pytest.mark.parametrize("num_ranks", range(1, 20))
def test_bytes_of_those_who_exchange_and_of_those_who_are_folded(num_ranks: int) -> None:
    seats = 2 ** (num_ranks.bit_length() - 1)
    num_extra = num_ranks - seats
    exchanged = 2 * Fraction(seats - 1, seats)
    expected = []
    for rank in range(num_ranks):
        is_paired = rank < 2 * num_extra
        expected.append(Fraction(1) if is_paired and rank % 2 == 0 else exchanged + is_paired)
    assert moved(halving_doubling(num_ranks)) == (expected, expected)


def test_partners_come_nearer_and_go_away_again() -> None:
    distances = []
    for round_ in halving_doubling(8).rounds:
        (distance,) = {abs(int(s) - int(d)) for s, d in zip(round_.src, round_.dst, strict=True)}
        distances.append((distance, int(round_.num_chunks[0])))
    assert distances == [(4, 4), (2, 2), (1, 1), (1, 1), (2, 2), (4, 4)]


@pytest.mark.parametrize("num_ranks", [0, -3])
def test_a_group_of_nobody(num_ranks: int) -> None:
    with pytest.raises(ScheduleError, match=rf"^num_ranks: {num_ranks}, expected at least 1\. Name the ranks\.$"):
        halving_doubling(num_ranks)
