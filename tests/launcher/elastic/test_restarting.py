"""When a worker, a service or a whole run is started again, and when it is given up."""

from dataclasses import replace

import pytest

from ringweave.jobs.restart_policy import RestartPolicy
from ringweave.launcher.outcome import WorkerFailure
from ringweave.launcher.restarts import LEFT_EXIT_CODE, SlotExit, WorkerRestarts
from ringweave.launcher.workers import WorkerExit

FENCED = "ringweave.errors.MembershipError: this worker is no member any more: no heartbeat came in time."
OVER = "ringweave.errors.MembershipError: job is over: all workers are done."


def ended(signal_name: str | None = None, code: int | None = None, line: str = "", lived_s: float = 1000.0) -> SlotExit:
    last = ("Traceback (most recent call last):", line) if line else ()
    found = WorkerExit(exit_code=code, signal_name=signal_name, time_s=0.0, was_stopped=False)
    return SlotExit(death=WorkerFailure(global_rank=0, node="a0", exit=found, last_lines=last), lifetime_s=lived_s)


def delays_s(policy: RestartPolicy, num_ends: int, lifetime_s: float, *, is_useful: bool = False) -> list[float | None]:
    found: list[float | None] = []
    for _ in range(num_ends):
        policy = policy.after_end(lifetime_s, 0.0, is_useful=is_useful)
        found.append(policy.due_s)
    return found


def test_what_ends_early_again_and_again_is_started_later_each_time_and_given_up_at_last() -> None:
    policy = RestartPolicy()
    assert delays_s(policy, 10, 0.1) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, None]
    for _ in range(10):
        assert not policy.has_given_up
        policy = policy.after_end(0.1, 0.0)
    assert policy.has_given_up
    assert not policy.is_due(1e9)
    assert delays_s(RestartPolicy(first_delay_s=1.5, max_failed_starts=3), 3, 0.1) == [1.5, 1.0, None]


def test_a_start_is_due_once() -> None:
    policy, found = RestartPolicy().after_end(3600.0, 5.0), []
    for now_s in (4.9, 5.0, 5.1):
        found.append(policy.is_due(now_s))
        policy = policy.starting_at(None) if found[-1] else policy
    assert found == [False, True, False]


@pytest.mark.parametrize(
    ("lifetime_s", "is_useful", "is_early"),
    [(9.0, True, True), (11.0, True, False), (11.0, False, True), (59.0, False, True), (61.0, False, False)],
)
def test_a_life_that_was_worth_its_start_did_not_end_early(lifetime_s: float, is_useful: bool, is_early: bool) -> None:
    """Where faults are frequent, those that come back must not be fewer and fewer."""
    assert delays_s(RestartPolicy(), 4, lifetime_s, is_useful=is_useful)[-1] == (4.0 if is_early else 0.0)
    policy = RestartPolicy()
    for _ in range(4):
        policy = policy.after_end(lifetime_s, 0.0, is_useful=is_useful)
    assert policy.num_failed_starts == (4 if is_early else 0)


def test_a_life_that_was_not_early_begins_the_row_anew() -> None:
    policy = RestartPolicy()
    for number in range(40):
        policy = policy.after_end(61.0 if number % 9 == 8 else 3.0, 0.0)
        assert not policy.has_given_up
    policy = policy.after_end(1.0, 0.0, has_joined=True)
    assert policy.num_failed_starts == 0


def test_what_fails_by_itself_three_times_in_a_row_is_given_up() -> None:
    policy = RestartPolicy()
    for is_own_failure in (True, True, False, True, True):
        policy = policy.after_end(100.0, 0.0, is_own_failure=is_own_failure)
        assert not policy.has_given_up
    policy = policy.after_end(0.0, 0.0)  # a start that failed is no end of a process
    policy = policy.after_end(86400.0, 0.0, is_own_failure=True)  # it never trained
    assert policy.has_given_up


def test_what_fails_once_a_day_is_started_for_ever() -> None:
    """A device that fails once a day was the end of the training on the third day."""
    policy = RestartPolicy()
    for _ in range(10):
        policy = policy.after_end(86400.0, 0.0, is_useful=True, is_own_failure=True)
        assert not policy.has_given_up


def test_who_is_killed_comes_back_for_ever() -> None:
    restarts = WorkerRestarts()
    for number in range(20):
        assert restarts.decide(2, ended("SIGKILL"), 100.0 * number) == "again"
        assert restarts.take_due(100.0 * number + 0.9) == []
        assert restarts.take_due(100.0 * number + 1.1) == [2]
        assert not restarts.pending


def test_where_spares_wait_the_first_delay_is_none() -> None:
    for first_delay_s in (0.0, 1.0):
        restarts = WorkerRestarts(first_delay_s=first_delay_s)
        restarts.decide(0, ended("SIGKILL"), 5.0)
        assert restarts.pending == {0: 5.0 + first_delay_s}


OWN = ended(code=1, line="torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", lived_s=20.0)
OTHERS_TRAIN = {1: True, 2: True}


def test_a_slot_that_fails_by_itself_three_times_in_a_row_is_given_up_while_others_train() -> None:
    restarts = WorkerRestarts()
    assert [restarts.decide(0, OWN, 0.0, OTHERS_TRAIN) for _ in range(3)] == ["again", "again", "give up"]
    assert restarts.give_up_reason(0) == "it failed by itself 3 times in a row"
    assert not restarts.pending


def test_a_mistake_in_the_script_which_ends_all_fails_the_run_with_the_last_of_them() -> None:
    restarts = WorkerRestarts()
    assert restarts.decide(0, OWN, 0.0, {1: True, 2: True}) == "again"
    assert restarts.decide(1, OWN, 0.0, {0: False, 2: True}) == "again"
    assert restarts.decide(2, OWN, 0.0, {0: False, 1: False}) == "fail"


@pytest.mark.parametrize(
    ("before", "verdict"),
    [(ended("SIGKILL"), "again"), (ended(code=1, line=FENCED), "again"), (ended(code=LEFT_EXIT_CODE), "fail")],
)
def test_where_another_slot_did_not_fail_by_itself_it_is_started_first(before: SlotExit, verdict: str) -> None:
    """Whether the job is over without those who had its state, the coordinator says; who was asked to go stays away."""
    restarts = WorkerRestarts()
    restarts.decide(1, before, 0.0, {0: True})
    assert restarts.decide(0, OWN, 0.0, {1: False}) == verdict


def test_the_last_slot_fails_the_run_though_others_were_given_up_for_another_reason() -> None:
    restarts = WorkerRestarts()
    for _ in range(10):
        restarts.decide(1, replace(ended("SIGSEGV"), was_member=False), 0.0, {0: True})
    assert restarts.give_up_reason(1) == "it died before it joined the others too often"
    assert restarts.decide(0, OWN, 0.0, {1: False}) == "fail"


@pytest.mark.parametrize("how", [ended("SIGSEGV", lived_s=1.0), ended(code=1, line=FENCED, lived_s=1.0)])
def test_who_dies_ten_times_in_a_row_before_it_is_a_member_is_given_up(how: SlotExit) -> None:
    fruitless = replace(how, was_member=False)
    restarts = WorkerRestarts()
    assert [restarts.decide(0, fruitless, 0.0) for _ in range(10)] == [*["again"] * 9, "give up"]
    restarts = WorkerRestarts()
    verdicts = [restarts.decide(0, each, 0.0) for each in (*[fruitless] * 9, how, *[fruitless] * 9)]
    assert verdicts == ["again"] * 19, "it was a member in between"


def test_a_slot_that_cannot_be_started_is_given_up() -> None:
    restarts = WorkerRestarts()
    assert [restarts.record_start_failure(0, 0.0) for _ in range(10)] == [*["again"] * 9, "give up"]
    assert not restarts.pending


def test_a_slot_that_cannot_be_started_is_not_one_that_failed_by_itself() -> None:
    """It may come back with what the others have lost by a mistake of theirs: the run has not failed yet."""
    restarts = WorkerRestarts()
    assert restarts.record_start_failure(1, 0.0) == "again"
    assert restarts.decide(0, OWN, 0.0, {1: False}) == "again"


def test_who_was_put_out_comes_back() -> None:
    restarts = WorkerRestarts()
    assert [restarts.decide(0, ended(code=1, line=FENCED), 0.0, OTHERS_TRAIN) for _ in range(5)] == ["again"] * 5


def test_who_has_left_or_finished_rests_and_so_does_who_comes_too_late() -> None:
    restarts = WorkerRestarts()
    assert restarts.decide(0, ended(code=LEFT_EXIT_CODE), 0.0) == "rest"
    assert restarts.decide(1, ended("SIGKILL"), 0.0) == "again"
    assert restarts.decide(2, SlotExit(death=None, lifetime_s=50.0), 0.0) == "rest"
    assert restarts.take_due(1e9) == [], "the training is over"
    assert restarts.decide(3, ended("SIGKILL"), 0.0) == "rest"


def test_when_a_worker_says_that_the_job_is_over_nobody_is_started_any_more() -> None:
    restarts = WorkerRestarts()
    assert restarts.decide(1, ended("SIGKILL"), 0.0) == "again"
    assert restarts.decide(0, ended(code=1, line=OVER), 0.5) == "rest"
    assert restarts.take_due(1e9) == []
    assert restarts.decide(2, ended("SIGSEGV"), 1.0) == "rest"
