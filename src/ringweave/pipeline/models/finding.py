"""`blocks(model)`: a model as the list of blocks that a pipeline is cut between, with nothing left out."""

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from ringweave.errors import TrainingError, UsageError, explain
from ringweave.files.problems import closest
from ringweave.pipeline.models import extras, families, holding
from ringweave.planning.partitioning import merging

TIED = ("refuse", "untie")


def blocks(model: nn.Module | Sequence[nn.Module], *, tied: str = "refuse") -> list[nn.Module]:
    """The model's blocks in the order in which they are computed; each is called with what the one before returns.

    `nn.Sequential`, `nn.ModuleList` and lists of modules are taken as they are. Of the transformers library's models
    those of `families.NAMES` are known: embeddings, each layer, and the head; attention masks are side inputs. Of any
    other model give a list of modules.

    Args:
        model: Whose modules the blocks are; they are not copied.
        tied: What to do with a weight that two blocks share: `refuse`, or `untie`, which gives the later block a copy
            of its own, trained apart from then on.

    Raises:
        TrainingError: The model's blocks are not known, something of it is in no block, or blocks share weights.
        UsageError: An unknown word for `tied`.
    """
    if tied not in TIED:
        do = closest(tied, TIED) or "Take one of these"
        raise UsageError(explain("tied", got=tied, expected=f"one of {', '.join(TIED)}", do=do))
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        found = families.blocks_of(model)
        check_complete(model, found)
    else:
        found = list(model)
    if tied == "untie":
        for (index, _), _, tensor in list(holding.shared(found)):
            _replace(found[index], tensor)
    holding.check_untied(found)
    return found


def check_complete(model: nn.Module, found: Sequence[nn.Module]) -> None:
    """Refuse blocks that together are not the model: every parameter and persistent buffer, by count and checksum.

    Raises:
        TrainingError: Something of the model is in no block.
    """
    names: dict[int, str] = {}
    for name, tensor in extras.without(model.state_dict(keep_vars=True)).items():
        names.setdefault(id(tensor), name)
    held = {id(tensor) for block in found for tensor in extras.without(block.state_dict(keep_vars=True)).values()}
    try:
        merging.check_whole(list(names.values()), [[name for key, name in names.items() if key in held]])
    except UsageError as cause:
        do = "Build the model without what it does not use, or give a list of modules that has it"
        missing = [name for key, name in names.items() if key not in held]
        raise TrainingError(
            explain("blocks of the model", got=f"none has {', '.join(missing[:3])}", expected="all weights", do=do)
        ) from cause


def _replace(block: nn.Module, tensor: Tensor) -> None:
    """The block gets a tensor of its own with the same values, wherever it uses this one."""
    own = copy.deepcopy(tensor)
    for module in block.modules():
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is tensor:
                    table[key] = own  # pyrefly: ignore - a parameter for a parameter, a buffer for a buffer
