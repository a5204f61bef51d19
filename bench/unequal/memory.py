"""Four workers, one of which has a quarter of the others' memory, by control groups: real processes, real memory.

    python bench/unequal/memory.py               # a minute; root
    python bench/unequal/memory.py --without     # the same without the memory guard: the kernel kills a worker
    python bench/unequal/memory.py --grows       # --elastic; a sample needs 1.6 times the memory from step 12 on

Each sample takes 2 MiB of activations, real pages, and time by sleeping (a third of it in the forward pass), so that a
busy machine changes little. Printed are the shares at the end beside the best feasible, searched by brute force on the
measured use of memory. It ends with 1 where shares differ by more than 5 % of a share, or a worker was killed.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringweave.topology import cgroups

WORKERS, BATCH, STEPS = 4, 512, 40
LITTLE_BYTES, MUCH_BYTES = 360 * 2**20, 1440 * 2**20
SAMPLE_S = 0.016
SAMPLE_BYTES = 2 * 2**20
"""Activations of a sample: real pages, which are kept until the backward pass."""
PAGE_BYTES = 4096
GROWTH, GROWS_AT_STEP = 1.6, 12
"""Factor on the activations from a train step on, with --grows."""
MAX_DIFFERENCE = 0.05
_GROUP = "ringweave-bench-memory"


def main() -> None:
    """Run the workers, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", action="store_true", help="without the memory guard")
    parser.add_argument("--grows", action="store_true", help="elastic, with samples that need more memory later")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(with_guard=not options.without, grows=options.grows)
        return
    groups = [make_group(rank, LITTLE_BYTES if rank == WORKERS - 1 else MUCH_BYTES) for rank in range(WORKERS)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            is_good = run(options, Path(folder), groups)
    finally:
        for group in groups:
            group.rmdir()
    sys.exit(0 if is_good or options.without else 1)


def run(options: argparse.Namespace, folder: Path, groups: list[Path]) -> bool:
    """Run the workers; return whether the bars are met."""
    flags = [name for name in ("--without", "--grows") if getattr(options, name[2:])]
    elastic = ["--elastic", f"{WORKERS - 1}:{WORKERS}"] if options.grows else []
    command = [sys.executable, "-m", "ringweave", "run", "--workers", str(WORKERS), "--mode", "balanced", *elastic]
    command += ["--run-dir", str(folder), __file__, "--worker", *flags]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    kills = sum(oom_kills(group) for group in groups)
    print(f"exit code {ended.returncode}; processes killed by the kernel for memory: {kills} (measured)")
    if ended.returncode:
        print("\n".join((ended.stdout + ended.stderr).splitlines()[-12:]))
        return False
    print("\n".join(line for line in ended.stdout.splitlines() if "(measured)" in line or "memory" in line))
    limits = {each["rank"]: each for each in events if each["kind"] == "memory_limited"}
    shares = json.loads((folder / "run.json").read_text(encoding="utf-8"))["training"]["shares"]
    for rank, each in sorted(limits.items()):
        print(
            f"rank {rank}: {each['memory_bytes'] / 2**20:.0f} MiB, of which {each['fixed_bytes'] / 2**20:.0f} fixed, "
            f"{each['sample_bytes'] / 2**20:.2f} a sample (measured): {each['samples_at_once']} at once (predicted)"
        )
    if options.grows:
        print(f"shares {shares} at the end, {sum(each['kind'] == 'worker_started' for each in events)} processes")
        return True
    speeds = {int(rank): float(number) for rank, number in re.findall(r"rank (\d): ([\d.]+) ms a sample", ended.stdout)}
    best = best_shares([speeds[rank] for rank in range(WORKERS)], limits[WORKERS - 1]["samples_at_once"])
    print(f"shares {shares}; the best feasible {best} (predicted from measured speeds)")
    difference = max(abs(share - other) / other for share, other in zip(shares, best, strict=True))
    print(f"largest difference {difference:.1%} of a share")
    return difference <= MAX_DIFFERENCE and kills == 0


def best_shares(sample_s: list[float], at_once: int) -> list[int]:
    """Return the shares with the shortest step, by trying all of the last worker, which has little memory."""
    *others_s, little_s = sample_s

    def shares(little: int) -> list[int]:
        rates = [1 / each_s for each_s in others_s]
        found = [int((BATCH - little) * rate / sum(rates)) for rate in rates]
        found[0] += BATCH - little - sum(found)
        return [*found, little]

    def step_s(little: int) -> float:
        *others, _ = shares(little)
        repeated = max(0, little - at_once) / 3
        return max(*(n * each_s for n, each_s in zip(others, others_s, strict=True)), (little + repeated) * little_s)

    return shares(min(range(1, BATCH), key=step_s))


# Control groups.


def make_group(rank: int, limit_bytes: int) -> Path:
    """Make the group of a worker."""
    mount = cgroups.find_mount(controller="memory")
    assert mount is not None, "control groups with memory are needed"
    group = mount.point / f"{_GROUP}-{rank}"
    group.mkdir(exist_ok=True)
    name = "memory.limit_in_bytes" if mount.version == 1 else "memory.max"
    (group / name).write_text(str(limit_bytes), encoding="ascii")
    return group


def oom_kills(group: Path) -> int:
    """Return the processes of a group that were killed for memory."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            lines = (group / name).read_text(encoding="ascii").splitlines()
            return sum(int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill")
    return 0


# The workers.


def train(*, with_guard: bool, grows: bool) -> None:
    """Train a model whose activations take memory, as an ordinary script does."""
    mount, rank = cgroups.find_mount(controller="memory"), int(os.environ["RANK"])
    assert mount is not None
    (mount.point / f"{_GROUP}-{rank}" / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    import torch  # in the group
    from torch.utils.data import DataLoader, TensorDataset

    import ringweave
    from ringweave.training.memory import memory_guard

    torch.set_num_threads(1)
    if not with_guard:
        memory_guard.guard_memory = lambda *_: None  # pyrefly: ignore - the run without it
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * STEPS, 4), torch.randn(BATCH * STEPS, 1))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = ringweave.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    began = time.perf_counter()
    steps_s: list[float] = []
    for x, y in loader:
        if grows and loader.num_train_steps >= GROWS_AT_STEP:
            model.module.sample_bytes = int(GROWTH * SAMPLE_BYTES)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        steps_s.append(time.perf_counter() - began)
        began = time.perf_counter()
    if not grows:
        print(f"rank {rank}: {1e3 * loader.source.membership.balancer.speed.s_per_sample:.2f} ms a sample (measured)")
    if rank == 0:
        last = statistics.median(steps_s[-10:])
        print(f"rank 0: {len(steps_s)} steps; {last:.3f} s a step at the end (measured), loss {loss.item():.4f}")


def make_model() -> Any:
    """Return a model with little to compute and much to keep."""
    import torch

    class Work(torch.autograd.Function):
        """Keeps memory for each sample, and sleeps: a third of its time in the forward pass, the rest in backward."""

        @staticmethod
        def forward(ctx: Any, values: torch.Tensor, sample_bytes: int) -> torch.Tensor:
            kept = torch.empty(len(values), sample_bytes, dtype=torch.uint8)
            kept[:, ::PAGE_BYTES] = 1
            ctx.save_for_backward(kept)
            time.sleep(SAMPLE_S / 3 * len(values))
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            time.sleep(SAMPLE_S * 2 / 3 * len(gradient))
            return gradient, None

    class Model(torch.nn.Module):
        """A small network around the work."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
            self.sample_bytes = SAMPLE_BYTES

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(Work.apply(torch.tanh(self.first(x)), self.sample_bytes))

    return Model()


if __name__ == "__main__":
    main()
