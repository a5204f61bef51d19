"""What ranks do in tests of rehearsals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ringweave.training.collectives import ControlGroup
from ringweave.training.mode_choice import step_benchmark
from ringweave.training.mode_choice.step_benchmark import ExchangeTimes
from ringweave.training.options import Local
from ringweave.training.outer_steps import SiteExchange

SLOWNESS = (1, 1, 2)
BATCH = 25
"""Of which the ranks compute 10, 10 and 5."""


class Refusing(nn.Linear):
    """A model that takes so many samples at most."""

    most_samples = 1000

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The output."""
        if len(input) > self.most_samples:
            raise RuntimeError(f"no memory for {len(input)} samples")
        return super().forward(input)


def said() -> list[dict[str, Any]]:
    """As all ranks have heard it."""
    common = {"batch_samples": BATCH, "num_bytes": 4 * 2**20, "cap": None, "rate": None, "uplinks": {}}
    common |= {"server_rate": None, "server_uplinks": {}, "speed": 1.0}
    return [{"trial_s": [0.01 * slowness], **common} for slowness in SLOWNESS]


def exchange() -> ExchangeTimes:
    """As if there were a server."""
    return ExchangeTimes(serving_s=0.0, exchanging_s=0.0)


def server_of(calls: list[str]) -> step_benchmark.ServerBenchmark:
    """What ranks do with it is noted."""

    @contextmanager
    def rounds() -> Iterator[Callable[[], object]]:
        calls.append("connected")
        yield lambda: calls.append("once")
        calls.append("closed")

    return step_benchmark.ServerBenchmark(exchange=exchange, rounds=rounds)


def rehearse(most_of_rank_1: int) -> tuple[list[dict[str, Any]], bool, int, list[str]]:
    """What follows from it, whether the model is as it was, the most samples that it had at once, and its calls."""
    torch.manual_seed(0)
    step_benchmark._MAX_ROUND_RATIO = 1e9  # whatever steps as short as these seem to take
    model, sizes, calls = Refusing(8, 2), [], []
    if dist.get_rank() == 1:
        model.most_samples = most_of_rank_1
    model.register_forward_hook(lambda _module, inputs, _output: sizes.append(len(inputs[0])))
    before = [each.clone() for each in model.parameters()]
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], momentum=0.9)
    loader = DataLoader(TensorDataset(torch.ones(30, 8)))
    found = step_benchmark.benchmark_steps(said(), (model, optimizer, loader), ControlGroup(), server_of(calls))
    is_same = all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    is_same = is_same and not optimizer.state and all(each.grad is None for each in model.parameters())
    return found, is_same, max(sizes, default=0), calls


def try_sites(local: Local, most_of_rank_1: int) -> tuple[list[dict[str, Any]], bool]:
    """Return what ranks know of two sites' steps, and whether model and optimizer are as they were."""
    step_benchmark._SITE_BUDGET_S = 0.1
    torch.manual_seed(0)
    model = Refusing(8, 2)
    if dist.get_rank() == 1:
        model.most_samples = most_of_rank_1
    before = [each.clone() for each in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    loader, control = DataLoader(TensorDataset(torch.ones(30, 8))), ControlGroup()
    exchange = SiteExchange([(0, 1), (2,)], dist.get_rank())
    triple, reports = (model, optimizer, loader), [{**each, "num_bytes": 72} for each in said()]
    found = step_benchmark.benchmark_sites(reports, triple, control, exchange, local)
    exchange.close()
    is_same = all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    return found, is_same and not optimizer.state and all(each.grad is None for each in model.parameters())
