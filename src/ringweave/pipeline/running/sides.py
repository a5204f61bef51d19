"""Side inputs: what every stage is given with each microbatch beside the activations, an attention mask say.

They are cut along their first dimension like the batch, and a block gets those that its `forward` names.
"""

import inspect
from collections.abc import Mapping

from torch import Tensor, nn


def wanted(block: nn.Module, side: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The side inputs that a block's forward has a parameter for."""
    if not side:
        return {}
    names = inspect.signature(block.forward).parameters
    return {name: value for name, value in side.items() if name in names}


def parts(side: Mapping[str, Tensor], num_microbatches: int) -> list[dict[str, Tensor]]:
    """The side inputs of each microbatch."""
    cut = {name: value.chunk(num_microbatches) for name, value in side.items()}
    return [{name: pieces[index] for name, pieces in cut.items()} for index in range(num_microbatches)]
