"""Residuals of gradients: they follow their parameters into other buckets, and through a state."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ringweave.training.checkpoints.manager import Checkpoints
from ringweave.training.gradients import GradientResiduals

PARAMETERS = [torch.zeros(3), torch.zeros(2, 2), torch.zeros(5)]


def bucket(index: int, *members: int) -> Any:
    """A bucket of DDP's with these parameters."""
    parameters = [PARAMETERS[member] for member in members]
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    return SimpleNamespace(index=lambda: index, parameters=lambda: parameters, buffer=lambda: buffer)


def filled() -> GradientResiduals:
    residuals = GradientResiduals()
    residuals.of_bucket(bucket(0, 0, 1)).copy_(torch.arange(7.0))
    residuals.of_bucket(bucket(1, 2)).copy_(torch.arange(10.0, 15.0))
    return residuals


def test_bucket_keeps_its_residual() -> None:
    residuals = filled()
    assert residuals.of_bucket(bucket(0, 0, 1)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert residuals.of_bucket(bucket(1, 2)).tolist() == [10, 11, 12, 13, 14]


def test_residuals_move_with_their_parameters_into_other_buckets() -> None:
    residuals = filled()
    assert residuals.of_bucket(bucket(0, 2, 0)).tolist() == [10, 11, 12, 13, 14, 0, 1, 2]
    assert residuals.of_bucket(bucket(1, 1)).tolist() == [3, 4, 5, 6]


def test_state_gives_another_process_the_same_residuals() -> None:
    state = filled().state_dict(PARAMETERS)
    assert {index: part.tolist() for index, part in state.items()} == {
        0: [0, 1, 2],
        1: [3, 4, 5, 6],
        2: [10, 11, 12, 13, 14],
    }
    again = GradientResiduals()
    again.load_state_dict(state, PARAMETERS)
    assert again.of_bucket(bucket(0, 1, 2)).tolist() == [3, 4, 5, 6, 10, 11, 12, 13, 14]


def prepared_model() -> tuple[Any, list[torch.Tensor]]:
    """A model under DDP with residuals, and its parameters."""
    model: Any = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(model)
    model.module = torch.nn.Linear(2, 1)
    parameters = list(model.module.parameters())
    model.gradient_residuals = GradientResiduals()
    model.gradient_residuals.load_state_dict({0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0])}, parameters)
    return model, parameters


def test_checkpoint_of_rings_says_that_residuals_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path, model=prepared_model()[0])
    checkpoints._server_checkpoint = cast(Any, SimpleNamespace(load=lambda *_: 7))
    assert checkpoints.load() == 7
    assert "residuals of rank 0 are lost after step 7: checkpoints of rings hold none" in caplog.text


def test_checkpoint_holds_the_residuals(tmp_path: Path) -> None:
    model, parameters = prepared_model()
    checkpoints = Checkpoints(tmp_path, model=model)
    checkpoints.save(5)
    checkpoints.wait()
    model.gradient_residuals.load_state_dict({}, parameters)
    assert checkpoints.load() == 5
    found = model.gradient_residuals.state_dict(parameters)
    assert {index: part.tolist() for index, part in found.items()} == {0: [1, 2], 1: [3]}
