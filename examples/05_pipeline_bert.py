"""Trains a small BERT by masked language modelling, byte by byte, on the standard library's text, cut into stages.

Needs the transformers library (`pip install ringweave[hf]`); its weights are drawn here, nothing is downloaded.

    ringweave run --workers 4 examples/05_pipeline_bert.py
    ringweave run --workers 4 examples/05_pipeline_bert.py --schedule 1f1b-overlap
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from ringweave import pipeline
from support import text

MASK, IGNORED, MASKED_ONE_IN = 256, -100, 7
DEFAULTS = {"steps": 100, "layers": 8, "width": 128, "context": 64, "batch": 32, "microbatches": 8}


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b or 1f1b-overlap")
    return parser.parse_args()


def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
    """Returns the mean nats per masked byte, from scores (sequences, context, bytes)."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def mask(sequences: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Returns sequences with some bytes hidden, and a target with those bytes alone."""
    hidden = torch.rand(sequences.shape, generator=torch.Generator().manual_seed(seed)) * MASKED_ONE_IN < 1
    return sequences.masked_fill(hidden, MASK), sequences.masked_fill(~hidden, IGNORED)


options, _ = parse_options(), torch.manual_seed(0)
sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "num_attention_heads": 4}
config = BertConfig(vocab_size=MASK + 1, num_hidden_layers=options.layers, tie_word_embeddings=False, **sizes)
blocks = pipeline.blocks(BertForMaskedLM(config))
example = torch.empty(options.batch, options.context, dtype=torch.int64, device="meta")
settings = pipeline.Settings(num_microbatches=options.microbatches, schedule=options.schedule)
model = pipeline.Pipeline(blocks, loss_fn, lambda b: torch.optim.AdamW(b.parameters(), lr=1e-3), example, settings)
corpus = text.load_corpus(4_000_000, torch.device("cpu"))
windows = text.Batches(source=corpus.train, batch=options.batch, context=options.context, seed=0, share=slice(None))
for step in range(options.steps):
    x, y = mask(windows.at(step)[0], seed=step)
    loss = model.train_step(x, target=y, max_norm=1.0)
    if model.rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: {loss:.3f} nats per masked byte (measured)", flush=True)
x, y = mask(text.held_out_windows(corpus, num_windows=options.batch, context=options.context)[0], seed=options.steps)
loss = model.evaluate(x, target=y)
if model.rank == 0:
    print(f"held out: {loss:.3f} nats per masked byte (measured), last blocks of stages {model.layout.splits}")
