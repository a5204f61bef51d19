"""What is decided in single situations."""

from dataclasses import replace

import pytest

from ringweave.jobs import advance, reconcile, records
from ringweave.jobs.failures import SETTLE_S
from ringweave.jobs.records import (
    EndCause,
    GroupPhase,
    JobRecord,
    ObservedGroup,
    ObservedJobState,
    PendingCause,
    UnresponsiveMachine,
)
from ringweave.jobs.states import JobState, NodeState
from tests.fakes.job_runtime import FakeJobRuntime
from tests.jobs.life import lives
from tests.jobs.life.lives import DELETE, KEEP, ON_FAILURE, record_of, running


def kinds(place: FakeJobRuntime) -> list[str]:
    return [type(action).__name__ for action in lives.look(place)]


def test_the_first_look_makes_everything() -> None:
    place = FakeJobRuntime(job=lives.a_job())
    saved, *rest = lives.look(place)
    assert isinstance(saved, records.SaveRecord)
    assert rest == [
        records.CreateConfig(counts=(3, 3)),
        records.CreateGroup(node=0, attempt=1, workers=3, round=1),
        records.CreateGroup(node=1, attempt=1, workers=3, round=1),
    ]


def test_the_gate_opens_only_when_all_are_ready() -> None:
    place = FakeJobRuntime(job=lives.a_job())
    lives.settle(place)
    place.advance_group((0, 1))
    lives.settle(place)
    assert place.released_round == 0
    known = record_of(place).nodes[0]
    assert known.reason is not None
    assert (known.state, str(known.reason)) == (
        NodeState.READY,
        "ready, and waits for node n1. Nothing to do; the job continues by itself.",
    )
    place.advance_group((1, 1))
    assert kinds(place) == ["SaveRecord", "ReleaseBarrier"]


def test_a_node_that_is_being_removed_does_not_count_as_ready() -> None:
    place = FakeJobRuntime(job=lives.a_job())
    lives.settle(place)
    place.advance_group((0, 1))
    place.advance_group((1, 1))
    place.groups[1, 1] = replace(place.groups[1, 1], is_terminating=True)
    lives.settle(place)
    assert place.released_round == 0


def test_a_killed_group_alone_is_replaced_and_the_others_go_back_to_the_gate() -> None:
    place = running(DELETE, DELETE, DELETE)
    place.end_group((1, 1), EndCause.PLATFORM, "killed by SIGKILL")
    _, *rest = lives.look(place)
    assert [action for action in rest if not isinstance(action, records.RequeueAt)] == [
        records.RestartGroup(node=0, attempt=1, round=2),
        records.DeleteGroup(node=1, attempt=1),
        records.RestartGroup(node=2, attempt=1, round=2),
    ]
    lives.settle(place)
    assert str(record_of(place).reason) == (
        "node n1 failed (killed by SIGKILL), retry 1 of 1; waits for nodes n0, n1, n2 to be ready, then all nodes "
        "start again, from their last checkpoint if there is one. ringweave logs text shows why the node failed; "
        "repair a node that fails repeatedly."
    )
    place.pass_time()
    lives.settle(place)
    assert sorted(place.groups) == [(0, 1), (1, 2), (2, 1)]
    assert [known.retries for known in record_of(place).nodes] == [0, 1, 0]


def test_a_group_is_called_back_once_though_it_has_not_heard_of_it_yet() -> None:
    place = running(DELETE, DELETE, DELETE)
    place.end_group((1, 1), EndCause.PLATFORM, "killed by SIGKILL")
    save, *_ = lives.look(place)
    place.apply(save)
    called = replace(place.groups[0, 1], requested_round=2)
    place.groups[0, 1] = called
    (only,) = [each for each in lives.look(place) if isinstance(each, records.RestartGroup)]
    assert only == records.RestartGroup(node=2, attempt=1, round=2)
    place.groups[0, 1] = replace(called, requested_round=1)
    assert len([each for each in lives.look(place) if isinstance(each, records.RestartGroup)]) == 2


@pytest.mark.parametrize(
    ("cause", "left"),
    [(None, {(0, 1)}), (EndCause.PROGRAM, {(0, 1), (1, 1)})],
)
def test_each_node_is_kept_or_deleted_by_its_own_policy(cause: EndCause | None, left: set) -> None:
    place = running(KEEP, ON_FAILURE, DELETE)
    if cause is None:
        lives.end_all(place)
    else:
        place.end_group((1, 1), cause)
        place.clock_s += SETTLE_S
    for _ in range(3):
        lives.settle(place)
        place.pass_time()
    assert set(place.groups) == left
    assert not any(group.phase.is_alive for group in place.groups.values())
    assert place.has_config


def test_a_ttl_ends_to_the_second_and_takes_everything() -> None:
    place = running(KEEP, DELETE, ttl_s=100.0)
    place.clock_s = 50.25
    lives.end_all(place)
    place.clock_s = 51.0
    lives.settle(place)
    assert lives.look(place)[-1] == records.RequeueAt(at_s=150.25)
    place.clock_s = 150.2
    assert kinds(place) == ["RequeueAt"]
    place.clock_s = 150.25
    assert kinds(place)[:2] == ["SaveRecord", "DeleteGroup"]
    for _ in range(3):
        lives.settle(place)
        place.pass_time()
    assert (place.job, place.groups, place.has_config) == (None, {}, False)


def test_an_end_that_is_seen_only_after_the_ttl_removes_the_job_at_once() -> None:
    place = running(ttl_s=10.0)
    lives.end_all(place)
    place.clock_s += 60.0
    saved, *rest = lives.look(place)
    assert saved.record.state is JobState.DELETING
    assert rest == [records.DeleteGroup(node=0, attempt=1), records.DeleteGroup(node=1, attempt=1)]


def test_what_is_not_ours_is_removed() -> None:
    place = running()
    stray = ObservedGroup(node=7, attempt=1, round=1, phase=GroupPhase.RUNNING)
    old = ObservedGroup(node=0, attempt=9, round=1, phase=GroupPhase.RUNNING)
    observed = replace(place.observe(), groups=(*place.observe().groups, stray, old))
    assert reconcile.reconcile(place.job, observed, place.clock_s) == (
        records.DeleteGroup(node=7, attempt=1),
        records.DeleteGroup(node=0, attempt=9),
    )


def test_progress_of_each_node_is_in_its_record() -> None:
    place = running()
    place.groups[0, 1] = replace(place.groups[0, 1], iterations=40, last_loss=2.5)
    lives.settle(place)
    assert (record_of(place).nodes[0].iterations, record_of(place).nodes[0].last_loss) == (40, 2.5)
    assert record_of(place).nodes[1].iterations is None


def test_a_suspended_job_makes_nothing_and_says_how_to_go_on() -> None:
    place = FakeJobRuntime(job=lives.a_job(suspend=True))
    lives.settle(place)
    assert (place.groups, place.has_config) == ({}, False)
    assert str(record_of(place).reason) == "suspended; no process of it runs. ringweave resume text."


def test_a_pending_group_says_what_its_place_says() -> None:
    place = FakeJobRuntime(job=lives.a_job())
    lives.settle(place)
    place.groups[1, 1] = replace(place.groups[1, 1], text="its container is being created")
    place.advance_group((0, 1))
    lives.settle(place)
    hint = "Nothing to do while an image or files are transferred; if it takes long, look at the platform's own status."
    assert str(record_of(place).reason) == f"waits for node n1 to start: its container is being created. {hint}"
    assert str(record_of(place).nodes[1].reason).startswith(
        "starts: its container is being created. Nothing to do while"
    )


def test_one_whose_machine_does_not_answer_says_so_and_what_helps() -> None:
    place = running()
    place.end_group((0, 1), EndCause.PLATFORM)
    lives.settle(place)
    place.groups[1, 1] = replace(
        place.groups[1, 1], unresponsive=UnresponsiveMachine(text="it is dark", fix="pull its plug")
    )
    lives.settle(place)
    record = record_of(place)
    hint = "Once you know that no process runs there any more, pull its plug."
    assert str(record.reason) == f"the machine of node n1 does not answer: it is dark. {hint}"
    assert str(record.nodes[1].reason) == f"its machine does not answer: it is dark. {hint}"


def test_one_whose_machine_does_not_answer_runs_as_long_as_nobody_misses_it() -> None:
    place = running()
    place.groups[1, 1] = replace(
        place.groups[1, 1], unresponsive=UnresponsiveMachine(text="it is dark", fix="pull its plug")
    )
    lives.settle(place)
    assert (record_of(place).state, record_of(place).reason) == (JobState.RUNNING, None)


def lacking(lack: PendingCause, text: str, *, is_retried: bool) -> JobRecord:
    """Of a job of which one group lacks something, in its first round or in a later one."""
    place = running() if is_retried else FakeJobRuntime(job=lives.a_job())
    if is_retried:
        place.end_group((1, 1), EndCause.PLATFORM)
        lives.settle(place)
        place.pass_time()
    lives.settle(place)
    key = (1, 1 + is_retried)
    place.groups[key] = replace(place.groups[key], text=text, pending_cause=lack)
    lives.settle(place)
    record = record_of(place)
    assert record.state is (JobState.RETRYING if is_retried else JobState.PENDING)
    return record


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_group_that_cannot_begin_by_itself_asks_for_no_room(is_retried: bool) -> None:
    """More room does not bring an image that does not exist; also in a later round that is what there is to say."""
    record = lacking(PendingCause.PREREQUISITE, "ImagePullBackOff: no such image", is_retried=is_retried)
    assert str(record.reason) == (
        "node n1 cannot start: ImagePullBackOff: no such image. Provide the missing resource; the start is tried "
        "again. If the job itself has to change, ringweave delete text and submit it again."
    )
    assert str(record.nodes[1].reason).startswith("cannot start: ImagePullBackOff: no such image. Provide the missing")


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_group_that_finds_no_room_says_so_also_when_its_node_was_lost(is_retried: bool) -> None:
    record = lacking(PendingCause.CAPACITY, "Unschedulable: 0/3 nodes", is_retried=is_retried)
    assert str(record.reason).startswith(
        "waits for capacity for node n1: Unschedulable: 0/3 nodes. Free capacity on the platform"
    )


def test_nothing_is_done_twice_while_groups_are_on_their_way_out() -> None:
    place = running()
    lives.ask(place, "stop")
    lives.settle(place)
    assert [group.is_terminating for group in place.groups.values()] == [True, True]
    assert record_of(place).state is JobState.ENDING
    assert kinds(place) == []


def test_an_empty_place_of_a_deleted_job_is_forgotten_at_once() -> None:
    place = FakeJobRuntime(job=lives.a_job(suspend=True))
    lives.ask(place, "delete")
    assert kinds(place) == ["SaveRecord", "ForgetJob"]
    assert ObservedJobState() == place.observe()


def test_a_place_that_was_taken_away_begins_a_round_and_an_end_stays_an_end():
    record = lives.a_job().record
    again = advance.record_after_preemption(record, "its allocation was taken back")
    assert (again.round, again.round_cause) == (record.round + 1, "its allocation was taken back")
    ended = replace(record, outcome=JobState.STOPPED)
    assert advance.record_after_preemption(ended, "its allocation was taken back") == ended
