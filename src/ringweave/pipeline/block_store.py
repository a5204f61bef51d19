"""Blocks of a model on one rank: its own with values, all others on the meta device; extra state as byte tensors."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError

_EXTRA_STATE_SUFFIX = "_extra_state"
"""Suffix of its key in a torch `state_dict`."""


def extra_states(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (module name inside the block, extra state as uint8 [bytes]) for each module that has one."""
    for name, module in block.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            buffer = io.BytesIO()
            torch.save(module.get_extra_state(), buffer)
            yield name, torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def set_extra_state(block: nn.Module, name: str, raw: Tensor) -> None:
    """Set a module's extra state from the bytes that `extra_states` yielded."""
    loaded = torch.load(io.BytesIO(raw.cpu().numpy().tobytes()), weights_only=True)
    block.get_submodule(name).set_extra_state(loaded)


def without_extra_state(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters and buffers of a module's `state_dict`."""
    return {name: value for name, value in state_dict.items() if name.rpartition(".")[2] != _EXTRA_STATE_SUFFIX}


class BlockStore:
    """All blocks of the model: this rank's with values, the others on the meta device, which takes no memory.

    The modules are modified in place: blocks that the rank does not hold are emptied.

    Raises:
        TrainingError: There are no blocks, or two of them share a parameter.
    """

    def __init__(self, modules: Sequence[nn.Module], held: Iterable[int], device: torch.device) -> None:
        if not modules:
            do = "Give the model's blocks in their order"
            raise TrainingError("blocks", got=0, expected="1 or more", do=do)
        check_untied(modules)
        self._modules = list(modules)
        self._device = device
        self._held = set(held)
        for index in range(len(modules)):
            self._modules[index] = modules[index].to(device if index in self._held else "meta")

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        """A block; without values if it is not held."""
        return self._modules[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    @property
    def held(self) -> tuple[int, ...]:
        """Indices of blocks with values, in order."""
        return tuple(sorted(self._held))

    def allocate(self, index: int) -> nn.Module:
        """Allocate a block on this rank's device; its values are undefined until they are filled in."""
        if index not in self._held:
            self._modules[index] = self._modules[index].to_empty(device=self._device)
            self._held.add(index)
        return self._modules[index]

    def set_block(self, index: int, module: nn.Module) -> None:
        """Hold a block that already has values, in place of its meta version."""
        self._modules[index] = module
        self._held.add(index)

    def drop_values(self, index: int) -> None:
        """Move a block to the meta device."""
        if index in self._held:
            self._modules[index] = self._modules[index].to("meta")
            self._held.remove(index)


def check_untied(modules: Sequence[nn.Module]) -> None:
    """Raise if two blocks share a parameter or buffer, since blocks may lie on different ranks.

    Raises:
        TrainingError: Names the first shared tensor in both blocks.
    """
    for (index, name), (first, first_name), _ in shared_tensors(modules):
        do = "Build the model without tied weights (tie_word_embeddings=False), or take blocks(model, tied='untie')"
        expected = "a tensor of the block's own, since blocks may lie on different ranks"
        got = f"{first_name} of block {first}"
        raise TrainingError(f"{name} of block {index}", got=got, expected=expected, do=do)


def shared_tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[tuple[int, str], tuple[int, str], Tensor]]:
    """Yield (index and name, first index and name, tensor) for each tensor that an earlier block has too."""
    owners: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            first = owners.setdefault(id(tensor), (index, name))
            if first[0] != index:
                yield (index, name), first, tensor
