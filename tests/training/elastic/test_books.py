import numpy as np
import pytest
import torch

from ringweave.errors import TrainingError
from ringweave.planning.balancing import SampleAccount, Speed
from ringweave.training.elastic.accounting import SampleAccounting, samples_of_member
from ringweave.training.elastic.retained_reductions import (
    NUM_ROW_WORDS,
    Commit,
    PartialSums,
    ReductionRow,
    row_to_tensor,
    rows_of_tensor,
)
from ringweave.training.elastic.share_table import BatchShares, ShareTable

ROSTER = BatchShares(first_batch=0, members=("0.0", "1.0", "2.0"), shares=(5, 4, 3))


def rows(books: SampleAccounting, members: tuple[str, ...]) -> tuple[ReductionRow, ...]:
    return tuple(ReductionRow(account=books.account_of(member), num_planned=books.num_planned) for member in members)


def test_parts_are_disjoint_and_make_the_whole_batch_also_a_short_one() -> None:
    for length in (12, 5, 1):
        batch = np.arange(100, 100 + length)
        parts = [samples_of_member(batch, ROSTER, member) for member in ROSTER.members]
        assert sorted(np.concatenate(parts).tolist()) == batch.tolist()
    assert len(samples_of_member(np.arange(12), ROSTER, "9.0")) == 0


def test_what_nobody_is_left_to_compute_is_lost_and_known() -> None:
    books = SampleAccounting()
    books.record_batch(np.arange(12), ROSTER)
    assert books.record_commit(Commit(number=1, members=ROSTER.members, rows=rows(books, ROSTER.members))) == 0
    books.record_batch(np.arange(12, 24), ROSTER)
    commit = Commit(number=2, members=("0.0", "2.0"), rows=rows(books, ("0.0", "2.0")))
    assert books.record_commit(commit) == 4
    account = books.epoch_account()
    assert account.is_accounted
    assert not account.is_exact
    assert account.lost == SampleAccount.from_indices([17, 18, 19, 20])
    assert commit.scale == 12 / 8
    again = SampleAccounting()
    again.load_json(0, books.to_json())
    assert again.epoch_account() == account


def test_missing_samples_are_computed_next_and_then_none_is_lost() -> None:
    books = SampleAccounting(recomputes=True)
    books.record_batch(np.arange(12), ROSTER)
    books.record_batch(np.arange(12, 24), ROSTER)
    left = ("0.0", "2.0")
    commit = Commit(number=1, members=left, rows=rows(books, left))
    assert commit.is_partial
    assert books.record_commit(commit) == 8
    assert [each.indices.tolist() for each in books.missing] == [[5, 6, 7, 8], [17, 18, 19, 20]]
    assert [each.batch.tolist() for each in books.missing] == [list(range(12)), list(range(12, 24))]
    shares = BatchShares(first_batch=2, members=left, shares=(6, 6))
    for _ in range(2):
        books.record_next_missing(shares)
    assert books.own_part("2.0").indices.tolist() == [19, 20]
    assert books.num_planned == 8
    alone = ("2.0",)
    assert books.record_commit(Commit(number=2, members=alone, rows=rows(books, alone))) == 4
    assert [each.indices.tolist() for each in books.missing] == [[5, 6], [17, 18]]
    for _ in range(2):
        books.record_next_missing(BatchShares(first_batch=4, members=alone, shares=(12,)))
    assert books.record_commit(Commit(number=3, members=alone, rows=rows(books, alone))) == 0
    assert not books.missing
    account = books.epoch_account()
    assert account.is_exact
    assert account.expected == SampleAccount.from_indices(range(24))


def test_a_step_that_restarts_has_no_sample_and_all_are_missing() -> None:
    books, left = SampleAccounting(recomputes=True), ("0.0", "2.0")
    for first in (0, 12):
        books.record_batch(np.arange(first, first + 12), ROSTER)
    void = (ReductionRow(num_planned=books.num_planned, restarts_step=True),) * 2
    commit = Commit(number=1, members=left, rows=void)
    assert commit.is_partial
    assert books.record_commit(commit) == 24
    assert [each.indices.tolist() for each in books.missing] == [list(range(12)), list(range(12, 24))]
    for _ in range(2):
        books.record_next_missing(BatchShares(first_batch=2, members=left, shares=(6, 6)))
    assert books.record_commit(Commit(number=2, members=left, rows=rows(books, left))) == 0
    assert books.epoch_account().is_exact


def test_members_of_which_some_restart_a_step_are_found_out() -> None:
    commit = Commit(number=7, members=("0.0", "2.0"), rows=(ReductionRow(), ReductionRow(restarts_step=True)))
    with pytest.raises(TrainingError, match=r"reduction 7: some members restart the step, expected all or none"):
        SampleAccounting().record_commit(commit)


def test_sums_that_were_kept_outlast_a_restart_of_the_rest() -> None:
    kept, part, void = (
        PartialSums(),
        ReductionRow(account=SampleAccount.from_indices([1]), num_planned=2),
        torch.ones(1),
    )
    kept.complete(Commit(number=1, members=("0.0",), rows=(part,), used_bits=1), [torch.full((1,), 5.0)])
    restart = ReductionRow(num_planned=1, restarts_step=True)
    kept.complete(Commit(number=2, members=("0.0",), rows=(restart,)), [void])
    assert void.item() == 0
    rest, whole = torch.full((1,), 2.0), ReductionRow(account=SampleAccount.from_indices([2]), num_planned=1)
    assert kept.complete(Commit(number=3, members=("0.0",), rows=(whole,), used_bits=2), [rest]) == 3
    assert rest.item() == 7


def test_missing_samples_that_no_pass_computes_are_lost() -> None:
    books = SampleAccounting(recomputes=True)
    books.record_batch(np.arange(12), ROSTER)
    books.record_commit(Commit(number=1, members=("0.0",), rows=rows(books, ("0.0",))))
    assert books.lose_missing() == 7
    account = books.epoch_account()
    assert account.is_accounted
    assert account.lost == SampleAccount.from_indices(range(5, 12))


def test_what_is_known_of_the_batches_follows_them() -> None:
    books = SampleAccounting()
    books.record_batch(np.arange(12), ROSTER)
    assert books.account_of("0.0") == SampleAccount.from_indices(range(5))
    books.record_batch(np.arange(12, 24), ROSTER)
    assert books.account_of("0.0") == SampleAccount.from_indices([*range(5), *range(12, 17)])
    assert books.account_of("9.0") == SampleAccount()
    books.discard_open_batches()
    assert books.account_of("0.0") == SampleAccount()
    books.record_batch(np.arange(24, 36), ROSTER)
    assert books.record_commit(Commit(number=1, members=ROSTER.members, rows=rows(books, ROSTER.members))) == 0
    assert books.epoch_account().expected == SampleAccount.from_indices(range(24, 36))
    assert books.account_of("0.0") == SampleAccount()


def test_members_that_say_something_else_are_found_out() -> None:
    books = SampleAccounting()
    books.record_batch(np.arange(12), ROSTER)
    wrong = (ReductionRow(account=SampleAccount.from_indices([1]), num_planned=12),) * 3
    with pytest.raises(TrainingError, match=r"account of reduction 7: .*, expected .*this is a bug of ringweave"):
        books.record_commit(Commit(number=7, members=ROSTER.members, rows=wrong))


@pytest.mark.parametrize(
    "row",
    [
        ReductionRow(),
        ReductionRow(account=SampleAccount(num_samples=3, fingerprint=2**64 - 1), num_planned=9),
        ReductionRow(is_recovering=True),
        ReductionRow(is_caught_up=True, is_recovering=True),
        ReductionRow(num_planned=9, restarts_step=True),
        ReductionRow(speed=Speed(s_per_sample=0.001, overhead_samples=2.5, noise=0.1)),
    ],
)
def test_rows_survive_the_way(row: ReductionRow) -> None:
    words = row_to_tensor(row, 0, 0)
    assert words.shape == (NUM_ROW_WORDS,)
    assert rows_of_tensor(words[None]) == ((row,), 0)


@pytest.mark.parametrize(("num_parameters", "num_words"), [(0, 0), (1, 1), (64, 1), (65, 2), (200, 4)])
def test_what_any_member_has_used_is_behind_the_rows(num_parameters: int, num_words: int) -> None:
    highest = 1 << num_parameters >> 1
    said = torch.stack(
        [row_to_tensor(ReductionRow(num_planned=9), used, num_parameters) for used in (highest, 0, highest & 1)]
    )
    assert said.shape == (3, NUM_ROW_WORDS + num_words)
    assert rows_of_tensor(said) == ((ReductionRow(num_planned=9),) * 3, highest)


def test_gradients_of_no_batch_count_the_same_for_all() -> None:
    assert Commit(number=1, members=("0.0", "1.0"), rows=(ReductionRow(), ReductionRow())).scale == 0.5


def test_who_follows_counts_for_nothing() -> None:
    rows = (ReductionRow(), ReductionRow(), ReductionRow(is_recovering=True, is_caught_up=True))
    commit = Commit(number=1, members=("0.0", "1.0", "2.1"), rows=rows)
    assert (commit.scale, commit.caught_up) == (0.5, ("2.1",))


def test_who_follows_has_no_samples_until_it_is_admitted() -> None:
    rosters, speed = ShareTable(12, is_balanced=True), Speed(s_per_sample=0.01)
    members = ("0.0", "1.0", "2.1", "3.1")
    rosters.start_generation(3, members, [None] * 4, [speed, speed, None, None], [1.0] * 4, ["2.1", "3.1"])
    assert rosters.shares_of_batch(3).shares == (6, 6, 0, 0)
    assert rosters.recovering == {"2.1", "3.1"}
    assert rosters.rebalance(4, [speed] * 4) is None, "not while somebody has none"
    assert rosters.admit(7, ["3.1"], [speed, speed, None, None]).shares == (4, 4, 0, 4)
    assert (rosters.shares_of_batch(6).shares, rosters.recovering) == ((6, 6, 0, 0), {"2.1"})
    assert rosters.still_recovering(["2.1", "3.1", "4.0"]) == {"2.1", "4.0"}, "what was heard before is out of date"
    rosters.start_generation(
        9, members[1:], [None] * 3, [speed, None, None], [1.0] * 3, rosters.still_recovering(["2.1", "3.1"])
    )
    assert rosters.shares_of_batch(9).shares == (6, 0, 6)


def test_a_batch_keeps_the_roster_that_it_was_drawn_with() -> None:
    rosters = ShareTable(12, is_balanced=False)
    rosters.start_generation(0, ("0.0", "1.0"), [None, None], [None, None], [1.0, 1.0])
    rosters.start_generation(7, ("0.0",), [None], [None], [1.0])
    assert rosters.shares_of_batch(6).members == ("0.0", "1.0")
    assert rosters.shares_of_batch(6).shares == (6, 6)
    assert rosters.shares_of_batch(7) == rosters.latest
    rosters.forget_before(7)
    assert rosters.shares_of_batch(7).shares == (12,)


def test_a_newcomer_is_expected_to_be_as_fast_as_the_file_says_it_is_beside_the_others() -> None:
    rosters = ShareTable(30, is_balanced=True)
    speed = Speed(s_per_sample=0.01)
    roster = rosters.start_generation(0, ("0.0", "1.0", "2.1"), [None] * 3, [speed, speed, None], [1.0, 1.0, 0.5])
    assert roster.shares == (12, 12, 6)
