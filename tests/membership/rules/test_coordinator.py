import pickle
from dataclasses import replace

import pytest

from ringweave import rpc
from ringweave.membership import membership_records
from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import FailureDetector
from ringweave.membership.membership_records import (
    BeginGeneration,
    GenerationProposal,
    MemberDirective,
    MemberRules,
    Membership,
    MemberStatus,
    PauseTraining,
    StopTraining,
    resolve_reduction,
)
from ringweave.membership.messages import WatchUpdate
from tests.membership.rules.table import Table, holder


def test_the_first_epoch_waits_for_all_that_are_expected() -> None:
    table = Table(3)
    table.coordinator.join("0.0", 0.0)
    table.coordinator.join("1.0", 0.0)
    assert table.coordinator.directive_for("0.0") == MemberDirective()
    assert table.begin("2.0", "0.0", "1.0").members == ("0.0", "1.0", "2.0"), "by slot"


def test_fewer_will_do_when_patience_has_run_out_and_too_few_end_the_job() -> None:
    table = Table(3, least=2)
    table.coordinator.join("0.0", 0.0)
    table.coordinator.join("1.0", 0.0)
    table.pass_time(20.2, "0.0", "1.0")
    assert table.coordinator.directive_for("0.0").proposal is not None
    alone = Table(3, least=2)
    alone.coordinator.join("0.0", 0.0)
    alone.pass_time(20.2, "0.0")
    assert alone.coordinator.directive_for("0.0").is_end
    assert alone.coordinator.end_reason == "1 workers came, expected at least 2"


def test_a_death_is_an_urgent_proposal_to_those_who_are_left() -> None:
    table = Table(3)
    first = table.begin("0.0", "1.0", "2.0")
    table.coordinator.note_process_exit("1.0", 0.5)
    order = table.coordinator.directive_for("0.0")
    assert order.proposal is not None
    assert order.proposal.is_urgent
    assert order.membership == first
    table.report_status(holder("0.0", at_step_boundary=False), holder("2.0", at_step_boundary=False, is_prepared=True))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "2.0")
    assert table.coordinator.directive_for("1.0").is_evicted


def test_a_newcomer_waits_for_the_border_of_all_others() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.note_process_exit("1.0", 0.5)
    table.coordinator.join("1.1", 1.0)
    table.report_status(holder("0.0", at_step_boundary=False), MemberStatus(member="1.1"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0",), "in the midst of a step"
    proposal = table.coordinator.directive_for("0.0").proposal
    assert proposal is not None
    assert not proposal.is_urgent
    table.report_status(MemberStatus(member="1.1"), holder("0.0"))
    assert table.coordinator.membership.members == ("0.0", "1.1")
    assert table.coordinator.membership.state_owners == ("0.0",)


def test_more_than_the_most_are_not_let_in() -> None:
    table = Table(2, most=2)
    table.begin("0.0", "1.0")
    table.coordinator.join("2.0", 1.0)
    assert table.coordinator.directive_for("0.0").proposal is None
    table.coordinator.note_process_exit("1.0", 0.5)
    table.report_status(holder("0.0"), MemberStatus(member="2.0"))
    table.report_status(holder("0.0"), MemberStatus(member="2.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "2.0")


def test_who_leaves_is_out_after_the_step() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.request_leave(holder("1.0"), 1.0, is_finished=False)
    table.report_status(holder("0.0"), holder("1.0", is_leaving=True))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0",)
    assert table.coordinator.directive_for("1.0").reason == "it has left"


def test_who_has_finished_disturbs_nobody_and_the_last_one_ends_the_job() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.request_leave(holder("1.0", committed=6), 1.0, is_finished=True)
    assert table.coordinator.directive_for("0.0").proposal is None
    table.coordinator.request_leave(holder("0.0", committed=6), 1.0, is_finished=True)
    assert table.coordinator.end_reason == "all workers are done"


def test_who_finishes_before_the_others_is_waited_for_no_longer() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.request_leave(holder("1.0"), 0.0, is_finished=True)
    table.pass_time(3.5, "0.0")
    table.report_status(holder("0.0", at_step_boundary=False))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0",)


@pytest.mark.parametrize("least", [1, 3])
def test_what_one_has_taken_over_counts_even_if_it_has_finished_however_few_are_left(least: int) -> None:
    table = Table(3, least=least)
    table.begin("0.0", "1.0", "2.0")
    table.coordinator.request_leave(holder("2.0", committed=6), 1.0, is_finished=True)
    table.coordinator.note_process_exit("1.0", 0.5)
    own = holder("0.0", is_prepared=True, at_step_boundary=False)
    table.report_status(own)
    assert table.coordinator.membership is not None
    assert resolve_reduction(own, table.coordinator.membership) == "commit"


def test_who_comes_when_the_others_are_through_hears_so() -> None:
    table = Table(1)
    table.begin("0.0")
    table.coordinator.join("1.0", 1.0)
    table.coordinator.request_leave(holder("0.0"), 1.0, is_finished=True)
    table.report_status(MemberStatus(member="1.0"))
    assert table.coordinator.end_reason == "all workers are done"


def test_whoever_is_started_again_was_not_through() -> None:
    table = Table(2, least=2)
    table.begin("0.0", "1.0")
    table.coordinator.request_leave(holder("1.0"), 1.0, is_finished=True)
    assert table.coordinator.has_finished
    table.coordinator.join("1.1", 1.0)
    assert not table.coordinator.has_finished
    assert table.coordinator.directive_for("0.0").proposal is not None, "it waits for a gradient that never comes"
    table.report_status(holder("0.0", at_step_boundary=False), MemberStatus(member="1.1"))
    table.report_status(holder("0.0"), MemberStatus(member="1.1"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "1.1")


def test_silence_counts_as_gone_but_the_silent_may_live_so_a_minority_waits() -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    table.pass_time(2.0, "2.0")
    table.report_status(holder("2.0"))
    assert table.coordinator.membership is not None
    assert len(table.coordinator.membership.members) == 3, "one of three does not go on alone"
    table.pass_time(21.0, "2.0")
    assert table.coordinator.end_reason == "most of the workers do not answer, and no other came within 20 s"


def test_whose_slot_has_another_process_is_silent_no_longer() -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    table.pass_time(2.0, "2.0")
    table.report_status(holder("2.0"))
    table.coordinator.join("0.1", table.now_s)
    table.report_status(holder("2.0"))
    assert table.coordinator.membership is not None
    assert len(table.coordinator.membership.members) == 3, "1.0 may live, and comes first"
    table.coordinator.join("1.1", table.now_s)
    assert table.coordinator.membership.members == ("2.0",), "both have ended, or there were no others of their slots"
    table.report_status(holder("2.0"), MemberStatus(member="0.1"), MemberStatus(member="1.1"))
    assert table.coordinator.membership.members == ("0.1", "1.1", "2.0")
    assert table.coordinator.membership.state_owners == ("2.0",)


def test_who_is_missed_after_its_slot_was_given_to_another_is_not_silent() -> None:
    presence = FailureDetector()
    presence.add_member("1.1", 0.0)
    presence.mark_gone("1.0", is_silent=True)
    presence.mark_gone("1.1", is_silent=True)
    presence.mark_gone("2.0", is_silent=True)
    assert presence.silent == {"1.1", "2.0"}
    presence.add_member("1.0", 1.0)
    presence.add_member("1.1", 1.0)
    assert presence.silent == {"1.1", "2.0"}, "no later one came"
    presence.add_member("1.2", 1.0)
    assert presence.silent == {"2.0"}
    assert presence.is_gone("1.1")


def test_whoever_cannot_be_reached_again_and_again_has_to_go() -> None:
    table = Table(3)
    membership = table.begin("0.0", "1.0", "2.0")
    for _ in range(3):
        table.coordinator.report_failure("0.0", membership.generation_id, ["2.0"], 1.0)
        table.report_status(*(holder(member, committed=0) for member in ("0.0", "1.0", "2.0")))
        assert table.coordinator.membership is not None
        membership = table.coordinator.membership
    assert membership.members == ("0.0", "1.0")
    assert table.coordinator.directive_for("2.0").reason == "the others cannot reach it"


def test_nobody_is_impatient_before_the_first_worker_has_come() -> None:
    table = Table(2)
    table.pass_time(100.0)
    table.coordinator.join("1.0", table.now_s)
    table.pass_time(19.0, "1.0")
    assert table.coordinator.end_reason == ""
    assert table.begin("0.0", "1.0").members == ("0.0", "1.0")


def test_an_order_to_a_thousand_members_fits_into_a_message() -> None:
    """A note of 700 characters each, and a layout of thousands of buckets."""
    table = Table(1000, most=1000)
    names = [f"{slot}.0" for slot in range(1000)]
    for name in names:
        table.coordinator.join(name, 0.0)
    for slot, name in enumerate(names):
        proposal = table.coordinator.directive_for(name).proposal
        assert proposal is not None
        status = holder(
            name,
            committed=6 - slot % 2,
            is_prepared=slot % 2 == 1,
            note="n" * 700,
            layout="l" * 50000,
        )
        table.coordinator.report_status(proposal.generation_id, status, 0.0)
    told = WatchUpdate(revision=1, is_active=True, directive=table.coordinator.directive_for("0.0"))
    assert len(told.model_dump_json()) < rpc.RpcLimits().max_body_bytes


@pytest.mark.parametrize(
    ("here", "silent", "expected"),
    [
        ("012", "", True),
        ("01", "2", True),
        ("2", "01", False),
        ("01", "23", True),
        ("23", "01", False),
        ("0", "", True),
    ],
)
def test_at_most_one_part_goes_on(here: str, silent: str, expected: bool) -> None:
    before = Membership(generation_id=(1, 1), statuses=tuple(holder(f"{slot}.0") for slot in sorted({*here, *silent})))
    found = membership_records.outnumbers_silent(
        before.members, [holder(f"{slot}.0") for slot in here], [f"{slot}.0" for slot in silent]
    )
    assert found is expected


def test_a_follower_obeys_nobody_who_knows_less_than_it_has_promised() -> None:
    follower = MemberRules("0.0")
    proposal = GenerationProposal(generation_id=(1, 2), is_urgent=True)
    assert follower.apply_directive(MemberDirective(generation_id=(1, 2), proposal=proposal)) == [
        PauseTraining(generation_id=(1, 2), is_urgent=True)
    ]
    assert follower.apply_directive(MemberDirective(generation_id=(1, 2), proposal=proposal)) == [], "once"
    membership = Membership(generation_id=(1, 2), statuses=(holder("0.0"),))
    old = Membership(generation_id=(1, 1), statuses=(holder("0.0"),))
    assert follower.apply_directive(MemberDirective(generation_id=(1, 1), membership=old)) == []
    assert follower.apply_directive(MemberDirective(generation_id=(1, 2), membership=membership)) == [
        BeginGeneration(membership=membership)
    ]
    follower.forget_coordinator()
    assert follower.apply_directive(MemberDirective(generation_id=(1, 9), is_evicted=True, reason="late")) == []
    assert follower.apply_directive(MemberDirective(generation_id=(2, 1), is_evicted=True, reason="gone")) == [
        StopTraining(reason="gone", is_end=False)
    ]
    assert follower.apply_directive(MemberDirective(generation_id=(9, 9), membership=membership)) == [], "out for good"


def test_a_newcomer_begins_what_it_stood_for_though_its_connection_broke_meanwhile() -> None:
    follower = MemberRules("0.0")
    follower.apply_directive(
        MemberDirective(generation_id=(1, 1), proposal=GenerationProposal(generation_id=(1, 1), is_urgent=True))
    )
    follower.forget_coordinator()
    membership = Membership(generation_id=(1, 1), statuses=(MemberStatus(member="0.0"), MemberStatus(member="1.0")))
    assert follower.apply_directive(MemberDirective(generation_id=(1, 1), membership=membership)) == [
        BeginGeneration(membership=membership)
    ]
    follower.forget_coordinator()
    again = Membership(generation_id=(1, 2), statuses=membership.statuses)
    assert follower.apply_directive(MemberDirective(generation_id=(2, 1), membership=again)) == [], (
        "who has been in one may have gone on since"
    )


def table_with_an_epoch_of_two(*, committed: int) -> Table:
    """Of three one was silent, and the two others have begun an epoch without it; where they stood then: at 5."""
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    table.pass_time(12.0, "1.0", "2.0")
    table.report_status(holder("1.0"), holder("2.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.0", "2.0")
    assert table.coordinator.membership.unconfirmed_predecessors == (("0.0", "1.0", "2.0"),)
    table.pass_time(12.0, "1.0")
    table.report_status(holder("1.0", committed=committed))
    return table


def test_until_an_epoch_is_known_to_be_met_the_rest_of_those_before_has_to_be_outnumbered_too() -> None:
    """The second of the two may never have heard of it, and have gone on with the one that was silent."""
    table = table_with_an_epoch_of_two(committed=5)
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.0", "2.0"), "one of three"
    for member in ("0.1", "2.1"):  # they take the places of those that nothing was heard of, which have ended
        table.coordinator.join(member, table.now_s)
    table.report_status(holder("1.0"), MemberStatus(member="0.1"), MemberStatus(member="2.1"))
    assert table.coordinator.membership.members == ("0.1", "1.0", "2.1")


def test_once_an_epoch_is_known_to_be_met_nobody_can_go_on_from_those_before() -> None:
    table = table_with_an_epoch_of_two(committed=6)
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.0",), "a step was done in it, for which both were there"
    assert table.coordinator.membership.unconfirmed_predecessors == (("1.0", "2.0"),)


def test_who_leaves_with_an_epoch_counts_on_neither_side() -> None:
    """Else where most of a job leave at once the last would wait for them."""
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    for each in ("0.0", "1.0"):
        table.coordinator.request_leave(holder(each), table.now_s, is_finished=False)
    table.report_status(holder("0.0", is_leaving=True), holder("1.0", is_leaving=True), holder("2.0"))
    assert table.coordinator.membership is not None
    assert (table.coordinator.membership.members, table.coordinator.membership.unconfirmed_predecessors) == (
        ("2.0",),
        (),
    )


def test_a_newcomer_that_goes_to_another_coordinator_obeys_it_though_its_term_is_an_earlier_one() -> None:
    """The first had to raise its term for a single member that came back, and was left by most before."""
    follower = MemberRules("2.1")
    follower.apply_directive(
        MemberDirective(generation_id=(3, 5), proposal=GenerationProposal(generation_id=(3, 5), is_urgent=False))
    )
    follower.forget_coordinator()
    proposal = GenerationProposal(generation_id=(2, 7), is_urgent=False)
    assert follower.apply_directive(MemberDirective(generation_id=(2, 7), proposal=proposal)) == [
        PauseTraining(generation_id=(2, 7), is_urgent=False)
    ]
    membership = Membership(generation_id=(3, 5), statuses=(holder("0.0"), MemberStatus(member="2.1")))
    assert follower.apply_directive(MemberDirective(generation_id=(3, 5), membership=membership)) == [], (
        "it stood for something else since"
    )


def test_a_result_that_one_has_taken_over_is_taken_over_by_all() -> None:
    ahead, behind = holder("0.0", committed=6), holder("1.0", is_prepared=True, at_step_boundary=False)
    membership = Membership(generation_id=(1, 2), statuses=(ahead, behind))
    assert resolve_reduction(behind, membership) == "commit"
    assert resolve_reduction(ahead, membership) == "nothing"


def test_a_result_that_all_who_are_left_have_counts_for_one_who_is_gone_may_have_taken_it_over() -> None:
    whole = [holder(f"{slot}.0", is_prepared=True, at_step_boundary=False) for slot in range(2)]
    follower = MemberStatus(member="2.0", is_recovering=True, committed=5, is_prepared=True)
    newcomer = MemberStatus(member="3.0")
    membership = Membership(generation_id=(1, 2), statuses=(*whole, follower, newcomer))
    assert membership.last_committed == 6
    assert [resolve_reduction(each, membership) for each in (*whole, follower, newcomer)] == [
        "commit",
        "commit",
        "commit",
        "nothing",
    ]
    for lacks in (replace(whole[1], is_prepared=False), replace(follower, is_prepared=False)):
        others = [lacks if each.member == lacks.member else each for each in membership.statuses]
        other = replace(membership, statuses=tuple(others))
        assert other.last_committed == 5, "nobody can have it"
        assert resolve_reduction(whole[0], other) == "repeat"


def test_2000_deaths_take_no_more_memory_than_100_and_the_dead_stay_evicted() -> None:
    table, sizes = Table(2), []
    table.begin("0.0", "1.0")
    for number in range(2000):
        table.coordinator.note_process_exit(f"1.{number}", table.now_s)
        table.report_status(holder("0.0"))
        table.coordinator.join(f"1.{number + 1}", table.now_s)
        table.report_status(holder("0.0"), MemberStatus(member=f"1.{number + 1}"))
        if number in (100, 1999):
            sizes.append(len(pickle.dumps(table.coordinator)))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "1.2000")
    assert sizes[1] < sizes[0] + 100 < 10_000
    for dead in ("1.0", "1.17", "1.1991", "1.1992", "1.1999"):
        assert table.coordinator.directive_for(dead).is_evicted, dead
        assert table.coordinator.knows_member(dead)
        table.coordinator.join(dead, table.now_s)
        assert dead not in table.coordinator.present
        earlier = Membership(generation_id=(1, 2), statuses=(holder("0.0"), holder(dead)))
        table.coordinator.rejoin(Rejoin(status=holder(dead), membership=earlier), table.now_s)
        assert table.coordinator.directive_for(dead).is_evicted
    assert table.coordinator.membership.members == ("0.0", "1.2000")
