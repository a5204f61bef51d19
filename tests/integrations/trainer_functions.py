"""Training of a small GPT on ragged sequences by Transformers' Trainer, on ranks and in one process."""

import dataclasses
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_SAMPLES, VOCABULARY, LONGEST = 41, 13, 7


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
    """The model's loss is a mean over tokens."""
    evaluates: bool = False


class Sequences(Dataset):
    """Ragged sequences of tokens."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(2, LONGEST + 1, (num_samples,), generator=generator)
        self._samples = [torch.randint(VOCABULARY, (int(each),), generator=generator) for each in lengths]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._samples[index]}


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


def make_trainer(case: Case, base: type, batch: int, folder: str, **more: Any) -> Any:
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
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )
    data = {"train_dataset": Sequences(), "eval_dataset": Sequences(17), "data_collator": collate}
    trainer = base(model=make_model(), args=arguments, compute_loss_func=loss_of_tokens, **data)
    if not case.counts_tokens:
        trainer.compute_loss_func, trainer.model_accepts_loss_kwargs = None, False
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    from ringweave.training import gradients

    model = gradients.unwrap_ddp(trainer.model)
    return {
        "parameters": [each.detach().numpy().copy() for each in model.parameters()],
        "log": trainer.state.log_history,
        "global_step": trainer.state.global_step,
        "lr": trainer.lr_scheduler.get_last_lr(),
    }


def train_on_ranks(case: Case) -> dict[str, Any]:
    from ringweave.integrations.transformers import Trainer

    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, Trainer, case.batch, folder)
        trainer.train()
        found = outcome(trainer)
        loader = trainer._prepared[1].prepared
        return {**found, "shares": loader.shares, "is_exact": loader.account.is_exact}


def train_elastically(case: Case, faults: dict[str, tuple[int, str]], awaited: str = "") -> dict[str, Any]:
    """Train as a member of an elastic job, telling each step; `faults` are member -> (step, moment) of its death."""
    import time

    from transformers import TrainerCallback

    from ringweave.integrations.transformers import Trainer
    from tests.fakes.elastic_job import own_member, send_message

    slot = own_member().partition(".")[0]
    os.environ.update(RANK=slot, LOCAL_RANK=slot)
    at, moment = faults.get(own_member(), (-1, ""))

    class Telling(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            send_message(("done", state.global_step, members()))
            if awaited and awaited not in members():
                time.sleep(1.0)

    class Mortal(Trainer):
        num_batches = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            if self.state.global_step == at and moment == "forward":
                os.kill(os.getpid(), 9)
            if self.state.global_step == at and moment == "backward" and self.model.training:
                found.register_hook(lambda _: os.kill(os.getpid(), 9))
            return found

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, Mortal, case.batch, folder)
        trainer.add_callback(Telling())
        members = trainer._members
        trainer.train()
        loader = trainer._prepared[1].prepared
        return {**outcome(trainer), "account": loader.account, "is_late": loader.has_joined_late}


def train_alone(case: Case) -> dict[str, Any]:
    """Train with the Trainer of Transformers, as a process that no launcher has started."""
    from transformers import Trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, Trainer, case.num_ranks * case.batch, folder)
        trainer.get_train_dataloader = lambda: _same_order(type(trainer).get_train_dataloader(trainer))
        trainer.train()
        return outcome(trainer)


def _same_order(loader: Any) -> Any:
    """Let one process see the samples in the order in which ringweave shuffles them."""
    from ringweave.planning import balancing

    class Order(torch.utils.data.Sampler):
        epoch = 0

        def __len__(self) -> int:
            return NUM_SAMPLES

        def __iter__(self) -> Any:
            self.epoch += 1
            return iter(balancing.shuffle_indices(NUM_SAMPLES, 42, self.epoch - 1).tolist())

    return torch.utils.data.DataLoader(
        loader.dataset, batch_size=loader.batch_size or loader.total_batch_size, sampler=Order(), collate_fn=collate
    )
