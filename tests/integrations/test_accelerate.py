"""Accelerate on ranks, against Accelerate in one process: ragged sequences, float64, means over tokens."""

from pathlib import Path

import numpy as np
import pytest

from ringweave.testing.ranks import run_ranks
from tests.fakes.elastic_job import ElasticJob
from tests.integrations import accelerate_functions, elastic_runs
from tests.integrations.accelerate_functions import Case, Outcome

LIBRARY = "transformers"
"""The model is one of Transformers."""
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.usefixtures("library")]


def train_alone(case: Case) -> Outcome:
    (found,) = run_ranks(accelerate_functions.train_alone, 1, case)
    return found


def check_same(found: Outcome, alone: Outcome) -> None:
    for own, wanted in zip(found.parameters, alone.parameters, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-9)
    assert found.predicted == alone.predicted
    assert found.learning_rates == alone.learning_rates
    assert found.is_exact


@pytest.mark.parametrize(
    "case",
    [pytest.param(Case(shares=(1, 2, 3)), marks=pytest.mark.thorough), Case(shares=(3, 1, 2), accumulate=2)],
    ids=["unequal shares", "accumulation"],
)
def test_a_run_of_three_workers_equals_one_process(case: Case) -> None:
    alone = train_alone(case)
    for found in run_ranks(accelerate_functions.train_on_ranks, 3, case):
        check_same(found, alone)


def test_a_run_goes_on_from_a_saved_state_in_the_middle_of_an_epoch() -> None:
    """Shares that follow measured speeds would add in another order, and give other bits."""
    for distances in run_ranks(accelerate_functions.resume_on_ranks, 2, Case(shares=(2, 2))):
        assert max(distances) == 0.0, "bitwise"


def test_a_worker_dies_in_a_step_and_its_successor_joins() -> None:
    case = Case()
    alone = train_alone(case)
    with ElasticJob(accelerate_functions.train_elastically, 3, case, {"1.0": (2, "backward")}, "1.1") as job:
        job.wait_message("0.0", lambda message: message[:2] == ("done", 4))
        job.start_worker(1, 1)
        outcomes = {member: job.outcome(member) for member in ("0.0", "2.0", "1.1")}
    assert not [each.error for each in outcomes.values() if each.error]
    for outcome in outcomes.values():
        check_same(outcome.value, alone)
    assert [outcome.value.has_joined_late for outcome in outcomes.values()] == [False, False, True]


def test_a_model_comes_with_its_optimizer_and_loader() -> None:
    for texts in run_ranks(accelerate_functions.refusals, 2):
        assert set(texts) == {"model alone", "no loader", "two models"}
        text = texts["no loader"]
        assert text.startswith("objects of Accelerator.prepare: '1 models to train, 1 optimizers and 0 lo")
        assert "expected one of each, and further loaders. Give prepare the model, its optimizer and" in text


SCRIPT = """
import os
import torch
from torch import nn
from ringweave.integrations.accelerate import Accelerator

def die(gradient):
    if os.environ["RINGWEAVE_MEMBER"] == "1.0" and num_steps == 2:
        os.kill(os.getpid(), 9)

torch.manual_seed(0)
num_steps = 0
accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
model = nn.Linear(3, 1)
model.weight.register_hook(die)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
accelerator.print("processes at the end:", accelerator.num_processes)
"""


@pytest.mark.thorough
@pytest.mark.e2e
def test_a_worker_of_a_real_elastic_run_is_killed(tmp_path: Path) -> None:
    output, exact, missing = elastic_runs.run_with_a_kill(SCRIPT, tmp_path)
    assert exact == [True, True]
    assert missing == 3
    assert "processes at the end:" in output
