"""What each block costs on each device: time of forward and backward, bytes that leave it, bytes that it holds.

Blocks of one kind (the same modules, the same shapes) are measured once on each device. Measured are copies with values
of their own, so that nothing of the model moves: no parameter, no running mean, no random number.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ringweave.pipeline.optimizing.optimizer import MakeOptimizer, has_parameters
from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.running import filling, sides
from ringweave.pipeline.running.boundaries import Boundary, as_values


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """One block, for one microbatch."""

    kind: str
    """Blocks with the same text cost the same."""
    forward_s: tuple[float, ...]
    """Measured, of each device: one number for each stage of the pipeline."""
    backward_s: tuple[float, ...]
    """Likewise."""
    update_s: tuple[float, ...]
    """Likewise: of the optimizer's step, once for each train step."""
    forward_bytes: int
    """Activations that leave it for the next block."""
    backward_bytes: int
    """Gradients that come back for them."""
    state_bytes: int
    """Parameters, their gradients, buffers, and what the optimizer keeps."""
    stash_bytes: int
    """What it keeps from forward until backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """All blocks in their order, the same on every rank."""

    blocks: tuple[BlockCost, ...]

    @property
    def num_devices(self) -> int:
        """One for each stage."""
        return len(self.blocks[0].forward_s)

    def stage_s(self, blocks: Sequence[int], device: int) -> tuple[float, float]:
        """Forward and backward of some blocks on a device, for one microbatch."""
        forward = sum(self.blocks[block].forward_s[device] for block in blocks)
        return forward, sum(self.blocks[block].backward_s[device] for block in blocks)


def profile(
    pipeline: Pipeline,
    make_optimizer: MakeOptimizer,
    *,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measure all kinds of blocks on all devices; all ranks call it at the same time.

    Devices measure at the same time as well, as they compute in training. Of replicas the slowest counts.

    Args:
        pipeline: Whose blocks; it stays as it is.
        make_optimizer: As given to the pipeline; what it keeps is counted.
        rounds: Forwards and backwards that are measured of each kind, after one that is not; their median counts.
        clock: In seconds.

    Cost: (rounds + 1) forwards and backwards of each kind.
    """
    bench = _Bench(pipeline, make_optimizer, rounds, clock)
    kinds = [kind_of(block, *bench.around(index)) for index, block in enumerate(pipeline.blocks)]
    found = {kind: bench.measure(kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    times = _of_all_devices(pipeline, found)
    blocks = []
    for index, kind in enumerate(kinds):
        leaving = pipeline.boundaries[index + 1]
        blocks.append(
            BlockCost(
                kind=kind,
                forward_s=times[kind][0],
                backward_s=times[kind][1],
                update_s=times[kind][2],
                forward_bytes=leaving.forward_bytes,
                backward_bytes=leaving.backward_bytes,
                state_bytes=found[kind][1].state,
                stash_bytes=found[kind][1].stash,
            )
        )
    return Profile(blocks=tuple(blocks))


def kind_of(block: nn.Module, arriving: Boundary, leaving: Boundary) -> str:
    """A text that is equal for blocks that cost the same: modules, their settings, and all shapes."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in tensors]
    return "\n".join([repr(block), *shapes, repr(arriving), repr(leaving)])


@dataclass(frozen=True, slots=True)
class _Bytes:
    state: int
    stash: int


def _of_all_devices(
    pipeline: Pipeline, found: Mapping[str, tuple[tuple[float, float, float], _Bytes]]
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]]:
    """(forward, backward, update) of each kind: a number for each stage, of what its ranks measured."""
    own = torch.tensor([seconds for seconds, _ in found.values()], dtype=torch.float64)
    table = torch.zeros(pipeline.layout.num_stages, *own.shape, dtype=torch.float64)
    table[pipeline.stage] = own
    by_kind = pipeline.groups.greatest(table).permute(1, 2, 0).tolist()
    rows = [(tuple(forward), tuple(backward), tuple(update)) for forward, backward, update in by_kind]
    return dict(zip(found, rows, strict=True))


class _Bench:
    """Copies of blocks on this rank's device, and a clock."""

    def __init__(
        self, pipeline: Pipeline, make_optimizer: MakeOptimizer, rounds: int, clock: Callable[[], float]
    ) -> None:
        self._pipeline, self._make, self._rounds, self._clock = pipeline, make_optimizer, rounds, clock
        self._device = pipeline.device

    def around(self, index: int) -> tuple[Boundary, Boundary]:
        """What a block gets and gives."""
        return self._pipeline.boundaries[index], self._pipeline.boundaries[index + 1]

    def measure(self, index: int) -> tuple[tuple[float, float, float], _Bytes]:
        """(seconds of forward, backward and update, bytes) of a block."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            block = filling.copy_of(self._pipeline.blocks[index], self._device)
            values = tuple(filling.like(tensor, self._device) for tensor in self._pipeline.boundaries[index].empty())
            side = {name: filling.like(value, self._device) for name, value in self._pipeline.side_forms.items()}
            given = sides.wanted(block, side)
            laps = [self._lap(block, values, given) for _ in range(self._rounds + 1)]
            update_s, state = self._update(block)
            num_bytes = _Bytes(state=state, stash=self._stash_bytes(block, values, given))
        forward, backward = zip(*laps[1:], strict=True)
        return (statistics.median(forward), statistics.median(backward), update_s), num_bytes

    def _lap(self, block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor]) -> tuple[float, float]:
        begun_s = self._now_s()
        with self._pipeline.precision.apply():
            outputs = [value for value in as_values(block(*values, **side)) if value.requires_grad]
        middle_s = self._now_s()
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return middle_s - begun_s, self._now_s() - middle_s

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    def _update(self, block: nn.Module) -> tuple[float, int]:
        """(seconds of the optimizer's step, bytes of all that is kept of a block between steps)."""
        parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
        total = sum(tensor.nbytes for tensor in (*block.parameters(), *block.buffers()))
        total += sum(parameter.nbytes for parameter in parameters)
        if not has_parameters(block):
            return 0.0, total
        optimizer = self._make(block)
        laps = [self._timed(optimizer.step) for _ in range(self._rounds + 1)]
        kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return statistics.median(laps[1:]), total + sum(tensor.nbytes for tensor in kept)

    def _timed(self, action: Callable[[], object]) -> float:
        begun_s = self._now_s()
        action()
        return self._now_s() - begun_s

    def _stash_bytes(self, block: nn.Module, values: tuple[Tensor, ...], side: dict[str, Tensor]) -> int:
        """Bytes of what forward keeps for backward and would not be there without it."""
        own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with self._pipeline.precision.apply(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = block(*values, **side)
        del output
        return sum(kept.values())
