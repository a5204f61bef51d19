"""Nodes that look alive and stand still: when they count as lost, and that no job waits for them for ever."""

from dataclasses import replace

import pytest

from ringweave.jobs import records
from ringweave.jobs.failures import EVICTED_HANG, RESTART_HANG, SETTLE_S
from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.jobs.states import JobState, NodeState
from tests.fakes.job_runtime import FakeJobRuntime
from tests.jobs.life import lives
from tests.jobs.life.lives import DELETE, KEEP, record_of, running

THREE = (DELETE,) * 3
STANDS_STILL = "it hangs, or is cut off"


def change(place: FakeJobRuntime, key: tuple[int, int], **changes) -> None:
    place.groups[key] = replace(place.groups[key], **changes)


def retries(place: FakeJobRuntime) -> list[int]:
    return [known.retries for known in record_of(place).nodes]


def members_known(place: FakeJobRuntime, *, node: int, out: bool = True, by: int = 0) -> None:
    """Agents have told who their workers are, and that of this node the workers of `node` are out of the membership."""
    for each, attempt in list(place.groups):
        names = tuple(f"{3 * each + local}.{attempt - 1}" for local in range(3))
        change(place, (each, attempt), members=names)
    lost = place.groups[node, 1].members if out else ()
    change(place, (by, 1), generation=(1, 2), evicted=lost)


def test_a_node_whose_workers_were_put_out_and_do_not_end_is_replaced_while_the_others_train() -> None:
    place = running(*THREE, least=3)
    members_known(place, node=1)
    lives.settle(place)
    assert lives.look(place) == [records.RequeueAt(at_s=place.clock_s + EVICTED_HANG.limit_s)]
    place.clock_s += EVICTED_HANG.limit_s - 0.1
    lives.settle(place)
    assert retries(place) == [0, 0, 0], "it may wake, and end by itself"
    place.clock_s += 0.1
    _, *rest = lives.look(place)
    assert rest == [records.DeleteGroup(node=1, attempt=1)]
    lives.settle(place)
    record = record_of(place)
    assert (record.state, record.round, retries(place)) == (JobState.RUNNING, 1, [0, 1, 0])
    assert record.reason is not None
    assert record.reason.code == "Degraded"
    assert STANDS_STILL in record.reason.text
    for _ in range(4):
        place.pass_time()
        lives.settle(place)
    record = record_of(place)
    assert (record.reason, record.round, place.broken_rules) == (None, 1, [])
    assert [known.attempt for known in record.nodes] == [1, 2, 1]
    place.clock_s += 2 * EVICTED_HANG.limit_s
    lives.settle(place)
    assert retries(place) == [0, 1, 0], "its next attempt has other members, and pays nothing"


def test_who_is_in_the_newest_epoch_is_in_whatever_was_told_of_older_ones() -> None:
    """A coordinator that was cut off may hold members for lost with which the other one goes on."""
    place = running(*THREE, least=3)
    members_known(place, node=1, by=0)
    change(place, (2, 1), generation=(2, 1), evicted=())
    lives.settle(place)
    assert lives.look(place) == []
    place.clock_s += 10 * EVICTED_HANG.limit_s
    lives.settle(place)
    assert (record_of(place).reason, retries(place)) == (None, [0, 0, 0])


def test_who_comes_back_in_time_is_not_counted_from_before() -> None:
    place = running(*THREE, least=3)
    members_known(place, node=1)
    lives.settle(place)
    place.clock_s += EVICTED_HANG.limit_s / 2
    members_known(place, node=1, out=False)
    lives.settle(place)
    members_known(place, node=1)
    lives.settle(place)
    place.clock_s += EVICTED_HANG.limit_s / 2
    lives.settle(place)
    assert retries(place) == [0, 0, 0]


@pytest.mark.parametrize("policy", [DELETE, KEEP])
def test_a_job_does_not_wait_for_a_node_that_hangs_when_the_others_have_finished(policy) -> None:
    place = running(DELETE, policy, DELETE, least=3)
    members_known(place, node=1)
    lives.settle(place)
    place.end_group((0, 1))
    place.end_group((2, 1))
    lives.settle(place)
    assert record_of(place).outcome is None
    place.clock_s += EVICTED_HANG.limit_s
    _, *rest = lives.look(place)
    kinds = {DELETE: records.DeleteGroup(node=1, attempt=1), KEEP: records.StopGroup(node=1, attempt=1)}
    assert kinds[policy] in rest
    change(place, (1, 1), is_terminating=True)  # told, and deaf
    lives.settle(place)
    record = record_of(place)
    assert (record.state, record.ended_s, retries(place)) == (JobState.SUCCEEDED, place.clock_s, [0, 0, 0])
    assert record.reason is not None
    assert (record.reason.code, record.reason.text) == (
        "CompletedWithoutNodes",
        f"all nodes but node n1 finished their iterations: {EVICTED_HANG.text}",
    )
    told = [(known.state, known.reason.code if known.reason else "") for known in record.nodes]
    assert told == [
        (NodeState.SUCCEEDED, "NodeCompleted"),
        (NodeState.STOPPED, "NodeAbandoned"),
        (NodeState.SUCCEEDED, "NodeCompleted"),
    ]
    assert place.event_keys.count("node1/attempt1/ended") == 1
    lives.ask(place, "delete")
    lives.settle(place)
    assert record_of(place).state is JobState.DELETING, "its name is free when nothing of it can run any more"
    for _ in range(3):
        place.pass_time()
        lives.settle(place)
    assert place.job is None


def test_a_script_that_goes_on_after_training_is_waited_for() -> None:
    """It is a member until its process ends: as the first worker, which saves or tests what all have trained."""
    place = running(*THREE, least=3)
    members_known(place, node=1, out=False, by=1)
    place.end_group((1, 1))
    place.end_group((2, 1))
    for _ in range(5):
        place.clock_s += 100 * EVICTED_HANG.limit_s
        lives.settle(place)
    assert (record_of(place).state, record_of(place).outcome) == (JobState.RUNNING, None)
    place.end_group((0, 1))
    lives.settle(place)
    assert record_of(place).outcome is JobState.SUCCEEDED


@pytest.mark.parametrize("least", [None, 3])
def test_who_is_called_back_to_the_gate_and_does_not_answer_is_lost(least: int | None) -> None:
    """As where a machine hangs that has the coordinator and half of the members: the others begin another round."""
    place = running(DELETE, DELETE, least=least)
    change(place, (1, 1), phase=GroupPhase.INTERRUPTED, ended_s=place.clock_s, text="MembershipError: job is over")
    place.clock_s += SETTLE_S
    lives.settle(place)
    change(place, (0, 1), phase=GroupPhase.RUNNING, round=1, requested_round=2)  # told, and deaf
    place.advance_group((1, 1))
    lives.settle(place)
    assert (record_of(place).round, retries(place)) == (2, [0, 0])
    assert lives.look(place) == [records.RequeueAt(at_s=place.clock_s + RESTART_HANG.limit_s)]
    place.clock_s += RESTART_HANG.limit_s
    lives.settle(place)
    record = record_of(place)
    assert (record.round, retries(place)) == (3, [1, 0])
    assert record.round_cause == f"node n0 failed ({RESTART_HANG.text}), retry 1 of 1"
    for _ in range(5):
        place.pass_time()
        lives.settle(place)
    assert (record_of(place).state, place.broken_rules) == (JobState.RUNNING, [])


def test_one_that_hangs_again_and_again_fails_the_job_with_a_reason() -> None:
    place = running(DELETE, DELETE, max_retries=0)
    place.end_group((1, 1), EndCause.PEER, "lost its peer")
    change(place, (0, 1), phase=GroupPhase.RUNNING)
    place.clock_s += SETTLE_S
    lives.settle(place)
    change(place, (0, 1), phase=GroupPhase.RUNNING, round=1, requested_round=2)
    lives.settle(place)
    place.clock_s += RESTART_HANG.limit_s
    lives.settle(place)
    record = record_of(place)
    assert record.outcome is JobState.FAILED
    assert record.outcome_reason is not None
    assert record.outcome_reason.text == f"node n0 failed more often than max_retries allows: {RESTART_HANG.text}"
