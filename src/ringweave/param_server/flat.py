"""Flat memory for all parameters or gradients of a model, one buffer for each dtype: the format of the RPC buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringweave.errors import TrainingError
from ringweave.param_server.messages import TensorSpec

_TRAINABLE_DTYPES = {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}


def tensor_specs(named: Sequence[tuple[str, Tensor]]) -> list[TensorSpec]:
    """Return the specs of these tensors for the server.

    Raises:
        TrainingError: One is of a dtype that cannot be trained.
    """
    for name, tensor in named:
        _torch_dtype(str(tensor.dtype).removeprefix("torch."), name)
    return [
        TensorSpec(name=name, shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in named
    ]


def buffer_sizes(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Return the bytes of each buffer, in the order in which the dtypes first occur."""
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.num_elements
    return tuple(count * _torch_dtype(name, name).itemsize for name, count in counts.items())


class FlatTensors:
    """Memory of the size of a model; `views` are the tensors, `pieces` the memory, one for each dtype."""

    def __init__(
        self, specs: Sequence[TensorSpec], pieces: Sequence[Tensor] | None = None, device: str = "cpu"
    ) -> None:
        """`pieces` is memory of the right sizes; None allocates uninitialized memory."""
        counts: dict[str, int] = {}
        for spec in specs:
            counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.num_elements
        if pieces is None:
            pieces = [
                torch.empty(count, dtype=_torch_dtype(name, name), device=device) for name, count in counts.items()
            ]
        self.pieces = tuple(pieces)
        by_name = dict(zip(counts, self.pieces, strict=True))
        begins = dict.fromkeys(counts, 0)
        self.views: list[Tensor] = []
        for spec in specs:
            begin = begins[spec.dtype]
            begins[spec.dtype] = end = begin + spec.num_elements
            self.views.append(by_name[spec.dtype][begin:end].view(spec.shape))

    @classmethod
    def over_buffers(cls, specs: Sequence[TensorSpec], buffers: Sequence[memoryview]) -> "FlatTensors":
        """Return the tensors over received memory, without a copy."""
        dtypes = dict.fromkeys(spec.dtype for spec in specs)
        pieces = [
            torch.frombuffer(buffer, dtype=_torch_dtype(name, name))
            if len(buffer)
            else torch.empty(0, dtype=_torch_dtype(name, name))
            for name, buffer in zip(dtypes, buffers, strict=True)
        ]
        return cls(specs, pieces)

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def buffers(self) -> list[memoryview]:
        """Return the memory as bytes; only on the CPU."""
        return [piece.view(torch.uint8).numpy().data for piece in self.pieces]

    def copy_(self, other: "FlatTensors") -> None:
        for own, others in zip(self.pieces, other.pieces, strict=True):
            own.copy_(others)


def _torch_dtype(name: str, where: str) -> torch.dtype:
    if name not in _TRAINABLE_DTYPES:
        raise TrainingError(
            f"dtype of {where}",
            got=name,
            expected=f"one of {', '.join(sorted(_TRAINABLE_DTYPES))}",
            do="Leave such parameters out of the optimizer",
        )
    return getattr(torch, name)
