"""Stand-ins with values of their own, so that a block can be tried without anything of the model moving."""

import copy

import torch
from torch import Tensor, nn


def copy_of(block: nn.Module, device: torch.device) -> nn.Module:
    """A copy with small random values, since those of a block that another rank holds are not here."""
    made = copy.deepcopy(block).to_empty(device=device)
    for tensor in (*made.parameters(), *made.buffers()):
        _fill(tensor)
    return made.train()


def like(form: Tensor, device: torch.device) -> Tensor:
    """A tensor of this form with small random values; with zeros if it is no float, which are valid as indices."""
    made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=device)
    _fill(made)
    return made.requires_grad_(form.requires_grad)


@torch.no_grad()
def _fill(tensor: Tensor) -> None:
    tensor.zero_()
    if tensor.is_floating_point():
        tensor.uniform_(0.01, 0.02)
