"""Members whose samples lead through different parts of the model, in real processes."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.elastic_job import ElasticJob
from tests.training.elastic import branch_functions

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]


def states(job: ElasticJob) -> list[dict[str, Any]]:
    outcomes = [job.outcome(member) for member in job.members]
    assert [each.error for each in outcomes] == [""] * len(outcomes)
    found = [each.value for each in outcomes]
    for other in found[1:]:
        assert all((other[name] == value).all() for name, value in found[0].items()), "bitwise"
    return found


def test_members_that_use_other_parameters_have_the_same_ones() -> None:
    """And those that one process has, which leaves alone what nobody has used."""
    num_steps = branch_functions.NUM_SAMPLES // branch_functions.BATCH
    with ElasticJob(branch_functions.train, 2, 2, num_steps) as job:
        found, *_ = states(job)
    model, data = branch_functions.make_model(), branch_functions.make_data()
    optimizer = branch_functions.make_optimizer(model)
    half = branch_functions.BATCH // 2
    for step in range(num_steps):
        optimizer.zero_grad()
        for first in (step * branch_functions.BATCH, step * branch_functions.BATCH + half):
            inputs, targets = data[first : first + half]
            (branch_functions.loss_of(model, inputs, targets) / 2).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=1e-12)
    assert torch.equal(torch.from_numpy(found["never.weight"]), branch_functions.make_model().never.weight.detach())


@pytest.mark.parametrize("mode", ["sync", "balanced"])
def test_who_joins_has_the_same_parameters_though_its_own_samples_lead_elsewhere(mode: str) -> None:
    with ElasticJob(branch_functions.train, 2, 3, 6, 0.02, mode) as job:
        job.wait_message("0.0", lambda said: said == ("done", 5))
        job.start_worker(2, 0)
        states(job)
