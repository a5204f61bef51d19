from dataclasses import replace
from typing import Any

import pytest

from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.training.elastic import recovery, share_table
from ringweave.training.elastic.recovery import GenerationStart, RecoveryPlan
from ringweave.training.elastic.share_table import BatchShares

LAYOUT = [[12, "float32", "cpu"]]
TEXT = recovery.layout_to_text(LAYOUT)


def membership(*statuses: MemberStatus) -> Membership:
    return Membership(generation_id=(1, 5), statuses=statuses)


def holder(member: str, layout: str = TEXT) -> MemberStatus:
    return MemberStatus(member=member, has_state=True, committed=4, layout=layout)


def test_newcomers_follow_where_the_others_have_buckets_and_read_of_one_holder_each() -> None:
    found = RecoveryPlan.of_membership(
        membership(
            MemberStatus(member="0.1"),
            holder("1.0"),
            MemberStatus(member="2.3"),
            holder("3.0"),
            MemberStatus(member="4.1"),
        ),
    )
    assert found.joining_ranks == (0, 2, 4)
    assert found.recovering == {"0.1", "2.3", "4.1"}
    assert found.layout == LAYOUT
    assert [found.recovery_source(rank) for rank in found.joining_ranks] == [1, 3, 1]
    assert [found.is_recovery_source(rank) for rank in range(5)] == [False, True, False, True, False]


def test_where_one_alone_has_the_state_the_first_that_follows_is_to_have_it_soon() -> None:
    following = MemberStatus(member="2.3", is_recovering=True, committed=4)
    alone = membership(MemberStatus(member="0.1"), holder("1.0"), following)
    assert RecoveryPlan.of_membership(alone).urgent_member == "0.1"
    assert (
        RecoveryPlan.of_membership(membership(holder("1.0"), following, MemberStatus(member="4.1"))).urgent_member
        == "2.3"
    )
    assert RecoveryPlan.of_membership(membership(*alone.statuses, holder("3.0"))).urgent_member is None
    assert RecoveryPlan.of_membership(membership(holder("0.0"))).urgent_member is None
    assert (
        RecoveryPlan.of_membership(membership(holder("0.0", ""), MemberStatus(member="1.1"))).urgent_member is None
    ), "it is waited for"


def test_who_follows_already_needs_no_donor_and_gives_nothing() -> None:
    following = MemberStatus(member="1.1", is_recovering=True, committed=4)
    found = RecoveryPlan.of_membership(membership(holder("0.0"), following))
    assert (found.joining_ranks, found.recovering) == ((), {"1.1"})
    assert not found.is_recovery_source(0)


def test_before_the_first_reduction_newcomers_are_waited_for() -> None:
    found = RecoveryPlan.of_membership(membership(holder("0.0", ""), MemberStatus(member="1.1")))
    assert (found.joining_ranks, found.recovering, found.layout) == ((1,), frozenset(), None)


def test_at_the_begin_of_a_job_the_first_member_s_state_becomes_everybody_s() -> None:
    found = RecoveryPlan.of_membership(membership(MemberStatus(member="0.0"), MemberStatus(member="1.0")))
    assert (found.owner_ranks, found.joining_ranks, found.recovering) == ((0,), (1,), frozenset())
    assert found.is_recovery_source(0)


def start_without(lost: str, *computing: dict[str, Any], committed: int = 4) -> GenerationStart:
    """Two of three members remain, of which one has drawn a batch of 12 samples with the one that is lost."""
    drawn = BatchShares(first_batch=3, members=("0.0", "1.0", "2.0"), shares=(6, 4, 2))
    members = [holder(each) for each in drawn.members if each != lost]
    members[0] = replace(members[0], num_drawn=4, committed=committed, batch_shares=share_table.shares_to_text([drawn]))
    return GenerationStart(membership=membership(*members), details=computing, is_joining=False)


def computes(s_per_sample: float | None, exchange_s: float) -> dict[str, Any]:
    speed = None if s_per_sample is None else [s_per_sample, 0.0, 0.0, 0.0, 0.0, 0.0]
    return {"speed": speed, "exchange_s": exchange_s}


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (start_without("2.0", computes(0.01, 0.3), computes(0.02, 0.2)), True),
        (start_without("2.0", computes(0.01, 0.3), computes(0.04, 0.2)), False),
        (start_without("2.0", computes(0.01, 0.3), computes(0.02, 0.1)), False),
        (start_without("2.0", computes(0.01, 0.3), computes(None, 0.0)), True),
        (start_without("2.0", computes(None, 0.3), computes(None, 0.2)), False),
        (start_without("2.0", computes(0.01, 0.0), computes(0.02, 0.0)), False),
        (start_without("3.0", *[computes(0.01, 0.3)] * 3), False),
        (start_without("2.0", *[computes(0.01, 0.3)] * 2, committed=3), False),
    ],
    ids=["faster", "slower", "short sums", "one unknown", "speeds unknown", "no sums yet", "none lost", "committed"],
)
def test_a_step_restarts_if_it_is_computed_sooner_than_its_gradients_are_summed(
    start: GenerationStart, expected: bool
) -> None:
    assert recovery.restarts_step(start, frozenset()) == expected
