"""Flat memory for all parameters or gradients of a model, one buffer for each dtype: the format of the RPC buffers.

Where the parameters are divided into fragments, each fragment has buffers of its own, so that it can travel alone.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ringweave.errors import TrainingError
from ringweave.param_server.messages import ServerSetup, TensorSpec

_Buffer = TypeVar("_Buffer")
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


def buffer_sizes(specs: Sequence[TensorSpec], fragments: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Return the bytes of each buffer, in the order in which the dtypes first occur; fragment by fragment."""
    if fragments:
        return tuple(itertools.chain(*(buffer_sizes([specs[place] for place in each]) for each in fragments)))
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.num_elements
    return tuple(count * _torch_dtype(name, name).itemsize for name, count in counts.items())


class FlatTensors:
    """Memory of the size of a model; `views` are the tensors, `pieces` the memory, one for each dtype."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        pieces: Sequence[Tensor] | None = None,
        device: str = "cpu",
        fragments: Sequence[Sequence[int]] = (),
    ) -> None:
        """`pieces` is memory of the right sizes; None allocates uninitialized memory.

        `fragments` has the indices of the tensors of each fragment; empty: there is one, of all.
        """
        self._fragments: list[FlatTensors] = []
        if fragments:
            self._join_fragments(specs, pieces, device, fragments)
        else:
            self._make_memory(specs, pieces, device)

    def _make_memory(self, specs: Sequence[TensorSpec], pieces: Sequence[Tensor] | None, device: str) -> None:
        """Make memory of each dtype, and views of all tensors."""
        counts: dict[str, int] = {}
        for spec in specs:
            counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.num_elements
        if pieces is None:
            pieces = [
                torch.empty(count, dtype=_torch_dtype(name, name), device=device) for name, count in counts.items()
            ]
        self.pieces: tuple[Tensor, ...] = tuple(pieces)
        by_name = dict(zip(counts, self.pieces, strict=True))
        begins = dict.fromkeys(counts, 0)
        self.views: list[Tensor] = []
        for spec in specs:
            begin = begins[spec.dtype]
            begins[spec.dtype] = end = begin + spec.num_elements
            self.views.append(by_name[spec.dtype][begin:end].view(spec.shape))

    def _join_fragments(
        self,
        specs: Sequence[TensorSpec],
        pieces: Sequence[Tensor] | None,
        device: str,
        fragments: Sequence[Sequence[int]],
    ) -> None:
        """Make the memory of each fragment, and views of all tensors in the model's order."""
        given = [None] * len(fragments) if pieces is None else _split_by_fragment(specs, fragments, pieces)
        views: dict[int, Tensor] = {}
        for places, own in zip(fragments, given, strict=True):
            part = FlatTensors([specs[place] for place in places], own, device)
            self._fragments.append(part)
            views |= zip(places, part.views, strict=True)
        self.pieces = tuple(piece for part in self._fragments for piece in part.pieces)
        self.views = [views[place] for place in sorted(views)]

    @classmethod
    def over_buffers(
        cls, specs: Sequence[TensorSpec], buffers: Sequence[memoryview], fragments: Sequence[Sequence[int]] = ()
    ) -> "FlatTensors":
        """Return the tensors over received memory, without a copy."""
        dtypes = [
            name
            for places in fragments or [range(len(specs))]
            for name in dict.fromkeys(specs[place].dtype for place in places)
        ]
        pieces = [
            torch.frombuffer(buffer, dtype=_torch_dtype(name, name))
            if len(buffer)
            else torch.empty(0, dtype=_torch_dtype(name, name))
            for name, buffer in zip(dtypes, buffers, strict=True)
        ]
        return cls(specs, pieces, fragments=fragments)

    @property
    def parts(self) -> "list[FlatTensors]":
        """Memory of each fragment."""
        return self._fragments or [self]  # kept nowhere: a cycle would hold the memory until a garbage collection

    def select(self, fragments: Sequence[int]) -> "list[FlatTensors]":
        """Return the memory of these fragments; all of it if there are none."""
        return [self.parts[index] for index in fragments] if fragments else [self]

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def buffers(self, fragments: Sequence[int] = ()) -> list[memoryview]:
        """Return the memory of these fragments as bytes, all of it if there are none; only on the CPU."""
        return [piece.view(torch.uint8).numpy().data for part in self.select(fragments) for piece in part.pieces]

    def copy_(self, other: "FlatTensors") -> None:
        for own, others in zip(self.pieces, other.pieces, strict=True):
            own.copy_(others)


def tensors_of_setup(setup: ServerSetup, buffers: Sequence[memoryview] | None = None) -> FlatTensors:
    """Return memory for all tensors of a job, over these buffers if there are some."""
    if buffers is None:
        return FlatTensors(setup.tensors, fragments=setup.fragments)
    return FlatTensors.over_buffers(setup.tensors, buffers, setup.fragments)


def fragments_of_setup(
    setup: ServerSetup, fragments: Sequence[int], buffers: Sequence[memoryview]
) -> list[tuple[int, FlatTensors]]:
    """Return these fragments, all if there are none, each with its tensors over the buffers."""
    places = setup.places_of(fragments)
    content = [
        FlatTensors.over_buffers([setup.tensors[place] for place in each], own)
        for each, own in zip(places, _split_by_fragment(setup.tensors, places, buffers), strict=True)
    ]
    return list(zip(fragments or range(len(places)), content, strict=True))


def select_buffers(setup: ServerSetup, fragments: Sequence[int], buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    """Return the buffers of these fragments, all if there are none, of those for all tensors."""
    if not fragments:
        return buffers
    by_fragment = _split_by_fragment(setup.tensors, setup.places_of(()), buffers)
    return [buffer for index in fragments for buffer in by_fragment[index]]


def _split_by_fragment(
    specs: Sequence[TensorSpec], fragments: Sequence[Sequence[int]], buffers: Iterable[_Buffer]
) -> list[list[_Buffer]]:
    """Return the buffers of each fragment, of those of all fragments in their order."""
    left = iter(buffers)
    return [list(itertools.islice(left, len(buffer_sizes([specs[place] for place in each])))) for each in fragments]


def _torch_dtype(name: str, where: str) -> torch.dtype:
    if name not in _TRAINABLE_DTYPES:
        raise TrainingError(
            f"dtype of {where}",
            got=name,
            expected=f"one of {', '.join(sorted(_TRAINABLE_DTYPES))}",
            do="Leave such parameters out of the optimizer",
        )
    return getattr(torch, name)
