"""Too few are left, or nobody who has the state: who saves it, who begins anew, and when a job ends."""

import pytest

from ringweave.membership.membership_records import MemberRules, MemberStatus, StopTraining
from tests.membership.rules.table import Table, holder


@pytest.mark.parametrize("is_kept_elsewhere", [False, True])
def test_when_nobody_is_left_who_has_the_state_others_begin_again_only_if_it_is_kept_elsewhere(
    is_kept_elsewhere: bool,
) -> None:
    table = Table(2, is_kept_elsewhere=is_kept_elsewhere)
    table.begin("0.0", "1.0")
    for member in ("0.0", "1.0"):
        table.coordinator.note_process_exit(member, 0.5)
    table.coordinator.join("1.1", 1.0)
    table.report_status(MemberStatus(member="1.1"))
    assert table.coordinator.membership is not None
    if is_kept_elsewhere:
        assert (table.coordinator.membership.members, table.coordinator.membership.state_owners) == (("1.1",), ())
    else:
        assert table.coordinator.end_reason.startswith("no worker is left that has the parameters")


def test_what_is_kept_elsewhere_waits_for_somebody_for_a_while_and_not_beside_members_that_may_live() -> None:
    table = Table(2, is_kept_elsewhere=True)
    table.begin("0.0", "1.0")
    table.pass_time(15.0)  # neither is heard of any more, and nobody has seen them end
    table.coordinator.join("2.0", table.now_s)
    table.report_status(MemberStatus(member="2.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "1.0")
    table.pass_time(35.0, "2.0")
    assert (table.coordinator.end_reason, table.coordinator.present) == ("", ("2.0",))
    table.pass_time(10.0, "2.0")
    assert (table.coordinator.end_reason, table.coordinator.present) == ("", ()), "others go on with the job"
    order = table.coordinator.directive_for("2.0")
    assert (order.is_evicted, order.is_end) == (True, False), "it may come anew"
    assert order.reason == "most of the workers do not answer, and no other came within 40 s"


def test_a_part_that_nobody_is_left_of_is_not_over_and_begins_again_whenever_somebody_comes() -> None:
    table = Table(2, is_kept_elsewhere=True)
    table.begin("0.0", "1.0")
    for member in ("0.0", "1.0"):
        table.coordinator.note_process_exit(member, 0.5)
    table.pass_time(300.0)
    assert table.coordinator.end_reason == ""
    table.coordinator.join("1.1", table.now_s)
    table.report_status(MemberStatus(member="1.1"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.1",)


def test_a_part_that_may_not_go_on_without_one_goes_on_whenever_that_one_is_back() -> None:
    table = Table(2, is_kept_elsewhere=True)
    table.begin("0.0", "1.0")
    table.pass_time(3.0, "0.0", "1.0")
    table.pass_time(1.5, "1.0")
    table.report_status(holder("1.0"))
    table.pass_time(30.0, "1.0")
    table.pass_time(0.1, "0.0", "1.0")
    table.report_status(holder("0.0"), holder("1.0"))
    table.pass_time(1.0, "0.0", "1.0")
    assert (table.coordinator.end_reason, sorted(table.coordinator.present)) == ("", ["0.0", "1.0"])
    assert table.coordinator.directive_for("1.0").proposal is None


def test_too_few_wait_for_others_and_then_end() -> None:
    table = Table(3, least=2)
    table.begin("0.0", "1.0", "2.0")
    table.coordinator.note_process_exit("1.0", 0.0)
    table.coordinator.note_process_exit("2.0", 0.0)
    table.report_status(holder("0.0"))
    table.pass_time(21.0, "0.0")
    assert table.coordinator.end_reason == "workers left: 1, expected at least 2, and no other came within 20 s"
    assert table.coordinator.directive_for("0.0").final_checkpoint_owner == "0.0"
    assert MemberRules("0.0").apply_directive(table.coordinator.directive_for("0.0")) == [
        StopTraining(reason=table.coordinator.end_reason, is_end=True, final_checkpoint_owner="0.0")
    ]


def test_others_are_waited_for_from_when_they_are_missed_whatever_was_waited_for_before() -> None:
    table = Table(3, least=3)
    membership = table.begin("0.0", "1.0", "2.0")
    table.coordinator.report_failure("0.0", membership.generation_id, [], table.now_s)
    table.report_status(holder("0.0"), holder("1.0"))
    table.pass_time(15.0, "0.0", "1.0", "2.0")
    table.coordinator.note_process_exit("2.0", table.now_s)
    table.pass_time(19.0, "0.0", "1.0")
    assert table.coordinator.end_reason == "", "for 15 s all three were there"
    table.pass_time(2.0, "0.0", "1.0")
    assert table.coordinator.end_reason == "workers left: 2, expected at least 3, and no other came within 20 s"


def test_what_a_coordinator_was_stopped_for_is_no_part_of_the_time_that_it_waits_for_others() -> None:
    """Whoever came meanwhile could not be heard, and has a moment to be."""
    table = too_few()
    table.pass_time(15.0, "0.0", "1.0")
    table.now_s += 25.0
    table.pass_time(4.0, "0.0", "1.0")
    assert table.coordinator.end_reason == ""
    table.pass_time(2.0, "0.0", "1.0")
    assert table.coordinator.end_reason == "workers left: 2, expected at least 3, and no other came within 20 s"


def test_of_those_who_are_too_few_the_one_that_is_furthest_saves_the_state() -> None:
    table = Table(4, least=3)
    table.begin("0.0", "1.0", "2.0", "3.0")
    table.coordinator.note_process_exit("2.0", 0.0)
    table.coordinator.note_process_exit("3.0", 0.0)
    table.report_status(holder("0.0", is_prepared=True, at_step_boundary=False), holder("1.0", committed=6))
    assert table.coordinator.directive_for("0.0").final_checkpoint_owner == "", "as long as others may come"
    table.pass_time(21.0, "0.0", "1.0")
    assert [table.coordinator.directive_for(member).final_checkpoint_owner for member in ("0.0", "1.0", "2.1")] == [
        "1.0"
    ] * 3


def test_the_last_that_leaves_saves_the_state() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    for member in ("0.0", "1.0"):
        table.coordinator.request_leave(holder(member, is_leaving=True), 0.0, is_finished=False)
    table.report_status(holder("0.0", is_leaving=True), holder("1.0", is_leaving=True))
    assert (table.coordinator.end_reason, table.coordinator.directive_for("1.0").final_checkpoint_owner) == (
        "all workers have left",
        "0.0",
    )


def too_few() -> Table:
    """Two of three are left, which wait for a third."""
    table = Table(3, least=3)
    table.begin("0.0", "1.0", "2.0")
    table.coordinator.note_process_exit("2.0", 0.0)
    table.report_status(holder("0.0", is_prepared=True, at_step_boundary=False), holder("1.0", committed=6))
    return table


def test_all_may_leave_while_they_wait_for_others_and_one_of_them_saves_the_state() -> None:
    table = too_few()
    table.coordinator.request_leave(holder("1.0", committed=6, is_leaving=True), 1.0, is_finished=False)
    assert table.coordinator.end_reason == "", "one stays"
    table.coordinator.request_leave(holder("0.0", is_leaving=True), 1.0, is_finished=False)
    assert (table.coordinator.end_reason, table.coordinator.directive_for("0.0").final_checkpoint_owner) == (
        "all workers have left",
        "1.0",
    )


def left_by_one() -> Table:
    """One of three left at a border, and there ought to be three."""
    table = Table(3, least=3)
    table.begin("0.0", "1.0", "2.0")
    table.coordinator.request_leave(holder("2.0", is_leaving=True), 0.0, is_finished=False)
    table.report_status(holder("0.0"), holder("1.0"), holder("2.0", is_leaving=True))
    assert table.coordinator.directive_for("2.0").reason == "it has left"
    proposal = table.coordinator.directive_for("0.0").proposal
    assert proposal is not None
    assert proposal.is_urgent, "no step is done by two"
    table.report_status(holder("0.0"), holder("1.0"))
    return table


def test_when_one_leaves_and_the_others_are_too_few_they_wait_and_then_one_saves_the_state() -> None:
    table = left_by_one()
    table.pass_time(21.0, "0.0", "1.0")
    assert table.coordinator.end_reason == "workers left: 2, expected at least 3, and no other came within 20 s"
    assert table.coordinator.directive_for("0.0").final_checkpoint_owner == "0.0"


def test_when_one_leaves_and_another_comes_in_time_they_go_on() -> None:
    table = left_by_one()
    table.pass_time(15.0, "0.0", "1.0")
    table.coordinator.join("3.0", table.now_s)
    table.report_status(MemberStatus(member="3.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "1.0", "3.0")
    table.pass_time(21.0, "0.0", "1.0", "3.0")
    assert table.coordinator.end_reason == ""
    assert table.coordinator.directive_for("0.0").proposal is None


def test_one_that_leaves_while_others_are_waited_for_is_out_once_they_have_come() -> None:
    table = too_few()
    table.coordinator.request_leave(holder("1.0", committed=6, is_leaving=True), 1.0, is_finished=False)
    for member in ("2.1", "3.0"):
        table.coordinator.join(member, 1.0)
    table.report_status(MemberStatus(member="2.1"), MemberStatus(member="3.0"))
    assert table.coordinator.directive_for("1.0").reason == "it has left", (
        "at the next epoch, without being asked again"
    )
    table.report_status(holder("0.0", committed=6))
    table.report_status(MemberStatus(member="2.1"), MemberStatus(member="3.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "2.1", "3.0")


def test_the_last_that_has_the_state_goes_when_another_one_has_it() -> None:
    table = Table(1)
    table.begin("0.0")
    table.coordinator.join("1.0", 0.0)
    table.coordinator.request_leave(holder("0.0", is_leaving=True), 0.0, is_finished=False)
    table.report_status(holder("0.0", is_leaving=True), MemberStatus(member="1.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "1.0"), "the newcomer reads it first"
    assert not table.coordinator.directive_for("0.0").is_evicted
    table.report_status(holder("0.0", committed=9, is_leaving=True), holder("1.0", committed=9))
    assert table.coordinator.directive_for("0.0").reason == "it has left"
    assert table.coordinator.membership.state_owners == ("1.0",)


def test_where_the_state_is_kept_elsewhere_nobody_has_to_stay_for_it() -> None:
    table = Table(1, is_kept_elsewhere=True)
    table.begin("0.0")
    table.coordinator.join("1.0", 0.0)
    table.coordinator.request_leave(holder("0.0", is_leaving=True), 0.0, is_finished=False)
    table.report_status(holder("0.0", is_leaving=True), MemberStatus(member="1.0"))
    assert table.coordinator.directive_for("0.0").reason == "it has left"


def test_without_the_state_there_is_nothing_to_go_on_with() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.note_process_exit("0.0", 0.5)
    table.report_status(holder("1.0"))
    table.coordinator.note_process_exit("1.0", 0.6)
    table.coordinator.join("0.1", 2.0)
    table.report_status(MemberStatus(member="0.1"))
    assert table.coordinator.end_reason == "no worker is left that has the parameters: go on from the last checkpoint"


def test_when_all_of_the_first_epoch_die_nobody_begins_anew_unasked() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    for member in ("0.0", "1.0"):
        table.coordinator.note_process_exit(member, 0.5)
    for member in ("0.1", "1.1"):
        table.coordinator.join(member, 2.0)
    table.report_status(MemberStatus(member="0.1"), MemberStatus(member="1.1"))
    assert table.coordinator.end_reason == "no worker is left that has the parameters: go on from the last checkpoint"


def test_who_is_left_of_an_epoch_that_never_stood_begins_anew() -> None:
    """Without all members no step was done."""
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.note_process_exit("0.0", 0.5)
    table.report_status(MemberStatus(member="1.0"))
    assert table.coordinator.membership is not None
    assert (table.coordinator.end_reason, table.coordinator.membership.members) == ("", ("1.0",))


def test_the_last_one_that_has_the_state_is_waited_for_longer_than_others() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.pass_time(3.0, "0.0", "1.0")
    table.coordinator.note_process_exit("1.0", table.now_s)
    table.report_status(holder("0.0"))
    table.coordinator.join("1.1", table.now_s)
    table.pass_time(15.0, "1.1")
    assert table.coordinator.present == ("0.0", "1.1")
    table.pass_time(10.0, "1.1")
    assert table.coordinator.present == ("1.1",), "but not for ever"


def test_when_some_are_through_and_the_others_have_died_all_is_done_though_the_state_is_kept_elsewhere() -> None:
    table = Table(2, is_kept_elsewhere=True)
    table.begin("0.0", "1.0")
    table.coordinator.request_leave(holder("1.0"), 0.5, is_finished=True)
    table.coordinator.note_process_exit("0.0", 0.6)
    assert table.coordinator.end_reason == "all workers are done", "nobody was asked to leave"


def missed() -> Table:
    """One of two that have the state is not heard of, the other one may not go on without it, and dies."""
    table = Table(2)
    first = table.begin("0.0", "1.0")
    table.coordinator.report_failure("0.0", first.generation_id, [], table.now_s)
    table.report_status(holder("0.0"), holder("1.0"))
    table.pass_time(3.0, "0.0", "1.0")
    table.pass_time(1.5, "1.0")
    table.report_status(holder("1.0"))
    table.coordinator.note_process_exit("1.0", table.now_s)
    table.coordinator.join("1.1", table.now_s)
    table.pass_time(5.0, "1.1")
    assert (table.coordinator.end_reason, table.coordinator.present) == ("", ("1.1",)), "the first may only be stopped"
    return table


def test_who_was_not_heard_of_and_has_the_state_is_waited_for_when_nobody_else_has_it_any_more() -> None:
    table = missed()
    table.pass_time(0.1, "0.0", "1.1")
    table.report_status(MemberStatus(member="1.1"), holder("0.0"))
    table.pass_time(1.0, "0.0", "1.1")
    assert (table.coordinator.end_reason, sorted(table.coordinator.present)) == ("", ["0.0", "1.1"])
    assert table.coordinator.membership is not None
    assert (table.coordinator.membership.members, table.coordinator.membership.state_owners) == (
        ("0.0", "1.1"),
        ("0.0",),
    )


def test_who_was_not_heard_of_and_has_the_state_is_not_waited_for_for_ever_nor_once_its_slot_is_given_anew() -> None:
    table = missed()
    table.pass_time(10.0, "1.1")
    assert table.coordinator.end_reason == ""
    table.pass_time(10.0, "1.1")
    table.report_status(MemberStatus(member="1.1"))
    assert table.coordinator.end_reason == "no worker is left that has the parameters: go on from the last checkpoint"
    table = missed()
    table.coordinator.join("0.1", table.now_s)
    table.report_status(MemberStatus(member="0.1"), MemberStatus(member="1.1"))
    assert table.coordinator.end_reason == "no worker is left that has the parameters: go on from the last checkpoint"


def test_a_coordinator_that_was_stopped_itself_waits_as_long_for_who_has_the_state() -> None:
    table = missed()
    table.now_s += 30.0
    table.pass_time(10.0, "1.1")
    assert table.coordinator.end_reason == ""
