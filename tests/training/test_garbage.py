"""What is there when an elastic worker becomes a member is left out of garbage collections, as without --elastic."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from tests.fakes.elastic_job import ElasticJob

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def count_looked_at(mode: str) -> tuple[int, int]:
    """(objects that a whole collection goes through after prepare, those that it leaves out)."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=3)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader, mode=mode)
    found = len(gc.get_objects()), gc.get_freeze_count()
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    return found


@pytest.mark.parametrize(("mode", "attendants"), [("balanced", ()), ("ps-hra", ("server",))])
def test_collections_of_an_elastic_worker_are_short(mode: str, attendants: tuple[str, ...]) -> None:
    with ElasticJob(count_looked_at, 2, mode, services=attendants) as job:
        for member in ("0.0", "1.0"):
            outcome = job.outcome(member)
            assert outcome.value is not None, outcome.error
            num_looked_at, num_left_out = outcome.value
            assert num_looked_at < 10_000
            assert num_left_out > 50_000
