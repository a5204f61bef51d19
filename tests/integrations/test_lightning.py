"""Lightning's Trainer and Fabric on ranks, against the same in one process: ragged sequences, means over tokens."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from ringweave.testing.ranks import run_ranks
from tests.fakes.elastic_job import ElasticJob
from tests.integrations import elastic_runs, lightning_cases
from tests.integrations.lightning_cases import Case, Outcome

LIBRARY = "lightning"
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.usefixtures("library")]


def run(name: str, num_ranks: int, *args: object) -> list[Outcome]:
    return run_ranks(lightning_cases.call, num_ranks, name, *args)


def check_same(found: Outcome, alone: Outcome, *, tolerance: float = 1e-9) -> None:
    """Compare parameters, and logged values as exactly as they are kept: in float32."""
    for own, wanted in zip(found.parameters, alone.parameters, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=0, atol=tolerance)
    assert (found.global_step, found.learning_rate) == (alone.global_step, alone.learning_rate)
    assert found.is_exact


def check_same_values(found: Outcome, alone: Outcome, *, tolerance: float = 1e-5, left_out: str = " ") -> None:
    """Compare logged values; those of an epoch with a lost worker miss its part, and are left out by their names."""
    assert found.metrics == pytest.approx(alone.metrics, rel=tolerance)
    for own, wanted in zip(found.log, alone.log, strict=True):
        assert own[0] == wanted[0]
        assert own[1].keys() == wanted[1].keys()
        for name, value in wanted[1].items():
            assert left_out in name or own[1][name] == pytest.approx(value, rel=tolerance), name


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        pytest.param(Case(shares=(1, 2, 3)), 1e-9, marks=pytest.mark.thorough),
        (Case(shares=(3, 1, 2), accumulate=3), 1e-9),
        (Case(shares=(1, 2, 3), num_epochs=1, is_manual=True), 1e-9),
        (Case(precision="bf16-mixed", num_epochs=1), 2e-2),
    ],
    ids=["evaluation", "accumulation and clipping", "manual optimization", "mixed precision"],
)
def test_a_run_of_three_workers_equals_one_process(case: Case, tolerance: float) -> None:
    (alone,) = run("train_alone", 1, case)
    for rank, found in enumerate(run("train_on_ranks", 3, case)):
        check_same(found, alone, tolerance=tolerance)
        check_same_values(found, alone, tolerance=max(1e-5, tolerance))
        assert (found.backend, found.ranks) == ("ringweave", (rank, 3))


def test_a_run_goes_on_from_its_checkpoint_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Shares that follow measured speeds would add in another order, and give other bits."""
    case = Case(accumulate=2, shares=(2, 2))
    whole = run("train_on_ranks", 2, case, str(tmp_path))
    resumed = run("train_on_ranks", 2, case, str(tmp_path / "again"), str(tmp_path / "step=8.ckpt"))
    for own, wanted in zip(resumed[0].parameters, whole[0].parameters, strict=True):
        assert (own == wanted).all(), "bitwise"
    assert resumed[0].metrics["val_loss"] == whole[0].metrics["val_loss"]


def test_a_worker_dies_in_a_step_and_its_successor_joins_in_the_middle_of_an_epoch() -> None:
    case = Case(accumulate=2, num_epochs=6)
    (alone,) = run("train_alone", 1, case)
    args = ("train_elastically", case, {"1.0": (2, "backward")}, 3.0)
    with ElasticJob(lightning_cases.call, 3, *args) as job:
        job.wait_message("0.0", lambda message: message[:2] == ("done", 3))
        job.start_worker(1, 1)
        outcomes = {member: job.outcome(member) for member in ("0.0", "2.0", "1.1")}
    assert not [each.error for each in outcomes.values() if each.error]
    for outcome in outcomes.values():
        check_same(outcome.value, alone)
    assert [outcome.value.has_joined_late for outcome in outcomes.values()] == [False, False, True]
    first, second, _ = (outcome.value for outcome in outcomes.values())
    assert first.log == second.log
    check_same_values(first, alone, left_out="_epoch")


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_twenty_kills_at_all_moments_of_a_step_change_nothing() -> None:
    case, num_kills = Case(num_ranks=4, num_epochs=50, accumulate=2, evaluates=False), 20
    (alone,) = run("train_alone", 1, case)
    moments = itertools.cycle(("backward", "optimizer", "forward", "after", "backward"))
    victims = [(number % 3, number // 3) for number in range(num_kills)]  # one worker always stays
    faults = {f"{slot}.{incarnation}": (1 + slot, next(moments)) for slot, incarnation in victims}
    with ElasticJob(lightning_cases.call, 4, "train_elastically", case, faults, 0.5) as job:
        job.replace_killed(faults)
        last = [member for member in job.members if member not in faults]
        outcomes = [job.outcome(member) for member in last]
    values = [each.value for each in outcomes if each.value is not None]  # None: it came when the others were through
    assert len(values) > 1, [each.error for each in outcomes]
    for value in values:
        check_same(value, alone)


def test_fabric_trains_as_one_process() -> None:
    case = Case(accumulate=2)
    (alone,) = run("train_by_fabric_alone", 1, case)
    for rank, found in enumerate(run("train_by_fabric", 3, case)):
        check_same(found, alone)
        assert found.metrics == pytest.approx(alone.metrics)
        assert (found.backend, found.ranks) == ("ringweave", (rank, 3))


def test_a_worker_of_fabric_dies_in_a_step() -> None:
    case = Case(accumulate=2)
    (alone,) = run("train_by_fabric_alone", 1, case)
    with ElasticJob(lightning_cases.call, 3, "train_by_fabric", case, True, {"1.0": 3}) as job:
        outcomes = [job.outcome(member) for member in ("0.0", "2.0")]
    assert not [each.error for each in outcomes if each.error]
    for rank, outcome in enumerate(outcomes):
        check_same(outcome.value, alone)
        assert outcome.value.ranks == (rank, 2)


def test_what_cannot_be_shared_out_is_refused() -> None:
    texts = run_ranks(lightning_cases.call, 2, "refusals")[0]
    fit = "training by Lightning: '{}', expected one fit by one optimizer, with automatic optimization. Use strategy="
    loader = "loader of the training: '{}', expected one DataLoader. Give the Trainer one DataLoader of a data set with"
    assert texts["twice"].startswith(fit.format("a second call of fit"))
    assert texts["two loaders"].startswith(loader.format("a second one"))
    assert texts["stream"].startswith(loader.format("a stream"))
    assert texts["two optimizers"].startswith(fit.format("2 optimizers"))
    assert texts["two models"].startswith("models to train with Fabric: 'a second one', expected one. Use strategy=")
    assert texts["no loader"].startswith(
        "training with Fabric: 'a pass', expected model, optimizer and loader. Call fabric.setup(model, optimizer) and "
    )


SCRIPT = """
import os
import lightning as L
import torch
from torch import nn
import ringweave.integrations.lightning

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.layer.weight.register_hook(self.die)

    def die(self, gradient):
        if os.environ["RINGWEAVE_MEMBER"] == "1.0" and self.global_step == 2:
            os.kill(os.getpid(), 9)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

L.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
trainer = L.Trainer(accelerator="cpu", strategy="ringweave", max_epochs=2, default_root_dir="out",
    enable_progress_bar=False)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=3, shuffle=True))
print("steps:", trainer.global_step)
"""


@pytest.mark.e2e
@pytest.mark.thorough  # daily with Transformers; deaths within a step daily with Lightning too, below
def test_a_worker_of_a_real_elastic_run_is_killed(tmp_path: Path) -> None:
    output, exact, missing = elastic_runs.run_with_a_kill(SCRIPT, tmp_path)
    assert exact == [True, True]
    assert missing == 3
    assert "steps: 8" in output
    assert list((tmp_path / "out").rglob("epoch=1-step=8.ckpt"))
