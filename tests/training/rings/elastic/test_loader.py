"""What the loader of a ring that may lose members does with a pass that was broken off, without a ring."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ringweave.errors import TrainingError
from ringweave.training.data import order
from ringweave.training.data.shared_loader import SharedLoader
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.gradients import SampleWeights
from ringweave.training.rings.elastic_ring import ElasticRing
from ringweave.training.rings.ring_progress import ResumeStart, RingCursor, RingProgress
from ringweave.training.rings.shard_source import ShardSource
from tests.training import fakes


def made(epoch: int) -> SharedLoader:
    """Of a ring with one member, which is in that epoch."""
    nothing = lambda *_, **__: None  # noqa: E731 - what the ring hears of it
    shares = ShareTable(4, is_balanced=True)
    shares.start_generation(0, ["0.0"], [None], [None], [1.0])
    trainer = fakes.trainer_state("0.0", shares, ring=lambda made: RingProgress(RingCursor(ring=0), made, nothing))
    trainer.progress.epoch = epoch
    session = SimpleNamespace(
        change_atomically=lambda change: change(), pass_step_boundary=nothing, record_progress=nothing
    )
    exchange = SimpleNamespace(broadcast_from_first=lambda *_: {"first": 0, "count": 4, "version": 1, "reports": {}})
    worker = SimpleNamespace(
        send_pending=nothing,
        discard_unpushed=nothing,
        apply_parameters=nothing,
        changes=None,
        received=SimpleNamespace(pieces=()),
    )
    timer: Any = SimpleNamespace(begin_step=nothing, record_samples=nothing)
    parts: Any = (session, trainer, worker, exchange, timer, None, nothing)
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    source = ShardSource(loader, order.read_loader(loader), 0, ElasticRing(*parts))
    return SharedLoader(loader, source, SampleWeights(num_ranks=1, is_mean=True), timer)


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
    source: Any = loader.source
    cursor = source.membership.progress.cursor
    cursor.start = ResumeStart(epoch=2, done=((0, 2), (4, 1)), seed=9)
    assert (source.seed, loader.next_epoch) == (9, 2)
    loader.set_epoch(2)
    assert not loader.has_joined_late
    assert next(iter(loader))[0].tolist() == [2, 3, 5, 6]
    assert cursor.num_shards == 1
    assert loader.has_joined_late, "no checkpoint is read any more"
