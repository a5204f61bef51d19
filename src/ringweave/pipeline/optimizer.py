"""One optimizer per block behind the interface of one, with gradient averaging, clipping and loss scaling.

A block's optimizer state can be saved, loaded and moved alone, and its update has the same bits on any rank. This needs
optimizers that update each parameter by itself (SGD, Adam, AdamW, Muon, ...); L-BFGS is not supported.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

from ringweave.errors import TrainingError
from ringweave.pipeline.model_blocks import BlockStore
from ringweave.pipeline.stage_layout import PipelineGroups


def allreduce_replicas(blocks: BlockStore, groups: PipelineGroups, *, divide_by: int) -> None:
    """Sum the gradients of this rank's blocks over the stage's devices in all replicas, and divide.

    One message per block and dtype, so that the partition does not change the order of additions.

    `divide_by`: the number of replicas for a mean, 1 for a sum: the devices of a stage have parts of the same loss.
    """
    if groups.stage_replicas is None:
        return
    under_way = []
    for index in blocks.held:
        for gradients in _gradients_by_dtype(blocks[index]):
            flat = _flatten_dense_tensors(gradients)
            under_way.append((dist.all_reduce(flat, group=groups.stage_replicas, async_op=True), flat, gradients))
    for work, flat, gradients in under_way:
        work.wait()
        if divide_by > 1:
            flat.div_(divide_by)
        for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(reduced)


def stash_gradients(blocks: BlockStore, groups: PipelineGroups) -> list[tuple[nn.Parameter, Tensor]]:
    """Remove the already averaged gradients before a pass that adds to them.

    Returns:
        Each parameter and its gradient, for `restore_gradients`; nothing with one replica.
    """
    if groups.stage_replicas is None:
        return []
    earlier = []
    for index in blocks.held:
        for parameter in blocks[index].parameters():
            if parameter.grad is not None:
                earlier.append((parameter, parameter.grad))
                parameter.grad = None
    return earlier


def restore_gradients(earlier: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Add the gradients of the pass to those that `stash_gradients` removed."""
    for parameter, gradient in earlier:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
        parameter.grad = gradient


def broadcast_first_replica(blocks: BlockStore, groups: PipelineGroups) -> None:
    """Broadcast the values of the stage's first rank to all ranks with the same blocks."""
    if groups.stage_replicas is None:
        return
    for index in blocks.held:
        for tensor in (*blocks[index].parameters(), *blocks[index].buffers()):
            dist.broadcast(tensor.detach(), group=groups.stage_replicas, group_src=0)


def global_norm(blocks: BlockStore, groups: PipelineGroups) -> Tensor:
    """The 2-norm of the gradients of all blocks; the same bits on all ranks and for all partitions.

    Each block's sum of squares is computed on the first rank that holds it; the sums are added in block order.

    Returns:
        A float64 number in host memory.
    """
    squares = torch.zeros(len(blocks), dtype=torch.float64)
    is_first = groups.stage_replicas is None or dist.get_rank(groups.stage_replicas) == 0
    for index in blocks.held if is_first else ():
        squares[index] = squared_norm(blocks[index])
    total = groups.sum_over_ranks(squares)
    return torch.stack(list(total)).cumsum(0)[-1].sqrt()


def squared_norm(block: nn.Module) -> float:
    """Sum of squares of a block's gradients, in float64."""
    sums = [gradient.detach().double().square().sum() for gradient in _block_gradients(block)]
    return float(torch.stack(sums).cumsum(0)[-1]) if sums else 0.0


def scale_gradients(blocks: BlockStore, factor: float) -> None:
    """Multiply all gradients of this rank by a factor."""
    for index in blocks.held:
        for gradient in _block_gradients(blocks[index]):
            gradient.mul_(factor)


def _block_gradients(block: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in block.parameters() if parameter.grad is not None]


def _gradients_by_dtype(block: nn.Module) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for gradient in _block_gradients(block):
        found.setdefault(gradient.dtype, []).append(gradient)
    return list(found.values())


MakeOptimizer = Callable[[nn.Module], Optimizer]
"""Makes a block's optimizer: `lambda block: torch.optim.AdamW(block.parameters(), lr=1e-3)`."""
GuardUpdate = Callable[[Callable[[], None]], None]
"""Runs the update that it is given, and may catch its errors."""


class BlockOptimizers(Optimizer):
    """The optimizers of this rank's blocks as one optimizer for schedulers, scalers and training loops.

    `param_groups` are the groups of a block's optimizer, with the parameters of all blocks of this rank. Settings in
    them (learning rate, weight decay) apply to all blocks: they are passed on at each step. A rank without parameters
    has the same groups, so that schedulers behave alike on all ranks.

    Raises:
        TrainingError: No block has parameters, or the blocks' optimizers differ in their number of groups.
    """

    def __init__(self, make: MakeOptimizer, blocks: BlockStore) -> None:
        self._make, self._blocks = make, blocks
        self._optimizers: dict[int, Optimizer] = {}
        self._guards: dict[int, GuardUpdate] = {}
        """Guards of blocks whose updates may fail."""
        example_block = next((block for block in blocks if has_parameters(block)), None)
        if example_block is None:
            do = "Give a model that can be trained"
            raise TrainingError("parameters of all blocks", got=0, expected="1 or more", do=do)
        groups = make(example_block).param_groups
        super().__init__([{**group, "params": [torch.empty(0)] if group["params"] else []} for group in groups], {})
        for index in blocks.held:
            self._make_optimizer(index)
        self._update_param_groups()

    def for_block(self, block: int) -> Optimizer | None:
        """A held block's optimizer; None if the block has nothing to train."""
        return self._optimizers.get(block)

    def add_block(
        self, block: int, state: dict[str, Any] | None = None, *, guard: GuardUpdate | None = None
    ) -> Optimizer | None:
        """Start updating a block that is newly held.

        Args:
            block: Index of the block.
            state: State dict of its previous optimizer; None: a new one.
            guard: Guard of the block's updates until `confirm_block`; None: a failing update is an error of `step`.
        """
        self._make_optimizer(block)
        if guard is not None:
            self._guards[block] = guard
        optimizer = self._optimizers.get(block)
        if optimizer is not None and state is not None:
            load_as_saved(optimizer, state)
        self._update_param_groups()
        return optimizer

    def confirm_block(self, block: int) -> None:
        """Update a block like all others from now on, without a guard."""
        self._guards.pop(block, None)

    def remove_block(self, block: int) -> None:
        """Stop updating a block, and drop its state."""
        self.confirm_block(block)
        self._optimizers.pop(block, None)
        self._update_param_groups()

    def step(self, closure: Any = None) -> None:  # pyrefly: ignore - what torch's overloads take, without a result
        """Update all blocks of this rank from their gradients.

        Raises:
            TrainingError: A closure was given; a pipeline cannot recompute the loss inside an update.
        """
        if closure is not None:
            do = "Take an optimizer that needs none"
            raise TrainingError("closure of a pipeline's optimizer", got=closure, expected="none", do=do)
        for block in sorted(self._optimizers):
            guard = self._guards.get(block)
            if guard is None:
                self.step_block(block)
            else:
                guard(partial(self.step_block, block))

    def step_block(self, block: int) -> None:
        """Update one block with the present settings."""
        optimizer = self._optimizers.get(block)
        if optimizer is None:
            return
        for ours, theirs in zip(self.param_groups, optimizer.param_groups, strict=True):
            theirs.update({name: value for name, value in ours.items() if name != "params"})
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """State of each block of this rank, and the common settings. For files use `checkpoints`."""
        return {
            "blocks": {block: optimizer.state_dict() for block, optimizer in self._optimizers.items()},
            "settings": self.settings(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` from a rank with the same blocks."""
        for block, state in state_dict["blocks"].items():
            load_as_saved(self._optimizers[block], state)
        self.load_settings(state_dict["settings"])
        self._update_param_groups()

    def settings(self) -> list[dict[str, Any]]:
        """Settings of each parameter group, without its parameters."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]

    def load_settings(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self.param_groups, settings, strict=True):
            group.update(values)

    def _make_optimizer(self, index: int) -> None:
        block = self._blocks[index]
        if not has_parameters(block):
            return
        optimizer = self._make(block)
        if len(optimizer.param_groups) != len(self.param_groups):
            expected = f"{len(self.param_groups)}, as the first block's"
            got, do = len(optimizer.param_groups), "Make the same groups for every block; a group may be empty"
            where = f"block {index}"
            raise TrainingError("groups of a block's optimizer", got=got, expected=expected, do=do, where=where)
        self._optimizers[index] = optimizer

    def _update_param_groups(self) -> None:
        """Put the parameters of all optimizers into this optimizer's groups."""
        for place, group in enumerate(self.param_groups):
            each = [self._optimizers[block].param_groups[place]["params"] for block in sorted(self._optimizers)]
            group["params"] = [parameter for parameters in each for parameter in parameters]


def load_as_saved(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`Optimizer.load_state_dict`, but each tensor keeps the dtype that it was saved in.

    Torch converts optimizer state to the parameters' dtype: float32 sums of bfloat16 weights would lose half the bits.
    """
    optimizer.load_state_dict(state)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for place, saved in state["state"].items():
        current = optimizer.state[parameters[place]]
        for name, value in saved.items():
            if isinstance(value, Tensor) and value.dtype != current[name].dtype:
                current[name] = value.to(current[name].device, copy=True)


def has_parameters(block: nn.Module) -> bool:
    """True if the block has something to train."""
    return any(parameter.requires_grad for parameter in block.parameters())


class GradScaler(torch.amp.GradScaler):
    """Skips an update on all ranks if a gradient on any of them is infinite or NaN.

    ```python
    scaler = pipeline.grad_scaler()
    loss = pipeline.forward_backward(x, target=y, scale=scaler.get_scale())
    scaler.unscale_(pipeline.optimizer)
    pipeline.clip_grad_norm(1.0)
    scaler.step(pipeline.optimizer)
    scaler.update()
    ```
    """

    def __init__(self, groups: PipelineGroups, device: torch.device, **options: Any) -> None:
        super().__init__(device.type, **options)
        self._groups, self._own_device = groups, device
        self.scale(torch.ones((), device=device))  # torch makes its state at the first loss

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide this rank's gradients by the scale, and share the found infinities with all ranks."""
        super().unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        own = max((float(value) for value in found.values()), default=0.0)
        anywhere = float(self._groups.max_over_ranks(torch.tensor([own], dtype=torch.float64)))
        found.clear()
        found[self._own_device] = torch.full((), anywhere, device=self._own_device)
