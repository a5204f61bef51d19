"""Trains a small GPT, byte by byte, on the sources and docs of Python's standard library.

An ordinary PyTorch script with DistributedDataParallel. It runs under any launcher, and alone:

    torchrun --nproc-per-node 4 examples/01_train_text.py --out runs/text
    python examples/01_train_text.py --out runs/text

It leaves in --out: losses.jsonl, checkpoints/ (continue with --resume), tensorboard/, loss.png, sample.txt, run.json.
"""

import argparse
import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import bigram, evaluation, files, gpt, pictures, processes, report, text
from support.checkpoints import Checkpoints

SIZES = [(field.name, field.default) for field in dataclasses.fields(gpt.GPTConfig)]
HAS_SYNC_OPTION = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # older torch has not
CONSTANT_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if HAS_SYNC_OPTION else "broadcast_buffers": False}


def parse_options() -> argparse.Namespace:
    """Returns the command line; the defaults train in about ninety seconds on four workers and two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/text"), help="folder for everything the run leaves behind")
    add("--steps", type=int, default=400, help="train steps in total, also when resumed: the schedule depends on it")
    add("--batch", type=int, default=40, help="sequences in a step, over all ranks; a multiple of the world size")
    add("--learning-rate", type=float, default=4e-3, help="its peak, after the warm-up")
    add("--seed", type=int, default=0, help="of the first weights, the batches and the sample")
    add("--resume", action="store_true", help="continue from the last checkpoint in --out, if there is one")
    add("--checkpoint-every", type=int, default=100, help="train steps between checkpoints")
    add("--evaluate-every", type=int, default=50, help="train steps between looks at the held-out bytes")
    add("--held-out-windows", type=int, default=512, help="how many held-out sequences are judged")
    add("--max-bytes", type=int, default=16_000_000, help="of text, to train on and to hold out")
    for name, default in SIZES:
        add(f"--{name}", type=int, default=default, help="size of the model")
    return parser.parse_args()


def learning_rate(train_step: int, options: argparse.Namespace) -> float:
    """Rises to its peak over the first tenth of the steps, then falls along a cosine to a tenth of the peak."""
    warm_up = max(1, options.steps // 10)
    progress = max(0, train_step - warm_up) / max(1, options.steps - warm_up)
    return options.learning_rate * min(train_step / warm_up, 0.55 + 0.45 * math.cos(math.pi * progress))


def train(options: argparse.Namespace) -> None:
    """Trains up to --steps, from the last checkpoint if asked to, and writes down how it went."""
    share = processes.share_of(options.batch, dist.get_rank(), dist.get_world_size())
    device = processes.pick_device()
    corpus = text.load_corpus(options.max_bytes, device)
    batches = text.Batches(
        source=corpus.train, batch=options.batch, context=options.context, seed=options.seed, share=share
    )
    held_out = text.held_out_windows(corpus, num_windows=options.held_out_windows, context=options.context)

    torch.manual_seed(options.seed)
    model = gpt.GPT(gpt.GPTConfig(**{name: getattr(options, name) for name, _ in SIZES})).to(device)
    parallel = DistributedDataParallel(model, **CONSTANT_BUFFERS)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    # DDP regroups its gradients after the first backward pass. With one pass thrown away, all that count add up in
    # the same order, and a resumed run repeats the uninterrupted one bit for bit.
    parallel(*batches.at(0)).backward()

    checkpoints = Checkpoints(options.out / "checkpoints")
    done_steps = checkpoints.load(model, optimizer) if options.resume else checkpoints.clear()
    log = report.Report(options.out, done_steps=done_steps, steps=options.steps, batch=options.batch)
    for train_step in range(done_steps + 1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train_step, options)
        optimizer.zero_grad()
        loss = parallel(*batches.at(train_step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        log.step(train_step, evaluation.mean_over_ranks(loss), learning_rate(train_step, options))

        if train_step % options.evaluate_every == 0 or train_step == options.steps:
            log.held_out(train_step, evaluation.nats_per_byte(model, *held_out))
        if train_step % options.checkpoint_every == 0 or train_step == options.steps:
            checkpoints.save(model, optimizer, train_step)
    log.close()
    if dist.get_rank() == 0:
        write_up(options, model, corpus, log)


def write_up(options: argparse.Namespace, model: gpt.GPT, corpus: text.Corpus, log: report.Report) -> None:
    """Sets the trained model beside a bigram model, lets it write, and leaves picture, sample and numbers behind."""
    held_out = text.held_out_windows(corpus, num_windows=options.held_out_windows, context=options.context)
    to_beat = bigram.nats_per_byte(bigram.fit(corpus.train), *held_out)
    sample = gpt.generate(model, b"def ", num_bytes=800, temperature=0.7, seed=options.seed)
    numbers = log.summary() | {
        "bigram_nats_per_byte": to_beat,
        "held_out_bytes": held_out[1].numel(),
        "train_bytes": len(corpus.train),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    files.merge_into_json(options.out / "run.json", numbers)
    (options.out / "sample.txt").write_bytes(sample)
    pictures.draw_losses(options.out, numbers)
    print(f"{sample.decode(errors='replace')}\n\nheld out: {numbers['held_out_nats_per_byte']:.3f} nats per byte")
    print(f"a bigram model: {to_beat:.3f}, on the same {held_out[1].numel()} bytes")


def main() -> None:
    """Joins the other ranks, trains, and leaves."""
    options = parse_options()
    processes.default_to_one()
    dist.init_process_group()
    try:
        train(options)
    finally:
        processes.leave()


if __name__ == "__main__":
    main()
