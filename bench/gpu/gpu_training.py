"""Training on ranks that share one device: DDP beside DDP on Gloo, and shares of a batch by measured speed.

`--what ddp`: a GPT on ringweave and on Gloo, by turns: the step, backward alone, and the buckets alone, from the
slowest rank's clock and from events of the compute stream. `--what balanced`: one rank is three times slower.
"""

import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import BenchDevice, agree_max, clock, first_line, join_world, rank_parser, reduce_and_wait, save_json
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

WARM_UP_STEPS = 2
SLOW_FACTOR = 3
SAMPLE_S = 1e-3
"""Busy time of a fast rank for each sample."""


class DDPContender:
    """One GPT in DDP on one group, with its times and losses."""

    def __init__(self, group: Any, device: BenchDevice, *, is_short: bool) -> None:
        from support import gpt

        torch.manual_seed(0)
        sizes = (
            {"layers": 2, "width": 64, "heads": 2, "context": 32}
            if is_short
            else {"layers": 8, "width": 512, "heads": 8, "context": 256}
        )
        self.model = gpt.GPT(gpt.GPTConfig(**sizes)).to(device.device)
        self.context, self.group, self.device = sizes["context"], group, device
        self.parallel = DistributedDataParallel(self.model, process_group=group, broadcast_buffers=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.last_gradient: Any = None
        self.model.embedding.weight.register_hook(self._mark)
        self.seconds: dict[str, list[float]] = {
            "step": [],
            "compute": [],
            "buckets": [],
            "backward": [],
            "backward_alone": [],
        }
        self.losses: list[float] = []

    def _mark(self, gradient: torch.Tensor) -> torch.Tensor:
        self.last_gradient = self._now()
        return gradient

    def _now(self) -> Any:
        if not self.device.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self.device.is_cuda else end - begin

    def step(self, number: int, batch: int, kind: str, *, is_update: bool) -> None:
        """Run forward, backward and, if asked for, the update; note how long the compute stream was in backward."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        data = torch.randint(0, 256, (batch, self.context + 1), generator=generator).to(self.device.device)
        self.optimizer.zero_grad()
        loss = self.parallel(data[:, :-1], data[:, 1:])
        begin = self._now()
        loss.backward()
        if is_update:
            self.optimizer.step()
            self.losses.append(loss.item())
        self.device.synchronize()
        self.seconds[kind].append(self._between(begin, self.last_gradient))

    def turn(self, number: int, batch: int, control: Any, *, is_measured: bool) -> None:
        """Run a step; where measured also one without allreduce, and the allreduce of all gradients alone."""
        step_s = clock(lambda: self.step(number, batch, "backward", is_update=True), self.device, control)
        if not is_measured:
            return
        self.seconds["step"].append(step_s)
        with self.parallel.no_sync():
            dry = lambda: self.step(number, batch, "backward_alone", is_update=False)  # noqa: E731
            self.seconds["compute"].append(clock(dry, self.device, control))
        content = torch.ones(sum(each.numel() for each in self.model.parameters()), device=self.device.device)
        self.seconds["buckets"].append(clock(lambda: self._buckets(content), self.device, control))

    def _buckets(self, content: torch.Tensor) -> None:
        works = [dist.all_reduce(each, group=self.group, async_op=True) for each in content.split(25 * 2**20 // 4)]
        for work in works:
            assert work is not None
            work.wait()

    def summary(self) -> dict[str, Any]:
        """Return medians, and all losses of this rank."""
        medians = {f"{name}_s": statistics.median(each) for name, each in self.seconds.items() if each}
        return medians | {
            "losses": self.losses,
            "num_parameters": sum(each.numel() for each in self.model.parameters()),
        }


def run_ddp(options: Any, device: BenchDevice, control: Any) -> None:
    """Train both by turns: a few measured turns first, then plain steps until 30 losses or the end of the time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # losses are compared bit by bit, nearly
    torch.utils.deterministic.fill_uninitialized_memory = False
    deadline_s = time.monotonic() + options.budget_s
    document: dict[str, Any] = {"world_size": dist.get_world_size(), "errors": {}}
    contenders: dict[str, DDPContender] = {}
    for name, group in (("gloo", control), ("ringweave", dist.group.WORLD)):
        attempt(
            name,
            document,
            control,
            lambda n=name, g=group: contenders.update({n: DDPContender(g, device, is_short=options.short)}),
        )
    batch = 2 if options.short else 8
    for number in range(options.steps):
        for name, each in sorted(contenders.items(), reverse=number % 2 == 1):
            is_measured = WARM_UP_STEPS <= number < WARM_UP_STEPS + options.measured
            if name not in document["errors"]:
                attempt(
                    name,
                    document,
                    control,
                    lambda e=each, n=number, m=is_measured: e.turn(n, batch, control, is_measured=m),
                )
        document.update({name: each.summary() for name, each in contenders.items()})
        document["loss_gap"] = loss_gap(contenders)
        if dist.get_rank() == 0:
            save_json(options.result, document)
        if agree_max(float(time.monotonic() > deadline_s), control):
            break


def attempt(name: str, document: dict[str, Any], control: Any, action: Callable[[], object]) -> None:
    """Run an action on all ranks; after an error on any of them the name is out on all."""
    failure = None
    try:
        action()
    except Exception as error:
        failure = first_line(error)
    if agree_max(float(failure is not None), control):
        document["errors"][name] = failure or "failed on another rank"


def loss_gap(contenders: dict[str, DDPContender]) -> float | None:
    """Return the largest relative difference of the losses of this rank; None without two contenders."""
    if len(contenders) < 2:
        return None
    pairs = zip(contenders["ringweave"].losses, contenders["gloo"].losses, strict=False)
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


class SlowLayer(nn.Module):
    """Linear layer that takes a time per sample.

    The host sleeps, and the device idles between two kernels: ranks share the GPU by time slices, so that a kernel that
    waits would slow the other ranks too.
    """

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.inner, self.sample_s = nn.Linear(64, 64), sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        time.sleep(self.sample_s * len(x))
        return output


def run_balanced(options: Any, device: BenchDevice, control: Any) -> None:
    """Measure equal and balanced shares beside the ideal step: all speeds added up and a step without slow samples."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sample_s = SAMPLE_S * (SLOW_FACTOR if rank == size - 1 else 1)
    batch = 16 * size
    steps = 6 if options.short else 40
    document: dict[str, Any] = {"world_size": size, "batch": batch, "errors": {}, "memory_caps": memory_caps()}
    speed = (size - 1) / SAMPLE_S + 1 / (SLOW_FACTOR * SAMPLE_S)
    runs = {"fixed": ("sync", 0.0), "sync": ("sync", sample_s), "balanced": ("balanced", sample_s)}
    for name, (mode, each_s) in runs.items():
        attempt(
            name,
            document,
            control,
            lambda n=name, m=mode, s=each_s: document.update({n: train_balanced(m, s, batch, steps, device, control)}),
        )
        if rank == 0:
            fixed_s = document.get("fixed", {}).get("step_s", 0.0)
            save_json(options.result, document | {"ideal_step_s": batch / speed + fixed_s})


def train_balanced(
    mode: str, sample_s: float, batch: int, steps: int, device: BenchDevice, control: Any
) -> dict[str, Any]:
    """Return the median step of the second half of the run, from the slowest rank, and the last shares."""
    import ringweave

    torch.manual_seed(0)
    model = nn.Sequential(SlowLayer(sample_s), nn.Linear(64, 8)).to(device.device)
    x = torch.randn(batch * steps, 64)
    loader = DataLoader(TensorDataset(x, torch.zeros(len(x), dtype=torch.long)), batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parallel, optimizer, loader = ringweave.prepare(model, optimizer, loader, mode=mode)
    seconds, last_s = [], time.perf_counter()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(inputs.to(device.device)), labels.to(device.device)).backward()
        optimizer.step()
        device.synchronize()
        seconds.append(time.perf_counter() - last_s)
        last_s = time.perf_counter()
    step_s = agree_max(statistics.median(seconds[len(seconds) // 2 :]), control)
    return {"step_s": step_s, "shares": [int(each) for each in loader.shares]}


def memory_caps() -> str:
    """Return whether shares follow the devices' memory."""
    import ringweave

    names = inspect.signature(ringweave.prepare).parameters
    return "built, not tried here" if any("memory" in name for name in names) else "not built"


def main() -> None:
    """Join the others and run what is asked for."""
    parser = rank_parser(__doc__)
    parser.add_argument("--what", choices=["ddp", "balanced"], default="ddp")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--measured", type=int, default=6, help="turns with all measurements")
    options = parser.parse_args()
    device = BenchDevice(options.device)
    control = join_world(120.0)
    device.calibrate_busy()
    warm = torch.ones(16, device=device.device)
    attempt("warm-up", {"errors": {}}, control, lambda: reduce_and_wait(warm, dist.group.WORLD))
    (run_ddp if options.what == "ddp" else run_balanced)(options, device, control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
