"""Transformers' Trainer on ranks, against the same Trainer in one process: ragged sequences, float64."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from ringweave.testing.ranks import run_ranks
from tests.fakes.elastic_job import ElasticJob
from tests.integrations import elastic_runs, trainer_functions
from tests.integrations.trainer_functions import Case, Outcome

LIBRARY = "transformers"
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.usefixtures("library")]


def train_alone(case: Case) -> Outcome:
    (found,) = run_ranks(trainer_functions.train_alone, 1, case)
    return found


def check_same(found: Outcome, alone: Outcome) -> None:
    """Compare parameters to 1e-9, and logs as exactly as they are kept: losses in float32."""
    for own, wanted in zip(found.parameters, alone.parameters, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-9)
    assert (found.global_step, found.learning_rates) == (alone.global_step, alone.learning_rates)
    for own, wanted in zip(found.log, alone.log, strict=True):
        assert own["step"] == wanted["step"]
        for key in {"loss", "grad_norm", "eval_loss", "eval_accuracy", "train_loss"} & wanted.keys():
            assert own[key] == pytest.approx(wanted[key], rel=1e-5), key


@pytest.mark.parametrize(
    "case",
    [
        Case(evaluates=True, accumulate=3, shares=(3, 1, 2), clip=0.3),
        Case(accumulate=2, counts_tokens=False, num_samples=42),
    ],
    ids=["evaluation, accumulation and clipping", "means over samples"],
)
def test_a_run_of_three_workers_equals_one_process(case: Case) -> None:
    alone = train_alone(case)
    for found in run_ranks(trainer_functions.train_on_ranks, 3, case):
        check_same(found, alone)
        assert found.is_exact
        assert found.backend == "ringweave"


def test_a_run_goes_on_from_its_checkpoint_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Shares that follow measured speeds would add in another order, and give other bits."""
    case = Case(saves_every=2, num_epochs=1, shares=(2, 2))
    whole = run_ranks(trainer_functions.train_on_ranks, 2, case, str(tmp_path))
    resumed = run_ranks(trainer_functions.train_on_ranks, 2, case, str(tmp_path), str(tmp_path / "checkpoint-4"))
    for own, wanted in zip(resumed[0].parameters, whole[0].parameters, strict=True):
        assert (own == wanted).all(), "bitwise"
    assert resumed[0].log[-2] == whole[0].log[-2]


def test_a_worker_dies_in_a_step_and_its_successor_joins_in_the_middle_of_an_epoch() -> None:
    case = Case(accumulate=2, num_epochs=6, evaluates=True)
    alone = train_alone(case)
    with ElasticJob(trainer_functions.train_elastically, 3, case, {"1.0": (2, "backward")}, 3.0) as job:
        job.wait_message("0.0", lambda message: message[:2] == ("done", 3))
        job.start_worker(1, 1)
        outcomes = {member: job.outcome(member) for member in ("0.0", "2.0", "1.1")}
    assert not [each.error for each in outcomes.values() if each.error]
    for outcome in outcomes.values():
        check_same(outcome.value, alone)
        assert outcome.value.is_exact
    assert [outcome.value.has_joined_late for outcome in outcomes.values()] == [False, False, True]


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_twenty_kills_at_all_moments_of_a_step_change_nothing() -> None:
    case, num_kills = Case(num_ranks=4, num_epochs=50, accumulate=2), 20
    alone = train_alone(case)
    moments = itertools.cycle(("backward", "optimizer", "forward", "after", "backward"))
    victims = [(number % 3, number // 3) for number in range(num_kills)]  # one worker always stays
    faults = {f"{slot}.{incarnation}": (1 + slot, next(moments)) for slot, incarnation in victims}
    with ElasticJob(trainer_functions.train_elastically, 4, case, faults, 0.5) as job:
        job.replace_killed(faults)
        last = [member for member in job.members if member not in faults]
        outcomes = [job.outcome(member) for member in last]
    assert not [each.error for each in outcomes if each.error]
    values = [each.value for each in outcomes if each.value is not None]  # None: it came when the others were through
    assert len(values) > 1
    for value in values:
        check_same(value, alone)
        assert value.is_exact


def test_what_cannot_be_shared_out_is_refused() -> None:
    (text,) = run_ranks(trainer_functions.refusals, 1)
    assert text["twice"].startswith("calls of Trainer.train: 'a second one', expected one. Make another Trainer, or ")
    assert text["mode"].startswith("mode of a trainer: 'ps-hra', expected sync, balanced or auto. Start the trainer ")


SCRIPT = """
import os
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from ringweave.integrations.transformers import Trainer

class Dies(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if os.environ["RINGWEAVE_MEMBER"] == "1.0" and state.global_step == 2:
            os.kill(os.getpid(), 9)

config = GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
data = [{"input_ids": torch.arange(5) + shift, "labels": torch.arange(5) + shift} for shift in (0, 1, 2, 3) * 6]
arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=2, num_train_epochs=2, report_to="none",
    logging_steps=1, disable_tqdm=True, gradient_accumulation_steps=2, save_steps=3)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[Dies()])
print("steps:", trainer.train().global_step)
"""


@pytest.mark.e2e
def test_a_worker_of_a_real_elastic_run_is_killed(tmp_path: Path) -> None:
    output, exact, _ = elastic_runs.run_with_a_kill(SCRIPT, tmp_path)
    assert exact == [True, True]
    assert "steps: 6" in output
    assert (tmp_path / "out" / "checkpoint-6" / "trainer_state.json").exists()
