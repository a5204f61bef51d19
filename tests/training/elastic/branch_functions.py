"""What workers run whose models use other parameters for other samples."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from tests.fakes.elastic_job import send_message

NUM_SAMPLES, BATCH, WIDTH = 96, 12, 6


class Branching(nn.Module):
    """One of two layers is used, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        return (self.left if inputs[:, 0].mean() > 0 else self.right)(hidden)


def make_model() -> Branching:
    torch.manual_seed(1)
    return Branching().double()


def make_data() -> TensorDataset:
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(inputs, torch.sin(inputs))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """By whose steps a parameter moves also where its gradient is zero."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def train(num_members: int, num_steps: int, pause_s: float = 0.0, mode: str = "sync") -> dict[str, Any]:
    """Until so many members have had samples for so many steps; the state of the model."""
    given = make_model()
    optimizer = make_optimizer(given)
    data = DataLoader(make_data(), batch_size=BATCH)
    model, optimizer, loader = ringweave.prepare(given, optimizer, data, mode=mode)
    step, num_together = loader.num_train_steps, 0
    for _ in loader.epochs(1_000_000):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            step += 1
            send_message(("done", step))
            num_together += sum(share > 0 for share in loader.shares) == num_members
            if num_together == num_steps:
                return {name: each.numpy().copy() for name, each in given.state_dict().items()}
            time.sleep(pause_s)
    raise AssertionError("more epochs than steps")
