"""The speed test: what it measures, that it leaves no trace, and the rings on real ranks."""

import json
import math

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from ringweave.errors import PeerError
from ringweave.testing.ranks import run_ranks
from ringweave.training.speed_test import Referee, measure
from tests.training import speed_test_functions


def test_the_model_is_as_it_was_before() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    model[0].weight.grad = torch.full((4, 4), 7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = torch.get_rng_state()

    seconds = measure(
        model, lambda module: module.train()(torch.randn(8, 4)).sum(), iter([0, 9, 10, 12, 20, 21, 30, 35]).__next__
    )

    assert seconds == 2, "the median of 2, 1 and 5; the first, 9, is to warm up"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 7.0))
    assert model[0].bias.grad is None
    assert not model.training
    assert torch.equal(torch.get_rng_state(), expected)


def test_rings_are_formed_in_order_of_arrival() -> None:
    store = HashStore()
    for rank, seconds in ((2, 0.1), (0, 0.2), (3, 0.9), (1, 1.0)):
        Referee(store, rank, 4).report(seconds)
    found = Referee(store, 0, 4).form_rings(2)
    assert found.rings == ((2, 0), (3, 1))
    assert found.seconds == (0.2, 1.0, 0.1, 0.9)
    assert found == Referee(store, 3, 4).form_rings(2), "the others read what rank 0 found"


def test_who_never_reports_is_left_out() -> None:
    store = HashStore()
    for rank in (2, 0, 1):
        Referee(store, rank, 4).report(0.5)
    found = Referee(store, 0, 4, timeout_s=0.05).form_rings(2)
    assert (found.rings, found.absent) == (((2, 0), (1,)), (3,))
    assert math.isinf(found.seconds[3])
    assert json.loads(store.get("rings"))["absent"] == [3]


def test_a_silent_rank_0_is_named() -> None:
    text = (
        r"^speed test: rank 0 formed no rings within 0\.02 s, expected them when time is up\. Look into the log of that"
    )
    with pytest.raises(PeerError, match=text):
        Referee(HashStore(), 1, 2, timeout_s=0.01).form_rings(1)


@pytest.mark.distributed
@pytest.mark.slow
def test_real_ranks_are_grouped_by_speed() -> None:
    found = run_ranks(speed_test_functions.run_test, 4, 2, [1.0, 0.0, 1.0, 0.0], 300.0)
    assert all(each == found[0] for each in found)
    assert [sorted(ring) for ring in found[0].rings] == [[1, 3], [0, 2]]
    assert min(found[0].seconds[0], found[0].seconds[2]) > 1.0
