"""All members wait for each other, and none gets on: nobody is to blame, and they begin anew."""

from dataclasses import replace

import pytest

from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import GenerationProposal
from tests.membership.rules.table import Table, holder

VAIN = Heartbeat(is_waiting=True, no_progress_s=21.0, waits_in_vain=True)
WAITS = Heartbeat(is_waiting=True, no_progress_s=21.0)


def proposal_after(table: Table, *beats: Heartbeat, seconds: float = 0.2) -> GenerationProposal | None:
    """What members 0, 1 and so on are asked to stand still for when they have beaten so for a while."""
    for _ in range(round(seconds / 0.1)):
        table.now_s += 0.1
        for slot, beat in enumerate(beats):
            table.coordinator.record_heartbeat(f"{slot}.0", beat, table.now_s)
        table.coordinator.tick(table.now_s)
    return table.coordinator.directive_for("0.0").proposal


def test_all_who_wait_in_vain_form_an_epoch_of_the_same_members() -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    proposal = proposal_after(table, WAITS, VAIN, WAITS)
    assert proposal is not None, "one that knows what is usual is enough: another may have come a moment ago"
    assert proposal.is_urgent
    table.report_status(*(holder(f"{slot}.0", at_step_boundary=False) for slot in range(3)))
    assert table.coordinator.membership is not None
    assert table.coordinator.membership.generation_id == proposal.generation_id
    assert table.coordinator.membership.members == ("0.0", "1.0", "2.0")


@pytest.mark.parametrize(
    "other",
    [
        Heartbeat(),
        replace(VAIN, no_progress_s=19.0),
        replace(VAIN, is_reading=True),
    ],
    ids=["computes", "got on", "reads the state"],
)
def test_as_long_as_one_of_them_is_busy_nobody_waits_in_vain(other: Heartbeat) -> None:
    table = Table(3)
    table.begin("0.0", "1.0", "2.0")
    assert proposal_after(table, VAIN, other, VAIN) is None
    assert proposal_after(table, VAIN, VAIN, VAIN) is not None


def test_where_none_knows_what_is_usual_they_wait() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    assert proposal_after(table, WAITS, WAITS) is None


def test_a_border_that_none_comes_to_is_not_waited_for() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.coordinator.join("2.0", table.now_s)
    asked = table.coordinator.directive_for("0.0").proposal
    assert asked is not None
    assert not asked.is_urgent
    proposal = proposal_after(table, VAIN, VAIN, Heartbeat())
    assert proposal is not None
    assert proposal.is_urgent


def test_where_the_state_is_kept_elsewhere_they_may_be_waiting_for_that() -> None:
    table = Table(2, is_kept_elsewhere=True)
    table.begin("0.0", "1.0")
    assert proposal_after(table, VAIN, VAIN) is None


def woken_s(table: Table, num: int, *, committed: int = 5) -> list[float]:
    """Seconds from the begin of each epoch until its members are told to begin anew, so many times."""
    found, begun_s = [], table.now_s
    while len(found) < num:
        if proposal_after(table, VAIN, VAIN, seconds=0.1) is not None:
            found.append(table.now_s - begun_s)
            table.report_status(*(holder(each, at_step_boundary=False, committed=committed) for each in ("0.0", "1.0")))
            begun_s = table.now_s
    return found


def test_who_is_only_slow_gets_twice_the_time_whenever_that_was_not_enough() -> None:
    table = Table(2)
    table.begin("0.0", "1.0")
    table.pass_time(100.0, "0.0", "1.0")
    assert woken_s(table, 5)[1:] == pytest.approx([200 * 2**number for number in range(4)], rel=0.01), "without an end"
    assert table.coordinator.num_standstill_restarts == 5
    assert table.coordinator.membership is not None
    table.coordinator.report_failure("0.0", table.coordinator.membership.generation_id, [], table.now_s)
    table.report_status(holder("0.0", committed=6), holder("1.0", committed=6))
    assert woken_s(table, 1, committed=6) == pytest.approx([0.1]), "they have got on since then"


def test_nobody_is_told_to_wait_anew_by_a_coordinator_that_decides_nothing() -> None:
    standby = Table(2, index=1, is_standby=True)
    assert proposal_after(standby, VAIN, VAIN) is None
