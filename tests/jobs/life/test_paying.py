"""Whose failure it was, and which node pays a retry for it."""

from dataclasses import replace

import pytest

from ringweave.jobs import advance, records
from ringweave.jobs.failures import RESTART_HANG, SETTLE_S
from ringweave.jobs.records import AttemptEnd, EndCause, GroupPhase
from ringweave.jobs.states import JobState, NodeState
from tests.fakes.job_runtime import FakeJobRuntime
from tests.jobs.life import lives
from tests.jobs.life.lives import DELETE, record_of, running


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_the_budget_of_a_node_is_exact(max_retries: int) -> None:
    place = running(max_retries=max_retries)
    for attempt in range(1, max_retries + 1):
        place.end_group((1, attempt), EndCause.PLATFORM)
        for _ in range(5):
            lives.settle(place)
            place.pass_time()
        assert record_of(place).state is JobState.RUNNING
        assert record_of(place).nodes[1].retries == attempt
    place.end_group((1, max_retries + 1), EndCause.PLATFORM, "killed by SIGKILL")
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is JobState.FAILED
    assert record.reason is not None
    assert record.reason.code == "BackoffLimitExceeded"
    assert "node n1 failed more often than max_retries allows: killed by SIGKILL" in str(record.reason)
    assert [known.retries for known in record.nodes] == [0, max_retries]


def test_a_failure_of_the_script_is_not_tried_again_once_no_other_cause_can_come() -> None:
    place = running()
    place.end_group((0, 1), EndCause.PROGRAM, "exit code 1: ValueError: no such file")
    lives.settle(place)
    place.clock_s += SETTLE_S
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is JobState.FAILED
    assert str(record.reason) == (
        "the script failed on node n0: exit code 1: ValueError: no such file; a retry would not fix it. "
        "Fix the script (ringweave logs text --node n0), then ringweave retry text; "
        "a script without a directory was copied: ringweave delete text, and submit it again."
    )
    assert [known.state for known in record.nodes] == [NodeState.FAILED, NodeState.STOPPED]


def test_an_exit_code_is_not_believed_while_a_first_cause_may_show_up() -> None:
    """Its peer was killed and it raises; the place tells of the peer a second later."""
    place = running(DELETE, DELETE, DELETE)
    place.groups[0, 1] = replace(
        place.groups[0, 1], phase=GroupPhase.FAILED, cause=EndCause.PROGRAM, exit_code=1, ended_s=place.clock_s
    )
    found = lives.look(place)
    assert found[-1] == records.RequeueAt(at_s=place.clock_s + SETTLE_S)
    lives.settle(place)
    assert record_of(place).reason.code == "DeterminingCause"
    place.clock_s += 1
    place.end_group((1, 1), EndCause.PLATFORM, "its machine is gone")
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is None
    assert [known.retries for known in record.nodes] == [0, 1, 0]
    assert record.nodes[0].ended == AttemptEnd(
        attempt=1, cause=EndCause.PEER, charged=False, text="exit code 1", exit_code=1
    )


def test_where_all_blame_another_the_first_one_pays() -> None:
    place = running(DELETE, DELETE, DELETE)
    for node, ended_s in ((0, 5.0), (1, 4.5), (2, 4.7)):
        place.groups[node, 1] = replace(
            place.groups[node, 1], phase=GroupPhase.INTERRUPTED, ended_s=ended_s, text="lost its peer"
        )
    lives.settle(place)
    assert [known.retries for known in record_of(place).nodes] == [0, 1, 0]
    assert record_of(place).nodes[1].ended is not None


def test_who_still_started_the_round_that_another_node_ended_pays_nothing() -> None:
    place = running(DELETE, DELETE, DELETE)
    place.groups[2, 1] = replace(place.groups[2, 1], phase=GroupPhase.READY)
    place.end_group((1, 1), EndCause.PLATFORM, "its machine is gone")
    lives.settle(place)
    assert record_of(place).round == 2
    late = {"phase": GroupPhase.INTERRUPTED, "round": 1, "ended_s": place.clock_s, "text": "round 1 is over"}
    place.groups[2, 1] = replace(place.groups[2, 1], **late)
    lives.settle(place)
    for _ in range(4):
        place.pass_time()
        lives.settle(place)
    assert record_of(place).state is JobState.RUNNING
    assert [(known.retries, known.attempt) for known in record_of(place).nodes] == [(0, 1), (1, 2), (0, 1)]


def interrupted(place: FakeJobRuntime, *nodes: int) -> None:
    """These lose a peer, one after the other; the others look as before."""
    for order, node in enumerate(nodes):
        ended = {"phase": GroupPhase.INTERRUPTED, "ended_s": place.clock_s + order, "text": "lost its peer"}
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
    _, *rest, wake = lives.look(place)
    assert rest == [records.RestartGroup(node=node, attempt=1, round=2) for node in (0, 1, 2)]
    assert wake == records.RequeueAt(at_s=place.clock_s + RESTART_HANG.limit_s), "it may never answer"
    lives.settle(place)
    record = record_of(place)
    assert ([known.retries for known in record.nodes], record.round) == ([0, 0, 0], 2)
    assert str(record.reason).startswith(
        "node n0 lost another (lost its peer), which has not answered yet; waits for nodes n0, n1, n2 to be ready"
    )
    for node in (0, 2):
        place.advance_group((node, 1))
    place.groups[1, 1] = replace(place.groups[1, 1], phase=GroupPhase.RUNNING, round=1)
    lives.settle(place)
    place.clock_s += 60.0
    place.groups[1, 1] = replace(
        place.groups[1, 1], phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text="its machine is gone"
    )
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
        place.advance_group((node, 1))
    lives.settle(place)
    record = record_of(place)
    assert ([known.retries for known in record.nodes], record.round, record.blame) == ([0, 0, 1], 3, None)
    assert place.released_round == 1, "the round of which it is settled is not run"
    for _ in range(4):
        place.pass_time()
        lives.settle(place)
    assert record_of(place).state is JobState.RUNNING
    assert [known.attempt for known in record_of(place).nodes] == [1, 1, 2]


@pytest.mark.parametrize(
    "removed",
    [
        {"phase": GroupPhase.READY},
        {"phase": GroupPhase.READY, "is_terminating": True},
        {"phase": GroupPhase.RUNNING, "is_terminating": True},
        {"phase": GroupPhase.INTERRUPTED, "is_terminating": True},
    ],
)
def test_nobody_pays_for_a_node_that_is_being_removed_while_they_connect_to_it(removed: dict) -> None:
    """Its Pod was deleted by somebody: it stops to answer before its place says that it is gone."""
    place = running(DELETE, DELETE, DELETE)
    place.groups[1, 1] = replace(place.groups[1, 1], **removed, ended_s=place.clock_s + 1)
    interrupted(place, 0, 2)
    lives.settle(place)
    assert ([known.retries for known in record_of(place).nodes], record_of(place).round) == ([0, 0, 0], 2)
    place.lose_group((1, 1))
    for _ in range(6):
        lives.settle(place)
        place.pass_time()
    record = record_of(place)
    assert ([known.retries for known in record.nodes], record.state) == ([0, 1, 0], JobState.RUNNING)
    assert [known.attempt for known in record.nodes] == [1, 2, 1]


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
    assert advance.record_after_preemption(record_of(place), "its allocation was taken back").blame is None


def test_two_nodes_that_fail_at_once_are_charged_one_each_in_one_round() -> None:
    place = running(DELETE, DELETE, DELETE)
    place.end_group((0, 1), EndCause.PLATFORM, "power cut")
    place.groups[2, 1] = replace(place.groups[2, 1], phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text="power cut")
    lives.settle(place)
    record = record_of(place)
    assert ([known.retries for known in record.nodes], record.round) == ([1, 0, 1], 2)
    assert record.round_cause == "node n0 failed (power cut), retry 1 of 1, and 1 more nodes failed"


def blame_each_other(place: FakeJobRuntime) -> None:
    for key, group in place.groups.items():
        if group.phase is GroupPhase.RUNNING:
            place.groups[key] = replace(
                group, phase=GroupPhase.INTERRUPTED, ended_s=place.clock_s, text="lost its peer"
            )


def end_at_once(phase: GroupPhase, cause: EndCause | None = None):
    def happen(place: FakeJobRuntime) -> None:
        for key, group in place.groups.items():
            if key[0] == 1 and group.phase.is_alive:
                ended = {"phase": phase, "cause": cause, "ended_s": place.clock_s, "text": "no room on the disk"}
                place.groups[key] = replace(group, **ended)

    return happen


def vanish_once_seen(place: FakeJobRuntime) -> None:
    if place.job is not None and place.job.record.nodes[1].seen:
        for key in [key for key in place.groups if key[0] == 1]:
            place.lose_group(key)


@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [
        (blame_each_other, "BackoffLimitExceeded", "lost its peer"),
        (end_at_once(GroupPhase.FAILED, EndCause.PLATFORM), "BackoffLimitExceeded", "no room on the disk"),
        (end_at_once(GroupPhase.FAILED, EndCause.PEER), "BackoffLimitExceeded", "no room on the disk"),
        (end_at_once(GroupPhase.FAILED, None), "BackoffLimitExceeded", "no room on the disk"),
        (end_at_once(GroupPhase.STOPPED), "BackoffLimitExceeded", "no room on the disk"),
        (end_at_once(GroupPhase.FAILED, EndCause.PROGRAM), "NonZeroExitCode", "no room on the disk"),
        (vanish_once_seen, "BackoffLimitExceeded", "its worker group disappeared"),
    ],
)
def test_what_fails_the_same_way_every_time_comes_to_an_end_that_says_why(happens, code: str, said: str) -> None:
    place = FakeJobRuntime(job=lives.a_job((DELETE, DELETE, DELETE), max_retries=3))
    for _ in range(60):
        lives.settle(place)
        happens(place)
        lives.settle(place)
        place.pass_time()
    record = record_of(place)
    assert record.state is JobState.FAILED
    assert record.reason is not None
    assert (record.reason.code, said in record.reason.text) == (code, True)
    assert "ringweave retry text" in record.reason.hint
    assert len(place.created) <= 3 * (3 + 1), "no node gets more attempts than it may have"
