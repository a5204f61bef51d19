"""Orders of epochs, and accounts: whatever the shares do, every sample is in one place."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.planning import balancing
from ringweave.planning.balancing import (
    EpochOrder,
    SampleAccount,
    fingerprint,
    rank_slice,
    scale_shares,
    shuffle_indices,
)


@st.composite
def epochs(draw):
    """An order, and shares that change from batch to batch."""
    num_ranks, batch = draw(st.integers(1, 4)), draw(st.integers(4, 20))
    order = EpochOrder(
        indices=shuffle_indices(draw(st.integers(1, 100)), draw(st.integers(0, 9)), draw(st.integers(0, 9))),
        batch_samples=batch,
        drop_last=False,
    )
    shares = []
    for index in range(order.num_batches):
        borders = sorted(draw(st.integers(0, batch)) for _ in range(num_ranks - 1))
        whole = tuple(np.diff([0, *borders, batch]).tolist())
        shares.append(scale_shares(whole, len(order.batch(index))))
    return order, shares


@given(epochs())
def test_every_sample_is_one_ranks_whatever_the_shares_do(epoch) -> None:
    order, shares = epoch
    num_ranks = len(shares[0])
    by_rank = [
        np.concatenate([order.batch(index)[rank_slice(each, rank)] for index, each in enumerate(shares)])
        for rank in range(num_ranks)
    ]
    assert sorted(np.concatenate(by_rank)) == list(range(len(order.indices)))
    assert sum((SampleAccount.from_indices(own) for own in by_rank), SampleAccount()) == SampleAccount.from_indices(
        order.indices
    )


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50), st.data())
def test_an_account_tells_a_lost_a_doubled_and_an_exchanged_sample(indices, data) -> None:
    at = data.draw(st.integers(0, len(indices) - 1))
    without = indices[:at] + indices[at + 1 :]
    assert fingerprint(indices) == fingerprint(sorted(indices))
    assert SampleAccount.from_indices(without) != SampleAccount.from_indices(indices)
    assert fingerprint([*indices, indices[at]]) != fingerprint(indices)
    assert fingerprint([*without, 10**6 + 1]) != fingerprint(indices)


def test_orders_differ_by_epoch_and_seed_alone() -> None:
    assert (shuffle_indices(50, 1, 2) == shuffle_indices(50, 1, 2)).all()
    assert (shuffle_indices(50, 1, 2) != shuffle_indices(50, 1, 3)).any()
    assert (shuffle_indices(50, 1, 2) != shuffle_indices(50, 2, 2)).any()


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_the_last_batch(drop_last: bool, sizes: list[int]) -> None:
    order = EpochOrder(indices=np.arange(10), batch_samples=4, drop_last=drop_last)
    assert [len(order.batch(index)) for index in range(order.num_batches)] == sizes


def test_an_epoch_goes_on_from_a_position() -> None:
    order = EpochOrder(indices=np.arange(10), batch_samples=4, drop_last=False, start=3)
    assert [order.batch(index).tolist() for index in range(order.num_batches)] == [[3, 4, 5, 6], [7, 8, 9]]
    assert order.trained_indices(1).tolist() == [3, 4, 5, 6]
    assert order.trained_indices(9).tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_an_account_without_some_of_its_samples_is_that_of_the_others() -> None:
    assert SampleAccount.from_indices(range(10)) - SampleAccount.from_indices(
        range(4, 10)
    ) == SampleAccount.from_indices(range(4))


@given(st.integers(1, 40), st.integers(1, 300), st.data())
def test_parts_of_an_epoch_add_up_to_its_train_steps(batch: int, num_samples: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, num_samples), max_size=8)) | {0, num_samples})
    parts = [
        balancing.batch_fraction(first, end - first, batch_samples=batch, num_samples=num_samples)
        for first, end in itertools.pairwise(cuts)
    ]
    assert sum(parts) == pytest.approx(-(-num_samples // batch))
