"""Where the data of rings go on."""

import numpy as np
import pytest

from ringweave.errors import TrainingError
from ringweave.param_server.data_shards import DataPosition
from ringweave.training.rings.ring_progress import PendingPush, ResumeStart, RingCursor
from ringweave.training.rings.shard_source import loader_state, remaining_indices

POSITION = DataPosition(pass_number=3, epoch=1, done=((0, 4), (6, 2)))


def test_the_rest_of_an_epoch_is_what_is_not_in_the_parameters() -> None:
    start = ResumeStart.of_state(loader_state(POSITION, 7, 10), 10)
    assert start == ResumeStart(epoch=1, done=((0, 4), (6, 2)), seed=7)
    order = np.arange(10)[::-1]
    assert remaining_indices(order, start.done_spans_of(1)).tolist() == [5, 4, 1, 0]
    assert remaining_indices(order, start.done_spans_of(2)).tolist() == order.tolist(), "whole, as every epoch after it"
    assert (start.to_message(4).pass_number, start.to_message(4).done) == (4, [(0, 4), (6, 2)])


def test_where_nothing_is_left_it_is_the_next_epoch() -> None:
    done = DataPosition(epoch=1, done=((0, 10),))
    assert ResumeStart.of_state(loader_state(done, 7, 10), 10) == ResumeStart(epoch=2, done=(), seed=7)


def test_other_data_are_refused() -> None:
    expected = r"samples of an epoch: 12, expected 10, as the checkpoint has them\. Go on with the data that it"
    with pytest.raises(TrainingError, match=expected):
        ResumeStart.of_state(loader_state(POSITION, 7, 10), 12)


def test_a_worker_that_joins_a_ring_knows_it_too() -> None:
    pending = PendingPush(num_samples=8, batch_share=0.5, ring_progress="", num_batches=2, epoch=1, spans=((4, 2),))
    place = RingCursor(ring=1, num_pushed=4, pending=pending, start=ResumeStart(epoch=1, done=((0, 4),), seed=7))
    found = RingCursor(ring=1)
    found.load_json(place.to_json())
    assert found == place
    assert (found.done_spans_of(1), found.done_spans_of(2), RingCursor(ring=0).done_spans_of(1)) == (((0, 4),), (), ())
