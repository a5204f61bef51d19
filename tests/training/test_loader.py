"""Loaders of all ranks side by side: each sample is one rank's, whatever shares and samplers do."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ringweave.errors import TrainingError
from ringweave.planning.balancing import SampleAccount, ShareChange
from ringweave.training.data import order
from ringweave.training.data.shared_loader import SharedLoader
from ringweave.training.elastic.accounting import EpochAccount
from tests.training import fakes

NUMBERS = TensorDataset(torch.arange(50))


class GroupedSampler(BatchSampler):
    """Batches of the script's own making."""

    def __init__(self) -> None:
        super().__init__(range(50), 5, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1, 2, 3]])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(50))


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def one_epoch(ranks: list[SharedLoader]) -> list[list[int]]:
    """What each rank was given that counts, and nothing of the account, which needs the others."""
    given: list[list[int]] = [[] for _ in ranks]
    passes = [iter(rank) for rank in ranks]
    for _ in range(len(ranks[0])):
        for rank, batches in enumerate(passes):
            (values,) = next(batches)
            given[rank] += values[: ranks[rank]._weights.num_samples].tolist()
    for batches in passes:
        with pytest.raises(TrainingError, match=r"^account of epoch \d+: .*Samples were lost or doubled; this is"):
            next(batches, None)
    return given


def change(ranks: list[SharedLoader], shares: tuple[int, ...], batch_number: int) -> None:
    for rank in ranks:
        rank.source.membership.balancer._change(batch_number, ShareChange(shares=shares, before_s=2.0, after_s=1.0))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_is_given_once(shuffle: bool) -> None:
    ranks = fakes.loaders(DataLoader(NUMBERS, batch_size=12, shuffle=shuffle), 3, (2, 4, 6))
    first, second = one_epoch(ranks), one_epoch(ranks)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(50))
    assert [len(own) for own in first] == [8, 17, 25], "the last batch of two is shared 0, 1, 1"
    assert (first != second) is shuffle, "each pass has an order of its own"
    total = sum((rank.source.membership.control.accounts[0] for rank in ranks), SampleAccount())
    assert total == SampleAccount.from_indices(range(50))


def test_a_rank_without_samples_computes_one_that_does_not_count() -> None:
    ranks = fakes.loaders(DataLoader(NUMBERS, batch_size=49), 3, (1, 24, 24))
    last = [list(rank.source._reader.batches(rank.source._epoch_order(), 0))[-1] for rank in ranks]
    assert [portion.num_total for _, portion in last] == [1, 1, 1]
    assert sorted(len(portion.indices) for _, portion in last) == [0, 0, 1]
    assert all(values.tolist() == [49] for (values,), _ in last)


def test_other_shares_hold_from_the_first_batch_that_nobody_has_loaded() -> None:
    ranks = fakes.loaders(DataLoader(NUMBERS, batch_size=10), 2, (5, 5), num_prefetched=2)
    passes = [iter(rank) for rank in ranks]
    sizes = []
    for number in range(5):
        sizes.append([len(next(batches)[0]) for batches in passes])
        if number == 0:
            change(ranks, (8, 2), 1)
    assert sizes == [[5, 5], [5, 5], [5, 5], [8, 2], [8, 2]]


def test_the_order_does_not_depend_on_the_ranks() -> None:
    def batches(world_size: int, shares: tuple[int, ...]) -> list[list[int]]:
        ranks = fakes.loaders(DataLoader(NUMBERS, batch_size=12, shuffle=True), world_size, shares)
        passes = [iter(rank) for rank in ranks]
        return [flat(next(each)[0].tolist() for each in passes) for _ in range(4)]

    assert batches(1, (12,)) == batches(3, (1, 8, 3))


def test_a_state_goes_on_at_its_position_on_another_number_of_ranks() -> None:
    loader = DataLoader(NUMBERS, batch_size=12, shuffle=True)
    (alone,) = fakes.loaders(loader, 1, (12,))
    batches = iter(alone)
    seen = [next(batches)[0].tolist() for _ in range(2)]
    state = alone.state_dict()
    assert state == {"epoch": 0, "position": 24, "seed": 5}
    ranks = fakes.loaders(loader, 2, (3, 9))
    for rank in ranks:
        rank.load_state_dict(state)
    passes = [iter(rank) for rank in ranks]
    rest = [next(each)[0].tolist() for _ in range(2) for each in passes]
    assert flat(rest) == flat(next(batches)[0].tolist() for _ in range(2))
    assert len(flat(seen + rest)) == len(set(flat(seen + rest))) == 48


@pytest.mark.parametrize(("drop_last", "is_last"), [(False, [False, False, True]), (True, [False, True])])
def test_a_loader_knows_its_portion_and_the_last_batch_of_an_epoch(drop_last: bool, is_last: list[bool]) -> None:
    (rank, _) = fakes.loaders(DataLoader(NUMBERS, batch_size=20, drop_last=drop_last), 2, (5, 15))
    batches, said = iter(rank), []
    assert rank.latest_portion is None
    for _ in is_last:
        (values,) = next(batches)
        assert rank.latest_portion is not None
        assert rank.latest_portion.indices.tolist() == values.tolist()
        said.append(rank.is_last_batch)
    assert said == is_last


def test_epochs_can_be_named() -> None:
    (rank,) = fakes.loaders(DataLoader(NUMBERS, batch_size=50, shuffle=True), 1, (50,))
    orders_seen = [next(iter(rank))[0].tolist() for _ in range(2)]
    rank.set_epoch(0)
    assert next(iter(rank))[0].tolist() == orders_seen[0] != orders_seen[1]


def test_the_epochs_that_remain_begin_at_the_position_of_a_state() -> None:
    (rank,) = fakes.loaders(DataLoader(NUMBERS, batch_size=10), 1, (10,))
    rank.load_state_dict({"epoch": 1, "position": 30, "seed": 5})
    assert rank.members == ("0",)
    sizes = {epoch: len(list(rank)) for epoch in rank.epochs(4) if epoch != 3}
    assert sizes == {1: 2, 2: 5}
    assert rank.next_epoch == 4, "an epoch without a pass is over too"


def test_an_evaluation_is_split_by_the_shares() -> None:
    ranks = fakes.loaders(DataLoader(NUMBERS, batch_size=12), 3, (2, 4, 6))
    parts = [torch.cat([x for (x,) in rank.split(DataLoader(NUMBERS, batch_size=4))]).tolist() for rank in ranks]
    assert flat(parts) == list(range(50))
    assert [len(part) for part in parts] == [8, 17, 25]


def test_an_evaluation_is_of_what_the_loader_samples() -> None:
    ranks = fakes.loaders(DataLoader(NUMBERS, batch_size=12), 2, (1, 1))
    held_out = SubsetRandomSampler(range(40, 50))
    loader = DataLoader(NUMBERS, batch_size=4, sampler=held_out)
    parts = [torch.cat([x for (x,) in rank.split(loader)]).tolist() for rank in ranks]
    assert parts == [list(range(40, 45)), list(range(45, 50))]
    shuffled = DataLoader(NUMBERS, batch_size=4, shuffle=True)
    assert flat(torch.cat([x for (x,) in rank.split(shuffled)]).tolist() for rank in ranks) == list(range(50))


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (
            DataLoader(NUMBERS, batch_sampler=GroupedSampler()),
            "batches of the loader: 'GroupedSampler', expected batches of a fixed size. Give the DataLoader",
        ),
        (
            DataLoader(Stream(), batch_size=4),
            "loader to be split: 'one of a stream', expected a data set with an",
        ),
        (
            DataLoader(NUMBERS, batch_size=4, sampler=WeightedRandomSampler([1.0] * 50, 5)),
            "loader to be split: 'one with WeightedRandomSampler', expected samples that are the same for every rank.",
        ),
        (
            DataLoader(NUMBERS, batch_size=4, sampler=RandomSampler(NUMBERS, num_samples=5)),
            "loader to be split: 'one with RandomSampler', expected samples that are the same for every rank.",
        ),
    ],
)
def test_what_cannot_be_split_for_an_evaluation(loader: DataLoader, text: str) -> None:
    (rank,) = fakes.loaders(DataLoader(NUMBERS, batch_size=12), 1, (12,))
    with pytest.raises(TrainingError, match=re.escape(text)):
        rank.split(loader)


def test_a_stream_is_shared_too() -> None:
    ranks = fakes.loaders(DataLoader(Stream(), batch_size=12), 2, (3, 9))
    given = []
    for rank in ranks:
        for batch, portion in rank.source._reader.batches(None, 0):
            given += batch[: len(portion.indices)].tolist()
    assert sorted(given) == list(range(50))
    with pytest.raises(TypeError, match=r"^a loader of a stream has no length$"):
        len(ranks[0])
    with pytest.raises(TrainingError, match=r"^state of a loader of a stream: one, expected none\. Let the data"):
        ranks[0].load_state_dict({"epoch": 0, "position": 0, "seed": 0})


def test_what_is_read_off_a_loader() -> None:
    def read(**settings) -> tuple[int, int | None, str, bool]:
        found = order.read_loader(DataLoader(NUMBERS, **settings))
        return found.batch_samples, found.num_samples, found.order, found.drop_last

    assert read(batch_size=8) == (8, 50, "sequential", False)
    assert read(batch_size=8, shuffle=True, drop_last=True) == (8, 50, "shuffled", True)
    distributed = DistributedSampler(NUMBERS, num_replicas=4, rank=1, seed=9)
    assert read(batch_size=8, sampler=distributed) == (32, 50, "shuffled", False), "its batch size is a rank's"
    assert order.shuffle_seed(DataLoader(NUMBERS, sampler=distributed)) == 9
    assert read(batch_size=8, sampler=WeightedRandomSampler(torch.ones(50), 20)) == (8, 20, "sampled", False)
    assert read(batch_size=8, sampler=RandomSampler(NUMBERS, num_samples=20)) == (8, 20, "sampled", False)
    assert order.read_loader(DataLoader(NUMBERS, num_workers=2, prefetch_factor=3)).num_prefetched == 6


def test_batches_that_cannot_be_shared_are_refused() -> None:
    text = r"^batches of the loader: 'list', expected batches of a fixed size\. Give the DataLoader batch_size"
    with pytest.raises(TrainingError, match=text):
        order.read_loader(DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]))  # pyrefly: ignore
    with pytest.raises(TrainingError, match=r"^batches of the loader: 'NoneType', expected batches of a fixed size\."):
        order.read_loader(DataLoader(NUMBERS, batch_size=None))
    with pytest.raises(TrainingError, match=r"^workers of a loader of a stream: 1, expected none\. Set num_workers=0"):
        order.read_loader(DataLoader(Stream(), batch_size=4, num_workers=1))


def test_an_account_tells_what_is_wrong() -> None:
    def account(*by_rank: list[int]) -> EpochAccount:
        expected = SampleAccount.from_indices(range(4))
        return EpochAccount.of_ranks(0, expected, list(map(SampleAccount.from_indices, by_rank)))

    assert account([2, 0], [1, 3]).is_exact
    assert not account([2, 0], [1]).is_exact
    assert not account([2, 0], [1, 1]).is_exact
