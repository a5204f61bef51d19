"""What a ring pushes is counted by what is in it, also when a member was gone before it counted."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.param_server.data_shards import merge_spans
from ringweave.planning.balancing import SampleAccount
from ringweave.training.elastic.accounting import SampleAccounting, samples_of_member
from ringweave.training.elastic.retained_reductions import Commit, ReductionRow
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.elastic.trainer import TrainerState
from ringweave.training.rings import ring_progress
from ringweave.training.rings.ring_progress import PendingPush, ResumeStart, RingCursor, RingProgress
from tests.training import fakes

MEMBERS = ("0.0", "1.0")


def make(pausing: Any = None, *, recomputes: bool = False) -> tuple[TrainerState, RingProgress]:
    trainer = fakes.trainer_state(
        "0.0",
        ShareTable(8, is_balanced=True),
        recomputes=recomputes,
        ring=lambda made: RingProgress(RingCursor(ring=1), made, pausing or (lambda _: None)),
    )
    trainer.share_table.start_generation(0, MEMBERS, [None, None], [None, None], [1.0, 1.0])
    return trainer, trainer.ring_progress


def counted(crew: TrainerState, *members: str, of: int) -> Commit:
    rows = tuple(ReductionRow(account=crew.accounting.account_of(member), num_planned=of) for member in members)
    return Commit(number=1, members=members, rows=rows)


@pytest.mark.parametrize(("left", "num_samples", "share"), [(MEMBERS, 8, 0.5), (("1.0",), 4, 0.25)])
def test_a_push_counts_for_the_samples_of_those_who_are_left(
    left: tuple[str, ...], num_samples: int, share: float
) -> None:
    crew, ring = make()
    ring.record_batch(np.arange(8), 0.5)
    assert not crew.is_between_steps
    crew.apply_commit(counted(crew, *left, of=8))
    samples = ring.samples
    assert (samples.num_samples, samples.batch_share, samples.mean_share) == (num_samples, share, share)
    assert crew.accounting.epoch_account().lost.num_samples == 8 - num_samples
    assert not crew.is_between_steps, "a newcomer would not have what is not pushed yet"
    samples.clear()
    assert crew.is_between_steps


def test_a_push_waits_for_the_samples_of_a_lost_member_and_has_them_all() -> None:
    crew, ring = make(recomputes=True)
    ring.record_batch(np.arange(8), 0.5, 40)
    ring.record_batch(np.arange(8, 16), 0.25, 48)
    crew.apply_commit(counted(crew, "1.0", of=16))
    assert (ring.samples.num_samples, len(crew.accounting.missing)) == (0, 2)
    crew.share_table.start_generation(crew.progress.num_drawn, ("1.0",), [None], [None], [1.0])
    parts = []
    for _ in range(2):
        crew.record_missing()
        parts.append(ring.batch_part)
    assert parts == [0.5, 0.25]
    crew.apply_commit(counted(crew, "1.0", of=8))
    samples = ring.samples
    assert (samples.num_samples, samples.num_batches, samples.batch_share) == (16, 2, 0.75)
    assert merge_spans(samples.spans) == ((40, 16),)
    assert crew.accounting.epoch_account().is_exact


def test_batches_that_are_reduced_together_are_one_push_of_so_many_batches() -> None:
    crew, ring = make()
    ring.record_batch(np.arange(8), 0.5)
    ring.record_batch(np.arange(8, 16), 0.5)
    crew.apply_commit(counted(crew, *MEMBERS, of=16))
    assert (ring.samples.num_samples, ring.samples.num_batches, ring.samples.mean_share) == (16, 2, 0.5)


@pytest.mark.parametrize("size", [8, 5, 13])
def test_every_sample_of_a_ticket_is_somebody_s_whatever_its_size(size: int) -> None:
    crew, ring = make()
    ring.record_batch(np.arange(size), 0.5)  # larger than the shares if a member has died since it was taken
    parts = [samples_of_member(np.arange(size), crew.share_table.latest, member) for member in MEMBERS]
    assert np.concatenate(parts).tolist() == list(range(size))
    crew.apply_commit(counted(crew, *MEMBERS, of=size))
    account = crew.accounting.epoch_account()
    assert account.is_exact
    assert account.total.num_samples == size


def test_a_push_says_which_samples_it_is_of_also_where_a_member_s_part_was_lost() -> None:
    crew, ring = make()
    crew.progress.epoch = 2
    ring.cursor.start = ResumeStart(epoch=2, done=((10, 5),), seed=3)
    ring.record_batch(np.arange(8), 0.5, 4)
    crew.apply_commit(counted(crew, *MEMBERS, of=8))
    assert (ring.samples.pass_number, ring.samples.epoch) == (2, 2)
    assert merge_spans(ring.samples.spans) == ((4, 6), (15, 2)), "around those that were done before"
    ring.record_batch(np.arange(8), 0.5, 12)
    crew.apply_commit(counted(crew, "1.0", of=8))
    assert merge_spans(ring.samples.spans) == ((4, 6), (15, 2), (21, 4)), "those of the other one are not in it"


def test_what_is_spread_is_no_gradient() -> None:
    crew, ring = make()
    ring.record_batch(np.arange(8), 0.5)
    ring.is_broadcasting = True
    crew.apply_commit(Commit(number=1, members=MEMBERS, rows=(ReductionRow(), ReductionRow())))
    assert (ring.samples.num_batches, crew.accounting.num_planned) == (0, 8)


def test_a_pass_that_is_broken_off_leaves_nothing_open() -> None:
    crew, ring = make()
    ring.record_batch(np.arange(8), 0.5)
    ring.discard_open_batches()
    assert crew.is_between_steps
    assert crew.accounting.num_planned == 0
    assert crew.accounting.epoch_account().expected == SampleAccount()


def test_a_ring_that_begins_again_has_what_its_ring_progress_says_of_this_epoch() -> None:
    crew, ring = make()
    old = SampleAccounting()
    old.load_json(2, [[30, 7], [28, 5], [2, 2]])
    left = {"epoch": 2, "accounts": old.to_json()}
    assert "is_ring_progress" in ring_progress.ring_progress_json(old)
    cursor = RingCursor(ring=1, num_pushed=5, base_version=9, num_shards=6, num_barriers=2, next_version=9)
    ring.resume_ring(cursor.to_json(), 2, left)
    assert (ring.cursor.num_pushed, ring.cursor.num_shards, crew.progress.epoch) == (5, 6, 2)
    assert (crew.accounting.epoch_account().total.num_samples, ring.has_whole_epoch) == (28, False)
    ring.resume_ring(replace(cursor, num_barriers=4).to_json(), 3, left)
    assert crew.accounting.epoch_account().total == SampleAccount(), "of another epoch"
    ring.open_epoch(4)
    assert ring.has_whole_epoch


def test_the_server_is_told_before_an_epoch_is_formed_but_for_the_first() -> None:
    told: list[Membership] = []
    _, ring = make(told.append)
    membership = Membership(generation_id=(1, 1), statuses=tuple(MemberStatus(member=member) for member in MEMBERS))
    pushed = PendingPush(num_samples=8, batch_share=0.5, ring_progress="{}", spans=((4, 8),), fragments=(1,))
    cursor = RingCursor(
        ring=1,
        num_pushed=4,
        base_version=8,
        num_shards=5,
        num_barriers=2,
        next_version=9,
        local_steps=30,
        num_since_level=2,
        weight=0.5,
        partly_pushed=[pushed],
        pending=pushed,
        start=ResumeStart(epoch=1, done=((0, 4),), seed=3),
    )
    ring.check_membership(membership)
    assert told == []
    ring.begin_generation({"ring": json.loads(json.dumps(cursor.to_json())), "is_whole": False}, is_joining=True)
    assert (ring.cursor, ring.has_whole_epoch) == (cursor, False)
    ring.check_membership(membership)
    assert told == [membership]
