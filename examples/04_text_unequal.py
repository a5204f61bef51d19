"""Trains the GPT of the first example on unequal workers: one file, by DDP on Gloo or by ringweave.

    torchrun --nproc-per-node 4 examples/04_text_unequal.py --ddp --out runs/gloo
    ringweave run --workers 4 --elastic 3:4 examples/04_text_unequal.py --out runs/ringweave

Both train on the same sequences in every step. `make demo` runs it so in a lab, and draws the page about it.
It leaves in --out: a curve steps-RANK.jsonl of each worker, sample.txt, result.json.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ringweave
from support import bigram, files, gpt, processes, text


def train(options: argparse.Namespace) -> None:
    """Trains for --steps steps and notes the times, the samples and the loss of each on this worker."""
    torch.manual_seed(0)
    corpus = text.load_corpus(options.max_bytes, torch.device("cpu"))
    model = gpt.GPT(gpt.GPTConfig(layers=options.layers, width=options.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    cycle = {"max_lr": options.learning_rate, "total_steps": options.steps + 1, "pct_start": 0.1}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **cycle, cycle_momentum=False)
    sequences = text.Sequences(corpus.train, model.config.context, options.steps * options.batch)
    if options.ddp:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(sequences, shuffle=False)
        loader = DataLoader(sequences, options.batch // dist.get_world_size(), sampler=sampler)
        parallel = DistributedDataParallel(model)
    else:
        loader = DataLoader(sequences, options.batch)
        state = {"schedule": schedule}
        parallel, optimizer, loader = ringweave.prepare(model, optimizer, loader, "balanced", extra_state=state)

    clock = StepClock(options.out, model.embedding.weight)
    iterations = ringweave.Iterations(total=options.steps)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = parallel(inputs, targets)
        loss.backward()
        reduced_s = time.monotonic()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        schedule.step()
        clock.note(schedule.last_epoch, reduced_s, samples=len(inputs), loss=loss.item())
        iterations.done(schedule.last_epoch, loss.item())
    iterations.close()
    if dist.get_rank() == 0:
        write_up(options, model, corpus)


class StepClock:
    """Notes when this worker began a step, had computed its gradients, had those of all, and was through."""

    def __init__(self, folder: Path, last: torch.Tensor) -> None:
        """Begins the curve with a line for step 0; `last` is the parameter whose gradient is computed last."""
        self.curve = folder / f"steps-{os.environ['RANK']}.jsonl"
        self.began_s = self.computed_s = time.monotonic()
        last.register_post_accumulate_grad_hook(self.gradients_computed)
        self.note(0, self.began_s, samples=0, loss=0.0)

    def gradients_computed(self, _: torch.Tensor) -> None:
        """Notes the time at which backward has nothing left to compute."""
        self.computed_s = time.monotonic()

    def note(self, train_step: int, reduced_s: float, *, samples: int, loss: float) -> None:
        """Writes a line about the step that ends now; seconds are those of the machine's monotonic clock."""
        times = {"began_s": self.began_s, "computed_s": self.computed_s, "reduced_s": reduced_s}
        self.began_s = time.monotonic()
        times["ended_s"] = self.began_s
        files.append(self.curve, train_step=train_step, samples=samples, loss=loss, **times)


def write_up(options: argparse.Namespace, model: gpt.GPT, corpus: text.Corpus) -> None:
    """Sets the trained model beside a bigram model on held-out text, and lets it write."""
    held_out = text.held_out_windows(corpus, num_windows=options.held_out_windows, context=model.config.context)
    with torch.no_grad():
        loss = model(*held_out).item()
    sample = gpt.generate(model, b"def ", num_bytes=options.sample_bytes, temperature=0.7, seed=0)
    (options.out / "sample.txt").write_bytes(sample)
    numbers = {
        "held_out_nats_per_byte": loss,
        "bigram_nats_per_byte": bigram.nats_per_byte(bigram.fit(corpus.train), *held_out),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    files.merge_into_json(options.out / "result.json", numbers)
    print(f"{sample.decode(errors='replace')}\n\nheld out: {loss:.3f} nats per byte")
    print(f"a bigram model: {numbers['bigram_nats_per_byte']:.3f}, on the same {held_out[1].numel()} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ddp", action="store_true", help="DistributedDataParallel on Gloo, not ringweave")
    add("--out", type=Path, default=Path("runs/text-unequal"), help="folder for everything the run leaves behind")
    add("--steps", type=int, default=60, help="train steps")
    add("--batch", type=int, default=56, help="sequences in a step, over all workers")
    add("--learning-rate", type=float, default=4e-3, help="its peak, after the warm-up")
    add("--layers", type=int, default=4, help="blocks of the model")
    add("--width", type=int, default=128, help="width of the model")
    add("--held-out-windows", type=int, default=256, help="how many held-out sequences are judged")
    add("--sample-bytes", type=int, default=600, help="length of the sample")
    add("--max-bytes", type=int, default=16_000_000, help="of text, to train on and to hold out")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    train(given)
    processes.leave()
