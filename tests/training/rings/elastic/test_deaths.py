"""Real kills of members of rings: their ring goes on, the others do not notice, and every push counts once."""

import itertools
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from ringweave.membership.messages import part_of_ring
from tests.fakes.elastic_job import ElasticJob
from tests.training.rings.elastic import ring_functions

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]


def value_of(job: ElasticJob, member: str) -> dict[str, Any]:
    outcome = job.outcome(member)
    assert outcome.error == "", f"{member}: {outcome.error}"
    assert outcome.value is not None, f"{member} ended with {outcome.exit_code}"
    return outcome.value


def check_alike(values: Sequence[dict[str, Any]]) -> None:
    for value in values:
        for own, first in zip(value["parameters"], values[0]["parameters"], strict=True):
            assert (own == first).all(), "bitwise"


def epochs_of(job: ElasticJob, ring: int) -> list[tuple[str, ...]]:
    """Members of one epoch after the other; on a busy machine one may have to be formed twice."""
    members = [membership.members for membership in job.coordinators[0].memberships_by_part[part_of_ring(ring)]]
    return [each for each, _ in itertools.groupby(members)]


def left_of_two_pairs(job: ElasticJob) -> tuple[list[dict[str, Any]], int]:
    """What those say that are left when each of two rings has lost a member; and the samples lost with these."""
    values = [value_of(job, member) for member in ("1.0", "2.0")]
    assert epochs_of(job, 0) == [("0.0", "1.0"), ("1.0",)]
    assert epochs_of(job, 1) == [("2.0", "3.0"), ("2.0",)]
    check_alike(values)
    assert all(account.is_accounted for value in values for account in value["accounts"])
    return values, sum(account.lost.num_samples for account in values[0]["accounts"])


NUM_EPOCHS = 5
"""Each ring has a step in each of them at least: the other one is held at the bound, and waits where they meet."""


def test_a_representative_dies_when_the_server_has_its_push_and_a_member_in_its_backward_pass() -> None:
    faults = {"0.0": (3, "push_and_pull"), "3.0": (2, "backward")}
    with ElasticJob(ring_functions.train, 4, NUM_EPOCHS, 2, faults, services=("server",)) as job:
        assert job.server is not None
        _, lost = left_of_two_pairs(job)
        status = job.server.service.status()
        assert lost == 0, "the other member of the ring computed them"
        assert status.samples == NUM_EPOCHS * ring_functions.NUM_SAMPLES
        assert status.version == sum(status.pushes.values()), "each push made one version"
        assert status.repeats >= 1, "the new representative said again what the server had heard"


def test_workers_that_are_started_again_join_their_ring_or_begin_it_again() -> None:
    faults = {"0.0": (2, "take_shard"), "2.0": (2, "push_and_pull"), "3.0": (2, "backward")}
    whole = (("0.1", "1.0"), ("2.1", "3.1"))
    with ElasticJob(ring_functions.train, 4, 10**6, 2, faults, 0.01, whole, services=("server",)) as job:
        for member in faults:
            assert job.outcome(member).exit_code == -signal.SIGKILL
        for slot in (0, 2, 3):
            job.start_worker(slot, 1)
        values = [value_of(job, member) for ring in whole for member in ring]
        assert epochs_of(job, 0)[-1] == whole[0], "the one that joins is the first, and represents it from there on"
        assert epochs_of(job, 1)[-1] == whole[1], "nobody was left: they begin it again"
        prepared = {member: said for member in whole[1] for said, _ in job.messages(member) if said[0] == "prepared"}
        assert all(said[2] >= 2 for said in prepared.values()), "where the server knows that it stood"
        for member in ("0.1", "2.1", "3.1"):
            assert any(said[0] == "done" for said, _ in job.messages(member)), f"{member} has trained"
        assert all(account.is_accounted for value in values for account in value["accounts"] if account)
        for of_ring in (values[:2], values[2:]):
            check_alike(of_ring)
