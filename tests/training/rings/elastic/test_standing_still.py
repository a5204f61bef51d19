"""A ring that stands still since too few of it are heard: its representative says so, once."""

from types import SimpleNamespace
from typing import Any

from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.training.rings.elastic_ring import SessionExchange

DECREE = Membership(generation_id=(1, 1), statuses=(MemberStatus(member="0.0"), MemberStatus(member="1.0")))


class Member(SessionExchange):
    """Keeps what it would tell the server."""

    def __init__(self) -> None:
        session: Any = SimpleNamespace(membership=DECREE)
        super().__init__(session, "0.0", lambda: session, lambda: session)
        self.said: list[Membership] = []

    def on_pause(self, membership: Membership) -> None:
        self.said.append(membership)


def looked(*frozen: tuple[float, float]) -> int:
    """How often it says that nobody has to wait for the ring, if that is frozen in these spans of ten seconds."""
    member = Member()
    for tenth in range(100):
        now_s = tenth / 10
        member.check_pause(now_s, is_paused=any(since_s <= now_s < until_s for since_s, until_s in frozen))
    return len(member.said)


def test_a_moment_in_which_members_come_or_go_is_not_worth_a_word() -> None:
    assert looked((1.0, 1.9), (3.0, 3.9), (5.0, 5.9)) == 0


def test_each_longer_one_is_told_once() -> None:
    assert looked((1.0, 6.0)) == 1
    assert looked((0.0, 10.0)) == 1
    assert looked((1.0, 3.0), (5.0, 9.0)) == 2
