"""Members that go from one coordinator to the other."""

from dataclasses import replace

import pytest

from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import MemberDirective, Membership, MemberStatus
from tests.membership.rules.table import Table, holder

# Longer than a file should be: every way to lose a coordinator is here, none of them long.


def test_whoever_goes_to_another_coordinator_is_not_taken_for_dead() -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    for member in ("0.0", "1.0"):
        table.coordinator.note_disconnect(member)
    assert table.coordinator.present == ("0.0", "1.0", "2.0"), "they may come back"
    table.pass_time(3.0, "2.0")
    table.report_status(holder("2.0"))
    assert table.coordinator.present == ("2.0",)
    assert table.coordinator.membership is not None
    assert len(table.coordinator.membership.members) == 3, "one of three does not go on alone"


def test_whoever_hangs_up_while_the_coordinator_stands_still_is_not_taken_for_dead() -> None:
    """It may have gone elsewhere, and not been able to say so."""
    for order in ("told first", "woken first"):
        table = Table(3)
        table.begin("0.0", "1.0", "2.0")
        table.pass_time(3.0, "0.0", "1.0", "2.0")
        table.now_s += 5.0
        if order == "woken first":
            table.coordinator.tick(table.now_s)
        for member in ("0.0", "1.0"):
            table.coordinator.note_process_exit(member, table.now_s)
        table.pass_time(12.0, "2.0")
        table.report_status(holder("2.0"))
        assert table.coordinator.present == ("2.0",)
        assert table.coordinator.membership is not None
        assert len(table.coordinator.membership.members) == 3, order


@pytest.mark.parametrize(("silent_s", "is_dead"), [(0.5, True), (0.7, False)])
def test_whoever_hangs_up_after_a_silence_may_have_gone_elsewhere_without_a_goodbye(
    silent_s: float, is_dead: bool
) -> None:
    """Both were cut off for so long that it may have given this coordinator up: its goodbye never came."""
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    table.pass_time(silent_s, "2.0")
    for member in ("0.0", "1.0"):
        table.coordinator.note_process_exit(member, table.now_s)
    assert ("0.0" not in table.coordinator.present) == is_dead
    table.pass_time(3.0, "2.0")
    table.report_status(holder("2.0"))
    assert table.coordinator.membership is not None
    assert (table.coordinator.membership.members == ("2.0",)) == is_dead, "else one of three would go on alone"


@pytest.mark.parametrize("is_reported_first", [False, True])
@pytest.mark.parametrize("beats_again", [False, True])
def test_a_member_that_hangs_up_after_a_silence_is_gone_at_once_if_the_generation_is_broken(
    is_reported_first: bool, beats_again: bool
) -> None:
    table = Table(3)
    membership = table.begin("0.0", "1.0", "2.0")
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    table.pass_time(0.7, "1.0", "2.0")
    if is_reported_first:
        table.coordinator.report_failure("1.0", membership.generation_id, [], table.now_s)
    table.coordinator.note_process_exit("0.0", table.now_s)
    if beats_again:
        table.coordinator.record_heartbeat("0.0", Heartbeat(), table.now_s)
    if not is_reported_first:
        table.coordinator.report_failure("1.0", membership.generation_id, [], table.now_s)
    if beats_again:
        assert "0.0" in table.coordinator.present
        return
    assert table.coordinator.present == ("1.0", "2.0")
    table.report_status(holder("1.0"), holder("2.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.0", "2.0")


def taken_over(
    *, lost_s: float = 0.0, no_progress_s: float = 0.0, is_settled: bool = True, patience_s: float = 0.8
) -> tuple[Table, Membership]:
    """A standby that two of three members have asked to take over, with the epoch that they are in."""
    membership = Table(3).begin("0.0", "1.0", "2.0")
    placed = (replace(each, address=f"10.0.0.{rank} 4711") for rank, each in enumerate(membership.statuses, 1))
    membership = replace(membership, statuses=tuple(placed))
    table = Table(3, index=1, is_standby=True)
    table.pass_time(10.0)
    for member in ("1.0", "2.0"):
        table.coordinator.rejoin(
            Rejoin(
                status=holder(member),
                membership=membership,
                promised=membership.generation_id,
                lost_s=lost_s,
                is_settled=is_settled,
                patience_s=patience_s,
                heartbeat=Heartbeat(is_waiting=no_progress_s > 0, no_progress_s=no_progress_s),
            ),
            table.now_s,
        )
    assert table.coordinator.term == 2
    return table, membership


def test_who_was_lost_with_the_coordinator_is_waited_for_from_then_on_if_training_stands_still() -> None:
    table, membership = taken_over(lost_s=1.05, no_progress_s=0.7)
    table.pass_time(0.1)
    proposal = table.coordinator.directive_for("1.0").proposal
    assert proposal is not None
    assert proposal.is_urgent
    table.report_status(holder("1.0"), holder("2.0"))
    assert table.coordinator.membership == membership, "the third may just be coming"
    table.pass_time(0.1)
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.0", "2.0")
    assert table.coordinator.directive_for("0.0").reason == "the others went on without it"


def test_who_hangs_when_it_asks_is_put_out_by_whoever_decides_then_and_hears_so() -> None:
    """A standby that has not taken over yet could not tell it so that it obeyed."""
    membership = Table(5).begin(*(f"{slot}.0" for slot in range(5)))
    table = Table(5, index=1, is_standby=True)
    table.pass_time(10.0)
    for slot in range(5):
        beat = Heartbeat(overdue_s=2.0) if slot == 0 else Heartbeat(is_waiting=True)
        rejoining = Rejoin(
            status=holder(f"{slot}.0"), membership=membership, promised=membership.generation_id, heartbeat=beat
        )
        table.coordinator.rejoin(rejoining, table.now_s)
        table.now_s += 0.05
        table.coordinator.tick(table.now_s)
    order = table.coordinator.directive_for("0.0")
    assert order.reason == "it made no progress while others waited for it"
    assert order.generation_id > (2, 0), "greater than what it has promised to the one before"


def test_where_members_have_learnt_to_be_patient_who_is_missing_has_more_time() -> None:
    """The machine is busy: whoever is missing may not even know yet that the coordinator is lost."""
    table, membership = taken_over(lost_s=1.35, no_progress_s=0.7, patience_s=1.6)
    table.pass_time(0.1)
    table.report_status(holder("1.0"), holder("2.0"))
    table.pass_time(0.9)
    assert table.coordinator.membership == membership
    table.pass_time(0.2)
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.0", "2.0")


def test_who_cannot_be_reached_is_given_up_as_soon_as_any_silent_member_however_busy_the_machine_is() -> None:
    for is_unreachable in (False, True):
        table, membership = taken_over(lost_s=0.7, no_progress_s=0.7, patience_s=1.6, is_settled=False)
        assert table.coordinator.take_probe_targets() == {"0.0": "10.0.0.1 4711"}
        assert table.coordinator.take_probe_targets() == {}, "once"
        if is_unreachable:
            table.coordinator.note_unreachable("0.0", table.now_s, has_ended=False)
        table.report_status(holder("1.0"), holder("2.0"))
        assert table.coordinator.membership == membership
        table.pass_time(0.3)
        assert table.coordinator.membership is not None
        assert (table.coordinator.membership.members == ("1.0", "2.0")) == is_unreachable


def test_whose_process_has_ended_is_given_up_at_once_however_busy_the_machine_is() -> None:
    table, membership = taken_over(lost_s=0.1, no_progress_s=0.05, patience_s=1.6, is_settled=False)
    table.report_status(holder("1.0"), holder("2.0"))
    assert table.coordinator.membership == membership
    table.coordinator.note_unreachable("0.0", table.now_s, has_ended=True)
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.0", "2.0")


@pytest.mark.parametrize("has_ended", [False, True])
def test_who_could_not_be_reached_and_asks_is_there(*, has_ended: bool) -> None:
    table, membership = taken_over(lost_s=0.5, no_progress_s=0.7, is_settled=False)
    table.coordinator.note_unreachable("0.0", table.now_s, has_ended=has_ended)
    rejoining = Rejoin(status=holder("0.0"), membership=membership, promised=membership.generation_id)
    table.coordinator.rejoin(rejoining, table.now_s)
    table.pass_time(1.0, "0.0", "1.0", "2.0")
    table.report_status(holder("0.0"), holder("1.0"), holder("2.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "1.0", "2.0")


def test_who_knows_that_the_epoch_is_broken_has_all_stand_still_at_once() -> None:
    table, membership = taken_over(lost_s=1.0, is_settled=False)
    assert table.coordinator.directive_for("1.0").proposal is not None
    table.report_status(holder("1.0"), holder("2.0"))
    assert table.coordinator.membership == membership, "the third may be coming"
    table.pass_time(0.3)
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("1.0", "2.0"), "nobody was asked again"


def test_where_training_goes_on_who_is_missing_must_be_there_and_has_more_time() -> None:
    table, membership = taken_over(lost_s=1.05)
    table.pass_time(1.4, "1.0", "2.0")
    assert table.coordinator.directive_for("1.0").proposal is None
    rejoining = Rejoin(status=holder("0.0"), membership=membership, promised=membership.generation_id, lost_s=2.4)
    table.coordinator.rejoin(rejoining, table.now_s)
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    assert table.coordinator.directive_for("0.0") == MemberDirective(
        generation_id=membership.generation_id, membership=membership
    ), "nothing has happened"


def test_who_comes_far_apart_is_waited_for_longer_though_training_stands_still_unless_nobody_can_come() -> None:
    membership = Table(4).begin("0.0", "1.0", "2.0", "3.0")
    beat = Heartbeat(is_waiting=True, no_progress_s=1.0)
    for is_unreachable in (False, True):
        table = Table(4, index=1, is_standby=True)
        for member in ("1.0", "2.0", "3.0"):
            table.pass_time(0.5)
            rejoining = Rejoin(
                status=holder(member),
                membership=membership,
                promised=membership.generation_id,
                lost_s=1.0,
                heartbeat=beat,
            )
            table.coordinator.rejoin(rejoining, table.now_s)
        if is_unreachable:
            table.coordinator.note_unreachable("0.0", table.now_s, has_ended=False)
        table.report_status(holder("1.0"), holder("2.0"), holder("3.0"))
        table.pass_time(0.9)
        assert (table.coordinator.membership == membership) == (not is_unreachable)
        table.pass_time(0.2)
        assert table.coordinator.membership is not None
        assert table.coordinator.membership.members == ("1.0", "2.0", "3.0")


@pytest.mark.parametrize("is_finished", [False, True])
def test_who_comes_and_ends_while_another_one_is_waited_for_is_not_taken_for_missing(is_finished: bool) -> None:
    membership = Table(5).begin("0.0", "1.0", "2.0", "3.0", "4.0")
    table = Table(5, index=1, is_standby=True)
    for member in ("1.0", "2.0", "3.0", "4.0"):
        rejoining = Rejoin(
            status=holder(member), membership=membership, promised=membership.generation_id, is_settled=False
        )
        table.coordinator.rejoin(rejoining, table.now_s)
    if is_finished:
        table.coordinator.request_leave(holder("4.0", committed=6), table.now_s, is_finished=True)
    else:
        table.coordinator.note_process_exit("4.0", table.now_s)
    table.pass_time(3.0, "1.0", "2.0", "3.0")
    assert table.coordinator.eviction_reason("0.0") == "the others went on without it"
    order = table.coordinator.directive_for("4.0")
    assert (order.is_evicted, order.reason) == (
        (False, "") if is_finished else (True, "its connection to the coordinator broke")
    )


def test_a_coordinator_that_hears_of_a_greater_term_is_a_standby_from_then_on() -> None:
    table = Table(3)
    membership = table.begin("0.0", "1.0", "2.0")
    table.coordinator.note_other_active(1, membership.generation_id)
    assert table.coordinator.is_active
    table.coordinator.note_other_active(2, membership.generation_id)
    assert (table.coordinator.is_active, table.coordinator.membership, table.coordinator.present) == (False, None, ())
    assert table.coordinator.directive_for("0.0") == MemberDirective(), "it has nothing to say to anybody"
    for member in ("0.0", "1.0"):
        table.coordinator.rejoin(Rejoin(status=holder(member), membership=membership, promised=(1, 9)), 1.0)
    assert table.coordinator.term == 3, "no term twice"
    assert [table.coordinator.knows_member(member) for member in ("0.0", "1.0", "2.0")] == [True, True, False]


def test_a_member_of_a_later_epoch_tells_a_coordinator_that_its_time_is_over() -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    later = Membership(generation_id=(2, 1), statuses=(holder("0.0"), holder("2.0")))
    table.coordinator.rejoin(Rejoin(status=holder("2.0"), membership=later, promised=(2, 1)), 1.0)
    assert not table.coordinator.is_active
    table.coordinator.rejoin(Rejoin(status=holder("0.0"), membership=later, promised=(2, 1)), 1.0)
    assert (table.coordinator.term, table.coordinator.membership) == (3, later)


def test_a_member_of_a_later_epoch_tells_a_coordinator_of_a_greater_term_that_its_time_is_over() -> None:
    """Two asked it, which made its term greater; one went back to the other before it heard of that."""
    table, membership = taken_over()
    later = Membership(generation_id=(1, 3), statuses=(holder("0.0"), holder("1.0")))
    assert (table.coordinator.term, table.coordinator.membership) == (2, membership)
    table.pass_time(2.0, "2.0")
    for member in ("1.0", "0.0"):
        status = holder(member, committed=9)
        rejoining = Rejoin(status=status, membership=later, promised=later.generation_id)
        table.coordinator.rejoin(rejoining, table.now_s)
        table.report_status(status, holder("2.0"))
        assert table.coordinator.is_active == (member == "0.0"), "it knows nothing of what those two have done"
    assert table.coordinator.membership == later


def test_of_two_coordinators_the_one_stays_that_knows_of_the_later_epoch_whatever_its_term() -> None:
    table, membership = taken_over()
    table.coordinator.note_other_active(99, (1, 0))
    assert table.coordinator.is_active, "the other one is behind"
    table.coordinator.note_other_active(1, (membership.generation_id[0], membership.generation_id[1] + 1))
    assert not table.coordinator.is_active


def test_most_members_that_come_back_after_they_have_asked_another_one_make_the_term_count() -> None:
    """The other one's answers were lost: it decides in its term, without members, and would depose this one."""
    table = Table(3)
    membership = table.begin("0.0", "1.0", "2.0")
    for member, term in (("0.0", 1), ("1.0", 3)):
        assert table.coordinator.term == term - 2 * (term > 1)
        rejoining = Rejoin(status=holder(member), membership=membership, promised=(2, 4))
        table.coordinator.rejoin(rejoining, table.now_s)
    assert (table.coordinator.term, table.coordinator.membership) == (3, membership)
    table.coordinator.note_other_active(2, membership.generation_id)
    assert table.coordinator.is_active


def asked_by_half(*announced: str) -> Table:
    """A coordinator that was started anew beside these, and is asked by two of four members; it decides nothing yet."""
    membership = Table(4).begin("0.0", "1.0", "2.0", "3.0")
    table = Table(4, is_standby=True)
    for member in announced:
        table.coordinator.announce_start(member, table.now_s)
    for member in ("2.0", "3.0"):
        rejoining = Rejoin(status=holder(member), membership=membership, promised=membership.generation_id)
        table.coordinator.rejoin(rejoining, table.now_s)
    return table


def test_half_of_the_members_go_on_with_one_that_starts_in_the_place_of_the_other_half() -> None:
    table = asked_by_half("0.1", "1.1")
    assert not table.coordinator.is_active, "the other one may decide"
    table.coordinator.note_other_idle(1.0)
    assert table.coordinator.is_active
    table.report_status(holder("2.0"), holder("3.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("2.0", "3.0"), "at once: the others are known to have ended"


def test_it_waits_for_a_majority_where_one_process_is_not_accounted_for() -> None:
    for announced in ((), ("0.1",), ("0.0", "1.0")):
        table = asked_by_half(*announced)
        table.coordinator.note_other_idle(1.0)
        assert not table.coordinator.is_active, announced
    membership = Table(4).begin("0.0", "1.0", "2.0", "3.0")
    table = Table(6, is_standby=True)
    for member in ("0.1", "1.1"):
        table.coordinator.announce_start(member, 0.0)
    for member in ("2.0", "3.0"):
        table.coordinator.rejoin(
            Rejoin(status=holder(member), membership=membership, promised=membership.generation_id), 0.0
        )
    table.coordinator.note_other_idle(1.0)
    assert not table.coordinator.is_active, "somebody of the two other slots may have joined after that epoch"


def test_what_was_announced_counts_no_longer_once_another_one_may_have_decided() -> None:
    table = asked_by_half("0.1", "1.1")
    table.coordinator.note_other_active(2, (2, 1))
    table.coordinator.note_other_idle(1.0)
    assert not table.coordinator.is_active, "they may be members by now"
    table = asked_by_half("0.1", "1.1")
    table.coordinator.note_other_idle(20.0)
    assert not table.coordinator.is_active, "nothing was heard of the other one for 20 s"


def test_half_of_the_members_go_on_where_newcomers_in_the_place_of_the_others_ask_for_a_coordinator_too() -> None:
    table = asked_by_half()
    for member in ("0.1", "1.1"):
        table.coordinator.join(member, 0.5)
    table.coordinator.note_other_idle(1.0)
    assert table.coordinator.is_active
    table.report_status(holder("2.0"), holder("3.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("2.0", "3.0"), "at once: the others are known to have ended"
    table = asked_by_half()
    for member in ("0.1", "1.1"):
        table.coordinator.join(member, 0.5)
    table.coordinator.note_other_idle(3.0)
    assert not table.coordinator.is_active, "they have not asked again: they may be members by now"


def ask(table: Table, seconds: int, *newcomers: str) -> None:
    """These ask for a coordinator again and again; the other one decides nothing."""
    for _ in range(seconds):
        table.now_s += 1.0
        for member in newcomers:
            table.coordinator.join(member, table.now_s)
        table.coordinator.note_other_idle(table.now_s)


def test_where_all_ask_and_none_was_ever_a_member_a_job_that_has_begun_is_over() -> None:
    table = Table(3, index=1, is_standby=True)
    ask(table, 20, "0.1", "1.0")
    assert (table.coordinator.is_active, table.coordinator.end_reason) == (False, ""), "the third may have the state"
    ask(table, 12, "0.1", "1.0", "2.1")
    assert table.coordinator.end_reason == "", "another one may be on its way that has it"
    ask(table, 1, "0.1", "1.0", "2.1")
    assert table.coordinator.end_reason == "no worker is left that has the parameters: go on from the last checkpoint"
    assert table.coordinator.directive_for("1.0").is_end


def test_while_a_member_looks_for_a_coordinator_no_job_is_over() -> None:
    membership = Table(4).begin("0.0", "1.0", "2.0", "3.0")
    table = Table(3, index=1, is_standby=True)
    for _ in range(5):
        ask(table, 4, "0.1", "1.1", "2.1")
        table.coordinator.rejoin(
            Rejoin(status=holder("3.0"), membership=membership, promised=membership.generation_id), table.now_s
        )
        ask(table, 4, "0.1", "1.1", "2.1")
        table.coordinator.note_disconnect("3.0")
    assert (table.coordinator.is_active, table.coordinator.end_reason) == (True, ""), (
        "all others are known to have ended"
    )


@pytest.mark.parametrize("index", [0, 1])
def test_a_job_whose_coordinator_is_lost_before_its_first_epoch_begins_all_the_same(index: int) -> None:
    table = Table(3, index=index, is_standby=True)
    ask(table, 13, "0.0", "1.0", "2.0")
    assert table.coordinator.is_active == (index == 0), "no two begin"
    if index == 0:
        assert table.begin("0.0", "1.0", "2.0").members == ("0.0", "1.0", "2.0")


@pytest.mark.parametrize("index", [0, 1])
def test_a_ring_of_which_nobody_is_left_begins_again_also_where_its_coordinator_is_lost_too(index: int) -> None:
    table = Table(2, index=index, is_standby=True, is_kept_elsewhere=True)
    ask(table, 12, "0.1", "1.1")
    assert not table.coordinator.is_active, "a member may be on its way"
    ask(table, 1, "0.1", "1.1")
    assert (table.coordinator.is_active, table.coordinator.end_reason) == (index == 0, ""), "no two begin"
    if index == 0:
        assert table.begin("0.1", "1.1").state_owners == ()


def test_a_member_that_has_not_heard_of_its_epoch_and_asks_to_be_let_in_is_accounted_for() -> None:
    membership = Membership(generation_id=(1, 2), statuses=(MemberStatus(member="0.1"), holder("1.0")))
    for is_asking in (False, True):
        table = Table(2, index=1, is_standby=True)
        table.coordinator.rejoin(
            Rejoin(status=holder("1.0"), membership=membership, promised=membership.generation_id), 0.0
        )
        if is_asking:
            table.coordinator.join("0.1", 0.5)
        table.coordinator.note_other_idle(1.0)
        assert table.coordinator.is_active == is_asking, "alone it may have gone on elsewhere"
    table.now_s = 1.0
    table.coordinator.join("0.1", table.now_s)
    assert table.coordinator.directive_for("0.1").membership == membership, "it is a member, and hears so"
    table.pass_time(2.0, "0.1", "1.0")
    assert (sorted(table.coordinator.present), table.coordinator.membership) == (["0.1", "1.0"], membership)


def cut_in_two() -> tuple[Table, Table, Membership]:
    """A member came back to the first coordinator; then both were cut off from the standby and the other members, who
    went on with it. Also the epoch that those are in."""
    first = Table(3)
    before = first.begin("0.0", "1.0", "2.0")
    first.coordinator.note_disconnect("2.0")
    first.coordinator.rejoin(
        Rejoin(status=holder("2.0"), membership=before, promised=before.generation_id), first.now_s
    )
    first.pass_time(12.0, "2.0")
    other = Table(3, index=1, is_standby=True)
    for member in ("0.0", "1.0"):
        rejoining = Rejoin(status=holder(member), membership=before, promised=before.generation_id)
        other.coordinator.rejoin(rejoining, other.now_s)
    other.pass_time(3.0, "0.0", "1.0")
    other.report_status(holder("0.0"), holder("1.0"))
    membership = other.coordinator.membership
    assert membership is not None
    assert (membership.generation_id[0], membership.members) == (2, ("0.0", "1.0"))
    return first, other, membership


def test_of_two_coordinators_the_one_stays_that_most_members_went_to_whoever_came_back_to_the_other() -> None:
    first, other, membership = cut_in_two()
    terms, before = (first.coordinator.term, other.coordinator.term), first.coordinator.membership
    assert before is not None
    first.coordinator.note_other_active(terms[1], membership.generation_id)
    other.coordinator.note_other_active(terms[0], before.generation_id)
    assert (first.coordinator.is_active, other.coordinator.is_active) == (False, True)
    assert other.coordinator.membership == membership, "nothing is lost that its members have done"
    rejoining = Rejoin(status=holder("2.0"), membership=Table(3).begin("0.0", "1.0", "2.0"), promised=(3, 0))
    other.coordinator.rejoin(rejoining, other.now_s)
    order = other.coordinator.directive_for("2.0")
    assert (order.is_evicted, order.generation_id > (3, 0)) == (True, True), "who was cut off obeys it"


def test_a_coordinator_that_was_left_hears_so_from_whoever_comes_from_the_other() -> None:
    first, _, membership = cut_in_two()
    rejoining = Rejoin(status=holder("1.0", committed=400), membership=membership, promised=membership.generation_id)
    first.coordinator.rejoin(rejoining, first.now_s)
    assert not first.coordinator.is_active
    assert not first.coordinator.directive_for("1.0").is_evicted


def test_an_epoch_that_is_begun_for_all_has_its_term_acknowledged() -> None:
    table = Table(3)
    before = table.begin("0.0", "1.0", "2.0")
    table.coordinator.rejoin(Rejoin(status=holder("2.0"), membership=before, promised=(4, 1)), table.now_s)
    assert table.coordinator.term == 1, "one member proves nothing"
    table.coordinator.note_process_exit("2.0", table.now_s)
    table.report_status(holder("0.0"), holder("1.0"))
    assert table.coordinator.term == 5


def test_a_member_that_comes_back_at_once_has_lost_nothing() -> None:
    table = Table(3)
    membership = table.begin("0.0", "1.0", "2.0")
    table.coordinator.note_disconnect("1.0")
    table.coordinator.rejoin(
        Rejoin(status=holder("1.0"), membership=membership, promised=membership.generation_id), 0.0
    )
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    order = table.coordinator.directive_for("1.0")
    assert (order.is_evicted, order.proposal, order.membership) == (False, None, membership)


def test_a_zombie_that_votes_is_no_member_of_those_who_went_on_without_it() -> None:
    first = Table(3).begin("0.0", "1.0", "2.0")
    newest = Membership(generation_id=(1, 5), statuses=(holder("0.0", committed=9), holder("2.0", committed=9)))
    table = Table(3, index=1, is_standby=True)
    for member, membership in [("1.0", first), ("0.0", newest), ("2.0", newest)]:
        rejoining = Rejoin(status=holder(member), membership=membership, promised=membership.generation_id)
        table.coordinator.rejoin(rejoining, 0.0)
    assert (table.coordinator.is_active, table.coordinator.membership) == (True, newest)
    assert table.coordinator.directive_for("1.0").reason == "the others went on without it"
    table.report_status(holder("0.0", committed=9), holder("1.0"), holder("2.0", committed=9))
    table.pass_time(1.0, "0.0", "1.0", "2.0")
    assert table.coordinator.membership.members == ("0.0", "2.0")


def test_a_standby_decides_nothing_until_most_members_ask_it_to() -> None:
    membership = Table(3).begin("0.0", "1.0", "2.0")
    table = Table(3, index=1, is_standby=True)
    table.coordinator.join("3.0", 0.0)
    table.coordinator.rejoin(
        Rejoin(status=holder("0.0"), membership=membership, promised=membership.generation_id), 0.0
    )
    assert not table.coordinator.is_active
    table.coordinator.rejoin(
        Rejoin(status=holder("1.0"), membership=membership, promised=membership.generation_id), 0.0
    )
    assert (table.coordinator.is_active, table.coordinator.term) == (True, 2)
    assert table.coordinator.membership == membership, "the epoch goes on"
    table.pass_time(3.0, "0.0", "1.0")
    table.report_status(holder("0.0"), holder("1.0"))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "1.0"), "the third has not come"


def test_who_was_not_waited_for_any_longer_is_told_so_when_it_listens() -> None:
    membership = Table(3).begin("0.0", "1.0", "2.0")
    table = Table(3, index=1, is_standby=True)
    for member in ("0.0", "1.0"):
        table.coordinator.rejoin(
            Rejoin(status=holder(member), membership=membership, promised=membership.generation_id), 0.0
        )
    assert not table.coordinator.directive_for("2.0").is_evicted
    table.pass_time(3.0, "0.0", "1.0")
    assert table.coordinator.eviction_reason("2.0") == "the others went on without it"
    assert not table.coordinator.directive_for("2.0").is_evicted, "they have not gone on yet"
    table.report_status(holder("0.0"), holder("1.0"))
    assert table.coordinator.directive_for("2.0").is_evicted
    assert table.coordinator.directive_for("2.0").reason == "the others went on without it"


def test_two_that_both_were_standbys_never_decide_in_the_same_term() -> None:
    """A coordinator that died is started again as a standby, whichever of the two it was."""
    membership = Table(3).begin("0.0", "1.0", "2.0")
    for promised, expected in [((1, 4), (3, 2)), ((2, 9), (3, 4)), ((3, 1), (5, 4))]:
        tables = [Table(3, index=index, is_standby=True) for index in (0, 1)]
        for table in tables:
            for member in ("0.0", "1.0"):
                rejoining = Rejoin(status=holder(member), membership=membership, promised=promised)
                table.coordinator.rejoin(rejoining, 0.0)
        assert tuple(table.coordinator.term for table in tables) == expected
