"""Whose certificate counts no more, by the newest membership alone."""

import pytest

from ringweave.membership import membership_records
from ringweave.membership.membership_records import Membership, MemberStatus


def follow(*generations: tuple[str, ...]) -> Membership:
    """The last of generations with these members."""
    found: Membership | None = None
    for number, members in enumerate(generations):
        found = Membership(
            generation_id=(1, number + 1),
            statuses=tuple(MemberStatus(member=each) for each in members),
            departed=membership_records.departed_members(found, members),
        )
    assert found is not None
    return found


FIRST, LATER = ("0.0", "1.0", "2.0"), ("0.0", "2.0")


@pytest.mark.parametrize(
    ("generations", "departed", "revoked"),
    [
        ((FIRST,), (), []),
        ((FIRST, LATER), ("1.0",), ["1.0"]),
        ((FIRST, LATER, LATER), ("1.0",), ["1.0"]),
        ((FIRST, LATER, ("0.0", "1.2", "2.0")), (), ["1.0", "1.1"]),
        ((FIRST, ("0.0", "1.2", "2.0"), LATER), ("1.2",), ["1.0", "1.1", "1.2"]),
    ],
)
def test_who_has_departed_is_known_in_all_later_generations(
    generations: tuple[tuple[str, ...], ...], departed: tuple[str, ...], revoked: list[str]
) -> None:
    last = follow(*generations)
    assert last.departed == departed
    known = ["0.0", "1.0", "1.1", "1.2", "1.3", "2.0", "3.0"]
    assert [each for each in known if last.revokes(each)] == revoked


def test_no_name_of_a_member_counts() -> None:
    assert all(follow(FIRST).revokes(each) for each in ("3", "a.b", "", "1.2.3"))
