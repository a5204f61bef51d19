"""Things to save, and what they look like from outside."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ringweave
from ringweave.training.checkpoints import store
from ringweave.training.checkpoints.store import CheckpointFile


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and a schedule whose state has more than numbers in it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)


def step(parts: tuple[nn.Module, torch.optim.Optimizer, Any]) -> list[float]:
    """One train step with dropout; the weights after it."""
    model, optimizer, schedule = parts
    optimizer.zero_grad()
    model(torch.ones(5, 3) * torch.rand(5, 1)).square().sum().backward()
    optimizer.step()
    schedule.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def keeper(folder: Path, parts: tuple[nn.Module, torch.optim.Optimizer, Any], **options: Any) -> ringweave.Checkpoints:
    model, optimizer, schedule = parts
    return ringweave.Checkpoints(folder, model=model, optimizer=optimizer, schedule=schedule, **options)


def save_some(folder: Path, steps: range, **options: Any) -> None:
    """A checkpoint after each of these train steps."""
    parts = make()
    checkpoints = keeper(folder, parts, **options)
    for train_step in steps:
        step(parts)
        checkpoints.save(train_step)
        assert checkpoints.wait(60)


def newest(folder: Path) -> CheckpointFile:
    return store.list_checkpoints(folder)[0]


def events(path: Path, kind: str) -> list[dict]:
    if not path.exists():
        return []
    return [each for line in path.read_text().splitlines() if (each := json.loads(line))["kind"] == kind]
