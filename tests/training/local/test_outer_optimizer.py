"""Learning rates of sites, without processes."""

import pytest
import torch
from torch import nn

from ringweave.training import outer_optimizer


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad"])
def test_optimizers_that_divide_by_the_size_of_gradients_are_known_by_a_step(name: str) -> None:
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.1)
    assert outer_optimizer.is_scale_invariant(optimizer)


def test_others_are_known_too_and_one_that_cannot_be_tried_counts_as_one_of_them() -> None:
    class Bound(torch.optim.AdamW):
        def __init__(self, parameters: list, model: nn.Module, lr: float = 1e-3) -> None:
            super().__init__(parameters, lr)
            self.model = model

    parameters = [nn.Parameter(torch.zeros(1))]
    others = [torch.optim.SGD(parameters, 0.1), torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)]
    for optimizer in (*others, torch.optim.LBFGS(parameters), Bound(parameters, nn.Linear(1, 1))):
        assert not outer_optimizer.is_scale_invariant(optimizer), type(optimizer).__name__


def parameter_after(optimizer: torch.optim.Optimizer, num_steps: int = 3) -> float:
    parameter = optimizer.param_groups[0]["params"][0]
    for _ in range(num_steps):
        parameter.grad = torch.ones(1)
        optimizer.step()
    return parameter.item()


def test_rates_are_scaled_in_the_step_alone_and_decay_stays() -> None:
    scaled, plain = (
        torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr, weight_decay=decay)
        for lr, decay in ((0.01, 0.5), (0.02, 0.25))
    )
    factor = 2.0
    outer_optimizer.scale_learning_rates(scaled, lambda: factor)
    schedule = torch.optim.lr_scheduler.ConstantLR(scaled, factor=1.0)
    assert parameter_after(scaled) == pytest.approx(parameter_after(plain))
    schedule.step()
    assert (scaled.param_groups[0]["lr"], scaled.param_groups[0]["weight_decay"]) == (0.01, 0.5)
    factor = 1.0
    before = scaled.param_groups[0]["params"][0].item()
    assert parameter_after(scaled, 1) == pytest.approx(before * (1 - 0.01 * 0.5) - 0.01, rel=1e-5)


def test_a_step_that_raised_leaves_no_scaled_rate_behind() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    outer_optimizer.scale_learning_rates(optimizer, lambda: 2.0)

    def fail() -> float:
        raise FloatingPointError("the script")

    with pytest.raises(FloatingPointError):
        optimizer.step(fail)
    assert parameter_after(optimizer, 1) == pytest.approx(0.8)
    assert optimizer.param_groups[0]["lr"] == 0.1
