from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import ReceiveOp, direct
from tests.schedules.generated import moved

SHARES = st.lists(st.sampled_from([0, 0, 1, 2, 3, 50]), min_size=1, max_size=12).filter(any)


@given(SHARES)
def test_rank_i_sends_and_receives_1_plus_n_minus_2_times_its_share(shares: list[int]) -> None:
    num_ranks, total = len(shares), sum(shares)
    sent, received = moved(direct(num_ranks, shares))
    assert sent == received == [1 + (num_ranks - 2) * Fraction(share, total) for share in shares]


@given(SHARES)
def test_the_halves_send_what_is_others_and_receive_what_is_ones_own(shares: list[int]) -> None:
    num_ranks, parts = len(shares), [Fraction(share, sum(shares)) for share in shares]
    others, own = [1 - part for part in parts], [(num_ranks - 1) * part for part in parts]
    assert moved(schedules.direct_reduce_scatter(num_ranks, shares)) == (others, own)
    assert moved(schedules.direct_allgather(num_ranks, shares)) == (own, others)


@given(SHARES)
def test_who_sends_to_whom_in_which_round(shares: list[int]) -> None:
    num_ranks, owners = len(shares), [rank for rank, share in enumerate(shares) if share]
    schedule = direct(num_ranks, shares)
    assert schedule.shares == tuple(shares[rank] for rank in owners)
    assert len(schedule.rounds) == 2 * (num_ranks - 1)
    for index, round_ in enumerate(schedule.rounds):
        distance = index % (num_ranks - 1) + 1
        rows = set(round_.rows())
        assert len(rows) == len(owners)
        for src in range(num_ranks):
            dst = (src + distance) % num_ranks
            if index < num_ranks - 1 and shares[dst]:
                assert (src, dst, owners.index(dst), 1, ReceiveOp.REDUCE) in rows
            if index >= num_ranks - 1 and shares[src]:
                assert (src, dst, owners.index(src), 1, ReceiveOp.COPY) in rows


def test_none_is_equal_shares() -> None:
    assert direct(5) == direct(5, [1] * 5)
    assert direct(5) != direct(5, [2] * 5)  # the same message borders, but other text


@pytest.mark.parametrize("rates", [(200, 200, 200, 50), (4, 4, 4, 4, 2, 2, 2, 2), (1, 1, 1), (8, 1, 1), (10, 9, 8, 7)])
def test_shares_by_rate_reach_the_bound_of_unequal_nics(rates: tuple[int, ...]) -> None:
    """tau = max(1/B_min, 2(N-1)/sum B); x_i <= (tau B_i - 1)/(N-2), summing to 1."""
    num_ranks = len(rates)
    tau = max(Fraction(1, min(rates)), Fraction(2 * (num_ranks - 1), sum(rates)))
    room = [(tau * rate - 1) / (num_ranks - 2) for rate in rates]
    assert sum(room) >= 1
    scaled = [int(part * 10**9 / sum(room)) for part in room]
    sent, received = moved(direct(num_ranks, scaled))
    slowest = max(max(s, r) / rate for s, r, rate in zip(sent, received, rates, strict=True))
    assert slowest == pytest.approx(float(tau), rel=1e-6)


@pytest.mark.parametrize("make", [direct, schedules.direct_reduce_scatter, schedules.direct_allgather])
@pytest.mark.parametrize(
    ("num_ranks", "shares", "expected"),
    [
        (3, [1, 1], "shares: (1, 1), expected one whole number for each of 3 ranks. Give a rank that shall own nothing "
         "the share 0."),
        (2, [0, 0], "shares: (0, 0), expected one whole number per chunk, none negative and not all 0. Give each chunk "
         "its relative size."),
        (2, [2, -1], "shares: (2, -1), expected one whole number per chunk, none negative and not all 0. Give each "
         "chunk its relative size."),
        (2, [0.5, 0.5], "shares: 0.5, expected whole numbers. Round them."),
        (0, None, "num_ranks: 0, expected at least 1. Name the ranks."),
        (-1, None, "num_ranks: -1, expected at least 1. Name the ranks."),
    ],
)  # fmt: skip
def test_shares_that_are_none(make, num_ranks: int, shares, expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make(num_ranks, shares)
    assert str(caught.value) == expected
