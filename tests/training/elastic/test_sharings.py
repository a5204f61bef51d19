import pytest

from ringweave.errors import TrainingError
from ringweave.membership.membership_records import MemberStatus, strip_duplicates
from ringweave.membership.messages import MAX_BATCH_SHARES_CHARS
from ringweave.training.elastic import share_table
from ringweave.training.elastic.share_table import BatchShares, ShareTable


def begun(*members: str, first: int = 0, batch: int = 12) -> ShareTable:
    rosters = ShareTable(batch, is_balanced=False)
    rosters.start_generation(first, members, [None] * len(members), [None] * len(members), [1.0] * len(members))
    return rosters


def test_batches_that_others_have_drawn_are_shared_as_they_drew_them_and_the_next_ones_are_not() -> None:
    others = begun("0.0", "1.0", "2.0")
    told = share_table.shares_of_text(share_table.shares_to_text(others.rows_between(7, 8)))
    assert told == [BatchShares(first_batch=7, members=("0.0", "1.0", "2.0"), shares=(4, 4, 4))]
    rosters = begun("0.0", "1.0", "2.0", "3.0")
    rosters.adopt_rows(told)
    rosters.start_generation(8, ["0.0", "1.0"], [None] * 2, [None] * 2, [1.0] * 2)
    assert [rosters.shares_of_batch(number).shares for number in (6, 7, 8)] == [(3, 3, 3, 3), (4, 4, 4), (6, 6)]


def test_what_is_told_is_of_the_batches_that_are_asked_for() -> None:
    rosters = begun("0.0", "1.0")
    rosters.start_generation(5, ["0.0"], [None], [None], [1.0])
    rosters.start_generation(9, ["0.0", "2.0"], [None] * 2, [None] * 2, [1.0] * 2)
    assert [(each.first_batch, each.members) for each in rosters.rows_between(4, 9)] == [
        (4, ("0.0", "1.0")),
        (5, ("0.0",)),
    ]
    assert [(each.first_batch, each.members) for each in rosters.rows_between(6, 7)] == [(6, ("0.0",))]


@pytest.mark.parametrize(("num_drawn", "passed_on"), [(8, ["", "", "b", ""]), (9, ["c", "", "", ""])])
def test_only_one_passes_it_on_that_has_drawn_the_most(num_drawn: int, passed_on: list[str]) -> None:
    statuses = [
        MemberStatus(member="0.1", is_recovering=True, num_drawn=num_drawn, batch_shares="c"),
        MemberStatus(member="1.0", has_state=True, num_drawn=7, batch_shares="a", layout="l"),
        MemberStatus(member="2.0", has_state=True, num_drawn=8, batch_shares="b", layout="l"),
        MemberStatus(member="3.0", has_state=True, num_drawn=8, batch_shares="b", layout="l"),
    ]
    passed = strip_duplicates([*statuses, MemberStatus(member="4.0", num_drawn=12)])
    assert [each.batch_shares for each in passed] == [*passed_on, ""]
    assert [each.layout for each in passed] == ["", "l", "", "", ""]
    assert [each.num_drawn for each in passed] == [num_drawn, 7, 8, 8, 12]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "all of it: Invalid JSON"),
        ('[{"first_batch":-1,"members":["0.0"],"shares":[1]}]', "0.first_batch: Input should be greater than"),
        ('[{"first_batch":1,"members":["x"],"shares":[1]}]', "0.members.0: String should match pattern"),
        ('[{"first_batch":1,"members":[],"shares":[]}]', "0.members: List should have at least 1 item"),
        ('[{"first_batch":1,"members":["0.0"],"shares":[]}]', "[] of 1 members, expected one of each"),
        ('[{"first_batch":1,"members":["0.0"],"shares":[0]}]', "expected one of each"),
        ('[{"first_batch":1,"members":["0.0"],"shares":[true]}]', "0.shares.0: Input should be a valid integer"),
        (
            "[" + " " * MAX_BATCH_SHARES_CHARS + "]",
            f"{MAX_BATCH_SHARES_CHARS + 2} characters', expected at most {MAX_BATCH_SHARES_CHARS}",
        ),
    ],
)
def test_what_no_member_says_is_refused(text: str, reason: str) -> None:
    with pytest.raises(TrainingError, match="batches that were drawn: ") as raised:
        share_table.shares_of_text(text)
    assert reason in str(raised.value)
    assert "Run the same ringweave on all nodes" in str(raised.value)


def test_nothing_that_is_open_is_no_text() -> None:
    assert share_table.shares_of_text("") == []
