"""Held-out loss of ps-hra beside synchronous training after the same samples: real processes, default settings.

    python bench/unequal/losses.py                       # three seeds; five minutes on a quiet machine, no root
    python bench/unequal/losses.py --cases stalls-AdamW --seeds 0

Four workers train a small network on handwritten digits. They are of unequal speed because they sleep, so that it costs
no processor time and a busy machine changes little. In each job rank after rank does the same training twice: in mode
`sync`, exactly that of one process, and in rings with a parameter server, on samples in the same order. Results are
written to OUT/CASE-SEED.json at once; a run that is started again goes on with those that are missing.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringweave

WORKERS, BATCH, EPOCHS = 4, 128, 8
SAMPLE_S = 0.0005
"""Seconds that a sample takes a worker of speed 1 to sleep."""
MOST_BEHIND = 1.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Speeds of workers, and their optimizer."""

    optimizer: str
    speeds: tuple[float, ...] = (1.0,) * WORKERS
    stall: float = 0.0
    """Probability that a step takes a worker four times as long."""


HALF = (1.0, 1.0, 0.25, 0.25)
CASES = {
    "half-quarter-SGD": Case(optimizer="SGD", speeds=HALF),
    "half-quarter-AdamW": Case(optimizer="AdamW", speeds=HALF),
    "stalls-AdamW": Case(optimizer="AdamW", stall=1 / 8),
}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="which, separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--out", type=Path, default=Path("bench/results/unequal/losses"), help="folder for results")
    parser.add_argument("--runs", type=Path, default=Path("runs/unequal-losses"), help="folder for run directories")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds.split(","):
        for name in options.cases.split(","):
            path = options.out.absolute() / f"{name}-{seed}.json"
            if not path.exists():
                run_case(name, seed, path, options.runs / f"{name}-{seed}")
    text = to_text([json.loads(path.read_text()) for path in sorted(options.out.glob("*-*.json"))])
    print(text)
    (options.out / "table.md").write_text(text + "\n")


def run_case(name: str, seed: str, path: Path, run_dir: Path) -> None:
    """Run one job, which writes the file.

    Raises:
        SystemExit: The job failed.
    """
    run = [sys.executable, "-m", "ringweave", "run", "--workers", str(WORKERS), "--mode", "ps-hra"]
    run += ["--run-dir", f"{run_dir}-{time.time_ns()}", __file__, name, seed, str(path)]
    print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    if code := subprocess.run(run, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"job of {name}, seed {seed}: exit code {code}, expected 0. Look at what it printed.")


def to_text(found: list[dict]) -> str:
    """Means over the seeds, beside the bar."""
    lines = ["| case | seeds | loss of sync | of ps-hra | ratio (bar 1.01) | of each seed |"]
    lines.append("|---|---|---|---|---|---|")
    for name in CASES:
        runs = [run for run in found if run["case"] == name]
        if runs:
            sync, rings = (statistics.mean(run[mode] for run in runs) for mode in ("sync", "ps-hra"))
            mark = "" if rings <= sync * MOST_BEHIND else "*"
            each = ", ".join(f"{run['ps-hra'] / run['sync']:.3f}" for run in runs)
            lines.append(f"| {name} | {len(runs)} | {sync:.4f} | {rings:.4f} | {rings / sync:.4f}{mark} | {each} |")
    lines.append(f"\nHeld-out losses after {EPOCHS} epochs, means over seeds (measured). * is above the bar.")
    return "\n".join(lines)


def work(name: str, seed: int, path: Path) -> None:
    """Run one rank's trainings."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    found = {mode: train(CASES[name], seed, mode) for mode in ("sync", "ps-hra")}
    if dist.get_rank() == 0:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        said = {"case": name, "seed": seed, **found, "commit": commit.stdout.strip(), "torch": str(torch.__version__)}
        path.write_text(json.dumps(said) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def train(case: Case, seed: int, mode: str) -> float:
    """The held-out loss in the end, the same on all ranks."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    is_held_out = torch.arange(len(labels)) % 5 == 0
    torch.manual_seed(seed)
    model = Unequal(case, nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)), seed)
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if case.optimizer == "SGD"
        else torch.optim.AdamW(model.parameters(), lr=3e-3)
    )
    samples = TensorDataset(images[~is_held_out].float() / 16, labels[~is_held_out])
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    parallel, optimizer, shared = ringweave.prepare(model, optimizer, loader, mode=mode)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / EPOCHS)
    for _ in range(EPOCHS):
        for x, y in shared:
            optimizer.zero_grad()
            nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(images[is_held_out].float() / 16), labels[is_held_out]).item()


class Unequal(nn.Module):
    """A model that sleeps as long as a slower machine would compute."""

    def __init__(self, case: Case, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.model, self._case = model, case
        self._draw = random.Random(f"{seed} {dist.get_rank()}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The model's output."""
        if torch.is_grad_enabled():
            stalled = 4.0 if self._draw.random() < self._case.stall else 1.0
            time.sleep(len(x) * SAMPLE_S / self._case.speeds[dist.get_rank()] * stalled)
        return self.model(x)


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
