"""Training of a small GPT on ragged sequences by a trainer of Transformers or by Accelerate; a job of trainers.py.

The time of a sample is a pause, as on an accelerator that computes by itself: the processors of one machine are shared
by all workers, and one of them cannot be slower than the others.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

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


class Clock(TrainerCallback):
    """Records the end of each train step."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the time."""
        self.ends_s.append(time.perf_counter())


class Killer(TrainerCallback):
    """Lets workers kill themselves, one after the other, each at another moment of a train step."""

    def __init__(self, options: argparse.Namespace, model: nn.Module) -> None:
        self._folder, self._num_kills, self._moment = options.out / "kills", options.kills, ""
        self._folder.mkdir(parents=True, exist_ok=True)
        model.lm_head.weight.register_hook(lambda _: self._die("backward"))  # pyrefly: ignore - it is a parameter

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Choose this worker as the next victim, if it is its turn and enough others are there."""
        del args, control, kwargs
        number, world_size = len(list(self._folder.iterdir())), dist.get_world_size()
        is_due = number < self._num_kills and state.global_step >= KILL_INTERVAL * (number + 1)
        if is_due and world_size > 2 and dist.get_rank() == (5 * number + 1) % world_size:
            (self._folder / str(number)).write_text(f"step {state.global_step}: {os.environ['RINGWEAVE_MEMBER']}\n")
            self._moment = MOMENTS[number % len(MOMENTS)]
            self._die("forward")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Die before the parameters change."""
        self._die("optimizer")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Die after the step."""
        self._die("after")

    def _die(self, moment: str) -> None:
        if self._moment == moment:
            os.kill(os.getpid(), signal.SIGKILL)


def train_by_trainer(options: argparse.Namespace) -> dict[str, Any]:
    """Train with the Trainer, of Transformers itself or of ringweave."""
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
    clock, model = Clock(), make_model(options)
    callbacks: list[TrainerCallback] = [clock, *([Killer(options, model)] if options.kills else [])]
    data = {"train_dataset": Sequences(), "data_collator": collate}
    trainer = Trainer(model=model, args=arguments, callbacks=callbacks, **data)
    trainer.train()
    return {"ends_s": clock.ends_s, "steps": trainer.state.global_step, "digest": digest(model)}


def train_by_accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """Train with an accelerator, of Accelerate itself or of ringweave."""
    if options.plain:
        from accelerate import Accelerator
    else:
        from ringweave.integrations.accelerate import Accelerator
    accelerator, clock, model = Accelerator(cpu=True), Clock(), make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Sequences(), batch_size=BATCH, shuffle=True, collate_fn=collate)
    parallel, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while len(clock.ends_s) < options.steps:
        for batch in loader:
            accelerator.backward(parallel(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            clock.on_step_end()
    return {"ends_s": clock.ends_s, "steps": len(clock.ends_s), "digest": digest(model)}


def digest(model: nn.Module) -> str:
    """Return a checksum of the parameters."""
    found = hashlib.sha256()
    for each in model.parameters():
        found.update(each.detach().numpy().data)
    return found.hexdigest()[:16]


def main() -> None:
    """Train, and write the outcome of this worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=("transformers", "accelerate"), required=True)
    parser.add_argument("--plain", action="store_true", help="the library itself, without ringweave")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sample-ms", type=float, default=0.0, help="pause for each sample")
    parser.add_argument("--has-slow-worker", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train = train_by_trainer if options.library == "transformers" else train_by_accelerate
    found = train(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"worker-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
