"""What the first member leaves, and who leaves it when the first one dies as soon as a reduction counts."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ringweave import telemetry
from ringweave.environment import WorkerEnvironment
from ringweave.planning.balancing import SampleAccount
from ringweave.training.elastic.accounting import EpochAccount
from ringweave.training.elastic.retained_reductions import Commit, ReductionRow
from ringweave.training.recorder import ElasticRecorder


@dataclass
class Job:
    """Members "0.0" and "1.0", of which the first that lives is the first."""

    path: Path
    living: list[str] = field(default_factory=lambda: ["0.0", "1.0"])

    def recorder(self, member: str) -> ElasticRecorder:
        return ElasticRecorder(WorkerEnvironment(events=self.path), lambda: self.living[0] == member)

    def said(self) -> list[tuple[str, int]]:
        """Kind of event, and which reduction or epoch it is about."""
        events = telemetry.read_events(self.path) if self.path.exists() else []
        return [(event["kind"], event.get("reduction", event.get("epoch"))) for event in events]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "events.jsonl")


def commit(number: int) -> Commit:
    """A reduction without the samples of somebody who was gone, after which another one is level."""
    rows = (ReductionRow(account=SampleAccount(num_samples=2), num_planned=3), ReductionRow(is_caught_up=True))
    return Commit(number=number, members=("0.0", "1.0"), rows=rows)


def complete(epoch: int) -> EpochAccount:
    expected, total, lost = (SampleAccount(num_samples=number) for number in (3, 2, 1))
    return EpochAccount(epoch=epoch, expected=expected, total=total, lost=lost)


def reduce(recorder: ElasticRecorder, number: int) -> None:
    recorder.reduction_committed()
    recorder.samples_lost(commit(number), 1)
    recorder.members_caught_up(commit(number), number)


def test_missing_samples_that_are_computed_next_are_told_with_their_number(job: Job) -> None:
    recorder = job.recorder("0.0")
    recorder.samples_recomputed(commit(3), 1)
    (event,) = telemetry.read_events(job.path)
    assert {key: event[key] for key in ("kind", "reduction", "members", "samples", "missing")} == {
        "kind": "samples_recomputed",
        "reduction": 3,
        "members": ["0.0", "1.0"],
        "samples": 2,
        "missing": 1,
    }


def test_the_first_member_writes_for_all(job: Job) -> None:
    for recorder in (job.recorder("0.0"), job.recorder("1.0")):
        reduce(recorder, 1)
        recorder.generation_begun()
        recorder.epoch_accounted(complete(0))
    assert job.said() == [("samples_lost", 1), ("members_caught_up", 1), ("samples_accounted", 0)]


def test_what_it_died_over_is_written_by_the_next_one_in_order(job: Job) -> None:
    next_one = job.recorder("1.0")
    reduce(next_one, 1)
    next_one.epoch_accounted(complete(0))
    job.living.pop(0)
    next_one.generation_begun()
    next_one.generation_begun()
    reduce(next_one, 2)
    lost = [("samples_lost", 1), ("members_caught_up", 1), ("samples_accounted", 0)]
    assert job.said() == [*lost, ("samples_lost", 2), ("members_caught_up", 2)]


def test_what_was_before_the_last_reduction_it_had_written_itself(job: Job) -> None:
    next_one = job.recorder("1.0")
    reduce(next_one, 1)
    next_one.reduction_committed()
    job.living.pop(0)
    next_one.generation_begun()
    assert job.said() == []


def test_who_is_not_the_first_after_it_either_still_knows(job: Job) -> None:
    last = job.recorder("2.0")
    reduce(last, 1)
    job.living = ["1.0", "2.0"]
    last.generation_begun()
    assert job.said() == []
    job.living.pop(0)
    last.generation_begun()
    assert job.said() == [("samples_lost", 1), ("members_caught_up", 1)]
