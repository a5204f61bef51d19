"""The blocks that a rank has the values of; it knows the form of all others."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError, explain


class HeldBlocks:
    """All blocks of the model, those of this rank with values, the others on the meta device, which takes no memory.

    Blocks are taken over: what a rank does not hold is emptied in place.

    Raises:
        TrainingError: There are no blocks, or two of them share a parameter.
    """

    def __init__(self, modules: Sequence[nn.Module], held: Iterable[int], device: torch.device) -> None:
        if not modules:
            do = "Give the model's blocks in their order"
            raise TrainingError(explain("blocks", got=0, expected="1 or more", do=do))
        check_untied(modules)
        self._modules = list(modules)
        self._device = device
        self._held = set(held)
        for index in range(len(modules)):
            self._modules[index] = modules[index].to(device if index in self._held else "meta")

    def __len__(self) -> int:
        """All of the model."""
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        """A block; one that is not held has no values."""
        return self._modules[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """All of them, in the model's order."""
        return iter(self._modules)

    @property
    def held(self) -> tuple[int, ...]:
        """Those with values, in order."""
        return tuple(sorted(self._held))

    def hold(self, index: int) -> nn.Module:
        """Make room for a block's values on this rank's device; they are undefined until they are filled in."""
        if index not in self._held:
            self._modules[index] = self._modules[index].to_empty(device=self._device)
            self._held.add(index)
        return self._modules[index]

    def put(self, index: int, module: nn.Module) -> None:
        """Hold a block whose values are there already, in place of the form that was known of it."""
        self._modules[index] = module
        self._held.add(index)

    def drop(self, index: int) -> None:
        """Forget a block's values."""
        if index in self._held:
            self._modules[index] = self._modules[index].to("meta")
            self._held.remove(index)


def check_untied(modules: Sequence[nn.Module]) -> None:
    """Refuse blocks that share a parameter or buffer: they may come to lie on different ranks.

    Raises:
        TrainingError: For the first one, with both its names.
    """
    for (index, name), (first, first_name), _ in shared(modules):
        do = "Build the model without tied weights (tie_word_embeddings=False), or take blocks(model, tied='untie')"
        expected = "a tensor of the block's own, since blocks may lie on different ranks"
        got = f"{first_name} of block {first}"
        raise TrainingError(explain(f"{name} of block {index}", got=got, expected=expected, do=do))


def shared(modules: Sequence[nn.Module]) -> Iterator[tuple[tuple[int, str], tuple[int, str], Tensor]]:
    """Each parameter or buffer that an earlier block has as well: (index and name, the first ones, the tensor)."""
    owners: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            first = owners.setdefault(id(tensor), (index, name))
            if first[0] != index:
                yield (index, name), first, tensor
