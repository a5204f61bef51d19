"""`wire="auto"` in training: exact until every rank waits for gradients, then what the forecast says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringweave.comm import wire_scope
from ringweave.testing.ranks import run_ranks
from ringweave.training import timing
from ringweave.training.gradients import GradientReducer, GradientWaits
from ringweave.training.timing import MeasuredStep, StepTimer

NUM_PASSES = 130


def step(exchange_s: float) -> MeasuredStep:
    return MeasuredStep(num_samples=1, seconds=1.0, wall_s=1.0, exchange_s=exchange_s)


def wires_of_passes(monkeypatch: pytest.MonkeyPatch, wire: str, waits_s: list[float]) -> list[str]:
    """The format that each pass of one rank asks for; steps wait so long."""
    asked: list[str] = []
    done = torch.futures.Future()
    done.set_result([torch.zeros(2)])

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        scope = wire_scope.current()
        if async_op:
            assert scope is not None
            asked.append(scope.wire)
            assert (scope.residual_of(tensor) is None) == (scope.wire == "exact")
        return SimpleNamespace(get_future=lambda: done)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    timer = StepTimer(timing.HostTimeline())
    reducer = GradientReducer(process_group=None, timer=timer, wire=wire)
    parameters, buffer = [torch.zeros(2)], torch.zeros(2)
    bucket: Any = SimpleNamespace(
        index=lambda: 0, is_last=lambda: False, parameters=lambda: parameters, buffer=lambda: buffer
    )
    for wait_s in waits_s:
        reducer.reduce(bucket)
        for listener in timer._listeners:
            listener(step(wait_s))
    return asked


def test_auto_stays_exact_where_the_reduction_hides_behind_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wires_of_passes(monkeypatch, "auto", [0.09] * NUM_PASSES) == ["exact"] * NUM_PASSES


def test_auto_asks_the_forecast_where_steps_wait_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wires_of_passes(monkeypatch, "auto", [0.11] * NUM_PASSES) == ["exact"] * 15 + ["auto"] * (NUM_PASSES - 15)


def test_links_that_get_slow_are_seen_later_and_formats_that_are_named_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slower = [0.0] * 70 + [0.5] * (NUM_PASSES - 70)
    assert wires_of_passes(monkeypatch, "auto", slower) == ["exact"] * 127 + ["auto"] * (NUM_PASSES - 127)
    assert wires_of_passes(monkeypatch, "int8", [0.0] * 20) == ["int8"] * 20


def decide(shares: list[float]) -> list[bool]:
    """Whether waits are long after each pass of 16 measured ones; each rank has its own share."""
    waits, found = GradientWaits(None), []
    for _ in range(16):
        waits.record(step(shares[dist.get_rank()]))
        waits.begin_pass()
        found.append(waits.are_long)
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("shares", "is_long"), [([0.9, 0.02], False), ([0.9, 0.12], True)])
def test_the_rank_that_waits_least_counts_since_others_wait_for_it(shares: list[float], is_long: bool) -> None:
    assert run_ranks(decide, 2, shares) == [[False] * 15 + [is_long]] * 2
