"""Options of torch's optimizers as scripts write them."""

import pytest
import torch
from torch import nn

from ringweave.errors import TrainingError
from ringweave.param_server.optimizers import (
    adjust_options,
    check_optimizer_name,
    check_options,
    group_options,
    optimizer_name,
)


def test_a_whole_number_is_a_learning_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    options = [group_options(optimizer.param_groups[0])]
    check_options(optimizer, options)
    adjust_options(optimizer, options, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_names_of_parameters_stay_with_the_script():
    """Torch keeps them where an optimizer is made from `named_parameters`."""
    optimizer = torch.optim.SGD([("0.weight", nn.Parameter(torch.zeros(1)))], lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight"]
    assert "param_names" not in group_options(optimizer.param_groups[0])


def test_a_list_of_other_things_than_numbers_is_refused():
    with pytest.raises(TrainingError, match=r"^option betas of the optimizer: \['a', 0\.9\], expected a number"):
        group_options({"lr": 0.1, "betas": ["a", 0.9]})


class SGD(torch.optim.SGD):
    """A script's own, which takes other steps than torch's."""


def test_an_optimizer_of_the_script_is_not_taken_for_the_one_of_its_name():
    parameters = [nn.Parameter(torch.zeros(1))]
    assert check_optimizer_name(optimizer_name(torch.optim.SGD(parameters, lr=0.1))) == "SGD"
    own = optimizer_name(SGD(parameters, lr=0.1))
    assert own.endswith("test_optimizers.SGD")
    with pytest.raises(TrainingError, match=r"^optimizer: '.*test_optimizers\.SGD', expected one of SGD, Adam, AdamW"):
        check_optimizer_name(own)
