"""Cost of a train step if glibc returns freed memory to the kernel, and if it keeps it.

    python bench/one_node/freed_memory.py

Four models, one process each on one thread, with and without the variables that `ringweave run` gives its workers; by
turns. Processor time and page faults of a train step are medians of the second half of 30, and over the rounds; memory
is the most that the process had.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from ringweave.launcher.workers import MALLOC_SETTINGS
from ringweave_bench import machine_description

MODELS = ("conv-256", "conv-512", "mlp", "transformer")
NUM_STEPS = 30


def main() -> None:
    """Without --model one process after another; the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="train this one here, and print what its steps took")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    if options.model:
        print(json.dumps(train(options.model)))
        return
    plain = {name: value for name, value in os.environ.items() if name not in MALLOC_SETTINGS}
    manners = {"given back": plain, "kept": plain | MALLOC_SETTINGS}
    found: dict[str, dict[str, list[dict[str, float]]]] = {model: {each: [] for each in manners} for model in MODELS}
    for number in range(options.rounds):
        for model in MODELS:
            for manner in sorted(manners, reverse=number % 2 == 1):
                command = [sys.executable, __file__, "--model", model]
                printed = subprocess.run(
                    command, env=manners[manner], capture_output=True, text=True, check=True
                ).stdout
                found[model][manner].append(json.loads(printed))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    rows = [row(model, of_model) for model, of_model in found.items()]
    print(
        "| model | processor ms a step, given back | kept | x | page faults a step | kept | MB | kept |\n|" + "---|" * 8
    )
    for each in rows:
        print(f"| {' | '.join(map(str, each.values()))} |")
    if options.out:
        about = {"machine": machine_description.describe_machine(), "kept": MALLOC_SETTINGS, "rounds": options.rounds}
        options.out.write_text(json.dumps(about | {"rows": rows, "measured": found}, indent=1) + "\n")


def row(model: str, found: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Medians over the rounds; the ratio is of those of one round each."""

    def median(manner: str, what: str) -> float:
        return statistics.median(each[what] for each in found[manner])

    pairs = zip(found["given back"], found["kept"], strict=True)
    cells: dict[str, object] = {"model": model}
    cells |= {f"processor_ms {manner}": round(median(manner, "processor_ms"), 1) for manner in found}
    cells["x"] = round(statistics.median(plain["processor_ms"] / kept["processor_ms"] for plain, kept in pairs), 2)
    cells |= {f"faults {manner}": round(median(manner, "faults")) for manner in found}
    return cells | {f"memory_mb {manner}": round(median(manner, "memory_mb")) for manner in found}


def train(name: str) -> dict[str, float]:
    """Measure the steps of this model in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs, targets = make(name)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = []
    for _ in range(NUM_STEPS):
        began_s, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        steps.append((time.process_time() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
    seconds, faults_of = zip(*steps[NUM_STEPS // 2 :], strict=True)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "processor_ms": 1e3 * statistics.median(seconds),
        "faults": statistics.median(faults_of),
        "memory_mb": most,
    }


def make(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model, a batch and its targets; digits' size, MNIST's, and bytes of text."""
    kind, _, batch = name.partition("-")
    if kind == "conv":
        count = int(batch)
        layers = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
        model = nn.Sequential(layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))
        return model, torch.randn(count, 1, 8, 8), torch.randint(10, (count,))
    if kind == "mlp":
        model = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
        return model, torch.randn(128, 784), torch.randint(10, (128,))
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    text = torch.randint(256, (8, 128))
    return nn.Sequential(nn.Embedding(256, 256), blocks, nn.Linear(256, 256)), text, text


if __name__ == "__main__":
    main()
