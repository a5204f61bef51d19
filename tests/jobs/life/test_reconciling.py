"""What is decided in single situations."""

from dataclasses import replace

import pytest

from ringweave.jobs.life import actions, advancing, reconciling
from ringweave.jobs.life.failing import SETTLE_S
from ringweave.jobs.life.observing import Cause, Group, Observed, Phase
from ringweave.jobs.life.records import Ended
from ringweave.jobs.life.states import JobState, NodeState
from ringweave.testing.places import FakePlace
from tests.jobs.life import lives
from tests.jobs.life.lives import DELETE, KEEP, ON_FAILURE


def running(*policies, **options) -> FakePlace:
    """A place in which all groups of a job run."""
    place = FakePlace(job=lives.a_job(policies or (DELETE, DELETE), **options))
    for _ in range(4):
        lives.settle(place)
        place.pass_time()
    lives.settle(place)
    assert place.job is not None
    assert place.job.record.state is JobState.RUNNING
    return place


def record_of(place: FakePlace):
    assert place.job is not None
    return place.job.record


def kinds(place: FakePlace) -> list[str]:
    return [type(action).__name__ for action in lives.look(place)]


def test_the_first_look_makes_everything() -> None:
    place = FakePlace(job=lives.a_job())
    saved, *rest = lives.look(place)
    assert isinstance(saved, actions.SaveRecord)
    assert rest == [
        actions.CreateConfig(counts=(3, 3)),
        actions.CreateGroup(node=0, attempt=1, workers=3, round=1),
        actions.CreateGroup(node=1, attempt=1, workers=3, round=1),
    ]


def test_the_gate_opens_only_when_all_are_ready() -> None:
    place = FakePlace(job=lives.a_job())
    lives.settle(place)
    place.step((0, 1))
    lives.settle(place)
    assert place.gate == 0
    known = record_of(place).nodes[0]
    assert known.reason is not None
    assert (known.state, str(known.reason)) == (
        NodeState.READY,
        "is ready, and waits for node n1. Nothing to do: it goes on by itself.",
    )
    place.step((1, 1))
    assert kinds(place) == ["SaveRecord", "OpenGate"]


def test_a_node_that_is_being_removed_does_not_count_as_ready() -> None:
    place = FakePlace(job=lives.a_job())
    lives.settle(place)
    place.step((0, 1))
    place.step((1, 1))
    place.groups[1, 1] = replace(place.groups[1, 1], leaving=True)
    lives.settle(place)
    assert place.gate == 0


def test_a_killed_group_alone_is_replaced_and_the_others_go_back_to_the_gate() -> None:
    place = running(DELETE, DELETE, DELETE)
    place.end((1, 1), Cause.PLACE, "killed by SIGKILL")
    _, *rest = lives.look(place)
    assert rest == [
        actions.Regather(node=0, attempt=1, round=2),
        actions.DeleteGroup(node=1, attempt=1),
        actions.Regather(node=2, attempt=1, round=2),
    ]
    lives.settle(place)
    assert str(record_of(place).reason) == (
        "node n1 failed (killed by SIGKILL), retry 1 of 1; waits for nodes n0, n1, n2 to be ready, then all go on from "
        "the last checkpoint. ringweave logs text shows why it failed; a node that fails again and again needs mending."
    )
    place.pass_time()
    lives.settle(place)
    assert sorted(place.groups) == [(0, 1), (1, 2), (2, 1)]
    assert [known.retries for known in record_of(place).nodes] == [0, 1, 0]


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_the_budget_of_a_node_is_exact(max_retries: int) -> None:
    place = running(max_retries=max_retries)
    for attempt in range(1, max_retries + 1):
        place.end((1, attempt), Cause.PLACE)
        for _ in range(5):
            lives.settle(place)
            place.pass_time()
        assert record_of(place).state is JobState.RUNNING
        assert record_of(place).nodes[1].retries == attempt
    place.end((1, max_retries + 1), Cause.PLACE, "killed by SIGKILL")
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is JobState.FAILED
    assert record.reason is not None
    assert record.reason.code == "RetriesSpent"
    assert "node n1 failed more often than max_retries allows: killed by SIGKILL" in str(record.reason)
    assert [known.retries for known in record.nodes] == [0, max_retries]


def test_a_failure_of_the_script_is_not_tried_again_once_no_other_cause_can_come() -> None:
    place = running()
    place.end((0, 1), Cause.PROGRAM, "exit code 1: ValueError: no such file")
    lives.settle(place)
    place.clock_s += SETTLE_S
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is JobState.FAILED
    assert str(record.reason) == (
        "the script failed on node n0: exit code 1: ValueError: no such file; trying again would not mend it. "
        "Mend the script (ringweave logs text --node n0), then ringweave retry text."
    )
    assert [known.state for known in record.nodes] == [NodeState.FAILED, NodeState.STOPPED]


def test_an_exit_code_is_not_believed_while_a_first_cause_may_show_up() -> None:
    """Its peer was killed and it raises; the place tells of the peer a second later."""
    place = running(DELETE, DELETE, DELETE)
    place.groups[0, 1] = replace(
        place.groups[0, 1], phase=Phase.FAILED, cause=Cause.PROGRAM, exit_code=1, ended_s=place.clock_s
    )
    found = lives.look(place)
    assert found[-1] == actions.Wake(at_s=place.clock_s + SETTLE_S)
    lives.settle(place)
    assert record_of(place).reason.code == "FindingCause"
    place.clock_s += 1
    place.end((1, 1), Cause.PLACE, "its machine is gone")
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is None
    assert [known.retries for known in record.nodes] == [0, 1, 0]
    assert record.nodes[0].ended == Ended(attempt=1, cause=Cause.PEER, charged=False, text="exit code 1", exit_code=1)


def test_where_all_blame_another_the_first_one_pays() -> None:
    place = running(DELETE, DELETE, DELETE)
    for node, ended_s in ((0, 5.0), (1, 4.5), (2, 4.7)):
        place.groups[node, 1] = replace(
            place.groups[node, 1], phase=Phase.INTERRUPTED, ended_s=ended_s, text="lost its peer"
        )
    lives.settle(place)
    assert [known.retries for known in record_of(place).nodes] == [0, 1, 0]
    assert record_of(place).nodes[1].ended is not None


def interrupted(place: FakePlace, *nodes: int) -> None:
    """These lose a peer, one after the other; the others look as before."""
    for order, node in enumerate(nodes):
        ended = {"phase": Phase.INTERRUPTED, "ended_s": place.clock_s + order, "text": "lost its peer"}
        place.groups[node, 1] = replace(place.groups[node, 1], **ended)
    place.clock_s += SETTLE_S + len(nodes)


def test_nobody_pays_for_a_lost_node_that_still_looks_alive() -> None:
    """Its machine is gone, and its place tells of that a minute later."""
    place = running(DELETE, DELETE, DELETE, max_retries=0)
    place.job = replace(
        place.job,
        request=replace(
            place.job.request,
            nodes=tuple(
                replace(node, max_retries=int(index == 1)) for index, node in enumerate(place.job.request.nodes)
            ),
        ),
    )
    interrupted(place, 0, 2)
    assert lives.look(place)[1:] == [actions.Regather(node=node, attempt=1, round=2) for node in (0, 1, 2)]
    lives.settle(place)
    record = record_of(place)
    assert ([known.retries for known in record.nodes], record.round) == ([0, 0, 0], 2)
    assert str(record.reason).startswith(
        "node n0 lost another (lost its peer), which has not answered yet; waits for nodes n0, n1, n2 to be ready"
    )
    for node in (0, 2):
        place.step((node, 1))
    place.groups[1, 1] = replace(place.groups[1, 1], phase=Phase.RUNNING, round=1)
    lives.settle(place)
    place.clock_s += 60.0
    place.groups[1, 1] = replace(place.groups[1, 1], phase=Phase.FAILED, cause=Cause.PLACE, text="its machine is gone")
    lives.settle(place)
    record = record_of(place)
    assert ([known.retries for known in record.nodes], record.round, record.blame) == ([0, 1, 0], 3, None)
    assert record.round_cause == "node n1 failed (its machine is gone), retry 1 of 1"


def test_where_all_answer_after_all_the_first_one_that_blamed_another_pays() -> None:
    place = running(DELETE, DELETE, DELETE)
    interrupted(place, 2, 0)
    lives.settle(place)
    assert record_of(place).blame is not None
    for node in (0, 1, 2):
        lives.settle(place)
        place.step((node, 1))
    lives.settle(place)
    record = record_of(place)
    assert ([known.retries for known in record.nodes], record.round, record.blame) == ([0, 0, 1], 3, None)
    assert place.gate == 1, "the round of which it is settled is not run"
    for _ in range(4):
        place.pass_time()
        lives.settle(place)
    assert record_of(place).state is JobState.RUNNING
    assert [known.attempt for known in record_of(place).nodes] == [1, 1, 2]


def test_what_was_not_paid_is_forgotten_with_the_round() -> None:
    for verb in ("suspend", "stop"):
        place = running(DELETE, DELETE, DELETE)
        interrupted(place, 0)
        lives.settle(place)
        lives.ask(place, verb)
        for _ in range(3):
            place.pass_time()
            lives.settle(place)
        assert [known.retries for known in record_of(place).nodes] == [0, 0, 0]
    place = running(DELETE, DELETE)
    interrupted(place, 0)
    lives.settle(place)
    assert advancing.regathered(record_of(place), "its allocation was taken back").blame is None


def test_two_nodes_that_fail_at_once_are_charged_one_each_in_one_round() -> None:
    place = running(DELETE, DELETE, DELETE)
    place.end((0, 1), Cause.PLACE, "power cut")
    place.groups[2, 1] = replace(place.groups[2, 1], phase=Phase.FAILED, cause=Cause.PLACE, text="power cut")
    lives.settle(place)
    record = record_of(place)
    assert ([known.retries for known in record.nodes], record.round) == ([1, 0, 1], 2)
    assert record.round_cause == "node n0 failed (power cut), retry 1 of 1, and 1 more nodes failed"


@pytest.mark.parametrize(
    ("cause", "left"),
    [(None, {(0, 1)}), (Cause.PROGRAM, {(0, 1), (1, 1)})],
)
def test_each_node_is_kept_or_deleted_by_its_own_policy(cause: Cause | None, left: set) -> None:
    place = running(KEEP, ON_FAILURE, DELETE)
    if cause is None:
        lives.end_all(place)
    else:
        place.end((1, 1), cause)
        place.clock_s += SETTLE_S
    for _ in range(3):
        lives.settle(place)
        place.pass_time()
    assert set(place.groups) == left
    assert not any(group.phase.is_alive for group in place.groups.values())
    assert place.config


def test_a_ttl_ends_to_the_second_and_takes_everything() -> None:
    place = running(KEEP, DELETE, ttl_s=100.0)
    place.clock_s = 50.25
    lives.end_all(place)
    place.clock_s = 51.0
    lives.settle(place)
    assert lives.look(place)[-1] == actions.Wake(at_s=150.25)
    place.clock_s = 150.2
    assert kinds(place) == ["Wake"]
    place.clock_s = 150.25
    assert kinds(place)[:2] == ["SaveRecord", "DeleteGroup"]
    for _ in range(3):
        lives.settle(place)
        place.pass_time()
    assert (place.job, place.groups, place.config) == (None, {}, False)


def test_an_end_that_is_seen_only_after_the_ttl_removes_the_job_at_once() -> None:
    place = running(ttl_s=10.0)
    lives.end_all(place)
    place.clock_s += 60.0
    saved, *rest = lives.look(place)
    assert saved.record.state is JobState.DELETING
    assert rest == [actions.DeleteGroup(node=0, attempt=1), actions.DeleteGroup(node=1, attempt=1)]


def test_what_is_not_ours_is_removed() -> None:
    place = running()
    stray = Group(node=7, attempt=1, round=1, phase=Phase.RUNNING)
    old = Group(node=0, attempt=9, round=1, phase=Phase.RUNNING)
    observed = replace(place.observe(), groups=(*place.observe().groups, stray, old))
    assert reconciling.reconcile(place.job, observed, place.clock_s) == (
        actions.DeleteGroup(node=7, attempt=1),
        actions.DeleteGroup(node=0, attempt=9),
    )


def test_progress_of_each_node_is_in_its_record() -> None:
    place = running()
    place.groups[0, 1] = replace(place.groups[0, 1], iterations=40, last_loss=2.5)
    lives.settle(place)
    assert (record_of(place).nodes[0].iterations, record_of(place).nodes[0].last_loss) == (40, 2.5)
    assert record_of(place).nodes[1].iterations is None


def test_a_suspended_job_makes_nothing_and_says_how_to_go_on() -> None:
    place = FakePlace(job=lives.a_job(suspend=True))
    lives.settle(place)
    assert (place.groups, place.config) == ({}, False)
    assert str(record_of(place).reason) == "it is suspended, nothing of it runs. ringweave resume text."


def test_a_pending_group_says_what_its_place_says() -> None:
    place = FakePlace(job=lives.a_job())
    lives.settle(place)
    place.groups[1, 1] = replace(place.groups[1, 1], text="0/3 nodes have 3 free GPUs")
    place.step((0, 1))
    lives.settle(place)
    assert str(record_of(place).reason).startswith(
        "waits for a place for node n1: 0/3 nodes have 3 free GPUs. Free room"
    )


def test_nothing_is_done_twice_while_groups_are_on_their_way_out() -> None:
    place = running()
    lives.ask(place, "stop")
    lives.settle(place)
    assert [group.leaving for group in place.groups.values()] == [True, True]
    assert record_of(place).state is JobState.ENDING
    assert kinds(place) == []


def test_an_empty_place_of_a_deleted_job_is_forgotten_at_once() -> None:
    place = FakePlace(job=lives.a_job(suspend=True))
    lives.ask(place, "delete")
    assert kinds(place) == ["SaveRecord", "Forget"]
    assert Observed() == place.observe()


def test_a_place_that_was_taken_away_begins_a_round_and_an_end_stays_an_end():
    record = lives.a_job().record
    again = advancing.regathered(record, "its allocation was taken back")
    assert (again.round, again.round_cause) == (record.round + 1, "its allocation was taken back")
    ended = replace(record, outcome=JobState.STOPPED)
    assert advancing.regathered(ended, "its allocation was taken back") == ended
