"""A worker dies at the moment that was asked for, and not before: with a counter in the place of death."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringweave.comm.generation_group import GenerationGroups
from ringweave.errors import UsageError
from ringweave.telemetry import EventLog
from ringweave_bench.chaos import kill_requests
from ringweave_bench.programs import moments
from ringweave_bench.programs.watched import StepCounter


class _StoppedError(Exception):
    """In the place of death."""


def stop(reached: str) -> None:
    raise _StoppedError(reached)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a step does, in order; hooks that a moment leaves behind are taken off."""
    found: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: found.append("all_reduce"))
    monkeypatch.setattr(GenerationGroups, "all_agree", lambda *_, **__: found.append("vote"))
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
    GenerationGroups.all_agree(groups, agrees=False)
    optimizer.step()
    said.append("optimizer")


WHOLE = ["forward", "backward", "all_reduce", "all_reduce", "vote", "optimizer"]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("moment", "num_before", "reached"),
    [
        ("forward", 0, "forward"),
        ("backward", 1, "backward"),
        ("bucket 0", 3, "bucket 0"),
        ("bucket 1", 4, "bucket 1"),
        ("commit", 4, "commit"),
        ("committed", 5, "committed"),
        ("optimizer", 5, "optimizer"),
    ],
)
def test_a_step_ends_at_its_moment_and_it_is_told_which_one_came(
    moment: str, num_before: int, reached: str, said: list[str]
) -> None:
    model, optimizer = trained()
    step(said, model, optimizer)
    assert said == WHOLE
    said.clear()
    moments.arm_moment(moment, optimizer, stop)
    with pytest.raises(_StoppedError, match=f"^{reached}$"):
        step(said, model, optimizer)
    assert said == WHOLE[:num_before]


def test_where_a_whole_step_has_no_such_bucket_it_is_the_commit_of_that(said: list[str]) -> None:
    model, optimizer = trained()
    moments.arm_moment("bucket 7", optimizer, stop)
    step(said, model, optimizer)
    with pytest.raises(_StoppedError, match=r"^commit$"):
        step(said, model, optimizer)
    assert said == [*WHOLE, *WHOLE[:4]]


def test_a_bucket_is_waited_for_where_the_step_s_sums_are_under_way_already(said: list[str]) -> None:
    """Of a worker that follows another thread takes part in them: the rest of those proves nothing."""
    groups: Any = None
    model, optimizer = trained()
    moments.arm_moment("bucket 1", optimizer, stop)
    dist.all_reduce(torch.ones(1))
    GenerationGroups.all_agree(groups, agrees=False)
    said.clear()
    with pytest.raises(_StoppedError, match=r"^bucket 1$"):
        step(said, model, optimizer)
    assert said == WHOLE[:4]


def test_a_moment_that_there_is_not() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    with pytest.raises(
        UsageError, match=r"moment of a train step: 'lunch', expected forward, .* See docs/how-to/inject-faults\.md"
    ):
        moments.arm_moment("lunch", optimizer, stop)


@pytest.mark.parametrize(("moment", "reached"), [("backward", "backward"), ("bucket 7", "commit")])
def test_a_worker_says_at_which_moment_it_dies(
    moment: str, reached: str, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def die() -> None:
        raise _StoppedError

    monkeypatch.setattr(moments, "kill_self", die)
    log = EventLog(tmp_path / "events.jsonl")
    note, watched = kill_requests.kill_request_path(log.path, 3), StepCounter(log, 3)
    model, optimizer = trained()
    kill_requests.write_kill_request(note, os.getpid(), moment)
    step(said, model, optimizer)
    watched.count_step(optimizer)
    if reached == "commit":  # of the next whole step
        step(said, model, optimizer)
    with pytest.raises(_StoppedError):
        step(said, model, optimizer)
    assert kill_requests.confirmed_moment(note, os.getpid()) == reached


def test_a_worker_that_cannot_say_it_dies_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def die() -> None:
        raise _StoppedError

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(moments, "kill_self", die)
    monkeypatch.setattr(kill_requests, "confirm_kill", fail)
    with pytest.raises(_StoppedError):
        StepCounter(EventLog(tmp_path / "events.jsonl"), 3)._confirm_and_die("forward")
