"""Block boundaries: shapes and types of the tensors between blocks, traced before training, and their wire formats.

A torch stage that infers its shapes runs a real forward first, which changes buffers (running means, say), so that a
rebuilt pipeline would differ. Instead all blocks are traced once on torch's meta device; blocks whose control flow
depends on values are run as copies with placeholder values.

Tensors pass from stage to stage exactly, in bf16, or in int8 with a shift and a scale for each channel. A channel is
the last dimension of a tensor of up to three dimensions (tokens, features), and the second one of images. Values of an
int8 message are `shift + scale * byte`: the least value of the channel and a 255th of its range, so the error of a
value is at most half a scale. A channel with an infinity or NaN decodes to NaN throughout, so that gradient scalers
notice it. There is no error feedback: a microbatch's activations are no estimate of the next one's.

A tensor is encoded where that makes it smaller: float64 and whole numbers never are, few samples travel in bf16
instead of int8.

```text
header    magic, format, values of a channel, channels, checksum of all that follows (24 bytes)
bf16      2 bytes a value        int8    shifts and scales in float32, 8 bytes a channel; 1 byte a value
```

On an accelerator nobody fills or checks the header, since that would wait for the device.
"""

import copy
import inspect
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import xxhash
from torch import Tensor, nn

from ringweave.environment import EXACT
from ringweave.errors import DisagreementError, TrainingError
from ringweave.pipeline.stage_layout import BOUNDARY_WIRES


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


_MAGIC, _HEADER = b"rwb1", struct.Struct("<4sIIIQ")
_CODED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_LEVELS = 255
_MIN_SCALE = torch.finfo(torch.float32).tiny
"""A channel whose scale would be smaller travels as its least value."""


class _Grid(NamedTuple):
    """A tensor as [outer, channels, inner]."""

    outer: int
    channels: int
    inner: int

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> "_Grid":
        if len(shape) > 3:
            return cls(shape[0], shape[1], math.prod(shape[2:]))
        return cls(math.prod(shape[:-1]), shape[-1] if shape else 1, 1)

    @property
    def num_values(self) -> int:
        return math.prod(self)


def format_of(wire: str, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return the format in which such a tensor travels: the smallest one that is not less exact than `wire`."""
    if dtype not in _CODED_TYPES:
        return EXACT
    allowed = BOUNDARY_WIRES[: BOUNDARY_WIRES.index(wire) + 1]
    return min(allowed, key=lambda name: _bytes_of(name, shape, dtype))


def message_bytes(wire: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a message with such a tensor."""
    return _bytes_of(format_of(wire, shape, dtype), shape, dtype)


def boundary_bytes(wire: str, boundary: Boundary) -> tuple[int, int]:
    """Return the bytes of one microbatch over a boundary: of its activations, and of their gradients."""
    sizes = [(message_bytes(wire, form.shape, form.dtype), form.requires_grad) for form in boundary.tensors]
    return sum(size for size, _ in sizes), sum(size for size, requires_grad in sizes if requires_grad)


def _bytes_of(name: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    grid = _Grid.of_shape(shape)
    if name == EXACT:
        return grid.num_values * dtype.itemsize
    payload = 2 * grid.num_values if name == "bf16" else grid.num_values + 8 * grid.channels
    return _HEADER.size + payload


@torch.no_grad()
def encode(wire: str, values: Tensor) -> Tensor:
    """Return the message of a tensor, uint8 [`message_bytes`]; the tensor itself if it travels exactly."""
    message = empty_message(wire, values)
    if message is None:
        return values
    name, grid = format_of(wire, values.shape, values.dtype), _Grid.of_shape(values.shape)
    body = message[_HEADER.size :]
    if name == "bf16":
        body.view(torch.bfloat16).copy_(values.reshape(-1))
    else:
        _encode_int8(values.detach().reshape(grid), body)
    if message.device.type == "cpu":
        header = _header_of(name, grid, body)
        message[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return message


def empty_message(wire: str, values: Tensor) -> Tensor | None:
    """Return memory for the message of such a tensor; None if it travels exactly."""
    if format_of(wire, values.shape, values.dtype) == EXACT:
        return None
    num_bytes = message_bytes(wire, values.shape, values.dtype)
    return torch.empty(num_bytes, dtype=torch.uint8, device=values.device)


@torch.no_grad()
def decode(wire: str, message: Tensor, values: Tensor, *, where: str = "") -> None:
    """Decode a message into a tensor of the form that was sent; nothing is allocated before all is checked.

    Raises:
        DisagreementError: The message's length, form or checksum is another one.
    """
    name, grid = format_of(wire, values.shape, values.dtype), _Grid.of_shape(values.shape)
    _check_message(name, grid, message, values, where)
    body, values = message[_HEADER.size :], values.detach()
    if name == "bf16":
        values.copy_(body.view(torch.bfloat16).view(values.shape))
        return
    shift, scale = (each.view(1, -1, 1) for each in body[: 8 * grid.channels].view(torch.float32).chunk(2))
    payload = body[8 * grid.channels :].view(grid)
    if values.dtype == torch.float32 and values.is_contiguous():
        torch.addcmul(shift, payload.float(), scale, out=values.view(grid))
    else:
        values.copy_(torch.addcmul(shift, payload.float(), scale).view(values.shape))


def _encode_int8(rows: Tensor, body: Tensor) -> None:
    """Encode [outer, channels, inner] into shifts, scales and bytes."""
    rows = rows.float()
    low, high = rows.amin((0, 2), keepdim=True), rows.amax((0, 2), keepdim=True)
    scale = high / _LEVELS - low / _LEVELS
    is_coded = scale >= _MIN_SCALE
    shifts, scales = body[: 8 * rows.shape[1]].view(torch.float32).chunk(2)
    shifts.copy_(low.view(-1))
    scales.copy_(torch.where(is_coded | scale.isnan(), scale, 0.0).view(-1))
    scales[~torch.isfinite(scale).view(-1)] = torch.nan
    scaled = (rows - low).mul_(torch.where(is_coded, 1 / scale, 0.0)).add_(0.5)
    body[8 * rows.shape[1] :].view(rows.shape).copy_(scaled)


def _header_of(name: str, grid: _Grid, body: Tensor) -> bytes:
    code, per_channel = BOUNDARY_WIRES.index(name), grid.outer * grid.inner
    return _HEADER.pack(_MAGIC, code, per_channel, grid.channels, xxhash.xxh3_64_intdigest(body.numpy().data))


def _check_message(name: str, grid: _Grid, message: Tensor, values: Tensor, where: str) -> None:
    expected_bytes = _bytes_of(name, values.shape, values.dtype)
    if message.dtype != torch.uint8 or message.shape != (expected_bytes,):
        got, expected = message.nbytes, f"{expected_bytes} for {name} of shape {tuple(values.shape)}"
        _refuse("bytes of a message between stages", got, expected, where)
    if message.device.type != "cpu":
        return
    magic, code, per_channel, channels, checksum = _HEADER.unpack(message[: _HEADER.size].numpy().tobytes())
    found = xxhash.xxh3_64_intdigest(message[_HEADER.size :].numpy().data)
    for noun, got, expected in (
        ("magic", magic, _MAGIC),
        ("format", code, BOUNDARY_WIRES.index(name)),
        ("values of a channel", per_channel, grid.outer * grid.inner),
        ("channels", channels, grid.channels),
        ("checksum", checksum, found),
    ):
        if got != expected:
            _refuse(f"message between stages, {noun}", got, str(expected), where)


def _refuse(noun: str, got: object, expected: str, where: str) -> None:
    do = "Run the same script and version of ringweave on all ranks; if they are the same, look for a faulty link"
    raise DisagreementError(noun, got=got, expected=expected, do=do, where=where)
