"""Layers merged into blocks by the rule of `ringweave.planning.partitioning.merging`, as modules."""

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from ringweave.pipeline.running import sides
from ringweave.pipeline.running.boundaries import as_values
from ringweave.planning.partitioning import merging
from ringweave.planning.partitioning.merging import Layer


class Group(nn.Module):
    """Several layers as one block."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def side_names(self) -> frozenset[str]:
        """Side inputs that any of its layers takes."""
        return frozenset().union(*(sides.names(layer) for layer in self.layers))

    def forward(self, *values: Tensor, **side: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One layer after the other."""
        for layer in self.layers:
            values = as_values(layer(*values, **sides.wanted(layer, side)))
        return values[0] if len(values) == 1 else values


def merge(
    layers: Sequence[nn.Module], work: Sequence[float], max_blocks: int, joined: Collection[int] = ()
) -> list[nn.Module]:
    """At most that many blocks of consecutive layers; the same on all ranks if `work` is.

    First layers that must stay together, then again and again the two neighbours whose work together is least.

    Args:
        layers: In the model's order.
        work: Of each layer: measured forward and backward, say, of a `Profile`.
        max_blocks: 1 or more.
        joined: Layers, from 0, behind which no cut is allowed.

    Raises:
        UsageError: Numbers that do not fit the layers.
    """
    named = [Layer(name=str(index), work=each) for index, each in enumerate(work)]
    found = merging.merge(named, max_blocks, joined)
    names = [layer.name for layer in named]
    merging.check_whole(list(map(str, range(len(layers)))), [names[block.first : block.end] for block in found])
    return [
        layers[block.first] if block.end == block.first + 1 else Group(layers[block.first : block.end])
        for block in found
    ]
