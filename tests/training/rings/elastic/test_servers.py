"""Real kills of parameter servers of rings that lose members: the standby goes on, and every push counts once."""

import signal
from collections.abc import Sequence

import pytest

from ringweave.membership import messages
from tests.fakes.elastic_job import ElasticJob
from tests.polling import wait_until
from tests.training.rings.elastic import ring_functions
from tests.training.rings.elastic.test_deaths import check_alike, value_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]

REPRESENTATIVES = ("0.0", "2.0")


def wait_steps(job: ElasticJob, members: Sequence[str], count: int = 3) -> None:
    """Until each of them has done so many steps more than by now."""
    for member in members:
        job.read_messages(member)
        done = max([said[1] for said, _ in job.messages(member) if said[0] == "done"], default=0)
        job.wait_message(member, lambda said, least=done + count: said[0] == "done" and said[1] >= least)


@pytest.mark.parametrize(("local_steps", "fragments"), [(0, 0), (1, 4)], ids=["gradients", "fragments"])
def test_servers_die_alone_with_the_coordinator_and_with_a_representative_and_training_goes_on(
    local_steps: int, fragments: int
) -> None:
    """With fragments the standby has momentum and the outer steps that are not full."""
    whole = (("0.1", "1.0"), ("2.0", "3.1"))
    attendants = ("servers", "standby")
    arguments = (10**6, 2, {}, 0.05, whole, local_steps, fragments)
    with ElasticJob(ring_functions.train, 4, *arguments, services=attendants) as job:
        pair = job.servers
        assert pair is not None
        wait_steps(job, REPRESENTATIVES)

        first = pair.wait_leadership(2)
        pair.send_signal(first.leader, signal.SIGKILL)
        wait_steps(job, REPRESENTATIVES)

        second = pair.wait_leadership(2, after=first.number)
        assert second.term > first.term
        pair.send_signal(second.leader, signal.SIGKILL)
        job.coordinators[0].close()
        wait_steps(job, REPRESENTATIVES)
        taken_over = {messages.part_of_ring(ring): 2 for ring in range(2)}
        wait_until(lambda: job.coordinators[1].num_present() == taken_over)  # else a ring of one member has no majority

        third = pair.wait_leadership(2, after=second.number)
        pair.send_signal(third.leader, signal.SIGKILL)
        job.send_signal("0.0", signal.SIGKILL)
        job.send_signal("3.0", signal.SIGKILL)
        wait_steps(job, ("1.0", "2.0"))
        for slot in (0, 3):
            job.start_worker(slot, 1)

        values = [value_of(job, member) for ring in whole for member in ring]
        version = pair.wait_counters()["version"]
        assert version == values[0]["num_pushed"] + values[2]["num_pushed"], "each push made one version"
        accounts = [account for value in values for account in value["accounts"] if account]
        assert accounts
        assert all(account.is_accounted for account in accounts)
        lost = [sum(account.lost.num_samples for account in value["accounts"] if account) for value in values]
        assert max(lost) < 2 * ring_functions.BATCH, "no more than two members computed in their last steps"
        for of_ring in (values[:2], values[2:]):
            check_alike(of_ring)
