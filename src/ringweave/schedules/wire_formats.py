"""Wire formats: encodings of float32 values for slow links, with their sizes as formulas, and codecs on numpy arrays.

A block of values shares a scale, which is a power of two and takes one byte, a biased exponent as in float32. Values
are rounded to the nearest whole number of scales. So

- decoded values are exact products, and encoding them again, in the same blocks or in parts of them, gives the same
  values: whoever hands on a decoded value hands on what it got;
- nothing is random. Error feedback carries the error of a value to its next message, so that nearest rounding, which
  has half the variance of random rounding and needs no random numbers, is not biased in the long run.

A block with an infinity or NaN decodes to NaN throughout, so that gradient scalers notice it.

```text
values    int8: ceil(n / 128) scales, n bytes      int4: ceil(n / 64) scales, ceil(n / 2) bytes
          int2: ceil(n / 64) scales, ceil(n / 4) bytes      bf16: 2 n bytes, little-endian
```
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError

Values = NDArray[np.float32]
Encoded = NDArray[np.uint8]

_TILE_VALUES = 2**16
"""Values that are coded at a time: their intermediate columns stay in the caches. A multiple of every block."""
_MANTISSA_BITS = 23
_INFINITY_BITS = 0x7F800000
_NOT_FINITE = 255
"""Scale of a block that holds an infinity or NaN."""
_ROUNDER = np.float32(3 << 22)
"""Scales that, added to fewer than 2^22 scales, round these to whole ones, which the low bits of the sum then hold."""
_MAX_ROUNDED_SCALE, _LARGE_SHIFT = 231, 64
"""Largest scale for which the rounder is finite; values of larger ones are divided by 2^64 first."""
_BF16_NAN = 0x7FC0


@dataclass(frozen=True, slots=True)
class WireFormat:
    """A format in which float32 values travel."""

    name: str
    bits: int
    block_values: int
    """Values that share a scale; 0 without scales."""
    relative_error: float
    """Largest error of one rounding, relative to the largest value of the block, or for bf16 to the value."""

    @property
    def levels(self) -> int:
        """Largest whole number of scales."""
        return 2 ** (self.bits - 1) - 1

    def encoded_bytes(self, num_values: int) -> int:
        """Return the size of so many encoded values."""
        num_scales = -(-num_values // self.block_values) if self.block_values else 0
        return num_scales + -(-num_values * self.bits // 8)

    @property
    def ratio(self) -> float:
        """Bytes per byte of float32, for many values."""
        return (self.bits / 8 + (1 / self.block_values if self.block_values else 0)) / 4


EXACT = WireFormat("exact", 32, 0, 0.0)
BF16 = WireFormat("bf16", 16, 0, 2.0**-8)
INT8 = WireFormat("int8", 8, 128, 1 / 127)
INT4 = WireFormat("int4", 4, 64, 1 / 7)
INT2 = WireFormat("int2", 2, 64, 1.0)
FORMATS = {each.name: each for each in (EXACT, BF16, INT8, INT4, INT2)}


def format_named(name: str) -> WireFormat:
    """Return the format of that name.

    Raises:
        ScheduleError: There is none.
    """
    if name not in FORMATS:
        expected = f"one of {', '.join(FORMATS)}"
        raise ScheduleError("wire format", got=name, expected=expected, do="Name one of these")
    return FORMATS[name]


@np.errstate(over="ignore", invalid="ignore")
def encode(
    wire_format: WireFormat,
    values: Values,
    encoded: Encoded | None,
    *,
    residual: Values | None = None,
    rounds: bool = False,
) -> None:
    """Encode values, with error feedback.

    Args:
        wire_format: The format.
        values: One-dimensional and contiguous.
        encoded: Receives the `encoded_bytes` of so many values; None only rounds.
        residual: Errors of earlier messages, which are added to the values before they are encoded; receives the
            errors of this one. None loses them.
        rounds: Give `values` what the receiver will decode.

    Cost:
        About 0.7 ns for each value in int8, 1.3 with a residual (shared x86-64 core, measured).
    """
    codec = _CODECS[wire_format.name]
    if encoded is not None:
        _check_length(wire_format, encoded, len(values))
    num_scales = wire_format.encoded_bytes(len(values)) - -(-len(values) * wire_format.bits // 8)
    needs_decoded = rounds or residual is not None
    for start in range(0, len(values), _TILE_VALUES):
        tile = wanted = values[start : start + _TILE_VALUES]
        if residual is not None:
            wanted = residual[start : start + _TILE_VALUES]
            wanted += tile
        scales, payload, decoded = codec.encode(wire_format, wanted, needs_decoded)
        if encoded is not None:
            _place(wire_format, encoded, num_scales, start, scales, payload)
        if decoded is not None and residual is not None:
            wanted -= decoded
            is_lost = (scales > _MAX_ROUNDED_SCALE).any() if num_scales else not math.isfinite(float(wanted.sum()))
            if is_lost:
                wanted[~np.isfinite(wanted)] = 0.0
        if decoded is not None and rounds:
            tile[:] = decoded


@np.errstate(over="ignore", invalid="ignore")
def decode(wire_format: WireFormat, encoded: Encoded, values: Values) -> None:
    """Decode into `values`; all bytes of the right number decode to something.

    Raises:
        ScheduleError: The number of bytes is not that of so many values; nothing has been allocated by then.

    Cost:
        About 0.4 ns for each value in int8 (shared x86-64 core, measured).
    """
    codec = _CODECS[wire_format.name]
    _check_length(wire_format, encoded, len(values))
    num_scales = len(encoded) - -(-len(values) * wire_format.bits // 8)
    for start in range(0, len(values), _TILE_VALUES):
        tile = values[start : start + _TILE_VALUES]
        first = start // wire_format.block_values if num_scales else 0
        last = -(-(start + len(tile)) // wire_format.block_values) if num_scales else 0
        begin = num_scales + start * wire_format.bits // 8
        end = num_scales + -(-(start + len(tile)) * wire_format.bits // 8)
        codec.decode(wire_format, encoded[first:last], encoded[begin:end], tile)


def _place(
    wire_format: WireFormat, encoded: Encoded, num_scales: int, start: int, scales: Encoded, payload: Encoded
) -> None:
    begin = num_scales + start * wire_format.bits // 8
    encoded[begin : begin + len(payload)] = payload
    if num_scales:
        first = start // wire_format.block_values
        encoded[first : first + len(scales)] = scales


def _check_length(wire_format: WireFormat, encoded: Encoded, num_values: int) -> None:
    expected = wire_format.encoded_bytes(num_values)
    if encoded.dtype != np.uint8 or encoded.shape != (expected,):
        raise ScheduleError(
            f"bytes of {wire_format.name} message",
            got=encoded.nbytes,
            expected=f"{expected} for {num_values} values",
            do="Run the same version of ringweave on all ranks",
        )


@dataclass(frozen=True, slots=True)
class _Codec:
    """Both directions for one tile of values."""

    encode: Callable[[WireFormat, Values, bool], tuple[Encoded, Encoded, Values | None]]
    """Scales and payload of these values, and if asked, what they decode to."""
    decode: Callable[[WireFormat, Encoded, Encoded, Values], None]
    """Fill the values from scales and payload."""


_NO_SCALES = np.zeros(0, np.uint8)


def _encode_bf16(_: WireFormat, values: Values, needs_decoded: bool) -> tuple[Encoded, Encoded, Values | None]:
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += np.uint32(0x7FFF)
    rounded += bits
    is_nan = np.isnan(values)
    if is_nan.any():
        rounded[is_nan] = _BF16_NAN << 16
    high = (rounded >> 16).astype("<u2")
    if not needs_decoded:
        return _NO_SCALES, high.view(np.uint8), None
    rounded &= np.uint32(0xFFFF0000)
    return _NO_SCALES, high.view(np.uint8), rounded.view(np.float32)


def _decode_bf16(_: WireFormat, _scales: Encoded, payload: Encoded, values: Values) -> None:
    np.left_shift(payload.view("<u2"), 16, out=values.view(np.uint32), dtype=np.uint32)


def _encode_exact(_: WireFormat, values: Values, needs_decoded: bool) -> tuple[Encoded, Encoded, Values | None]:
    return _NO_SCALES, values.astype("<f4").view(np.uint8), values.copy() if needs_decoded else None


def _decode_exact(_: WireFormat, _scales: Encoded, payload: Encoded, values: Values) -> None:
    values[:] = payload.view("<f4")


def _encode_blocks(
    wire_format: WireFormat, values: Values, needs_decoded: bool
) -> tuple[Encoded, Encoded, Values | None]:
    """Encode a tile in few passes: a number that is added and taken away again rounds to whole scales."""
    num_values, width = len(values), wire_format.block_values
    if num_values % width:
        values = np.concatenate([values, np.zeros(-num_values % width, np.float32)])
    rounded = np.abs(values)
    largest = np.maximum.reduceat(rounded.view(np.int32), np.arange(0, len(values), width))  # NaN is above all
    scales, shifts = _scales_of(wire_format, largest), None
    if int(scales.max()) > _MAX_ROUNDED_SCALE:
        shifts = np.where((scales > _MAX_ROUNDED_SCALE) & (scales < _NOT_FINITE), np.uint32(_LARGE_SHIFT), np.uint32(0))
        values = values * np.repeat(_power_of_two(127 - shifts), width)
    rounders = np.repeat(_power_of_two(scales if shifts is None else scales - shifts) * _ROUNDER, width)
    np.add(values, rounders, out=rounded)
    whole = rounded.view(np.int32)  # its low bits hold the number of scales
    if wire_format.bits == 8:
        payload = whole[:num_values].astype(np.int8).view(np.uint8)
    else:
        payload = _pack(whole, wire_format.bits)[: -(-num_values * wire_format.bits // 8)]
    if not needs_decoded:
        return scales.astype(np.uint8), payload, None
    rounded -= rounders
    if shifts is not None:
        rounded *= np.repeat(_power_of_two(127 + shifts), width)
    return scales.astype(np.uint8), payload, rounded[:num_values]


def _power_of_two(exponents: NDArray[np.uint32]) -> Values:
    """Return powers of two from biased exponents; that of a block that is not finite is infinite."""
    return (exponents << _MANTISSA_BITS).view(np.float32)


def _scales_of(wire_format: WireFormat, largest: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Return the smallest powers of two, as biased exponents, of which `levels` reach the largest values' bits."""
    level_bits = wire_format.bits - 2  # levels are 1.11..1 in binary, with so many ones behind the point
    carry = (1 << (_MANTISSA_BITS - level_bits)) - 1
    exponents = (largest.view(np.uint32) + np.uint32(carry)) >> _MANTISSA_BITS
    scales = np.maximum(exponents, level_bits + 1) - level_bits
    if int(scales.max()) > _MAX_ROUNDED_SCALE:
        scales[largest >= _INFINITY_BITS] = _NOT_FINITE
    return scales


def _decode_blocks(wire_format: WireFormat, scales: Encoded, payload: Encoded, values: Values) -> None:
    whole = payload.view(np.int8) if wire_format.bits == 8 else _unpack(payload, wire_format.bits)
    np.copyto(values, whole[: len(values)])
    sizes = _power_of_two(scales.astype(np.uint32))
    sizes[scales == _NOT_FINITE] = np.nan
    values *= np.repeat(sizes, wire_format.block_values)[: len(values)]


def _pack(whole: NDArray[np.int32], bits: int) -> Encoded:
    """Pack the low bits of whole numbers into bytes, the first one lowest."""
    count, mask = 8 // bits, (1 << bits) - 1
    low = (whole & mask).astype(np.uint8).reshape(-1, count)
    packed = low[:, 0].copy()
    for place in range(1, count):
        packed |= low[:, place] << (bits * place)
    return packed


def _unpack(payload: Encoded, bits: int) -> NDArray[np.int8]:
    count, sign = 8 // bits, np.uint8(1 << (bits - 1))
    whole = np.empty((len(payload), count), np.int8)
    for place in range(count):
        part = (payload >> (bits * place)) & ((1 << bits) - 1)
        whole[:, place] = (part ^ sign).view(np.int8) - np.int8(sign)
    return whole.reshape(-1)


_BLOCKS = _Codec(_encode_blocks, _decode_blocks)
_CODECS: dict[str, _Codec] = {
    "exact": _Codec(_encode_exact, _decode_exact),
    "bf16": _Codec(_encode_bf16, _decode_bf16),
    "int8": _BLOCKS,
    "int4": _BLOCKS,
    "int2": _BLOCKS,
}
