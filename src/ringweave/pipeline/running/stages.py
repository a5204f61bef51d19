"""The blocks of one stage as the module that torch's PipelineStage computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from ringweave.errors import TrainingError, explain
from ringweave.pipeline.running import sides
from ringweave.pipeline.running.boundaries import Boundary, Precision, as_values
from ringweave.pipeline.running.keys import Keys


class StageModule(nn.Module):
    """Computes its blocks one after the other, each with random numbers of its own.

    `begin` says which train step follows; each forward is then that of the next microbatch in the schedule's order.
    What the blocks are may change between two steps.
    """

    def __init__(self, keys: Keys, precision: Precision) -> None:
        super().__init__()
        self.blocks: list[tuple[int, nn.Module]] = []
        """Index in the model and module; not registered, since blocks belong to those who hold them."""
        self.leaving: Boundary | None = None
        """What the next stage expects; None for the last one, whose output goes to the loss."""
        self._keys, self._precision = keys, precision
        self._train_step = 0
        self._side: Sequence[Mapping[str, Tensor]] = ()
        self._microbatches = iter(())

    def begin(self, train_step: int, microbatches: Sequence[int], side: Sequence[Mapping[str, Tensor]]) -> None:
        """A step begins.

        Args:
            train_step: What is drawn depends on it.
            microbatches: In the order in which this stage's forwards come.
            side: Side inputs of each microbatch, by its index.
        """
        self._train_step, self._side = train_step, side
        self._microbatches = iter(microbatches)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The activations behind the last block; what arrives, where there is none."""
        microbatch = next(self._microbatches)
        with self._precision.apply(), self._drawing(microbatch) as begin:
            for index, block in self.blocks:
                begin(index)
                values = as_values(block(*values, **sides.wanted(block, self._side[microbatch])))
        self._check(values)
        return values[0] if len(values) == 1 else values

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the blocks: torch's stage scales their gradients."""
        for _, block in self.blocks:
            yield from block.parameters(recurse)

    def train(self, mode: bool = True) -> "StageModule":
        """All blocks train, or are evaluated."""
        for _, block in self.blocks:
            block.train(mode)
        return super().train(mode)

    def _drawing(self, microbatch: int) -> AbstractContextManager[Callable[[int], None]]:
        if not self.training:
            return nullcontext(lambda _: None)
        return self._keys.drawing(self._train_step, microbatch, self._precision.device)

    def _check(self, values: tuple[Tensor, ...]) -> None:
        """Gloo would take bytes of another type for what it expects."""
        got = [(tuple(value.shape), value.dtype) for value in values]
        if self.leaving is not None and got != [(form.shape, form.dtype) for form in self.leaving.forms]:
            expected = f"{[(form.shape, form.dtype) for form in self.leaving.forms]}, as in the example"
            do = "Compute in one precision (Settings.autocast), with shapes that do not depend on values"
            raise TrainingError(explain("activations of a stage", got=got, expected=expected, do=do))
