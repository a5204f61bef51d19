"""An optimizer for each block, which look like one: what a block's update needs stays with the block.

So a block's state can be saved, loaded and moved alone, and its update has the same bits wherever it is done.
Optimizers that look at several parameters at once beyond a block (L-BFGS) would not be the same; those for single
parameters (SGD, Adam, AdamW, Muon, ...) are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringweave.errors import TrainingError, explain
from ringweave.pipeline.models.holding import HeldBlocks

MakeOptimizer = Callable[[nn.Module], Optimizer]
"""Makes the optimizer of a block: `lambda block: torch.optim.AdamW(block.parameters(), lr=1e-3)`."""
Attempt = Callable[[Callable[[], None]], None]
"""Makes the update that it is given, and may keep an error of it to itself."""


class BlockOptimizers(Optimizer):
    """The optimizers of this rank's blocks as one that schedulers, scalers and loops can use.

    `param_groups` are those that a block's optimizer has, with the parameters of all blocks of this rank. Settings in
    them (learning rate, weight decay) hold for all blocks: they are passed on at each step. They are there on a rank
    without parameters as well, so that schedulers do the same on all ranks.

    Raises:
        TrainingError: No block has parameters, or blocks differ in their number of groups.
    """

    def __init__(self, make: MakeOptimizer, blocks: HeldBlocks) -> None:
        self._make, self._blocks = make, blocks
        self._optimizers: dict[int, Optimizer] = {}
        self._attempts: dict[int, Attempt] = {}
        """Of the blocks whose updates may fail."""
        form = next((block for block in blocks if has_parameters(block)), None)
        if form is None:
            do = "Give a model that can be trained"
            raise TrainingError(explain("parameters of all blocks", got=0, expected="1 or more", do=do))
        groups = make(form).param_groups
        super().__init__([{**group, "params": [torch.empty(0)] if group["params"] else []} for group in groups], {})
        for index in blocks.held:
            self._add(index)
        self._gather()

    def of(self, block: int) -> Optimizer | None:
        """A held block's optimizer; None where it has nothing to train."""
        return self._optimizers.get(block)

    def take(
        self, block: int, state: dict[str, Any] | None = None, *, attempt: Attempt | None = None
    ) -> Optimizer | None:
        """Begin to update a block that is held since just now.

        Args:
            block: Its index.
            state: Of the optimizer that updated it before, as `of(block).state_dict()` gave it; None: a new one.
            attempt: Makes the block's updates until `keep`; None: an update that fails is an error of `step`.
        """
        self._add(block)
        if attempt is not None:
            self._attempts[block] = attempt
        optimizer = self._optimizers.get(block)
        if optimizer is not None and state is not None:
            load_as_saved(optimizer, state)
        self._gather()
        return optimizer

    def keep(self, block: int) -> None:
        """Update a block like all others from now on, without an attempt."""
        self._attempts.pop(block, None)

    def release(self, block: int) -> None:
        """Stop updating a block, and forget its state."""
        self.keep(block)
        self._optimizers.pop(block, None)
        self._gather()

    def step(self, closure: Any = None) -> None:  # pyrefly: ignore - what torch's overloads take, without a result
        """Update all blocks of this rank from their gradients.

        Raises:
            TrainingError: There is a closure; a pipeline cannot compute the loss again inside of an update.
        """
        if closure is not None:
            do = "Take an optimizer that needs none"
            raise TrainingError(explain("closure of a pipeline's optimizer", got=closure, expected="none", do=do))
        for block in sorted(self._optimizers):
            attempt = self._attempts.get(block)
            if attempt is None:
                self.step_block(block)
            else:
                attempt(partial(self.step_block, block))

    def step_block(self, block: int) -> None:
        """Update one block, with the settings of now."""
        optimizer = self._optimizers.get(block)
        if optimizer is None:
            return
        for ours, theirs in zip(self.param_groups, optimizer.param_groups, strict=True):
            theirs.update({name: value for name, value in ours.items() if name != "params"})
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Of each block of this rank, and the settings that hold for all. For files there are `checkpoints`."""
        return {
            "blocks": {block: optimizer.state_dict() for block, optimizer in self._optimizers.items()},
            "settings": self.settings(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave on a rank with the same blocks."""
        for block, state in state_dict["blocks"].items():
            load_as_saved(self._optimizers[block], state)
        self.load_settings(state_dict["settings"])
        self._gather()

    def settings(self) -> list[dict[str, Any]]:
        """Of each group, without its parameters."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]

    def load_settings(self, settings: list[dict[str, Any]]) -> None:
        """Take over what `settings` gave."""
        for group, values in zip(self.param_groups, settings, strict=True):
            group.update(values)

    def _add(self, index: int) -> None:
        block = self._blocks[index]
        if not has_parameters(block):
            return
        optimizer = self._make(block)
        if len(optimizer.param_groups) != len(self.param_groups):
            expected = f"{len(self.param_groups)}, as the first block's"
            got, do = len(optimizer.param_groups), "Make the same groups for every block; a group may be empty"
            where = f"block {index}"
            raise TrainingError(
                explain("groups of a block's optimizer", got=got, expected=expected, do=do, where=where)
            )
        self._optimizers[index] = optimizer

    def _gather(self) -> None:
        """Our groups have the parameters of all optimizers."""
        for place, group in enumerate(self.param_groups):
            each = [self._optimizers[block].param_groups[place]["params"] for block in sorted(self._optimizers)]
            group["params"] = [parameter for parameters in each for parameter in parameters]


def load_as_saved(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """What `Optimizer.load_state_dict` does, but for the types of tensors: each keeps the one that it was saved in.

    Torch gives an optimizer's state the type of the parameters: float32 sums of bfloat16 weights lose half their bits.
    """
    optimizer.load_state_dict(state)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for place, saved in state["state"].items():
        kept = optimizer.state[parameters[place]]
        for name, value in saved.items():
            if isinstance(value, Tensor) and value.dtype != kept[name].dtype:
                kept[name] = value.to(kept[name].device, copy=True)


def has_parameters(block: nn.Module) -> bool:
    """There is something to train."""
    return any(parameter.requires_grad for parameter in block.parameters())
