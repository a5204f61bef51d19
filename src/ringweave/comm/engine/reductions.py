"""Reduce operations: how two contributions combine, for every operation and dtype that torch computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ringweave.errors import CommunicationError, explain

Combine = Callable[[Tensor, Tensor], object]
"""Combines the second tensor into the first, in place."""

_GLOO_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)

_SIGNED_TWIN = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch adds and compares these dtypes only through their signed twins."""

_FLOAT8 = frozenset(
    dtype
    for dtype in (getattr(torch, name, None) for name in dir(torch) if name.startswith("float8_"))
    if isinstance(dtype, torch.dtype)
)

_SLICE_ELEMENTS = 2**15
"""Slice size of operations that need extra memory: slices stay in the caches, and the memory stays small."""


@dataclass(frozen=True, slots=True)
class ReduceOperation:
    """A reduce operation on a dtype, in the three steps that every executor needs."""

    name: str
    """`sum`, `avg`, ...: for texts."""
    combine: Combine
    factor: Tensor | float | None = None
    """Multiply each rank's input by this before anything is sent (PREMUL_SUM)."""
    averages: bool = False
    """Divide the result by the number of ranks (AVG only)."""

    def prepare(self, message: Tensor) -> None:
        """Apply the factor to this rank's input before the first send."""
        if self.factor is not None:
            message.mul_(self.factor)

    def finish(self, message: Tensor, num_ranks: int) -> None:
        """Divide the sum after the last receive, if this is an average."""
        if not self.averages:
            return
        if message.dtype in _SIGNED_TWIN:
            np.floor_divide(message.numpy(), num_ranks, out=message.numpy())
        elif message.dtype in _FLOAT8:
            for part in message.split(_SLICE_ELEMENTS):
                part.copy_(part.float().div_(num_ranks))
        else:
            is_real = message.is_floating_point() or message.is_complex()
            message.div_(num_ranks, rounding_mode=None if is_real else "trunc")


def reduction_for(op: Any, dtype: torch.dtype) -> ReduceOperation:
    """Return the reduction for a torch `op` and dtype.

    Raises:
        CommunicationError: torch cannot compute it, such as a bitwise AND of floats; raised before anything is sent.
    """
    kind = ReduceOp.RedOpType(int(op.op)) if hasattr(op, "op") else op
    name = str(kind).rpartition(".")[2].lower()
    combine = _COMBINES.get(kind)
    if combine is None:
        raise CommunicationError(_unsupported_text(name, dtype))
    if dtype in _FLOAT8:
        combine = _in_slices(_via_float32(combine))
    if dtype in _SIGNED_TWIN:
        ordered = kind in (ReduceOp.MIN, ReduceOp.MAX)
        combine = _in_slices(_via_signed(combine, _SIGNED_TWIN[dtype], ordered=ordered))
    reduction = ReduceOperation(name, combine, _premul_factor(op, kind), kind == ReduceOp.AVG)
    try:
        sample = torch.ones(1, dtype=dtype)
        reduction.prepare(sample)
        combine(sample, sample.clone())
        reduction.finish(sample, 1)
    except (RuntimeError, TypeError) as cause:
        raise CommunicationError(_unsupported_text(name, dtype)) from cause
    return reduction


def native_supports(reduction: ReduceOperation, dtype: torch.dtype) -> bool:
    """Return True if Gloo computes this reduction on CPU tensors without our help."""
    return dtype in _GLOO_DTYPES and reduction.factor is None and not reduction.averages


def _in_slices(combine: Combine) -> Combine:
    def combine_slices(mine: Tensor, arriving: Tensor) -> None:
        for region, piece in zip(mine.split(_SLICE_ELEMENTS), arriving.split(_SLICE_ELEMENTS), strict=True):
            combine(region, piece)

    return combine_slices


def _via_float32(combine: Combine) -> Combine:
    def combine_wide(mine: Tensor, arriving: Tensor) -> None:
        wide = mine.float()
        combine(wide, arriving.float())
        mine.copy_(wide)

    return combine_wide


def _via_signed(combine: Combine, signed: torch.dtype, *, ordered: bool) -> Combine:
    """Combine unsigned numbers as two's complement; flipping the sign bit keeps their order."""
    sign_bit = torch.iinfo(signed).min if ordered else 0

    def combine_signed(mine: Tensor, arriving: Tensor) -> None:
        left, right = mine.view(signed), arriving.view(signed) ^ sign_bit
        left.bitwise_xor_(sign_bit)
        combine(left, right)
        left.bitwise_xor_(sign_bit)

    return combine_signed


def _premul_factor(op: Any, kind: object) -> Tensor | float | None:
    if kind != ReduceOp.PREMUL_SUM:
        return None
    factor = op.__getstate__()[1]
    return factor.cpu() if isinstance(factor, Tensor) else factor


def _unsupported_text(name: str, dtype: torch.dtype) -> str:
    return explain(
        f"reduce operation {name}",
        got=str(dtype),
        expected="a dtype for which torch computes it",
        do="Convert the tensor, or use another operation",
    )


_COMBINES: dict[object, Combine] = {
    ReduceOp.SUM: lambda mine, arriving: mine.add_(arriving),
    ReduceOp.AVG: lambda mine, arriving: mine.add_(arriving),
    ReduceOp.PREMUL_SUM: lambda mine, arriving: mine.add_(arriving),
    ReduceOp.PRODUCT: lambda mine, arriving: mine.mul_(arriving),
    ReduceOp.MIN: lambda mine, arriving: torch.minimum(mine, arriving, out=mine),
    ReduceOp.MAX: lambda mine, arriving: torch.maximum(mine, arriving, out=mine),
    ReduceOp.BAND: lambda mine, arriving: mine.bitwise_and_(arriving),
    ReduceOp.BOR: lambda mine, arriving: mine.bitwise_or_(arriving),
    ReduceOp.BXOR: lambda mine, arriving: mine.bitwise_xor_(arriving),
}
