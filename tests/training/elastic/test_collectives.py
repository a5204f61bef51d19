"""Collectives of scripts in real elastic jobs: deaths, workers that join, and scripts that disagree."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import effort
from tests.fakes.elastic_job import ElasticJob
from tests.training.elastic import collective_functions
from tests.training.elastic.elastic_functions import HIDDEN, WIDE

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

NUM_KILLS, NUM_WORKERS = 6, 3


def said(job: ElasticJob, member: str, word: str) -> list[Any]:
    return [message for message, _ in job.messages(member) if message[0] == word]


def test_a_script_that_logs_by_an_allreduce_in_every_step_survives_kills_at_random_moments(tmp_path: Path) -> None:
    """Also of the first member. Each is started again, replays, and logs what the others logged."""
    rng, stop_file = random.Random(7), tmp_path / "stop"
    with ElasticJob(collective_functions.log_in_every_step, NUM_WORKERS, str(stop_file), 0.01) as job:
        present = [f"{slot}.0" for slot in range(NUM_WORKERS)]
        for _ in range(NUM_KILLS):
            for member in present:
                step = max((said[1] for said, _ in job.messages(member) if said[0] == "logged"), default=0)
                job.wait_message(member, lambda message, after=step: message[:1] == ("logged",) and message[1] > after)
            time.sleep(rng.random() / 5)
            victim = present.pop(rng.randrange(len(present)))
            job.send_signal(victim, signal.SIGKILL)
            slot, _, incarnation = victim.partition(".")
            present.append(job.start_worker(int(slot), int(incarnation) + 1))
            job.wait_message(present[-1], lambda message: message[0] == "logged")
        stop_file.touch()
        outcomes = {member: job.outcome(member) for member in present}
        assert [each.error for each in outcomes.values()] == [""] * NUM_WORKERS
        assert len({tuple(each.value) for each in outcomes.values()}) == 1, "parameters, bit by bit"
        for member in job.members:
            job.read_messages(member)
        logged: dict[int, set[Any]] = {}
        for member in job.members:
            steps = [message[1] for message in said(job, member, "logged")]
            assert steps == list(range(steps[0], steps[0] + len(steps))), "each step once"
            for message in said(job, member, "logged"):
                logged.setdefault(message[1], set()).add(message[2:])
        assert {len(values) for values in logged.values()} == {1}, "the same value on all"
        assert sorted(logged) == list(range(1, max(logged) + 1))
        for member in job.members:
            slot, _, incarnation = member.partition(".")
            name = f"run of 0{'+' * int(incarnation)}" if slot == "0" else "run of 0"
            assert said(job, member, "began") == [("began", name)], "also on those that joined; a source has its own"


@pytest.mark.parametrize("victim", ["0.0", "2.0"])
def test_every_kind_of_collective_has_the_values_of_those_that_took_part(victim: str) -> None:
    with ElasticJob(collective_functions.call_all, 3, 6, victim, 4) as job:
        left = [member for member in job.members if member != victim]
        outcomes = [job.outcome(member) for member in left]
        assert [each.error for each in outcomes] == ["", ""]
        first, second = (said(job, member, "found")[0][1] for member in left)
        members = first.pop("members"), second.pop("members")
        own = [float(member[0]) + 1 for member in left]
        for found in (first, second):
            for dtype in ("torch.float64", "torch.bfloat16", "torch.int64"):
                assert found[f"SUM {dtype}"] == [sum(own)]
                mean = sum(own) / 2
                assert found[f"AVG {dtype}"] == [int(mean) if dtype == "torch.int64" else mean]
                assert found[f"MAX {dtype}"] == [max(own)]
                assert found[f"MIN {dtype}"] == [min(own)]
                assert found[f"PRODUCT {dtype}"] == [own[0] * own[1]]
            assert found["flag"] is (victim != "0.0")
            assert found["asynchronous"] == found["functional"] == sum(own)
            assert {tuple(row) for row in found["rows"]} == {(each, -each) for each in own}
            assert set(found["table"]) == set(own)
            assert {each["own"] for each in found["objects"]} == set(own)
            assert found["broadcast"] in own
            assert found["texts"] == [f"of {found['broadcast']}"]
        assert members
        for outcome in outcomes:
            assert outcome.value["rows"] == [[each, -each] for each in own], "by rank, once all know who is left"
            assert outcome.value["members"] == tuple(left)


@pytest.mark.parametrize(
    ("victim", "moment"), effort.alternating(["0.0", "1.0"], ["header", "rows", "last byte", "committed"])
)
def test_a_death_at_any_moment_of_the_commit_leaves_the_same_value_on_all(victim: str, moment: str) -> None:
    with ElasticJob(collective_functions.die_in, 3, victim, moment) as job:
        left = [member for member in job.members if member != victim]
        outcomes = [job.outcome(member) for member in left]
        assert [each.error for each in outcomes] == ["", ""]
        assert [each.value for each in outcomes] == [2.0, 2.0]
        for member in left:
            job.read_messages(member)
        totals = [said(job, member, "total") for member in left]
        assert totals[0] == totals[1]
        steps = [step for _, step, _ in totals[0]]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) in (8, 9), "one more if the lost member had drawn samples that the others compute"
        third = totals[0][2][2]
        possible = {"last byte": (2.0, 3.0), "committed": (3.0,)}.get(moment, (2.0,))
        assert third in possible, "whether all others have its input decides"


def test_a_worker_that_joins_gets_the_values_that_the_others_had() -> None:
    with ElasticJob(collective_functions.call_all, 2, 20, "", 18, 1.0) as job:
        job.wait_message("0.0", lambda said: said == ("done", 2))
        job.start_worker(2, 0)
        outcomes = [job.outcome(member) for member in job.members]
        assert [each.error for each in outcomes] == [""] * 3
        found = [said(job, member, "found")[0][1] for member in job.members]
        assert found[1] == found[0]
        last = [each.value for each in outcomes]
        assert last[1] == last[0]


@pytest.mark.parametrize("victim_is_extra", [True, False])
def test_scripts_that_disagree_are_told_so(victim_is_extra: bool) -> None:
    with ElasticJob(collective_functions.differ, 2, victim_is_extra, HIDDEN) as job:
        errors = [job.outcome(member).error for member in job.members]
    for error in errors:
        assert "operation of worker 1.0: " in error, error
        assert "Call the same collectives, in the same order and with the same sizes, on all workers" in error


def test_scripts_that_disagree_beside_messages_of_a_backward_pass_are_told_so() -> None:
    """Sums of two large buckets may come before anything by which members could compare what they are in."""
    with ElasticJob(collective_functions.differ, 3, True, WIDE) as job:
        errors = [job.outcome(member).error for member in job.members]
    for error in errors:
        assert "operation of worker 1.0: 'gradients', expected allreduce" in error, error


@pytest.mark.parametrize("is_large", [True, False])
def test_what_cannot_be_repeated_raises_on_all_and_training_continues(is_large: bool) -> None:
    with ElasticJob(collective_functions.lose_the_source, 3, is_large) as job:
        job.wait_message("0.0", lambda message: message == ("halts",))
        time.sleep(0.3)
        job.send_signal("0.0", signal.SIGKILL)
        outcomes = [job.outcome(member) for member in ("1.0", "2.0")]
        assert [each.error for each in outcomes] == ["", ""]
        texts = [each.value for each in outcomes]
        if is_large:
            assert all(texts), texts
        else:
            assert texts[0].startswith("broadcast: 'a source that was lost, or that is not the same on all"), texts
            assert texts[1] == texts[0]
