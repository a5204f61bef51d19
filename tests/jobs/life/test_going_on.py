"""Elastic jobs: who is replaced while the others train on, and when they cannot."""

from dataclasses import replace

import pytest

from ringweave.jobs import records
from ringweave.jobs.failures import SETTLE_S, SHARED_CAUSE_S
from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.jobs.states import JobState
from tests.fakes.job_runtime import FakeJobRuntime
from tests.jobs.life import lives
from tests.jobs.life.lives import DELETE, record_of, running

THREE = (DELETE,) * 3


def retries(place: FakeJobRuntime) -> list[int]:
    return [known.retries for known in record_of(place).nodes]


def change(place: FakeJobRuntime, key: tuple[int, int], **changes) -> None:
    place.groups[key] = replace(place.groups[key], **changes)


def test_a_killed_group_alone_is_replaced_and_nobody_else_is_called() -> None:
    place = running(*THREE, least=6)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    _, *rest = lives.look(place)
    assert rest == [records.DeleteGroup(node=1, attempt=1)]
    lives.settle(place)
    record = record_of(place)
    assert (record.state, str(record.reason)) == (
        JobState.RUNNING,
        "node n1 failed (its agent was killed), retry 1 of 1; the other nodes continue, and node n1 can join them when "
        "replaced. Nothing to do; ringweave logs text --node n1 shows why it failed.",
    )
    for _ in range(4):
        place.pass_time()
        lives.settle(place)
    record = record_of(place)
    assert (record.state, record.reason, record.round, place.released_round) == (JobState.RUNNING, None, 1, 1)
    assert {key: group.phase for key, group in place.groups.items()} == dict.fromkeys(
        [(0, 1), (1, 2), (2, 1)], GroupPhase.RUNNING
    )
    assert (retries(place), place.broken_rules) == ([0, 1, 0], [])


def test_of_a_node_that_fails_again_and_again_the_last_ends_are_kept() -> None:
    place = running(*THREE, least=6, max_retries=1000)
    for attempt in range(1, 131):
        place.end_group((1, attempt), EndCause.PLATFORM, f"end {attempt}")
        while (1, attempt + 1) not in place.groups or place.groups[1, attempt + 1].phase is not GroupPhase.RUNNING:
            place.pass_time()
            lives.settle(place)
    known = record_of(place).nodes[1]
    assert (known.attempt, known.retries) == (131, 130)
    assert [each.text for each in known.history] == [f"end {attempt}" for attempt in range(31, 131)]


@pytest.mark.parametrize(("lived_s", "delays_s"), [(0.5, [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]), (11.0, [0.0] * 7)])
def test_a_node_that_fails_soon_again_and_again_waits_longer_each_time(lived_s: float, delays_s: list[float]) -> None:
    place = running(*THREE, least=6, max_retries=1000)
    found = []
    for attempt in range(1, 8):
        place.pass_time(lived_s)
        lives.settle(place)
        place.end_group((1, attempt), EndCause.PLATFORM, "its agent was killed")
        lives.settle(place)
        ended_s = place.clock_s
        place.pass_time(0.0)  # it is gone
        lives.settle(place)
        while (1, attempt + 1) not in place.groups:
            assert f"{record_of(place).nodes[1].reason}".startswith("starts again within half a minute")
            requests = [each.at_s for each in lives.look(place) if isinstance(each, records.RequeueAt)]
            assert requests == [record_of(place).nodes[1].restarts.due_s]
            place.pass_time(requests[0] - place.clock_s)
            lives.settle(place)
        found.append(place.clock_s - ended_s)
        while place.groups[1, attempt + 1].phase is not GroupPhase.RUNNING:
            place.pass_time(0.0)
            lives.settle(place)
    assert found == delays_s


def test_with_too_few_left_all_begin_again_as_in_any_job() -> None:
    place = running(*THREE, least=6, max_retries=2)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    place.end_group((2, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    record = record_of(place)
    assert (record.round, record.state, record.loss, retries(place)) == (2, JobState.RETRYING, None, [0, 1, 1])
    assert record.round_cause == "node n2 failed (its agent was killed), retry 1 of 2"
    assert place.groups[0, 1].round == 2, "it is called back"


@pytest.mark.parametrize(
    ("standby", "lost", "goes_on"),
    [
        (False, (0,), False),
        (False, (1, 2), True),
        (True, (0,), True),
        (True, (1,), True),
        (True, (0, 2), True),
        (True, (0, 1), False),
    ],
)
def test_without_a_node_that_has_a_parameter_server_nobody_goes_on(
    standby: bool, lost: tuple[int, ...], goes_on: bool
) -> None:
    """The first node has it, and the second one its standby."""
    place = running(*THREE, least=3, mode="ps-hra", standby=standby)
    for node in lost:
        place.end_group((node, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    assert record_of(place).round == (1 if goes_on else 2)
    assert retries(place) == [int(node in lost) for node in range(3)]


@pytest.mark.parametrize("text", ["killed", "vanished"])
def test_before_the_gate_was_open_nobody_goes_on(text: str) -> None:
    place = FakeJobRuntime(job=lives.a_job(THREE, least=3))
    lives.settle(place)
    place.advance_group((0, 1))
    lives.settle(place)
    place.end_group((1, 1), EndCause.PLATFORM) if text == "killed" else place.lose_group((1, 1))
    lives.settle(place)
    assert (record_of(place).round, place.released_round) == (2, 0)


def test_two_lost_at_once_are_charged_one_each() -> None:
    place = running(*THREE, least=3)
    place.end_group((0, 1), EndCause.PLATFORM, "power cut")
    place.lose_group((2, 1))
    lives.settle(place)
    assert (retries(place), record_of(place).round) == ([1, 0, 1], 1)
    assert record_of(place).loss is not None


def test_who_cannot_go_on_after_a_loss_pays_nothing() -> None:
    """As where the last ones with the job's state died: those that had just joined hear that it is over."""
    place = running(*THREE, least=3)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    for node in (0, 2):
        change(
            place, (node, 1), phase=GroupPhase.INTERRUPTED, ended_s=place.clock_s, text="MembershipError: job is over"
        )
    place.clock_s += SETTLE_S
    lives.settle(place)
    record = record_of(place)
    assert (record.round, record.round_cause) == (2, "node n1 failed (its agent was killed), retry 1 of 1")
    for _ in range(5):
        place.pass_time()
        lives.settle(place)
    assert (record_of(place).state, retries(place)) == (JobState.RUNNING, [0, 1, 0])
    assert [known.attempt for known in record_of(place).nodes] == [1, 2, 1]


def test_without_a_loss_the_first_that_blames_another_pays_as_in_any_job() -> None:
    place = running(*THREE, least=3)
    for node in (0, 1, 2):
        change(place, (node, 1), phase=GroupPhase.INTERRUPTED, ended_s=place.clock_s + node, text="lost its peer")
    place.clock_s += SETTLE_S
    lives.settle(place)
    assert (retries(place), record_of(place).round) == ([1, 0, 0], 2)


def test_who_is_interrupted_beside_a_loss_is_called_back() -> None:
    """A script without prepare: nobody can go on."""
    place = running(*THREE, least=3)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    change(place, (0, 1), phase=GroupPhase.INTERRUPTED, ended_s=place.clock_s, text="lost its peer")
    lives.settle(place)
    assert (retries(place), record_of(place).round) == ([0, 1, 0], 2)


def test_a_script_that_fails_of_a_lost_place_is_replaced_without_a_charge() -> None:
    place = running(*THREE, least=3)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    place.clock_s += SETTLE_S / 2
    place.end_group((2, 1), EndCause.PROGRAM, "RuntimeError: what it had of others is gone")
    lives.settle(place)
    assert (retries(place), record_of(place).round, record_of(place).outcome) == ([0, 1, 0], 1, None)
    for _ in range(4):
        place.pass_time()
        lives.settle(place)
    assert [known.attempt for known in record_of(place).nodes] == [1, 2, 2]


ECC = "rank 4 raised torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def fail_script(place: FakeJobRuntime, *keys: tuple[int, int], text: str = ECC) -> None:
    """Their scripts fail, and nothing else is seen in time."""
    for key in keys:
        place.end_group(key, EndCause.PROGRAM, text)
    lives.settle(place)
    place.clock_s += SETTLE_S
    lives.settle(place)


def come_back(place: FakeJobRuntime) -> None:
    for _ in range(4):
        place.pass_time()
        lives.settle(place)


def test_a_device_that_fails_is_its_nodes_loss_and_the_others_train_on() -> None:
    """It raises an exception, so the job failed at once, with every healthy node."""
    place = running(*THREE, least=6)
    fail_script(place, (1, 1))
    record = record_of(place)
    assert (record.state, record.round, retries(place)) == (JobState.RUNNING, 1, [0, 1, 0])
    assert str(record.reason) == (
        f"node n1 failed ({ECC}), retry 1 of 1; the other nodes continue, and node n1 can join them when "
        "replaced. Nothing to do; ringweave logs text --node n1 shows why it failed."
    )
    come_back(place)
    assert [known.attempt for known in record_of(place).nodes] == [1, 2, 1]
    assert (record_of(place).reason, place.broken_rules) == (None, [])


def test_a_device_that_fails_more_often_than_it_may_is_given_up_and_the_others_finish() -> None:
    place = running(*THREE, least=3, max_retries=2)
    for attempt in (1, 2, 3):
        fail_script(place, (1, attempt))
        come_back(place)
    record = record_of(place)
    assert (record.state, record.round, retries(place)) == (JobState.RUNNING, 1, [0, 2, 0])
    assert record.nodes[1].is_excluded
    assert place.created.count((1, 4)) == 0
    lives.end_all(place)
    lives.settle(place)
    assert record_of(place).outcome is JobState.SUCCEEDED


def test_a_mistake_that_ends_the_script_on_all_nodes_fails_the_job_at_once() -> None:
    place = running(*THREE, least=3)
    fail_script(place, (0, 1), (1, 1), (2, 1), text="rank 0 raised KeyError: 'label'")
    record = record_of(place)
    assert (record.outcome, retries(place)) == (JobState.FAILED, [0, 0, 0])
    assert record.outcome_reason is not None
    assert record.outcome_reason.text == (
        "the script failed on nodes n0, n1, n2: rank 0 raised KeyError: 'label'; a retry would not fix it"
    )


@pytest.mark.parametrize("later_s", [SETTLE_S / 2, SETTLE_S, 30.0])
def test_a_mistake_that_some_nodes_come_to_later_fails_the_job_then(later_s: float) -> None:
    """What was replaced meanwhile cannot go on alone, and has not shown that it would not fail of the same."""
    place = running(*THREE, least=3)
    fail_script(place, (0, 1), text="KeyError")
    if later_s > SETTLE_S:
        come_back(place)
        assert record_of(place).reason is None
    place.clock_s += later_s
    fail_script(place, (1, 1), (2, 1), text="KeyError")
    record = record_of(place)
    assert (record.outcome, retries(place)) == (JobState.FAILED, [1, 0, 0])
    assert record.outcome_reason is not None
    assert record.outcome_reason.code == "NonZeroExitCode"


def test_a_replacement_that_has_trained_for_long_goes_on_alone_when_others_fail() -> None:
    place = running(*THREE, least=3)
    fail_script(place, (0, 1))
    come_back(place)
    place.clock_s += SHARED_CAUSE_S
    fail_script(place, (1, 1), (2, 1))
    assert (record_of(place).outcome, record_of(place).round, retries(place)) == (None, 1, [1, 1, 1])


def test_with_too_few_left_a_device_that_fails_costs_a_round_and_not_the_job() -> None:
    place = running(*THREE, least=6)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    place.clock_s += 10 * SETTLE_S
    fail_script(place, (2, 1))
    record = record_of(place)
    assert (record.outcome, record.round, retries(place)) == (None, 2, [0, 1, 1])


def test_in_other_jobs_a_script_that_fails_fails_the_job() -> None:
    place = running(*THREE)
    fail_script(place, (1, 1))
    assert record_of(place).outcome is JobState.FAILED


def test_a_script_that_fails_at_an_unknown_time_is_charged_and_not_excused_for_ever() -> None:
    place = running(*THREE, least=3)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    change(place, (2, 1), phase=GroupPhase.FAILED, cause=EndCause.PROGRAM, exit_code=1, ended_s=None)
    place.clock_s += SETTLE_S
    lives.settle(place)
    assert (record_of(place).outcome, retries(place)) == (None, [0, 1, 1])


def test_once_a_node_has_finished_nobody_is_replaced_and_the_job_ends_with_the_last() -> None:
    place = running(*THREE, least=6)
    place.end_group((0, 1))
    lives.settle(place)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    record = record_of(place)
    assert (record.state, record.reason, record.round, retries(place)) == (JobState.RUNNING, None, 1, [0, 0, 0])
    place.clock_s += 7
    place.end_group((2, 1))
    lives.settle(place)
    record = record_of(place)
    assert (record.outcome, record.ended_s) == (JobState.SUCCEEDED, place.clock_s)
    assert len(place.created) == 3


def test_a_replacement_that_comes_after_the_end_is_not_waited_for() -> None:
    place = running(*THREE, least=3)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    lives.settle(place)
    place.pass_time()
    lives.settle(place)
    assert (1, 2) in place.groups
    place.end_group((0, 1))
    place.end_group((2, 1))
    lives.settle(place)
    assert record_of(place).outcome is JobState.SUCCEEDED


def test_a_script_that_fails_though_another_node_has_finished_fails_the_job() -> None:
    place = running(*THREE, least=3)
    place.end_group((0, 1))
    place.end_group((1, 1), EndCause.PROGRAM, "ValueError")
    lives.settle(place)
    place.clock_s += SETTLE_S
    place.end_group((2, 1))
    lives.settle(place)
    assert record_of(place).outcome is JobState.FAILED


def given_up(*, least: int = 3) -> FakeJobRuntime:
    """Node n1 has failed once more than it may, while the others train."""
    place = running(*THREE, least=least, max_retries=0)
    place.end_group((1, 1), EndCause.PLATFORM, "its agent was killed")
    for _ in range(3):
        lives.settle(place)
        place.pass_time()
    return place


def test_the_others_go_on_without_a_node_that_may_not_be_tried_again() -> None:
    place = given_up()
    record = record_of(place)
    assert (record.state, record.round, len(place.created)) == (JobState.RUNNING, 1, 3)
    assert str(record.reason) == (
        "node n1 failed (its agent was killed), retry 0 of 0; the other nodes continue without node n1, which failed "
        "more "
        "often than max_retries allows. Nothing to do; ringweave logs text --node n1 shows why it failed."
    )
    told = record.nodes[1]
    assert told.reason is not None
    assert (told.state, told.reason.code, told.retries) == ("Failed", "NodeBackoffLimitExceeded", 0)
    lives.end_all(place)
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is JobState.SUCCEEDED
    assert [known.state for known in record.nodes] == ["Succeeded", "Failed", "Succeeded"]


@pytest.mark.parametrize("what", ["another is lost", "all blame another", "suspended"])
def test_without_it_there_is_no_other_round(what: str) -> None:
    place = given_up()
    if what == "another is lost":
        place.end_group((2, 1), EndCause.PLATFORM, "its agent was killed too")
        place.end_group((0, 1), EndCause.PLATFORM, "its agent was killed too")
    elif what == "all blame another":
        for node in (0, 2):
            change(place, (node, 1), phase=GroupPhase.INTERRUPTED, ended_s=place.clock_s, text="job is over")
        place.clock_s += SETTLE_S
    else:
        lives.ask(place, "suspend")
        for _ in range(3):
            lives.settle(place)
            place.pass_time()
        lives.ask(place, "resume")
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is JobState.FAILED
    assert record.outcome_reason is not None
    assert record.outcome_reason.code == "BackoffLimitExceeded"


def test_tried_again_it_may_come_back() -> None:
    place = given_up()
    lives.ask(place, "stop")
    lives.settle(place)
    lives.ask(place, "retry")
    for _ in range(6):
        lives.settle(place)
        place.pass_time()
    record = record_of(place)
    assert (record.state, record.run) == (JobState.RUNNING, 2)
    assert not any(known.is_excluded for known in record.nodes)


def test_with_too_few_left_a_node_that_is_spent_fails_the_job() -> None:
    place = given_up(least=6)
    assert record_of(place).state is JobState.RUNNING
    place = running(DELETE, DELETE, least=3, max_retries=0)
    place.end_group((0, 1), EndCause.PLATFORM, "power cut")
    place.end_group((1, 1), EndCause.PLATFORM, "power cut")
    lives.settle(place)
    assert record_of(place).outcome is JobState.FAILED
