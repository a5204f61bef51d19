"""A worker dies at the moment that was asked for, and not before: with a counter in the place of death."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringweave.benchmarks.programs import moments
from ringweave.comm.regrouping import EpochGroups
from ringweave.errors import UsageError


class _StoppedError(Exception):
    """In the place of death."""


def stop(*_: Any, **__: Any) -> None:
    raise _StoppedError


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a step does, in order; hooks that a moment leaves behind are taken off."""
    found: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: found.append("all_reduce"))
    monkeypatch.setattr(EpochGroups, "vote", lambda *_, **__: found.append("vote"))
    handles: list[Any] = []
    for name in ("register_module_forward_hook", "register_optimizer_step_pre_hook"):
        real = getattr(moments, name)
        monkeypatch.setattr(moments, name, lambda end, real=real: handles.append(real(end)))
    yield found
    for handle in handles:
        handle.remove()


def step(said: list[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A train step of a job with two buckets."""
    groups: Any = None
    loss = model(torch.ones(1, 2)).sum()
    said.append("forward")
    loss.backward()
    said.append("backward")
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    EpochGroups.vote(groups, is_for=False)
    optimizer.step()
    said.append("optimizer")


WHOLE = ["forward", "backward", "all_reduce", "all_reduce", "vote", "optimizer"]


@pytest.mark.parametrize(
    ("moment", "num_before"),
    [
        ("forward", 0),
        ("backward", 1),
        ("bucket 0", 3),
        ("bucket 1", 4),
        ("bucket 7", 4),
        ("commit", 4),
        ("committed", 5),
        ("optimizer", 5),
    ],
)
def test_a_step_ends_at_its_moment(moment: str, num_before: int, said: list[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(said, model, optimizer)
    assert said == WHOLE
    said.clear()
    moments.arm(moment, optimizer, stop)
    with pytest.raises(_StoppedError):
        step(said, model, optimizer)
    assert said == WHOLE[:num_before]


def test_a_moment_that_there_is_not() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    with pytest.raises(UsageError, match=r"moment of a train step: 'lunch', expected forward, .* See docs/chaos\.md"):
        moments.arm("lunch", optimizer)
