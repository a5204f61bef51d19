"""Microbatches: ranges of the samples of a model's call, and outputs put together from them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

RandomStates = tuple[Tensor, Tensor | None]
"""Random states of the host and of the card; None without a card."""
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of errors of other classes than torch.OutOfMemoryError: of torch's allocator for the host, and of CUDA and its
libraries, which take memory of a card beside torch's allocator."""
_SAME_OUTPUT = 0.02
"""Largest difference of outputs computed together or one by one, as a fraction of the largest output."""


def slice_samples(tree: Any, num_samples: int, first: int, until: int) -> Any:
    """Return a tree of containers whose tensors of `num_samples` rows have only the rows `first` to `until - 1`."""

    def cut(leaf: Any) -> Any:
        is_cut = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == num_samples
        return leaf[first:until] if is_cut else leaf

    return pytree.tree_map(cut, tree)


class CannotSplitError(Exception):
    """Outputs of microbatches cannot be put together."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of the model with a batch, repeatable on a range of its samples."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int
    contexts: tuple[tuple[str, torch.dtype, bool], ...]
    """Autocast of the script: (type of device, dtype, it is on)."""

    @classmethod
    def of_script(
        cls, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int
    ) -> "ModelCall | None":
        """Return the call; None if its inputs are no batch of so many samples, or want gradients."""
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        has_batch = any(each.ndim and each.shape[0] == num_samples for each in tensors)
        if not has_batch or any(each.requires_grad for each in tensors):
            return None
        kinds = {"cpu", *(each.device.type for each in tensors)}
        contexts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in sorted(kinds)]
        return cls(run, args, kwargs, num_samples, tuple(contexts))

    def of_range(self, first: int, until: int) -> Any:
        """Return the model's output for some samples, under the script's autocast.

        Cached casts of weights are not used: those of a pass without gradients would hide the weights from another one.
        """
        args, kwargs = slice_samples((self.args, self.kwargs), self.num_samples, first, until)
        with contextlib.ExitStack() as stack:
            for kind, dtype, is_on in self.contexts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=False))
            return self.run(*args, **kwargs)

    def whole(self) -> Any:
        """Return the model's output for all samples."""
        return self.run(*self.args, **self.kwargs)

    @property
    def sample_bytes(self) -> float:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return sum(each.nbytes for each in leaves if _is_batch(each, self.num_samples)) / self.num_samples


def _is_batch(leaf: Any, num_samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == num_samples


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """Samples of a call that are computed at once."""

    first: int
    until: int
    fraction: float
    """Factor of a loss of these samples, in that of all samples of the call."""
    leaves: list[Any] = field(default_factory=list)
    """Leaves of the output; with their graph if it is kept until the backward pass."""
    is_kept: bool = False
    random_states: RandomStates | None = None
    """Random states before it was computed, of the host and of the card."""

    @property
    def num_samples(self) -> int:
        return self.until - self.first


def merge_leaf(parts: Sequence[Microbatch], index: int) -> Any:
    """Return one leaf of the output of all microbatches.

    Raises:
        CannotSplitError: The leaf does not consist of samples, and is no loss.
    """
    leaves = [part.leaves[index] for part in parts]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        if any(isinstance(leaf, Tensor) or leaf != leaves[0] for leaf in leaves):
            raise CannotSplitError
        return leaves[0]
    if all(leaf.ndim == 0 and leaf.is_floating_point() for leaf in leaves):
        weighted = (leaf.detach() * part.fraction for leaf, part in zip(leaves, parts, strict=True) if part.fraction)
        return sum(weighted, torch.zeros_like(leaves[0]))  # a mean over nothing is no number
    rows = {leaf.shape[0] / part.num_samples if leaf.ndim else 0 for leaf, part in zip(leaves, parts, strict=True)}
    if len(rows) != 1 or not min(rows) >= 1:
        raise CannotSplitError
    return torch.cat([leaf.detach() for leaf in leaves])


def used_parameters(leaves: Sequence[Any]) -> set[Tensor]:
    """Return the parameters that some outputs depend on, by their graph, as DDP does."""
    pending = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    found = {leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is None and leaf.requires_grad}
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            found.add(node.variable)
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        pending += following
    return found


def is_same_leaf(merged: Any, together: Any) -> bool:
    """Return whether a leaf that was put together is about the one of all samples together."""
    if not isinstance(together, Tensor) or not together.is_floating_point() or not together.numel():
        return True
    limit = _SAME_OUTPUT * together.abs().max() + torch.finfo(together.dtype).tiny
    return merged.shape == together.shape and bool(((merged - together).abs() <= limit).all())


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory could not be allocated, on a card or by the process."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


@contextlib.contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Set the buffers that a pass changes back to their values."""
    before = [(each, each._version, each.detach().clone()) for each in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)


def random_states(device: torch.device) -> RandomStates:
    """Return the present random states of the host and of the card."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def restored_random_states(device: torch.device, states: RandomStates | None = None) -> Iterator[None]:
    """Compute with these random states, or the present ones, and leave the present ones as they are."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if states is not None:
            torch.set_rng_state(states[0])
            if states[1] is not None:
                torch.cuda.set_rng_state(states[1], device)
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch off what makes outputs random, or mixes samples, such as dropout and batch statistics."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
