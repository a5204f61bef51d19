"""Training of a small GPT on ragged sequences by Accelerate, on ranks and in one process."""

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.integrations.trainer_functions import Sequences, collate, make_model

NUM_SAMPLES, NUM_EVALUATED, EPOCHS, CLIP = 41, 17, 2, 0.3
SEED = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    num_ranks: int = 3
    batch: int = 2
    """Samples of each process."""
    accumulate: int = 1
    shares: tuple[int, ...] = ()
    """Samples of each rank in a batch; empty leaves them equal."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a training."""

    parameters: list[np.ndarray]
    learning_rates: list[float]
    predicted: list[int]
    """Prediction for the first token of each sample of the evaluation."""
    is_exact: bool = True
    has_joined_late: bool = False


def count_tokens(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean over the tokens of a batch, in float64."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)


def make(batch: int, sampler: Any = None) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, DataLoader, Any]:
    """Return model, optimizer, loaders of training and evaluation, and schedule of a script."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(SEED)
    order = {"shuffle": True, "generator": generator} if sampler is None else {"sampler": sampler}
    loader = DataLoader(Sequences(NUM_SAMPLES), batch_size=batch, collate_fn=collate, **order)
    evaluation = DataLoader(Sequences(NUM_EVALUATED), batch_size=batch, collate_fn=collate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 12, 0.5)
    return model, optimizer, loader, evaluation, schedule


def train(accelerator: Any, prepared: Any, tell: Any = lambda: None, first_epoch: int = 0) -> None:
    """Train by an ordinary loop of Accelerate."""
    model, optimizer, loader, _, schedule = prepared
    for _ in range(first_epoch, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            tell()


@torch.no_grad()
def predict(accelerator: Any, model: nn.Module, loader: Any) -> list[int]:
    """Return the prediction for the first token of each sample, in the order of the data."""
    found: list[int] = []
    for batch in loader:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        found += accelerator.gather_for_metrics(logits[:, 0].argmax(-1)).tolist()
    return found


def outcome(prepared: Any, predicted: list[int], **more: Any) -> Outcome:
    parameters = [each.detach().numpy().copy() for each in prepared[0].parameters()]
    return Outcome(parameters=parameters, learning_rates=prepared[4].get_last_lr(), predicted=predicted, **more)


def prepare(accelerator: Any, case: Case) -> Any:
    """Prepare with the shares of the case, which then stay."""
    prepared = accelerator.prepare(*make(case.batch))
    if case.shares:
        prepared[2].prepared.source.membership.balancer.reset_shares(0, case.shares, None)
    return prepared


def train_on_ranks(case: Case) -> Outcome:
    from ringweave.integrations.accelerate import Accelerator

    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="127.0.0.1")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate, weight=count_tokens)
    prepared = prepare(accelerator, case)
    train(accelerator, prepared)
    predicted = predict(accelerator, prepared[0], prepared[3])
    return outcome(prepared, predicted, is_exact=prepared[2].prepared.account.is_exact)


def resume_on_ranks(case: Case) -> list[float]:
    """Save in the middle of the first epoch, load in another accelerator; return the distances of the parameters."""
    from accelerate import state
    from accelerate.utils import broadcast_object_list

    from ringweave.integrations.accelerate import Accelerator

    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="127.0.0.1")
    folder = broadcast_object_list([tempfile.mkdtemp()])[0] if state.PartialState(cpu=True).initialized else ""
    accelerator = Accelerator(cpu=True, weight=count_tokens)
    prepared = prepare(accelerator, case)
    num_batches = iter(range(1, 1000))
    train(accelerator, prepared, lambda: accelerator.save_state(folder) if next(num_batches) == 3 else None)
    whole = outcome(prepared, [])
    accelerator = Accelerator(cpu=True, weight=count_tokens)
    prepared = prepare(accelerator, case)
    accelerator.load_state(folder)
    train(accelerator, prepared)
    pairs = zip(whole.parameters, outcome(prepared, []).parameters, strict=True)
    return [float(abs(own - wanted).max()) for own, wanted in pairs]


def refusals() -> dict[str, str]:
    """Texts of the errors for what cannot be prepared, on a rank with or without it."""
    from ringweave.errors import RingweaveError
    from ringweave.integrations.accelerate import Accelerator

    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="127.0.0.1")
    accelerator, (model, optimizer, loader, evaluation, _) = Accelerator(cpu=True), make(2)
    calls = {"model alone": (model,), "no loader": (model, optimizer), "two models": (model, make_model(), optimizer)}
    found = {}
    for name, objects in calls.items():
        try:
            accelerator.prepare(*objects)
        except RingweaveError as error:
            found[name] = str(error)
    frozen = make_model().requires_grad_(False)
    assert accelerator.prepare(frozen) is frozen, "a model that is not trained needs no optimizer"
    prepared = accelerator.prepare(evaluation, optimizer, loader, model)
    assert accelerator.skip_first_batches(prepared[0], 2) is prepared[0], "the first loader is the one to train with"
    assert len(list(prepared[0])) == len(prepared[0]) - 2
    return found


def train_elastically(case: Case, faults: dict[str, tuple[int, str]], awaited: str) -> Outcome:
    """Train as a member of an elastic job, telling each batch; `faults` are member -> (batch, moment) of its death."""
    import time

    from ringweave.integrations.accelerate import Accelerator
    from tests.fakes.elastic_job import own_member, send_message

    slot = own_member().partition(".")[0]
    os.environ.update(RANK=slot, LOCAL_RANK=slot)
    weights = [count_tokens(collate([each])) for each in Sequences(NUM_SAMPLES)]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate, weight=weights)
    prepared = accelerator.prepare(*make(case.batch))
    loader, (at, moment) = prepared[2].prepared, faults.get(own_member(), (-1, ""))
    num_done = 0

    def tell() -> None:
        nonlocal num_done
        num_done += 1
        send_message(("done", num_done, loader.members))
        if num_done >= 5 and awaited and awaited not in loader.members:
            time.sleep(3.0)

    def die(*_: Any) -> None:
        if num_done == at:
            os.kill(os.getpid(), 9)

    if moment == "backward":
        prepared[0].module.lm_head.weight.register_hook(die)
    train(accelerator, prepared, tell)
    predicted = predict(accelerator, prepared[0], prepared[3])
    return outcome(prepared, predicted, is_exact=loader.account.is_exact, has_joined_late=loader.has_joined_late)


def train_alone(case: Case) -> Outcome:
    """Train with Accelerate itself, as a process that no launcher has started."""
    from accelerate import Accelerator

    from ringweave.planning import balancing

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)

    class Order(torch.utils.data.Sampler):
        num_passes = 0

        def __len__(self) -> int:
            return NUM_SAMPLES

        def __iter__(self) -> Any:
            self.num_passes += 1
            return iter(balancing.shuffle_indices(NUM_SAMPLES, SEED, self.num_passes - 1).tolist())

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate)
    model, optimizer, loader, evaluation, schedule = make(case.num_ranks * case.batch, Order())
    schedule.step_size //= case.num_ranks  # Accelerate takes a step for each process
    prepared = accelerator.prepare(model, optimizer, loader, evaluation, schedule)
    train(accelerator, prepared)
    return outcome(prepared, predict(accelerator, model, evaluation))
