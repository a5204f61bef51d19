"""Real processes that join while others train: nobody waits for the state, and what comes out is the same."""

import pytest

from tests.fakes.elastic_job import ElasticJob
from tests.training.elastic import elastic_functions

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]


def sums(job: ElasticJob, member: str) -> dict[int, float]:
    """Train step -> what its collective gave."""
    job.read_messages(member)
    return {said[1]: said[2] for said, _ in job.messages(member) if said[0] == "done"}


def test_whatever_a_script_makes_of_gradients_a_newcomer_s_does_the_same() -> None:
    """Accumulation, clipping, schedules, buffers, collectives of the script's own, two that join."""
    with ElasticJob(elastic_functions.train_richly, 2, 4, 6, 0.02) as job:
        job.wait_message("0.0", lambda said: said[:2] == ("done", 5))
        newcomers = [job.start_worker(slot, 0) for slot in (2, 3)]
        outcomes = [job.outcome(member) for member in job.members]
        assert [each.error for each in outcomes] == [""] * 4
        first, *others = [each.value["state"] for each in outcomes]
        for other in others:
            assert all((other[name] == value).all() for name, value in first.items()), "bitwise"
        known = sums(job, "0.0")
        last = max(known)
        assert list(known) == list(range(1, last + 1))
        for member in newcomers:
            own = sums(job, member)
            assert list(own) == list(range(min(own), last + 1)), "every step from its first on"
            assert all(known[step] == total for step, total in own.items()), "one collective, one step"
