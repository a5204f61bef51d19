"""What the loader of an elastic job says without a step being made."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, TensorDataset

from ringweave.training.elastic.loader import ElasticLoader, ElasticParts, Place
from ringweave.training.loading import orders
from ringweave.training.loading.prepared import PreparedLoader


def made(place: Place) -> ElasticLoader:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    parts = SimpleNamespace(place=place, weights=SimpleNamespace(fraction=0.25))
    return ElasticLoader(loader, orders.read(loader), 0, cast(ElasticParts, cast(Any, parts)))


def test_the_next_epoch_is_that_of_the_members_where_they_are_further() -> None:
    place = Place()
    loader = made(place)
    assert loader.next_epoch == 0
    loader.set_epoch(2)
    assert loader.next_epoch == 2
    place.epoch = 5
    assert loader.next_epoch == 5


def test_it_says_of_itself_what_every_prepared_loader_does() -> None:
    loader = made(Place())
    assert isinstance(loader, PreparedLoader)
    assert (loader.batch_size, loader.fraction, len(loader.dataset)) == (4, 0.25, 10)
