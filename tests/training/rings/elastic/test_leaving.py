"""Members of rings that are asked to leave: they go at a border, so their rings go on and nothing is lost."""

import signal

import pytest

from tests.fakes.elastic_job import ElasticJob
from tests.training.rings.elastic import ring_functions
from tests.training.rings.elastic.test_deaths import left_of_two_pairs

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

NUM_EPOCHS = 6
PAUSE_S = 0.05
"""So that they are asked to long before the end."""


@pytest.mark.parametrize("local_steps", [0, 3], ids=["every step is pushed", "local steps"])
def test_a_representative_and_a_member_leave_and_no_push_is_lost_or_doubled(local_steps: int) -> None:
    leaving = ("0.0", "3.0")  # one of each ring
    arguments = (NUM_EPOCHS, 2, {}, PAUSE_S, (), local_steps)
    with ElasticJob(ring_functions.train, 4, *arguments, services=("server",)) as job:
        assert job.server is not None
        for member in leaving:
            job.wait_message(member, lambda said: said[:2] == ("done", 4))  # with local steps: one push and a step
            job.send_signal(member, signal.SIGTERM)
        left = [job.outcome(member) for member in leaving]
        assert [(each.exit_code, each.error) for each in left] == [(143, "")] * 2
        values, lost = left_of_two_pairs(job)
        assert lost == 0, "they finished their steps"
        status = job.server.service.status()
        assert status.samples == NUM_EPOCHS * ring_functions.NUM_SAMPLES
        assert status.version == sum(status.pushes.values()) == sum(value["num_pushed"] for value in values)
        for member, other in (("0.0", "1.0"), ("3.0", "2.0")):
            assert 4 <= last_step(job, member) < last_step(job, other), "its ring has gone on without it"


def last_step(job: ElasticJob, member: str) -> int:
    """The number of its last step, in its ring."""
    return max(said[3] for said, _ in job.messages(member) if said[0] == "done")
