from dataclasses import replace

import pytest

from ringweave.launcher.outcome import WorkerFailure
from ringweave.launcher.restarts import LEFT_EXIT_CODE, RunRestartPolicy, SlotExit, WorkerRestartPolicy
from ringweave.launcher.workers import WorkerExit

FENCED = "ringweave.errors.MembershipError: this worker is no member any more: no heartbeat came in time."
OVER = "ringweave.errors.MembershipError: job is over: all workers are done."


def ended(signal_name: str | None = None, code: int | None = None, line: str = "", lived_s: float = 1000.0) -> SlotExit:
    last = ("Traceback (most recent call last):", line) if line else ()
    found = WorkerExit(exit_code=code, signal_name=signal_name, time_s=0.0, was_stopped=False)
    return SlotExit(death=WorkerFailure(global_rank=0, node="a0", exit=found, last_lines=last), lifetime_s=lived_s)


def test_who_is_killed_comes_back_for_ever() -> None:
    restarts = WorkerRestartPolicy()
    for number in range(20):
        assert restarts.decide(2, ended("SIGKILL"), 100.0 * number) == "again"
        assert restarts.take_due(100.0 * number + 0.9) == []
        assert restarts.take_due(100.0 * number + 1.1) == [2]
        assert not restarts.pending


def test_who_dies_again_at_once_waits_longer_but_not_for_ever() -> None:
    restarts, delays_s = WorkerRestartPolicy(), []
    for _ in range(9):
        restarts.decide(0, ended("SIGKILL", lived_s=1.0), 0.0)
        delays_s.append(restarts.pending[0])
        restarts.take_due(1e9)
    assert delays_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_where_spares_wait_the_first_delay_is_none_and_later_ones_are_as_ever() -> None:
    restarts, delays_s = WorkerRestartPolicy(first_delay_s=0.0), []
    for lived_s in (1.0, 1.0, 1.0, 1000.0, 1.0, 1.0):
        restarts.decide(0, ended("SIGKILL", lived_s=lived_s), 0.0)
        delays_s.append(restarts.pending[0])
        restarts.take_due(1e9)
    assert delays_s == [0.0, 2.0, 4.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("lived_s", "has_trained", "is_soon"),
    [(19.0, True, True), (21.0, True, False)] + [(lived_s, False, lived_s < 60.0) for lived_s in (21.0, 59.0, 61.0)],
)
def test_a_life_that_was_worth_its_start_did_not_end_soon(lived_s: float, has_trained: bool, is_soon: bool) -> None:
    """Where faults are frequent, those who come back must not be fewer and fewer."""
    restarts, how = WorkerRestartPolicy(), replace(ended("SIGKILL", lived_s=lived_s), has_trained=has_trained)
    for _ in range(4):
        restarts.decide(0, how, 0.0)
    assert restarts.pending[0] == (8.0 if is_soon else 1.0)


OWN = ended(code=1, line="torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", lived_s=20.0)
OTHERS_TRAIN = {1: True, 2: True}


def test_a_slot_that_fails_by_itself_three_times_in_a_row_is_given_up_while_others_train() -> None:
    restarts = WorkerRestartPolicy()
    assert [restarts.decide(0, OWN, 0.0, OTHERS_TRAIN) for _ in range(3)] == ["again", "again", "give up"]
    assert restarts.give_up_reason(0) == "it failed by itself 3 times in a row"
    restarts = WorkerRestartPolicy()
    verdicts = [restarts.decide(0, each, 0.0, OTHERS_TRAIN) for each in (OWN, OWN, ended("SIGKILL"), OWN, OWN)]
    assert verdicts == ["again"] * 5, "another kind of death in between"


def test_who_has_trained_for_long_begins_a_row_anew() -> None:
    """A device that fails once a day was the end of the training on the third day."""
    restarts, once_a_day = WorkerRestartPolicy(), replace(OWN, lifetime_s=86400.0)
    assert [restarts.decide(0, once_a_day, 0.0, OTHERS_TRAIN) for _ in range(10)] == ["again"] * 10
    restarts, without_a_step = WorkerRestartPolicy(), replace(OWN, lifetime_s=86400.0, has_trained=False)
    assert [restarts.decide(0, without_a_step, 0.0, OTHERS_TRAIN) for _ in range(3)] == ["again", "again", "give up"]


def test_a_mistake_in_the_script_which_ends_all_fails_the_run_with_the_last_of_them() -> None:
    restarts = WorkerRestartPolicy()
    assert restarts.decide(0, OWN, 0.0, {1: True, 2: True}) == "again"
    assert restarts.decide(1, OWN, 0.0, {0: False, 2: True}) == "again"
    assert restarts.decide(2, OWN, 0.0, {0: False, 1: False}) == "fail"


@pytest.mark.parametrize(
    ("before", "verdict"),
    [(ended("SIGKILL"), "again"), (ended(code=1, line=FENCED), "again"), (ended(code=LEFT_EXIT_CODE), "fail")],
)
def test_where_another_slot_did_not_fail_by_itself_it_is_started_first(before: SlotExit, verdict: str) -> None:
    """Whether the job is over without those who had its state, the coordinator says; who was asked to go stays away."""
    restarts = WorkerRestartPolicy()
    restarts.decide(1, before, 0.0, {0: True})
    assert restarts.decide(0, OWN, 0.0, {1: False}) == verdict


def test_the_last_slot_fails_the_run_though_others_were_given_up_for_another_reason() -> None:
    restarts = WorkerRestartPolicy()
    for _ in range(10):
        restarts.decide(1, replace(ended("SIGSEGV"), was_member=False), 0.0, {0: True})
    assert restarts.give_up_reason(1) == "it died before it joined the others too often"
    assert restarts.decide(0, OWN, 0.0, {1: False}) == "fail"


@pytest.mark.parametrize("how", [ended("SIGSEGV", lived_s=1.0), ended(code=1, line=FENCED, lived_s=1.0)])
def test_who_dies_ten_times_in_a_row_before_it_is_a_member_is_given_up(how: SlotExit) -> None:
    fruitless = replace(how, was_member=False)
    restarts = WorkerRestartPolicy()
    assert [restarts.decide(0, fruitless, 0.0) for _ in range(10)] == [*["again"] * 9, "give up"]
    restarts.take_due(1e9)
    assert not restarts.pending
    restarts = WorkerRestartPolicy()
    verdicts = [restarts.decide(0, each, 0.0) for each in (*[fruitless] * 9, how, *[fruitless] * 9)]
    assert verdicts == ["again"] * 19, "it was a member in between"


def test_a_slot_that_cannot_be_started_waits_longer_each_time_and_is_given_up() -> None:
    restarts, delays_s = WorkerRestartPolicy(), []
    for _ in range(9):
        assert restarts.record_start_failure(0, 0.0) == "again"
        delays_s.append(restarts.pending[0])
        assert restarts.take_due(1e9) == [0]
    assert delays_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert restarts.record_start_failure(0, 0.0) == "give up"
    assert not restarts.pending


def test_who_comes_to_train_in_between_begins_the_row_of_starts_that_failed_anew() -> None:
    restarts = WorkerRestartPolicy()
    for _ in range(3):
        assert [restarts.record_start_failure(0, 0.0) for _ in range(9)] == ["again"] * 9
        assert restarts.decide(0, ended("SIGKILL"), 0.0) == "again"


def test_a_slot_that_cannot_be_started_is_not_one_that_failed_by_itself() -> None:
    """It may come back with what the others have lost by a mistake of theirs: the run has not failed yet."""
    restarts = WorkerRestartPolicy()
    assert restarts.record_start_failure(1, 0.0) == "again"
    assert restarts.decide(0, OWN, 0.0, {1: False}) == "again"


def test_who_was_put_out_comes_back() -> None:
    restarts = WorkerRestartPolicy()
    assert [restarts.decide(0, ended(code=1, line=FENCED), 0.0, OTHERS_TRAIN) for _ in range(5)] == ["again"] * 5


def test_who_has_left_or_finished_rests_and_so_does_who_comes_too_late() -> None:
    restarts = WorkerRestartPolicy()
    assert restarts.decide(0, ended(code=LEFT_EXIT_CODE), 0.0) == "rest"
    assert restarts.decide(1, ended("SIGKILL"), 0.0) == "again"
    assert restarts.decide(2, SlotExit(death=None, lifetime_s=50.0), 0.0) == "rest"
    assert restarts.take_due(1e9) == [], "the training is over"
    assert restarts.decide(3, ended("SIGKILL"), 0.0) == "rest"


def test_when_a_worker_says_that_the_job_is_over_nobody_is_started_any_more() -> None:
    restarts = WorkerRestartPolicy()
    assert restarts.decide(1, ended("SIGKILL"), 0.0) == "again"
    assert restarts.decide(0, ended(code=1, line=OVER), 0.5) == "rest"
    assert restarts.take_due(1e9) == []
    assert restarts.decide(2, ended("SIGSEGV"), 1.0) == "rest"


def death(signal_name: str | None = None) -> WorkerFailure:
    found = ended(signal_name, None if signal_name else 1).death
    assert found is not None
    return found


def test_a_run_that_is_killed_before_it_begins_is_not_started_again_for_ever() -> None:
    attempts = RunRestartPolicy()
    whys = [attempts.stop_reason(death("SIGSEGV"), 3.0) for _ in range(10)]
    assert whys == [*[""] * 9, "10 attempts in a row ended within 60 s each"]
    attempts = RunRestartPolicy()
    assert not any(attempts.stop_reason(death("SIGKILL"), 61.0 if number % 9 == 8 else 3.0) for number in range(40))


def test_a_run_whose_script_fails_before_it_begins_is_tried_three_times() -> None:
    attempts = RunRestartPolicy()
    whys = [attempts.stop_reason(each, 100.0) for each in (death(), death("SIGKILL"), death(), death())]
    assert whys == ["", "", "", "3 attempts ended with an exception of the script"]
