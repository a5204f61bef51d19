"""Block boundaries: shapes and types of the tensors between blocks, traced before training; side inputs.

A torch stage that infers its shapes runs a real forward first, which changes buffers (running means, say), so that a
rebuilt pipeline would differ. Instead all blocks are traced once on torch's meta device; blocks whose control flow
depends on values are run as copies with placeholder values.
"""

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError


def placeholder_copy(block: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy with small random values, since a block held by another rank has none here."""
    made = copy.deepcopy(block).to_empty(device=device)
    for tensor in (*made.parameters(), *made.buffers()):
        _fill_random(tensor)
    return made.train()


def placeholder_like(spec: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of this form: small random floats, or zeros for other types, which are valid as indices."""
    made = torch.empty_strided(spec.shape, spec.stride(), dtype=spec.dtype, device=device)
    _fill_random(made)
    return made.requires_grad_(spec.requires_grad)


@torch.no_grad()
def _fill_random(tensor: Tensor) -> None:
    tensor.zero_()
    if tensor.is_floating_point():
        tensor.uniform_(0.01, 0.02)


def side_input_names(block: nn.Module) -> Collection[str]:
    """Return names of a block's side inputs: parameters of its forward, or `side_names` if it passes them on."""
    found = cast("Collection[str] | None", getattr(block, "side_names", None))
    return inspect.signature(block.forward).parameters if found is None else found


def select_side_inputs(block: nn.Module, side: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the side inputs that a block takes."""
    if not side:
        return {}
    taken = side_input_names(block)
    return {name: value for name, value in side.items() if name in taken}


def split_side_inputs(side: Mapping[str, Tensor], num_microbatches: int) -> list[dict[str, Tensor]]:
    """Split side inputs into those of each microbatch."""
    cut = {name: value.chunk(num_microbatches) for name, value in side.items()}
    return [{name: pieces[index] for name, pieces in cut.items()} for index in range(num_microbatches)]


META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and type of a tensor, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """True if a gradient comes back for it."""

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "TensorMeta":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def meta_tensor(self) -> Tensor:
        """Return such a tensor on the meta device."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)
        return made.requires_grad_() if self.requires_grad else made


@dataclass(frozen=True, slots=True)
class Boundary:
    """Tensors of one microbatch that go from a block to the next."""

    tensors: tuple[TensorMeta, ...]

    @property
    def forward_bytes(self) -> int:
        """Size of the activations."""
        return sum(form.num_bytes for form in self.tensors)

    @property
    def backward_bytes(self) -> int:
        """Size of the gradients that come back."""
        return sum(form.num_bytes for form in self.tensors if form.requires_grad)

    def meta_tensors(self) -> tuple[Tensor, ...]:
        """Return such tensors on the meta device."""
        return tuple(form.meta_tensor() for form in self.tensors)

    def part(self, num_samples: int, of: int) -> "Boundary":
        """Return the boundary of some of a microbatch's samples.

        Raises:
            TrainingError: A tensor has no samples in its first dimension, or is not contiguous.
        """
        for form in self.tensors:
            is_whole = bool(form.shape) and form.shape[0] % of == 0
            if not is_whole or not form.meta_tensor().is_contiguous():
                expected = f"a contiguous tensor with {of} samples, or a multiple of it, in its first dimension"
                do = "Give each stage one device, or let blocks pass on tensors of samples only"
                raise TrainingError("tensor between blocks", got=form.shape, expected=expected, do=do)
        return Boundary(
            tuple(replace(form, shape=(form.shape[0] // of * num_samples, *form.shape[1:])) for form in self.tensors)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Device and autocast type of a computation."""

    device: torch.device
    autocast: torch.dtype | None = None
    """Type for the operations that autocast covers; None: the tensors' own types."""

    def autocast_context(self) -> torch.autocast:
        """Return a context for forwards and losses."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)


def trace_boundaries(
    blocks: Sequence[nn.Module],
    inputs: tuple[Tensor, ...],
    side: Mapping[str, Tensor],
    precision: Precision | None = None,
) -> tuple[Boundary, ...]:
    """Trace the tensors of one microbatch before each block and after the last one.

    Args:
        blocks: All blocks of the model, on any device; neither they nor their buffers change.
        inputs: Inputs of one microbatch; only their form matters.
        side: Side inputs of one microbatch, as all stages get them.
        precision: With autocast, blocks are run on the device, since torch's meta device does not support autocast.

    Raises:
        TrainingError: A block's output is not tensors, or a block does not accept the output of the one before it.
    """
    values = tuple(_to_meta(value) for value in inputs)
    side = {name: _to_meta(value) for name, value in side.items()}
    found = [_boundary_of(values)]
    for index, block in enumerate(blocks):
        values = _trace_block(index, block, values, side, precision or Precision(device=CPU))
        found.append(_boundary_of(values))
    return tuple(found)


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Return a block's output as arguments for the next one."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _trace_block(
    index: int, block: nn.Module, values: tuple[Tensor, ...], side: Mapping[str, Tensor], precision: Precision
) -> tuple[Tensor, ...]:
    side_inputs = select_side_inputs(block, side)
    try:
        output = _run_on_meta(block, values, side_inputs) if precision.autocast is None else None
        if output is None:
            output = _run_with_placeholders(block, values, side_inputs, precision)
    except (RuntimeError, ValueError, IndexError) as cause:
        got, where = str(cause).split("\n", 1)[0], f"block {index}, {type(block).__name__}"
        expected = "a block that can be computed on what the one before it returns"
        do = "Compare its forward's arguments with that"
        raise TrainingError("block", got=got, expected=expected, do=do, where=where) from cause
    odd = [type(value).__name__ for value in output if not isinstance(value, Tensor)]
    if odd:
        where = f"block {index}, {type(block).__name__}"
        expected, do = "a tensor or a tuple of tensors", "Wrap it so that it returns what the next block is called with"
        raise TrainingError("output of a block", got=odd[0], expected=expected, do=do, where=where)
    return tuple(_to_meta(value) for value in output)


def _run_on_meta(block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor]) -> tuple[Tensor, ...] | None:
    """Return the block's outputs on the meta device; None if that fails."""
    tensors = dict((*block.named_parameters(), *block.named_buffers()))
    empty = {name: _to_meta(tensor) for name, tensor in tensors.items()}
    try:
        with torch.enable_grad():
            return as_tuple(torch.func.functional_call(block, empty, values, side))
    except (RuntimeError, NotImplementedError):
        return None


def _run_with_placeholders(
    block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor], precision: Precision
) -> tuple[Tensor, ...]:
    """Run a copy with random values, for blocks that branch on values, as masks of the transformers library do."""
    device = precision.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        placeholder = placeholder_copy(block, device)
        own = tuple(placeholder_like(value, device) for value in values)
        given = {name: placeholder_like(value, device) for name, value in side.items()}
        with precision.autocast_context():
            return as_tuple(placeholder(*own, **given))


def _to_meta(tensor: Tensor) -> Tensor:
    return TensorMeta.from_tensor(tensor).meta_tensor()


def _boundary_of(values: Sequence[Tensor]) -> Boundary:
    return Boundary(tuple(TensorMeta.from_tensor(value) for value in values))
