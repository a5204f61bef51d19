"""A rank whose gradients are not finite names itself, once, and only if the fault is its own."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringweave.training import timing
from ringweave.training.gradients import GradientReducer
from ringweave.training.timing import StepTimer

NAN, INF = float("nan"), float("inf")


def named_in(
    passes: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[int]:
    """Passes of (gradient, parameter) in which rank 3 names itself."""
    done = torch.futures.Future()
    done.set_result([torch.zeros(2)])
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: SimpleNamespace(get_future=lambda: done))
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    reducer, found = GradientReducer(process_group=None, timer=StepTimer(timing.HostTimeline())), []
    for number, (gradient, parameter) in enumerate(passes):
        bucket: Any = SimpleNamespace(
            is_last=lambda: True,
            index=lambda: 0,
            parameters=lambda value=parameter: [torch.full((5000,), value)],
            buffer=lambda value=gradient: torch.full((5000,), value),
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ringweave"):
            reducer.reduce(bucket)
        found += [number] if caplog.messages else []
        assert all("gradients of rank 3: 'not finite, and so the sum" in each for each in caplog.messages)
    return found


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([(1.0, 1.0)] * 3, []),
        ([(1.0, 1.0), (NAN, 1.0), (NAN, 1.0), (1.0, 1.0), (INF, 1.0)], [1, 4]),
        ([(NAN, NAN)] * 2, []),
    ],
)
def test_a_rank_names_itself_once(
    passes: list[tuple[float, float]],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert named_in(passes, monkeypatch, caplog) == expected
