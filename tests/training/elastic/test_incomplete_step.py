"""A train step that misses samples changes nothing, and what the script did after it is undone."""

import torch
from torch import nn

from ringweave.training.elastic.training_state import IncompleteStep


class Script:
    """A model, an optimizer, and a schedule that goes along."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.is_incomplete = False
        self.step = IncompleteStep(self.optimizer, {"schedule": self.schedule}, lambda: self.is_incomplete)

    def iterate(self, gradient: float) -> None:
        """Do what a script does in each train step."""
        self.weight.grad = torch.full_like(self.weight, gradient)
        self.optimizer.step()
        self.schedule.step()


def test_the_optimizer_and_the_schedule_take_one_step_for_two_iterations() -> None:
    script, whole = Script(), Script()
    for each in (script, whole):
        each.iterate(0.5)
    script.is_incomplete = True
    before = script.weight.detach().clone()
    script.iterate(7.0)
    assert torch.equal(script.weight, before)
    assert script.weight.grad is None, "a gradient that stays would be added to the whole one"
    assert script.optimizer.state[script.weight]["step"] == 1
    script.is_incomplete = False
    script.step.restore()
    assert script.schedule.get_last_lr() == whole.schedule.get_last_lr()
    for each in (script, whole):
        each.iterate(0.25)
    assert torch.equal(script.weight, whole.weight)
    assert script.schedule.get_last_lr() == whole.schedule.get_last_lr()


def test_a_step_that_is_never_completed_is_taken_with_the_gradients_that_there_are() -> None:
    script, whole = Script(), Script()
    script.is_incomplete = True
    script.iterate(3.0)
    script.is_incomplete = False
    script.step.take_without_missing(2.0)
    whole.iterate(6.0)
    assert torch.equal(script.weight, whole.weight)
    assert script.schedule.get_last_lr() == whole.schedule.get_last_lr()
    assert script.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_nothing_is_undone_where_the_script_has_not_called_the_optimizer() -> None:
    script = Script()
    script.optimizer.param_groups[0]["lr"] = 0.05
    script.step.restore()
    script.step.take_without_missing(1.0)
    assert script.optimizer.param_groups[0]["lr"] == 0.05
    assert torch.equal(script.weight, torch.ones_like(script.weight))
