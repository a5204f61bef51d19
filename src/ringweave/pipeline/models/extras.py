"""What modules keep beside parameters and buffers and hand out themselves (`get_extra_state`), as tensors of bytes.

It is written by torch and read back with `weights_only`, which builds plain values and tensors and runs nothing.
"""

import io
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

_SUFFIX = "_extra_state"
"""Of its key in a `state_dict`, as torch gives it."""


def states_of(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of each module that has one: its name inside of the block, and uint8 [bytes]."""
    for name, module in block.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            written = io.BytesIO()
            torch.save(module.get_extra_state(), written)
            yield name, torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def fill(block: nn.Module, name: str, raw: Tensor) -> None:
    """Give a module back what `states_of` gave for its name."""
    loaded = torch.load(io.BytesIO(raw.cpu().numpy().tobytes()), weights_only=True)
    block.get_submodule(name).set_extra_state(loaded)


def without(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters and buffers of a module's `state_dict`."""
    return {name: value for name, value in state_dict.items() if name.rpartition(".")[2] != _SUFFIX}
