"""Training of a small GPT on ragged sequences by Transformers' Trainer, on ranks and in one process."""

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LONGEST = 13, 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    num_ranks: int = 3
    num_epochs: float = 2
    batch: int = 2
    """Samples of each process."""
    accumulate: int = 1
    clip: float = 1.0
    counts_tokens: bool = True
    """Losses are means over all tokens of a train step; else means over sequences of the same length."""
    evaluates: bool = False
    num_samples: int = 41
    shares: tuple[int, ...] = ()
    """Samples of each rank in a batch; empty leaves them equal."""
    saves_every: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a training."""

    parameters: list[np.ndarray]
    log: list[dict[str, Any]]
    global_step: int
    learning_rates: list[float]
    is_exact: bool = True
    has_joined_late: bool = False
    backend: str = ""


class Sequences(Dataset):
    """Sequences of tokens, ragged ones or all of the same length."""

    def __init__(self, num_samples: int, shortest: int = 2) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(shortest, LONGEST + 1, (num_samples,), generator=generator)
        self._samples = [torch.randint(VOCABULARY, (int(each),), generator=generator) for each in lengths]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._samples[index]}


def sequences(case: Case) -> Sequences:
    return Sequences(case.num_samples, 2 if case.counts_tokens else LONGEST)


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest sequence; padding has no label."""
    rows = [each["input_ids"] for each in samples]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": padded, "attention_mask": (labels != -100).long(), "labels": labels}


def make_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)).double()


def loss_of_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Loss in float64; the library's own one is in float32."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
    assert num_items_in_batch is not None
    return total / num_items_in_batch


def mean_loss(model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:
    """Mean over the sequences of a batch, in float64, of a trainer that counts no tokens."""
    labels = inputs["labels"]
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    loss = loss_of_tokens(outputs, labels, labels[:, 1:].ne(-100).sum())
    return (loss, outputs) if return_outputs else loss


def make_trainer(case: Case, base: type, batch: int, folder: str) -> Any:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=case.accumulate,
        num_train_epochs=case.num_epochs,
        max_grad_norm=case.clip,
        learning_rate=0.01,
        warmup_steps=3,
        logging_steps=2,
        eval_strategy="epoch" if case.evaluates else "no",
        save_strategy="steps" if case.saves_every else "no",
        save_steps=case.saves_every or 500,
        report_to="none",
        disable_tqdm=True,
    )
    data = {"train_dataset": sequences(case), "eval_dataset": Sequences(17), "data_collator": collate}
    trainer = base(model=make_model(), args=arguments, compute_loss_func=loss_of_tokens, **data)
    if case.evaluates:
        trainer.compute_metrics = accuracy
    if not case.counts_tokens:
        trainer.compute_loss_func, trainer.model_accepts_loss_kwargs = None, False
        trainer.compute_loss = mean_loss
    return trainer


def accuracy(prediction: Any) -> dict[str, float]:
    """Fraction of tokens that the model predicts, over all sequences of an evaluation."""
    predicted, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels)[labels != -100].mean())}


def outcome(trainer: Any, **more: Any) -> Outcome:
    return Outcome(
        parameters=[each.detach().numpy().copy() for each in trainer.model.parameters()],
        log=trainer.state.log_history,
        global_step=trainer.state.global_step,
        learning_rates=trainer.lr_scheduler.get_last_lr(),
        **more,
    )


def train_on_ranks(case: Case, folder: str = "", checkpoint: str | None = None) -> Outcome:
    import torch.distributed as dist

    from ringweave.integrations.transformers import Trainer

    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="127.0.0.1")

    class WithShares(Trainer):
        def _prepare_all(self, *args: Any) -> Any:
            loader = super()._prepare_all(*args)
            if case.shares:
                loader.prepared.source.membership.balancer.reset_shares(0, case.shares, None)
            return loader

    with tempfile.TemporaryDirectory() as own_folder:
        trainer = make_trainer(case, WithShares, case.batch, folder or own_folder)
        trainer.train(resume_from_checkpoint=checkpoint)
        account = trainer._prepared[1].prepared.account
        return outcome(trainer, is_exact=account.is_exact, backend=dist.get_backend())


def refusals() -> dict[str, str]:
    """Texts of the errors for what cannot be shared out."""
    from ringweave.errors import RingweaveError
    from ringweave.integrations.transformers import Trainer

    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="127.0.0.1", WORLD_SIZE="1")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        case = Case(num_samples=4, num_epochs=1)
        trainer = make_trainer(case, Trainer, 2, folder)
        trainer.train()
        try:
            trainer.train()
        except RingweaveError as error:
            found["twice"] = str(error)
        os.environ["RINGWEAVE_MODE"] = "ps-hra"
        try:
            make_trainer(case, Trainer, 2, folder).train()
        except RingweaveError as error:
            found["mode"] = str(error)
    return found


def train_elastically(case: Case, faults: dict[str, tuple[int, str]], pause_s: float) -> Outcome:
    """Train as a member of an elastic job, telling each step; steps are longer while members are missing.

    `faults` are member -> (steps that it has taken, moment) of its death.
    """
    import time

    from transformers import TrainerCallback

    from ringweave.integrations.transformers import Trainer
    from tests.fakes.elastic_job import own_member, send_message

    slot = own_member().partition(".")[0]
    os.environ.update(RANK=slot, LOCAL_RANK=slot)
    fault, num_taken = faults.get(own_member(), (-1, "")), 0

    def die(moment: str) -> None:
        if fault == (num_taken, moment):
            os.kill(os.getpid(), 9)

    class Mortal(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            die("optimizer")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal num_taken
            num_taken += 1
            send_message(("done", state.global_step, loader().members))
            die("after")
            if state.global_step > 2 and len(loader().members) < case.num_ranks:
                time.sleep(pause_s)

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, Trainer, case.batch, folder)
        trainer.add_callback(Mortal())
        trainer.model.lm_head.register_forward_pre_hook(lambda *_: die("forward"))
        trainer.model.lm_head.weight.register_hook(lambda _: die("backward"))

        def loader() -> Any:
            return trainer._prepared[1].prepared

        trainer.train()
        return outcome(trainer, is_exact=loader().account.is_exact, has_joined_late=loader().has_joined_late)


def train_alone(case: Case) -> Outcome:
    """Train with the Trainer of Transformers, as a process that no launcher has started."""
    from transformers import Trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, Trainer, case.num_ranks * case.batch, folder)
        trainer.get_train_dataloader = lambda: _same_order(case)
        trainer.train()
        return outcome(trainer)


def _same_order(case: Case) -> Any:
    """Let one process see the samples in the order in which ringweave shuffles them."""
    from ringweave.planning import balancing

    class Order(torch.utils.data.Sampler):
        num_passes = 0

        def __len__(self) -> int:
            return case.num_samples

        def __iter__(self) -> Any:
            self.num_passes += 1
            return iter(balancing.shuffle_indices(case.num_samples, 42, self.num_passes - 1).tolist())

    batch = case.num_ranks * case.batch
    return torch.utils.data.DataLoader(sequences(case), batch_size=batch, sampler=Order(), collate_fn=collate)
