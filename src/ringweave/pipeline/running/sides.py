"""Side inputs: what every stage is given with each microbatch beside the activations, an attention mask say.

They are cut along their first dimension like the batch, and a block gets those that its `forward` names.
"""

import inspect
from collections.abc import Collection, Mapping

from torch import Tensor, nn


def names(block: nn.Module) -> Collection[str]:
    """What a block's forward has parameters for; a block that hands on to others says so by `side_names`."""
    found = getattr(block, "side_names", None)
    return inspect.signature(block.forward).parameters if found is None else found


def wanted(block: nn.Module, side: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The side inputs that a block takes."""
    if not side:
        return {}
    taken = names(block)
    return {name: value for name, value in side.items() if name in taken}


def parts(side: Mapping[str, Tensor], num_microbatches: int) -> list[dict[str, Tensor]]:
    """The side inputs of each microbatch."""
    cut = {name: value.chunk(num_microbatches) for name, value in side.items()}
    return [{name: pieces[index] for name, pieces in cut.items()} for index in range(num_microbatches)]
