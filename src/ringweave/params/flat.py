"""All parameters of a model, or their gradients, in one piece of memory for each dtype: what goes over the wire."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringweave.errors import TrainingError, explain
from ringweave.params.messages import TensorSpec

_DTYPES = {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}


def specs_of(named: Sequence[tuple[str, Tensor]]) -> list[TensorSpec]:
    """What the server has to know of these tensors.

    Raises:
        TrainingError: One is of a dtype that cannot be trained.
    """
    for name, tensor in named:
        _dtype(str(tensor.dtype).removeprefix("torch."), name)
    return [
        TensorSpec(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in named
    ]


def sizes_of(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Bytes of each piece, in the order in which the dtypes come first."""
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.num_elements
    return tuple(count * _dtype(name, name).itemsize for name, count in counts.items())


class Flat:
    """Memory of the sizes of a model; `views` are the tensors, `pieces` the memory, one for each dtype."""

    def __init__(
        self, specs: Sequence[TensorSpec], pieces: Sequence[Tensor] | None = None, device: str = "cpu"
    ) -> None:
        """`pieces` is the memory, of the right sizes; None takes memory that holds anything."""
        counts: dict[str, int] = {}
        for spec in specs:
            counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.num_elements
        if pieces is None:
            pieces = [torch.empty(count, dtype=_dtype(name, name), device=device) for name, count in counts.items()]
        self.pieces = tuple(pieces)
        by_name = dict(zip(counts, self.pieces, strict=True))
        begins = dict.fromkeys(counts, 0)
        self.views: list[Tensor] = []
        for spec in specs:
            begin = begins[spec.dtype]
            begins[spec.dtype] = end = begin + spec.num_elements
            self.views.append(by_name[spec.dtype][begin:end].view(spec.shape))

    @classmethod
    def over(cls, specs: Sequence[TensorSpec], buffers: Sequence[memoryview]) -> "Flat":
        """The tensors in memory that was received, without a copy."""
        dtypes = dict.fromkeys(spec.dtype for spec in specs)
        pieces = [
            torch.frombuffer(buffer, dtype=_dtype(name, name))
            if len(buffer)
            else torch.empty(0, dtype=_dtype(name, name))
            for name, buffer in zip(dtypes, buffers, strict=True)
        ]
        return cls(specs, pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def buffers(self) -> list[memoryview]:
        """The memory itself, as bytes; only on the CPU."""
        return [piece.view(torch.uint8).numpy().data for piece in self.pieces]

    def copy_(self, other: "Flat") -> None:
        """Take over the content of another one."""
        for own, others in zip(self.pieces, other.pieces, strict=True):
            own.copy_(others)


def _dtype(name: str, where: str) -> torch.dtype:
    if name not in _DTYPES:
        raise TrainingError(
            explain(
                f"dtype of {where}",
                got=name,
                expected=f"one of {', '.join(sorted(_DTYPES))}",
                do="Leave such parameters out of the optimizer",
            )
        )
    return getattr(torch, name)
