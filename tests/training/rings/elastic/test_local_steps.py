"""Real kills in rings that take local steps: no step is done twice, and whoever joins has what is under way.

The rings of mode local push one fragment of the parameters after the other.
"""

import signal
from typing import Any

import pytest

from tests import effort
from tests.fakes.elastic_job import ElasticJob
from tests.training.rings.elastic import ring_functions
from tests.training.rings.elastic.test_deaths import check_alike, epochs_of, left_of_two_pairs, value_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

NUM_EPOCHS = 12
"""In one of them a ring has steps left over when it ends, which are pushed there."""
LOCAL_STEPS = 3


def steps_of(fragments: int) -> int:
    """Local steps from one push to the next: with fragments fewer, to have many pushes too."""
    return 2 if fragments else LOCAL_STEPS


def sums_of(job: ElasticJob, member: str) -> dict[int, Any]:
    """Number of a step in the ring -> the sum of the parameters after it, as the member has them."""
    return {said[3]: said[4] for said, _ in job.messages(member) if said[0] == "done"}


def check_steps_alike(job: ElasticJob, first: str, second: str) -> int:
    """Between two pushes the members of a ring have parameters of their own: the same after each step that both did."""
    one, other = sums_of(job, first), sums_of(job, second)
    common = one.keys() & other.keys()
    assert {each: one[each] for each in common} == {each: other[each] for each in common}
    return len(common)


@pytest.mark.parametrize(
    ("moment", "fragments"), effort.alternating(["push_and_pull", "take_shard", "wait_barrier", "push"], [0, 4])
)
def test_a_representative_and_a_member_die_between_two_pushes(moment: str, fragments: int) -> None:
    faults = {"0.0": (2, moment), "3.0": (2, "backward")}
    arguments = (NUM_EPOCHS, 2, faults, 0.0, (), steps_of(fragments), fragments)
    with ElasticJob(ring_functions.train, 4, *arguments, services=("server",)) as job:
        assert job.server is not None
        values, lost = left_of_two_pairs(job)
        status = job.server.service.status()
        assert lost == 0, "the other members of their rings computed them"
        assert status.samples == NUM_EPOCHS * ring_functions.NUM_SAMPLES
        assert status.version == sum(status.pushes.values()) == sum(value["num_pushed"] for value in values)
        num_steps = [max(sums_of(job, member)) for member in ("1.0", "2.0")]
        assert status.version < sum(num_steps), "not every step was pushed"
        for member in faults:
            job.read_messages(member)
        for first, second in (("0.0", "1.0"), ("2.0", "3.0")):
            check_steps_alike(job, first, second)


@pytest.mark.parametrize("fragments", [0, 4], ids=["all parameters", "fragments"])
def test_workers_that_are_started_again_join_between_two_pushes_or_begin_their_ring_again(fragments: int) -> None:
    faults = {"0.0": (2, "take_shard"), "2.0": (4, "push_and_pull"), "3.0": (4, "backward")}
    whole = (("0.1", "1.0"), ("2.1", "3.1"))
    arguments = (10**6, 2, faults, 0.01, whole, steps_of(fragments), fragments)
    with ElasticJob(ring_functions.train, 4, *arguments, services=("server",)) as job:
        for member in faults:
            assert job.outcome(member).exit_code == -signal.SIGKILL
        for slot in (0, 2, 3):
            job.start_worker(slot, 1)
        values = [value_of(job, member) for ring in whole for member in ring]
        assert epochs_of(job, 0)[-1] == whole[0], "the one that joins is the first, and pushes from there on"
        assert epochs_of(job, 1)[-1] == whole[1], "nobody was left: they begin it again"
        for first, second in whole:
            assert check_steps_alike(job, first, second) > LOCAL_STEPS
        status = job.server.service.status() if job.server else None
        assert status is not None
        assert status.version == values[0]["num_pushed"] + values[2]["num_pushed"]
        assert all(account.is_accounted for value in values for account in value["accounts"] if account)
        for of_ring in (values[:2], values[2:]):
            check_alike(of_ring)
