"""Accounts of an epoch in which rings have lost members, or are gone."""

import json

import pytest

from ringweave.planning.balancing import SampleAccount
from ringweave.training.elastic.accounting import SampleAccounting
from ringweave.training.rings import ring_progress

EPOCH = SampleAccount.from_indices(range(100))


def said(total: range, lost: range = range(0), *, is_whole: bool = True, epoch: int = 0) -> ring_progress.RingReport:
    """What a ring says that has drawn these samples."""
    drawn = SampleAccount.from_indices(total) + SampleAccount.from_indices(lost)
    words = [
        [each.num_samples, each.fingerprint]
        for each in (drawn, SampleAccount.from_indices(total), SampleAccount.from_indices(lost))
    ]
    return {"epoch": epoch, "accounts": words, "is_whole": is_whole}


def test_what_all_rings_trained_on_is_the_epoch() -> None:
    account = ring_progress.sum_accounts(
        3, EPOCH, [said(range(60), epoch=3), said(range(60, 100), epoch=3)], num_rings=2
    )
    assert account.is_exact
    assert account.epoch == 3


def test_samples_of_members_that_died_are_lost_and_accounted_for() -> None:
    account = ring_progress.sum_accounts(0, EPOCH, [said(range(50), range(50, 60)), said(range(60, 100))], num_rings=2)
    assert (account.is_exact, account.is_accounted, account.lost.num_samples) == (False, True, 10)


@pytest.mark.parametrize("is_gone", [True, False])
def test_what_a_ring_took_of_which_nobody_is_left_counts_as_lost(is_gone: bool) -> None:
    by_ring = [said(range(60))] if is_gone else [said(range(60)), said(range(80, 100), is_whole=False)]
    account = ring_progress.sum_accounts(0, EPOCH, by_ring, num_rings=2)
    assert (account.is_accounted, account.lost.num_samples) == (True, 40 if is_gone else 20)


@pytest.mark.parametrize("by_ring", [[said(range(60)), said(range(50, 100))], [said(range(60)), said(range(70, 100))]])
def test_what_is_doubled_or_missing_while_all_rings_are_there_is_a_bug(
    by_ring: list[ring_progress.RingReport],
) -> None:
    assert not ring_progress.sum_accounts(0, EPOCH, by_ring, num_rings=2).is_accounted


def test_a_ring_that_has_batches_open_or_came_later_is_not_whole() -> None:
    books = SampleAccounting()
    assert ring_progress.ring_report(books, is_whole=True) == {"epoch": 0, "accounts": [[0, 0]] * 3, "is_whole": True}
    assert not ring_progress.ring_report(books, is_whole=False)["is_whole"]


def test_a_ring_that_is_gone_speaks_by_its_ring_progress_of_this_epoch() -> None:
    books = SampleAccounting()
    books.load_json(0, [[12, 34], [10, 30], [2, 4]])
    left = json.loads(ring_progress.ring_progress_json(books))
    assert (left["accounts"], left["is_whole"]) == ([[12, 34], [10, 30], [2, 4]], False)
    pushed = {**said(range(60, 90), is_whole=False), "is_ring_progress": True}
    account = ring_progress.sum_accounts(0, EPOCH, [said(range(60)), pushed], num_rings=2)
    assert (account.is_accounted, account.total.num_samples, account.lost.num_samples) == (True, 90, 10)
    of_old = ring_progress.sum_accounts(1, EPOCH, [said(range(60), epoch=1), pushed], num_rings=2)
    assert (of_old.is_accounted, of_old.lost.num_samples) == (True, 40)
    assert ring_progress.reporting_ring({0: left, 1: said(range(60)), 2: said(range(60))}) == 1
