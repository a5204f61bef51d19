"""Inputs of the soak's collectives, and their expected results.

A message repeats one period of random values, so that every rank can compute the others': the expected result is
computed once for the period, in double precision or exactly, and each element of the result is compared with it.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ringweave.comm.engine import reductions
from ringweave.errors import CommunicationError

PERIOD = 16381
"""Elements, a prime: a piece that lands elsewhere than it belongs shows."""

_PREMUL = "premul_sum"
_OPERATIONS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
    _PREMUL: None,
}
_INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_NARROW = ("float8_e4m3fn", "float8_e5m2")
_COMPLEX = ("complex64", "complex128")
_DTYPES = (*_FLOATS, "float32", "float32", *_INTEGERS, *_NARROW, *_COMPLEX)
_LAYOUTS = ("contiguous", "contiguous", "strided", "transposed", "shifted")
_SIZES_BYTES = (1, 100, 70_000, 1_000_000, 4_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One collective."""

    seed: int
    number: int
    ranks: tuple[int, ...]
    dtype_name: str
    operation: str
    num_elements: int
    factor: float
    """Factor of PREMUL_SUM."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def draw(script: random.Random, seed: int, number: int, ranks: list[int], max_bytes: int) -> Case:
    """The next collective of the script, of at most `max_bytes`."""
    while True:
        dtype_name, operation = script.choice(_DTYPES), script.choice(list(_OPERATIONS))
        if _is_reduced(operation, dtype_name):
            break
    itemsize = getattr(torch, dtype_name).itemsize
    floor = min(script.choice(_SIZES_BYTES), max_bytes)
    if max_bytes > 10**7:
        floor = max_bytes // 2
    num_bytes = int(floor * (max_bytes / floor) ** script.random())
    return Case(
        seed=seed,
        number=number,
        ranks=tuple(ranks),
        dtype_name=dtype_name,
        operation=operation,
        num_elements=max(1, num_bytes // itemsize - script.randint(0, 5)),
        factor=script.choice([0.5, 1.0 / 3, 1.7]),
    )


def reduce_op(case: Case) -> Any:
    """Return the operation for torch.distributed."""
    return dist._make_nccl_premul_sum(case.factor) if case.operation == _PREMUL else _OPERATIONS[case.operation]


def laid_out(case: Case, rank: int) -> Tensor:
    """Return this rank's input, in a layout of its own."""
    num = case.num_elements
    values = _repeated(_period(case, rank), num)
    layout = random.Random(f"{case.seed} {case.number} {rank}").choice(_LAYOUTS)
    if layout == "strided":
        return torch.zeros(2 * num, dtype=case.dtype)[::2].copy_(values)
    if layout == "transposed" and num % 3 == 0:
        return torch.zeros(num // 3, 3, dtype=case.dtype).t().copy_(values.view(3, -1))
    if layout == "shifted":
        return torch.zeros(num + 1, dtype=case.dtype)[1:].copy_(values)
    return values


def bits(tensor: Tensor) -> Any:
    """The bytes of a tensor, in the order of its elements."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy()


def find_wrong(case: Case, result: Tensor) -> str:
    """Describe the first error of a result; empty if every element is right."""
    flat = result.contiguous().view(-1)
    expected, allowed = _expected(case)
    for start in range(0, case.num_elements, PERIOD):
        part = _wide(flat[start : start + PERIOD])
        away = (part - expected[: len(part)]).abs()
        within = (away <= allowed[: len(part)]) if allowed is not None else part == expected[: len(part)]
        if not within.all():
            at = int((~within).nonzero()[0])
            num_wrong = int((~within).sum())
            found = f"element {start + at} is {part[at].item()}, expected {expected[at].item()}"
            return f"{found}; {num_wrong} of {len(part)} elements are wrong from {start}"
    return ""


def _is_reduced(operation: str, dtype_name: str) -> bool:
    if operation == _PREMUL:
        return dtype_name in (*_FLOATS, *_COMPLEX)
    if operation == "product" and dtype_name in _COMPLEX:
        return False  # torch.distributed refuses it
    try:
        reductions.reduction_for(_OPERATIONS[operation], getattr(torch, dtype_name))
    except CommunicationError:
        return False
    return True


def _period(case: Case, rank: int) -> Tensor:
    """One period of a rank's input."""
    size = min(PERIOD, case.num_elements)
    generator = torch.Generator().manual_seed(hash((case.seed, case.number, rank)) % 2**62)
    if case.dtype_name in _INTEGERS:
        words = torch.randint(-(2**62), 2**62, (size,), generator=generator)
        return (words & 1).bool() if case.dtype == torch.bool else words.to(case.dtype)
    real = torch.rand(size, generator=generator, dtype=torch.float64)
    values = 0.5 + real if case.operation == "product" else 2 * real - 1
    if case.dtype.is_complex:
        other = torch.rand(size, generator=generator, dtype=torch.float64)
        return torch.complex(values, other - 0.5).to(case.dtype)
    return values.to(case.dtype)


def _repeated(period: Tensor, num_elements: int) -> Tensor:
    size = len(period)
    out = torch.empty(num_elements, dtype=period.dtype)
    whole = num_elements // size * size
    out[:whole].view(-1, size).copy_(period)
    out[whole:] = period[: num_elements - whole]
    return out


def _wide(values: Tensor) -> Tensor:
    """Values in a type that differences can be computed in."""
    if values.dtype.is_complex:
        return values.to(torch.complex128)
    if values.dtype == torch.uint64:
        return values.view(torch.int64)  # compared bit by bit
    return values.to(torch.float64) if values.dtype.is_floating_point else values.to(torch.int64)


def _expected(case: Case) -> tuple[Tensor, Tensor | None]:
    """Return one period of the result, and the tolerance of each element; None where it has to be exact."""
    inputs = [_period(case, rank) for rank in case.ranks]
    if case.dtype_name in _INTEGERS:
        return _wide(_reduce_integers(case, inputs)), None
    wide = torch.stack([_wide(values) for values in inputs])
    if case.operation in ("min", "max"):
        return wide.amin(0) if case.operation == "min" else wide.amax(0), None
    epsilon = torch.finfo(case.dtype).eps
    if case.operation == "product":
        result = wide.prod(0)
        sizes = wide.abs().prod(0)
        return result, 8 * len(inputs) * epsilon * sizes + torch.finfo(case.dtype).tiny
    scale = {"avg": 1 / len(inputs), _PREMUL: case.factor}.get(case.operation, 1.0)
    allowed = (len(inputs) + 2) * epsilon * abs(scale) * wide.abs().sum(0)
    return scale * wide.sum(0), allowed + torch.finfo(case.dtype).tiny


def _reduce_integers(case: Case, inputs: list[Tensor]) -> Tensor:
    """Reduce modulo 2**64 and cut, as the dtype does at every step."""
    wide = [_wide(values) for values in inputs]
    is_flipped = case.dtype == torch.uint64 and case.operation in ("min", "max")
    if is_flipped:  # the order of unsigned numbers, among signed ones
        wide = [values ^ torch.iinfo(torch.int64).min for values in wide]
    result = wide[0].clone()
    for values in wide[1:]:
        _COMBINES[case.operation](result, values)
    if is_flipped:
        result ^= torch.iinfo(torch.int64).min
    if case.dtype == torch.bool:
        return (result & 1 if case.operation == "bxor" else result) != 0
    result = result.to(case.dtype)
    if case.operation == "avg":
        return torch.from_numpy(_divided(result, len(inputs)))
    return result


def _divided(total: Tensor, count: int) -> Any:
    """Integers divided towards zero."""
    array = total.numpy()
    quotient = abs(array.astype(object)) // count
    return (quotient * [1 if value >= 0 else -1 for value in array.tolist()]).astype(array.dtype)


_COMBINES: dict[str, Any] = {
    "sum": lambda mine, other: mine.add_(other),
    "avg": lambda mine, other: mine.add_(other),
    "product": lambda mine, other: mine.mul_(other),
    "min": lambda mine, other: torch.minimum(mine, other, out=mine),
    "max": lambda mine, other: torch.maximum(mine, other, out=mine),
    "band": lambda mine, other: mine.bitwise_and_(other),
    "bor": lambda mine, other: mine.bitwise_or_(other),
    "bxor": lambda mine, other: mine.bitwise_xor_(other),
}
"""On 64 bits; a product of numbers cut to fewer bits is the cut product."""
