"""What the loader of a ring that may lose members does with a pass that was broken off, without a ring."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ringweave.errors import TrainingError
from ringweave.training.data import order
from ringweave.training.elastic.share_table import BatchShares
from ringweave.training.gradients import SampleWeights
from ringweave.training.rings.elastic_ring_loader import ElasticRingLoader
from ringweave.training.rings.elastic_trainer import RingCursor
from ringweave.training.rings.ring_resume import ResumeStart


def made(epoch: int) -> ElasticRingLoader:
    """Of a ring with one member, which is in that epoch."""
    place = SimpleNamespace(epoch=epoch, num_drawn=0, is_latecomer=False)
    nothing = lambda *_, **__: None  # noqa: E731 - what the ring hears of it
    roster = BatchShares(first_batch=0, members=("0.0",), shares=(4,))
    crew = SimpleNamespace(
        batch_part=1.0,
        place=place,
        rosters=SimpleNamespace(of=lambda _: roster),
        drawn_last=roster,
        end_step=nothing,
        draw=nothing,
        drop=nothing,
        open_epoch=lambda number: setattr(place, "epoch", number),
        ring_place=RingCursor(ring=0),
    )
    parts: Any = SimpleNamespace(
        name="0.0",
        session=SimpleNamespace(change=lambda change: change(), border=nothing, sign=nothing),
        crew=crew,
        member=SimpleNamespace(take=lambda *_: (0, 4), send=nothing, rest=nothing, meet=lambda *_, **__: {}),
        weights=SampleWeights(num_ranks=1, is_mean=True),
        timer=SimpleNamespace(begin=nothing, give=nothing),
        num_rings=1,
        note=nothing,
    )
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    return ElasticRingLoader(loader, order.read_loader(loader), 0, parts)


def test_an_epoch_that_was_broken_off_is_over_and_cannot_be_named_again() -> None:
    loader = made(0)
    assert len(next(iter(loader))[0]) == 4
    loader.set_epoch(0)
    expected = r"epoch of an elastic job of rings: 0, expected one whose pass was not broken off, .*Name the next one;"
    with pytest.raises(TrainingError, match=expected):
        next(iter(loader))


def test_of_an_epoch_that_was_over_before_who_comes_later_gets_nothing() -> None:
    loader = made(1)
    loader.set_epoch(0)
    assert list(loader) == []


def test_of_an_epoch_that_a_checkpoint_goes_on_in_what_is_done_is_not_drawn() -> None:
    loader = made(2)
    loader.ring_cursor.start = ResumeStart(epoch=2, done=((0, 2), (4, 1)), seed=9)
    assert (loader.seed, loader.next_epoch) == (9, 2)
    loader.set_epoch(2)
    assert next(iter(loader))[0].tolist() == [2, 3, 5, 6]
    assert not loader.has_joined_late
    loader.ring_cursor.num_shards = 1
    assert loader.has_joined_late, "no checkpoint is read any more"
