"""Formats of the tensors that pass from stage to stage: exact, bf16, or int8 with a shift and a scale for each channel.

A channel is the last dimension of a tensor of up to three dimensions (tokens, features), and the second one of images.
Values of an int8 message are `shift + scale * byte`: the least value of the channel and a 255th of its range, so the
error of a value is at most half a scale. A channel with an infinity or NaN decodes to NaN throughout, so that gradient
scalers notice it. There is no error feedback: a microbatch's activations are no estimate of the next one's.

A tensor is encoded where that makes it smaller: float64 and whole numbers never are, few samples travel in bf16
instead of int8.

```text
header    magic, format, values of a channel, channels, checksum of all that follows (24 bytes)
bf16      2 bytes a value        int8    shifts and scales in float32, 8 bytes a channel; 1 byte a value
```

On an accelerator nobody fills or checks the header, since that would wait for the device.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from ringweave.environment import EXACT
from ringweave.errors import DisagreementError
from ringweave.pipeline.runtime.boundaries import Boundary
from ringweave.pipeline.stage_layout import BOUNDARY_WIRES

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
