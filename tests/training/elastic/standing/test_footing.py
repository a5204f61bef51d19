"""What a member does where it cannot go on."""

from typing import Any, cast

import pytest

from ringweave.errors import CapacityError
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed
from ringweave.training.elastic.session_state import SessionState

DECREE = Membership(
    generation_id=(1, 2),
    statuses=(
        MemberStatus(member="0.1"),
        MemberStatus(member="1.0", has_state=True),
        MemberStatus(member="2.0", has_state=True),
    ),
)


@pytest.mark.parametrize(("member", "saves"), [("0.1", False), ("1.0", True), ("2.0", False)])
def test_the_first_with_the_state_saves_it_where_those_who_are_left_have_too_little_memory(
    member: str, saves: bool
) -> None:
    saved: list[str] = []
    footing = SessionState(member, cast(Any, None), cast(Any, None))
    footing.newest_membership = DECREE
    footing.save_final_checkpoint = lambda: (saved.append(member), "The state after 7 train steps is in a folder.")[1]
    with pytest.raises(CapacityError) as raised:
        balancing.apportion(100, [Speed(s_per_sample=1.0)] * 3, [30, 30, 30])
    footing.error = raised.value
    text = "samples that fit into the memory of the ranks: [30, 30, 30], expected at least 1 each and 100 together."
    with pytest.raises(CapacityError) as ended, footing.saves_final_checkpoint(), footing.lock:
        footing.raise_if_stopped()
    assert str(ended.value).startswith(text)
    assert str(ended.value).endswith("is in a folder.") is saves
    assert saved == [member] * saves
