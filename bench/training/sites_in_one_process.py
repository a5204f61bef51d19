"""Loss of mode `local` by inner steps and format, beside synchronous training on the same samples: no network, no lab.

    python bench/training/sites_in_one_process.py --inner-steps 4 16 64 --wire exact int4 int2 top-k --seeds 0 1 2

One process trains a byte-level GPT (of examples/support) once on whole batches, and once as several sites do: each has
a copy of the model and its own AdamW, takes its part of every batch, and exchanges outer gradients with the code of
mode `local` (`ringweave.training.outer_optimizer`). An outer step is applied one round after it began, as in a job.
Prints the held-out loss above that of synchronous training at equal samples, mean and spread over the seeds.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch

from ringweave.training import Local
from ringweave.training.outer_optimizer import OuterGradient, OuterOptimizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

import local_in_lab as lab_bench


class SitesInOneProcess:
    """Sites of equal speed, each with its model, optimizer and outer state."""

    def __init__(self, options: argparse.Namespace, settings: Local, seed: int) -> None:
        self._wire, self._num_done = settings.format, 0
        self.models, self._optimizers = zip(*(lab_bench.make(options, seed) for _ in range(options.sites)), strict=True)
        fragments = min(settings.fragments, settings.inner_steps or 1)
        self._outer = [OuterOptimizer(model, settings, fragments) for model in self.models]
        for each in self._outer:
            each.take_parameters_once()
        self._round_steps = -(-(settings.inner_steps or 1) // fragments)
        self._fragments, self._running = fragments, list[OuterGradient]()
        self._num_steps = 0

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Do a train step: an inner step of each site with its part of the batch, and an outer one if it is due."""
        parts = zip(inputs.chunk(len(self.models)), targets.chunk(len(self.models)), strict=True)
        for model, optimizer, part in zip(self.models, self._optimizers, parts, strict=True):
            lab_bench.step(model, optimizer, *part)
        self._num_steps += 1
        if self._num_steps % self._round_steps == 0:
            self._end_outer_step()
            self._begin_outer_step([self._num_done % self._fragments])

    def finish(self) -> None:
        """End with the outer step of all fragments that ends an epoch: all sites have the same parameters."""
        self._end_outer_step()
        self._begin_outer_step(range(self._fragments))
        self._end_outer_step()

    def _begin_outer_step(self, fragments: "range | list[int]") -> None:
        self._running = [outer.begin_step(fragments) for outer in self._outer]
        self._num_done += 1

    def _end_outer_step(self) -> None:
        messages = [gradient.encode(self._wire) for gradient in self._running]
        for outer, gradient in zip(self._outer, self._running, strict=False):
            gradient.set_mean(self._wire, messages, [1.0] * len(messages))
            outer.apply_step(gradient)
        self._running = []


def main() -> None:
    """Train all combinations; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner-steps", type=int, nargs="+", default=[16], help="train steps of one outer step")
    parser.add_argument("--wire", nargs="+", default=["int4"], help="formats of outer gradients")
    parser.add_argument("--outer", nargs="+", default=[""], help="LR/MOMENTUM of the outer optimizer")
    parser.add_argument("--fragments", type=int, default=Local().fragments, help="parts of the parameters")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of weights and order")
    parser.add_argument("--sites", type=int, default=2, help="number of sites")
    parser.add_argument("--train-steps", type=int, default=1024, help="train steps")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a train step")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--out", type=Path, help="file for the losses, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    synchronous = {seed: train(options, None, seed) for seed in options.seeds}
    print(f"measured, synchronous: {synchronous}", flush=True)
    found = []
    for steps, wire, outer in itertools.product(options.inner_steps, options.wire, options.outer):
        rates = dict(zip(("outer_lr", "outer_momentum"), map(float, outer.split("/")), strict=True)) if outer else {}
        settings = Local(inner_steps=steps, wire=wire, fragments=options.fragments, **rates)
        above = [train(options, settings, seed) / synchronous[seed] - 1 for seed in options.seeds]
        spread = f" ({min(above):+.2%} to {max(above):+.2%})" if len(above) > 1 else ""
        print(
            f"measured, {steps:>3} inner steps, {wire:>5}, {outer}: {statistics.mean(above):+.2%}{spread}", flush=True
        )
        found.append({"inner_steps": steps, "wire": wire, "outer": outer, "above": above})
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def train(options: argparse.Namespace, settings: Local | None, seed: int) -> float:
    """Return the held-out loss after the train steps, of sites or of one process."""
    data, held_out = lab_bench.corpus(seed)
    alone, optimizer = lab_bench.make(options, seed)
    in_sites = SitesInOneProcess(options, settings, seed) if settings is not None else None
    for number in range(options.train_steps):
        first = number * options.batch
        batch = [each[first : first + options.batch] for each in data.tensors]
        if in_sites is not None:
            in_sites.step(*batch)
        else:
            lab_bench.step(alone, optimizer, *batch)
    if in_sites is not None:
        in_sites.finish()
        alone = in_sites.models[0]
    return lab_bench.held_out_loss(alone, held_out)


if __name__ == "__main__":
    main()
