"""Training of a small GPT on ragged sequences by Transformers, Accelerate or Lightning; a job of trainers.py.

The time of a sample is a pause, as on an accelerator that computes by itself: the processors of one machine are shared
by all workers, and one of them cannot be slower than the others.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LONGEST, NUM_SAMPLES, BATCH = 64, 24, 512, 8
SLOWNESS = 4
"""A sample takes so many times longer on the slow worker."""
MOMENTS = ("forward", "backward", "optimizer", "after")
KILL_INTERVAL = 8
"""Train steps from one kill to the next, at least."""


class Sequences(Dataset):
    """Ragged sequences of tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(4, LONGEST + 1, (NUM_SAMPLES,), generator=generator)
        self._samples = [torch.randint(VOCABULARY, (int(each),), generator=generator) for each in lengths]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._samples[index]}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest sequence; padding has no label."""
    rows = [each["input_ids"] for each in samples]
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels != -100).long(), "labels": labels}


class Slowed(GPT2LMHeadModel):
    """Model whose samples take their time."""

    sample_s = 0.0

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        """Compute, and wait for the time of these samples."""
        time.sleep(self.sample_s * len(input_ids))
        return super().forward(input_ids=input_ids, **inputs)


def make_model(options: argparse.Namespace) -> Slowed:
    """Return the model, the same on all workers; one of them is slow."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_positions": LONGEST, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = Slowed(GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0))
    is_slow = options.has_slow_worker and os.environ["RANK"] == os.environ.get("SLOW_RANK", "3")
    model.sample_s = options.sample_ms / 1e3 * (SLOWNESS if is_slow else 1)
    return model


class Steps:
    """Train steps of this worker: records the end of each, and kills the worker when it is its turn.

    Workers kill themselves, one after the other, each at another moment of a train step.
    """

    def __init__(self, options: argparse.Namespace, model: nn.Module) -> None:
        self.ends_s: list[float] = []
        self._folder, self._num_kills, self._moment = options.out / "kills", options.kills, ""
        self._trained = options.out / "trained"
        """One file for each worker that has taken a step: it has the parameters."""
        for folder in (self._folder, self._trained):
            folder.mkdir(parents=True, exist_ok=True)
        model.lm_head.weight.register_hook(lambda _: self.reach("backward"))  # pyrefly: ignore - it is a parameter

    def begin(self, number: int, members: Callable[[], Sequence[str]]) -> None:
        """Begin a step; choose this worker as the next victim, if it is its turn and enough others have trained."""
        num_killed = len(list(self._folder.iterdir()))
        latest = int((self._folder / str(num_killed - 1)).read_text() or number) if num_killed else 0
        if num_killed >= self._num_kills or number < latest + KILL_INTERVAL:
            return
        own = os.environ["RINGWEAVE_MEMBER"]
        trained = [each for each in members() if (self._trained / each).exists()]
        if len(trained) > 2 and trained[(5 * num_killed + 1) % len(trained)] == own:
            (self._trained / own).unlink()
            (self._folder / str(num_killed)).write_text(str(number))
            self._moment = MOMENTS[num_killed % len(MOMENTS)]
            self.reach("forward")

    def end(self) -> None:
        """Record the time of the end of a step."""
        self.ends_s.append(time.perf_counter())
        if self._num_kills and not self._moment:
            (self._trained / os.environ["RINGWEAVE_MEMBER"]).touch()
        self.reach("after")

    def reach(self, moment: str) -> None:
        """Die if this is the moment."""
        if self._moment == moment:
            os.kill(os.getpid(), signal.SIGKILL)


def train_by_transformers(options: argparse.Namespace) -> dict[str, Any]:
    """Train with the Trainer, of Transformers itself or of ringweave."""
    from transformers import TrainerCallback, TrainingArguments

    if options.plain:
        from transformers import Trainer
    else:
        from ringweave.integrations.transformers import Trainer
    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        max_steps=options.steps,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = make_model(options)
    steps = Steps(options, model)

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.begin(state.global_step, lambda: trainer._prepared[1].prepared.members)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.reach("optimizer")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.end()

    data = {"train_dataset": Sequences(), "data_collator": collate}
    trainer = Trainer(model=model, args=arguments, callbacks=[Watch()], **data)
    trainer.train()
    return {"ends_s": steps.ends_s, "steps": trainer.state.global_step, "digest": digest(model)}


def train_by_accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """Train with an accelerator, of Accelerate itself or of ringweave."""
    if options.plain:
        from accelerate import Accelerator
    else:
        from ringweave.integrations.accelerate import Accelerator
    accelerator, model = Accelerator(cpu=True), make_model(options)
    steps = Steps(options, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    loader = DataLoader(Sequences(), batch_size=BATCH, shuffle=True, collate_fn=collate)
    parallel, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_epochs, number = -(-options.steps // len(loader)), 0
    for epoch in range(num_epochs) if options.plain else loader.prepared.epochs(num_epochs):
        for index, batch in enumerate(loader):
            number = epoch * len(loader) + index  # about: a step with missing samples counts twice
            steps.begin(number, lambda: loader.prepared.members)
            accelerator.backward(parallel(**batch).loss)
            steps.reach("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            steps.end()
    return {"ends_s": steps.ends_s, "steps": num_epochs * len(loader), "digest": digest(model)}


def train_by_lightning(options: argparse.Namespace) -> dict[str, Any]:
    """Train with Lightning's Trainer, by its own strategy or by ringweave's."""
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    if not options.plain:
        import ringweave.integrations.lightning  # noqa: F401 - makes the strategy known
    model = make_model(options)
    steps = Steps(options, model)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)  # a collective in each step
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            steps.begin(trainer.global_step, lambda: trainer.strategy._prepared.members)

        def on_before_optimizer_step(self, *_: Any) -> None:
            steps.reach("optimizer")

        def on_train_batch_end(self, *_: Any) -> None:
            steps.end()

    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=4 if options.plain else 1,
        strategy="ddp" if options.plain else "ringweave",
        max_steps=options.steps,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.out,
    )
    trainer.fit(Module(), DataLoader(Sequences(), batch_size=BATCH, shuffle=True, collate_fn=collate))
    return {"ends_s": steps.ends_s, "steps": trainer.global_step, "digest": digest(model)}


TRAIN = {
    "transformers": train_by_transformers,
    "accelerate": train_by_accelerate,
    "lightning": train_by_lightning,
}


def digest(model: nn.Module) -> str:
    """Return a checksum of the parameters."""
    found = hashlib.sha256()
    for each in model.parameters():
        found.update(each.detach().numpy().data)
    return found.hexdigest()[:16]


def main() -> None:
    """Train, and write the outcome of this worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=TRAIN, required=True)
    parser.add_argument("--plain", action="store_true", help="the library itself, without ringweave")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sample-ms", type=float, default=0.0, help="pause for each sample")
    parser.add_argument("--has-slow-worker", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = TRAIN[options.library](options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"worker-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
