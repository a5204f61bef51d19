"""Those who alone have the job's state fall silent, or have not come, while others follow."""

from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus
from tests.membership.rules.table import Table, holder


def recovering(member: str, committed: int = 5) -> MemberStatus:
    return MemberStatus(member=member, is_recovering=True, committed=committed)


def followed(*, is_kept_elsewhere: bool = False) -> Table:
    """One has the job's state, and two that joined a moment ago follow it; it falls silent."""
    table = Table(1, is_kept_elsewhere=is_kept_elsewhere)
    table.begin("0.0")
    for member in ("1.0", "2.0"):
        table.coordinator.join(member, table.now_s)
    table.report_status(holder("0.0"), MemberStatus(member="1.0"), MemberStatus(member="2.0"))
    assert table.coordinator.membership is not None
    assert (table.coordinator.membership.members, table.coordinator.membership.state_owners) == (
        ("0.0", "1.0", "2.0"),
        ("0.0",),
    )
    table.pass_time(3.0, "0.0", "1.0", "2.0")
    table.pass_time(1.5, "1.0", "2.0")
    return table


def test_who_follows_has_not_the_state_so_the_one_that_has_it_is_waited_for() -> None:
    table = followed()
    proposal = table.coordinator.directive_for("1.0").proposal
    assert proposal is not None, "those who follow are asked whether they have it by now"
    assert proposal.is_urgent
    table.report_status(recovering("1.0", 6), recovering("2.0", 6))
    table.pass_time(15.0, "1.0", "2.0")
    assert (table.coordinator.end_reason, table.coordinator.present) == ("", ("0.0", "1.0", "2.0"))
    table.pass_time(0.5, "0.0", "1.0", "2.0")
    table.report_status(holder("0.0", committed=6))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.members == ("0.0", "1.0", "2.0")
    assert table.coordinator.directive_for("1.0").proposal is None


def test_who_cannot_reach_the_one_that_has_the_state_has_to_go_itself() -> None:
    table = Table(1)
    table.begin("0.0")
    for member in ("1.0", "2.0"):
        table.coordinator.join(member, table.now_s)
    table.report_status(holder("0.0"), MemberStatus(member="1.0"), MemberStatus(member="2.0"))
    for number in range(3):
        assert table.coordinator.membership is not None
        table.coordinator.report_failure("1.0", table.coordinator.membership.generation_id, ["0.0"], table.now_s)
        table.report_status(holder("0.0"), *(recovering(member) for member in ("1.0", "2.0")))
        assert ("1.0" in table.coordinator.membership.members) == (number < 2)
    assert table.coordinator.membership.members == ("0.0", "2.0")
    assert table.coordinator.directive_for("1.0").reason == "the others cannot reach it"


def test_the_one_that_has_the_state_is_waited_for_but_not_for_ever() -> None:
    table = followed()
    table.report_status(recovering("1.0", 6), recovering("2.0", 6))
    table.pass_time(22.0, "1.0", "2.0")
    assert table.coordinator.end_reason == "no worker is left that has the parameters: go on from the last checkpoint"


def test_once_one_that_followed_has_the_state_nobody_is_waited_for_any_longer_than_usual() -> None:
    table = followed()
    table.report_status(recovering("1.0", 6), holder("2.0", committed=6))
    table.pass_time(0.5, "1.0", "2.0")
    assert table.coordinator.present == ("1.0", "2.0")
    assert table.coordinator.eviction_reason("0.0") == "no heartbeat came in time"
    assert table.coordinator.end_reason == ""


def test_where_the_state_is_kept_elsewhere_those_who_follow_need_not_wait_for_one_that_has_it() -> None:
    table = followed(is_kept_elsewhere=True)
    table.pass_time(0.5, "1.0", "2.0")
    assert table.coordinator.present == ("1.0", "2.0")


def test_a_silent_member_that_is_alone_is_asked_nothing() -> None:
    table = Table(1)
    membership = table.begin("0.0")
    table.pass_time(3.0, "0.0")
    table.pass_time(10.0)
    assert (table.coordinator.membership, table.coordinator.directive_for("0.0").proposal) == (membership, None)


def taken_over_by_followers(*, is_kept_elsewhere: bool = False, level: str = "") -> Table:
    """A standby that three who follow have asked to take over; the two that have the job's state have not come."""
    statuses = [holder("0.0"), holder("1.0"), *(recovering(f"{slot}.0") for slot in (2, 3, 4))]
    membership = Membership(generation_id=(1, 5), statuses=tuple(statuses))
    table = Table(5, index=1, is_standby=True, is_kept_elsewhere=is_kept_elsewhere)
    table.pass_time(10.0)
    beat = Heartbeat(is_waiting=True, no_progress_s=1.0)
    for member in ("2.0", "3.0", "4.0"):
        status = holder(member) if member == level else recovering(member)
        rejoining = Rejoin(
            status=status, membership=membership, promised=membership.generation_id, lost_s=1.0, heartbeat=beat
        )
        table.coordinator.rejoin(rejoining, table.now_s)
    table.report_status(*(holder(each) if each == level else recovering(each) for each in ("2.0", "3.0", "4.0")))
    table.pass_time(5.0, "2.0", "3.0", "4.0")
    return table


def test_a_coordinator_that_takes_over_waits_for_those_who_have_the_state() -> None:
    table = taken_over_by_followers()
    assert table.coordinator.end_reason == "", "they were stopped or cut off with the coordinator before"
    assert table.coordinator.membership is not None
    for member in ("0.0", "1.0"):
        membership = table.coordinator.membership
        rejoining = Rejoin(status=holder(member), membership=membership, promised=membership.generation_id)
        table.coordinator.rejoin(rejoining, table.now_s)
    members = [f"{slot}.0" for slot in range(5)]
    table.pass_time(0.2, *members)
    table.report_status(holder("0.0"), holder("1.0"), *map(recovering, members[2:]))
    assert (table.coordinator.end_reason, table.coordinator.membership.members) == ("", tuple(members))
    assert table.coordinator.membership.generation_id[0] == 2


def test_a_coordinator_that_takes_over_waits_for_the_state_but_not_for_ever() -> None:
    table = taken_over_by_followers()
    table.pass_time(16.0, "2.0", "3.0", "4.0")
    assert table.coordinator.end_reason == "no worker is left that has the parameters: go on from the last checkpoint"


def test_a_coordinator_that_takes_over_does_not_wait_for_a_state_that_others_have() -> None:
    table = taken_over_by_followers(level="3.0")
    assert table.coordinator.eviction_reason("0.0") == "the others went on without it"
    table = taken_over_by_followers(is_kept_elsewhere=True)
    assert table.coordinator.eviction_reason("0.0") == "the others went on without it"


def test_a_coordinator_that_takes_over_does_not_wait_for_whoever_is_followed_in_its_slot() -> None:
    table = taken_over_by_followers()
    for member in ("0.1", "1.1"):
        assert table.coordinator.end_reason == ""
        table.coordinator.join(member, table.now_s)
    assert table.coordinator.end_reason == "no worker is left that has the parameters: go on from the last checkpoint"
