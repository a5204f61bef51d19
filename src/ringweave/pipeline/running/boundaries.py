"""What crosses from block to block, known before anything runs: torch's stages then infer nothing with real forwards.

A stage that infers its shapes runs a real forward first, which moves buffers on (running means, say): a pipeline that
was rebuilt would not be the one that was not. So blocks are followed once without data, on torch's meta device.

Source: `docs/decisions/0016-pipeline.md`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError, explain
from ringweave.pipeline.running import sides

META = torch.device("meta")


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


def follow(blocks: Sequence[nn.Module], inputs: tuple[Tensor, ...], side: Mapping[str, Tensor]) -> tuple[Boundary, ...]:
    """What crosses before each block and behind the last one, of one microbatch.

    Args:
        blocks: All of the model, on any device; they are not changed, and none of their buffers is.
        inputs: Of one microbatch; only their form matters.
        side: What all stages are given, of one microbatch.

    Raises:
        TrainingError: A block gives something else than tensors, or cannot be followed without data.
    """
    values = tuple(_form_on_meta(value) for value in inputs)
    side = {name: _form_on_meta(value) for name, value in side.items()}
    found = [_boundary(values)]
    for index, block in enumerate(blocks):
        values = _through(index, block, values, side)
        found.append(_boundary(values))
    return tuple(found)


def as_values(output: Any) -> tuple[Tensor, ...]:
    """A block's output as the next one's arguments."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _through(
    index: int, block: nn.Module, values: tuple[Tensor, ...], side: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    tensors = dict((*block.named_parameters(), *block.named_buffers()))
    without_data = {name: _form_on_meta(tensor) for name, tensor in tensors.items()}
    where = f"block {index}, {type(block).__name__}"
    try:
        with torch.enable_grad():
            given = sides.wanted(block, side)
            output = as_values(torch.func.functional_call(block, without_data, values, given))
    except (RuntimeError, NotImplementedError) as cause:
        expected = "a block that can be computed without data, on torch's meta device"
        do = "Keep decisions that depend on values out of forward"
        raise TrainingError(
            explain("block", got=str(cause).split("\n", 1)[0], expected=expected, do=do, where=where)
        ) from cause
    odd = [type(value).__name__ for value in output if not isinstance(value, Tensor)]
    if odd:
        do = "Wrap it so that it returns what the next block is called with"
        raise TrainingError(
            explain("output of a block", got=odd[0], expected="a tensor or a tuple of tensors", do=do, where=where)
        )
    return output


def _form_on_meta(tensor: Tensor) -> Tensor:
    return TensorForm.of(tensor).empty()


def _boundary(values: Sequence[Tensor]) -> Boundary:
    return Boundary(tuple(TensorForm.of(value) for value in values))
