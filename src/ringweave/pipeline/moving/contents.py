"""All that belongs to a block, as named tensors and plain facts: what is sent, filled in again, and compared.

State (parameters, what the optimizer keeps of them) changes in the optimizer's step only. Changes (gradients, buffers,
extra state) come with every forward and backward. What a block draws at random belongs to neither: it follows from the
run's seed, the block's index, the train step and the microbatch (`running/keys.py`).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from ringweave.errors import TrainingError, explain
from ringweave.pipeline.models import extras

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Contents:
    """Tensors by name, and facts that JSON can hold."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def state_of(block: nn.Module, optimizer: Optimizer | None) -> Contents:
    """What only the optimizer's step changes.

    Raises:
        TrainingError: The optimizer keeps something that is neither a tensor nor a plain value.
    """
    found = Contents({f"parameter {name}": value.detach() for name, value in block.named_parameters()})
    found.facts["requires_grad"] = {name: value.requires_grad for name, value in block.named_parameters()}
    kept = found.facts["optimizer"] = {}
    for place, parameter in enumerate(_parameters(optimizer)):
        for name, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            key = f"optimizer {place} {name}"
            if isinstance(value, Tensor):
                found.tensors[key] = value.detach()
                kept[key] = {"place": place, "name": name, "device": value.device.type}
            elif isinstance(value, _PLAIN):
                kept[key] = {"place": place, "name": name, "value": value}
            else:
                do = "Train with an optimizer whose state can be moved, or without a controller"
                expected = "a tensor, a number, a text or nothing"
                raise TrainingError(explain(f"optimizer's {name}", got=value, expected=expected, do=do))
    return found


def changes_of(block: nn.Module) -> Contents:
    """What a forward and a backward change.

    Raises:
        TrainingError: A gradient is sparse.
    """
    found = Contents({f"buffer {name}": value.detach() for name, value in block.named_buffers()})
    for name, parameter in block.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            do = "Use dense gradients (sparse=False)"
            expected = "a dense one"
            raise TrainingError(explain(f"gradient of {name}", got=parameter.grad.layout, expected=expected, do=do))
        found.tensors[f"gradient {name}"] = parameter.grad.detach()
    for name, value in extras.states_of(block):
        found.tensors[f"extra {name}"] = value
    return found


def room_for(name: str, form: Tensor, block: nn.Module) -> Tensor:
    """Where an arriving tensor belongs: in the block where it has a place there, else in memory of its own.

    Raises:
        TrainingError: The block's own tensor has another form.
    """
    kind, _, key = name.partition(" ")
    parameters, buffers = dict(block.named_parameters()), dict(block.named_buffers())
    own = parameters.get(key) if kind == "parameter" else buffers.get(key) if kind == "buffer" else None
    if own is None and kind in ("parameter", "buffer"):
        do = "Give the same blocks on all ranks"
        raise TrainingError(explain(f"{name} of a block that arrives", got="unknown here", expected="known", do=do))
    if own is None:
        return torch.empty(form.shape, dtype=form.dtype)
    if (own.shape, own.dtype) != (form.shape, form.dtype):
        got, expected = (tuple(form.shape), form.dtype), f"{tuple(own.shape)}, {own.dtype}, as it is here"
        do = "Give the same blocks on all ranks, and keep the shapes of buffers"
        raise TrainingError(explain(f"{name} of a block that arrives", got=got, expected=expected, do=do))
    return own.detach()


def fill_state(optimizer: Optimizer | None, arrived: Contents) -> None:
    """Give the optimizer of a new block what the one before it kept, as it was and not converted to any type."""
    parameters = _parameters(optimizer)
    for key, fact in arrived.facts["optimizer"].items():
        assert optimizer is not None
        parameter = parameters[fact["place"]]
        value = fact.get("value")
        if key in arrived.tensors:
            device = parameter.device if fact["device"] != "cpu" else torch.device("cpu")
            value = arrived.tensors[key].to(device)
        optimizer.state[parameter][fact["name"]] = value


def fill_changes(block: nn.Module, arrived: Contents) -> None:
    """Gradients and extra state; buffers are in their place already."""
    parameters = dict(block.named_parameters())
    for name, value in arrived.tensors.items():
        kind, _, key = name.partition(" ")
        if kind == "gradient":
            parameters[key].grad = value.to(parameters[key].device)
        elif kind == "extra":
            extras.fill(block, key, value)


def digest(block: nn.Module, optimizer: Optimizer | None) -> int:
    """63 bits of everything but gradients, which are spent: equal for equal bits."""
    state, changes = state_of(block, optimizer), changes_of(block)
    found = xxhash.xxh3_64(repr(sorted(state.facts["optimizer"].items())).encode())
    for contents in (state, changes):
        for name, value in sorted(contents.tensors.items()):
            if not name.startswith("gradient "):
                found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
                found.update(as_bytes(value).numpy().data)
    return found.intdigest() >> 1


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in host memory, uint8 [bytes]; shared with it where it lies there in one piece."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _parameters(optimizer: Optimizer | None) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]] if optimizer else []
