"""How fast a rank computes, by a model that is left as it was."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ringweave.training.choosing import trials

SAMPLES = TensorDataset(torch.ones(6, 3), torch.zeros(6))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(x).squeeze() - y, "count": torch.tensor(3)}


class Refusing(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"not with {input.shape}")


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(3)])


def ticking(step_s: float):
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


@pytest.mark.parametrize("model", [nn.Linear(3, 2), TwoInputs(), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))])
def test_seconds_of_a_sample(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    found = trials.measure(model, DataLoader(SAMPLES, batch_size=4), 4, clock=ticking(0.2))
    assert found is not None
    assert all(each == pytest.approx(0.1) for each in found)  # two looks at the clock in a block of one trial
    assert 1 <= len(found) <= 8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.random.get_rng_state())


def test_short_trials_are_put_together():
    found = trials.measure(nn.Linear(3, 2), DataLoader(SAMPLES), 2, clock=ticking(0.01))
    assert found is not None
    assert max(found) < 0.011  # a block of ten trials, not one


@pytest.mark.parametrize(("model", "data"), [(Refusing(3, 2), SAMPLES), (nn.Linear(3, 2), Stream())])
def test_what_cannot_be_tried_out_has_no_speed(model, data):
    assert trials.measure(model, DataLoader(data), 2) is None


def test_noise_is_no_stall():
    assert trials.settle([1.0, 1.1, 0.9, 4.0]) == [1.05, 1.05, 1.05, 4.0]
