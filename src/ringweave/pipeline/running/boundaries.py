"""What crosses from block to block, known before anything runs: torch's stages then infer nothing with real forwards.

A stage that infers its shapes runs a real forward first, which moves buffers on (running means, say): a pipeline that
was rebuilt would not be the one that was not. So blocks are followed once without data, on torch's meta device; those
that decide by values, as copies with values of their own.

Source: `docs/decisions/0016-pipeline.md`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError, explain
from ringweave.pipeline.running import filling, sides

META, HOST = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """A gradient comes back for it."""

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorForm":
        """What a tensor looks like."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def empty(self) -> Tensor:
        """Such a tensor on the meta device."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)
        return made.requires_grad_() if self.requires_grad else made


@dataclass(frozen=True, slots=True)
class Boundary:
    """What one microbatch carries from a block to the next."""

    forms: tuple[TensorForm, ...]

    @property
    def forward_bytes(self) -> int:
        """Of the activations that go on."""
        return sum(form.num_bytes for form in self.forms)

    @property
    def backward_bytes(self) -> int:
        """Of the gradients that come back."""
        return sum(form.num_bytes for form in self.forms if form.requires_grad)

    def empty(self) -> tuple[Tensor, ...]:
        """Such tensors on the meta device."""
        return tuple(form.empty() for form in self.forms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """In what blocks are computed."""

    device: torch.device
    autocast: torch.dtype | None = None
    """Of operations that take it; None: what tensors have."""

    def apply(self) -> torch.autocast:
        """A context for forwards and losses."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)


def follow(
    blocks: Sequence[nn.Module],
    inputs: tuple[Tensor, ...],
    side: Mapping[str, Tensor],
    precision: Precision | None = None,
) -> tuple[Boundary, ...]:
    """What crosses before each block and behind the last one, of one microbatch.

    Args:
        blocks: All of the model, on any device; they are not changed, and none of their buffers is.
        inputs: Of one microbatch; only their form matters.
        side: What all stages are given, of one microbatch.
        precision: With autocast, blocks are tried on the device: torch's meta device knows nothing of autocast.

    Raises:
        TrainingError: A block gives something else than tensors, or does not take what the one before it gives.
    """
    values = tuple(_form_on_meta(value) for value in inputs)
    side = {name: _form_on_meta(value) for name, value in side.items()}
    found = [_boundary(values)]
    for index, block in enumerate(blocks):
        values = _through(index, block, values, side, precision or Precision(device=HOST))
        found.append(_boundary(values))
    return tuple(found)


def as_values(output: Any) -> tuple[Tensor, ...]:
    """A block's output as the next one's arguments."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _through(
    index: int, block: nn.Module, values: tuple[Tensor, ...], side: Mapping[str, Tensor], precision: Precision
) -> tuple[Tensor, ...]:
    given = sides.wanted(block, side)
    try:
        output = _without_data(block, values, given) if precision.autocast is None else None
        if output is None:
            output = _with_stand_ins(block, values, given, precision)
    except (RuntimeError, NotImplementedError, ValueError, IndexError) as cause:
        got, where = str(cause).split("\n", 1)[0], f"block {index}, {type(block).__name__}"
        expected = "a block that can be computed on what the one before it returns"
        do = "Compare its forward's arguments with that"
        raise TrainingError(explain("block", got=got, expected=expected, do=do, where=where)) from cause
    odd = [type(value).__name__ for value in output if not isinstance(value, Tensor)]
    if odd:
        where = f"block {index}, {type(block).__name__}"
        expected, do = "a tensor or a tuple of tensors", "Wrap it so that it returns what the next block is called with"
        raise TrainingError(explain("output of a block", got=odd[0], expected=expected, do=do, where=where))
    return tuple(_form_on_meta(value) for value in output)


def _without_data(block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor]) -> tuple[Tensor, ...] | None:
    """None if it cannot be done."""
    tensors = dict((*block.named_parameters(), *block.named_buffers()))
    empty = {name: _form_on_meta(tensor) for name, tensor in tensors.items()}
    try:
        with torch.enable_grad():
            return as_values(torch.func.functional_call(block, empty, values, side))
    except (RuntimeError, NotImplementedError):
        return None


def _with_stand_ins(
    block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor], precision: Precision
) -> tuple[Tensor, ...]:
    """For blocks that decide by values, as masks of the transformers library do: a copy with values of its own."""
    device = precision.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        stand_in = filling.copy_of(block, device)
        own = tuple(filling.like(value, device) for value in values)
        given = {name: filling.like(value, device) for name, value in side.items()}
        with precision.apply():
            return as_values(stand_in(*own, **given))


def _form_on_meta(tensor: Tensor) -> Tensor:
    return TensorForm.of(tensor).empty()


def _boundary(values: Sequence[Tensor]) -> Boundary:
    return Boundary(tuple(TensorForm.of(value) for value in values))
