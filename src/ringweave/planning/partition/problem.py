"""Partition problem: blocks merged from layers, devices, cuts and memory; stage times and memory by prefix sums.

Units only have to be consistent: the time of a block is its work divided by the device's capability, that of a cut is
its traffic divided by the link's bandwidth. A capability of 1 and work in seconds are measured times.
Every solver adds up in the same way, so that they agree to the bit.
"""

import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ringweave.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionMemory:
    """Memory that blocks hold and devices have, in one unit, such as bytes."""

    limit: tuple[float, ...]
    state: tuple[float, ...]
    """For each block: parameters, gradients and optimizer state."""
    stash: tuple[float, ...]
    """For each block: memory kept for backward, for one microbatch in flight."""
    in_flight: tuple[float, ...]
    """For each device: microbatches whose activations it holds at the same time, by the schedule; a fraction where it
    computes only some of their samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionProblem:
    """Blocks 1..n and devices 1..M, both in order; stage m is the blocks on device m.

    Raises:
        UsageError: Lengths that do not fit each other, values that are not numbers of the right sign, or fewer blocks
            than devices where every device has to get one.
    """

    work: tuple[tuple[float, ...], ...]
    """A row for each kind of device, a number for each block: forward and backward of one microbatch."""
    capability: tuple[float, ...]
    """For each device: work per second; positive."""
    kinds: tuple[int, ...] = ()
    """For each device: its row of `work`; empty if there is one row."""
    activation: tuple[float, ...] = ()
    """For each block: all traffic across a cut behind it for one microbatch, both ways. The last is not used, since no
    traffic crosses there; empty: cuts cost nothing."""
    bandwidth: tuple[float, ...] = ()
    """Bandwidth of the link into each device but the first; empty: cuts cost nothing."""
    memory: PartitionMemory | None = None
    """None: nothing is limited."""
    allow_empty: bool = False
    """A device may get no block. Traffic across it is passed on, by both of its links."""

    def __post_init__(self) -> None:
        _check_counts(self)
        for row in self.work:
            _check_numbers("work", row, self.num_blocks, "block")
        _check_numbers("capability", self.capability, self.num_devices, "device", positive=True)
        if self.activation:
            _check_numbers("activation", self.activation, self.num_blocks, "block")
        if self.bandwidth:
            links = "link (device 2 to the last)"
            _check_numbers("bandwidth", self.bandwidth, self.num_devices - 1, links, positive=True)
        if self.memory is not None:
            _check_numbers("memory limit", self.memory.limit, self.num_devices, "device")
            _check_numbers("memory of blocks", self.memory.state, self.num_blocks, "block")
            _check_numbers("activations held", self.memory.stash, self.num_blocks, "block")
            _check_numbers("microbatches in flight", self.memory.in_flight, self.num_devices, "device")

    @property
    def num_blocks(self) -> int:
        return len(self.work[0])

    @property
    def num_devices(self) -> int:
        return len(self.capability)


def _check_counts(problem: PartitionProblem) -> None:
    if not problem.work or not problem.work[0]:
        raise UsageError("work", got=problem.work, expected="a number for each block", do="Give one or more")
    if not problem.capability:
        do = "Give one or more"
        raise UsageError("capability", got=problem.capability, expected="a number for each device", do=do)
    num_kinds = len(problem.work)
    kinds = problem.kinds or (0,) * problem.num_devices
    if (num_kinds > 1 and not problem.kinds) or len(kinds) != problem.num_devices:
        do = "Say for each device which row of work is its own"
        raise UsageError("kinds", got=problem.kinds, expected=f"{problem.num_devices} indices", do=do)
    if not all(0 <= kind < num_kinds for kind in kinds):
        do = "Name rows that there are"
        raise UsageError("kinds", got=problem.kinds, expected=f"indices below {num_kinds}", do=do)
    if not problem.allow_empty and problem.num_blocks < problem.num_devices:
        expected = f"at least one for each of the {problem.num_devices} devices"
        do = "Leave devices out, cut the model finer, or allow empty stages (--allow-empty)"
        raise UsageError("number of blocks", got=problem.num_blocks, expected=expected, do=do)


def _check_numbers(
    quantity: str, values: Sequence[float], count: int, noun_text: str, *, positive: bool = False
) -> None:
    """Raise unless there are as many values as expected, finite, and of the right sign."""
    if len(values) != count:
        do = f"Give one for each {noun_text}"
        raise UsageError(f"{quantity}: how many", got=len(values), expected=str(count), do=do)
    for number, value in enumerate(values, start=1):
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            expected = "a finite number above 0" if positive else "a finite number, 0 or more"
            noun = noun_text.split(maxsplit=1)[0]
            raise UsageError(f"{quantity} of {noun} {number}", got=value, expected=expected, do="Correct it")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionStage:
    """The blocks of one device, and their predicted costs."""

    device: int
    """Index of the device, from 0."""
    first: int
    """First block, from 1; larger than `last` where the stage is empty."""
    last: int
    compute_s: float
    """Predicted time of forward and backward of one microbatch."""
    transfer_s: float
    """Predicted time of what crosses the link into this device for one microbatch."""
    memory: float | None
    """Peak memory; None if no memory was given."""

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks; zero for an empty stage."""
        return self.last - self.first + 1


class PartitionCosts:
    """A problem as prefix sums. Cut s lies behind block s; stage (s, j) is the blocks s+1..j. Devices count from 0."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        rows = [_prefix(row) for row in problem.work]
        kinds = problem.kinds or (0,) * problem.num_devices
        lists = [row.tolist() for row in rows]
        self.work = [rows[kind] for kind in kinds]
        self.work_list = [lists[kind] for kind in kinds]
        self.crossing = _crossing(problem)
        self.held = _held(problem)
        by_array = {id(held): held.tolist() for held in self.held}
        self.held_list = [by_array[id(held)] for held in self.held]

    def limit(self, device: int) -> float:
        """Return the memory of a device; infinite if none was given."""
        memory = self.problem.memory
        return math.inf if memory is None else memory.limit[device]

    def compute_s(self, device: int, s: int, j: int) -> float:
        """Return the time of the blocks s+1..j on a device."""
        work = self.work[device]
        return float(work[j] - work[s]) / self.problem.capability[device]

    def transfer_s(self, device: int, s: int) -> float:
        """Return the time of cut s on the link into a device; zero for the first, and where nothing crosses."""
        if not self.problem.bandwidth or device == 0:
            return 0.0
        return float(self.crossing[s]) / self.problem.bandwidth[device - 1]

    def memory(self, device: int, s: int, j: int) -> float:
        """Return the peak memory of the blocks s+1..j on a device; zero if no memory was given."""
        return float(self.held[device][j] - self.held[device][s]) if self.held else 0.0

    def fits(self, device: int, s: int, j: int) -> bool:
        """Return True if the blocks s+1..j fit into a device's memory."""
        return self.memory(device, s, j) <= self.limit(device)

    def stages(self, splits: Sequence[int]) -> tuple[PartitionStage, ...]:
        edges = (0, *splits, self.problem.num_blocks)
        return tuple(self._stage(device, s, j) for device, (s, j) in enumerate(itertools.pairwise(edges)))

    def bottleneck_s(self, splits: Sequence[int]) -> float:
        """Return the largest time of a stage or a cut."""
        return max(max(stage.compute_s, stage.transfer_s) for stage in self.stages(splits))

    def _stage(self, device: int, s: int, j: int) -> PartitionStage:
        return PartitionStage(
            device=device,
            first=s + 1,
            last=j,
            compute_s=self.compute_s(device, s, j),
            transfer_s=self.transfer_s(device, s),
            memory=self.memory(device, s, j) if self.held else None,
        )


def last_within(prefix: np.ndarray, sources: np.ndarray, allowance: float) -> np.ndarray:
    """Return the last j for each source s with prefix[j] - prefix[s] <= allowance, as that difference is rounded.

    Args:
        prefix: Nondecreasing sums, [n + 1].
        sources: Indices into it, growing.
        allowance: 0 or more, or infinite.

    Returns:
        Indices, nondecreasing, each at least its source.
    """
    at = prefix[sources]
    last = prefix.searchsorted(at + allowance, side="right") - 1
    # The sum above rounds otherwise than the difference does: step back or on where that matters.
    while (over := prefix[last] - at > allowance).any():
        last = last - over
    while (under := prefix[np.minimum(last + 1, len(prefix) - 1)] - at <= allowance)[last < len(prefix) - 1].any():
        last = np.where(under & (last < len(prefix) - 1), last + 1, last)
    return last


def _prefix(values: Sequence[float]) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=float))))


def _crossing(problem: PartitionProblem) -> np.ndarray:
    """Return the traffic across each cut 0..n: none before the first block and behind the last."""
    crossing = np.zeros(problem.num_blocks + 1)
    if problem.activation:
        crossing[1:-1] = problem.activation[:-1]
    return crossing


def _held(problem: PartitionProblem) -> list[np.ndarray]:
    memory = problem.memory
    if memory is None:
        return []
    state, stash = _prefix(memory.state), _prefix(memory.stash)
    by_depth = {depth: state + depth * stash for depth in set(memory.in_flight)}
    return [by_depth[depth] for depth in memory.in_flight]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Measured costs of one layer."""

    name: str
    """Name in the model; no two layers share one."""
    work: float
    """Work of forward and backward of one microbatch."""
    activation: float = 0.0
    """All traffic across a cut behind it."""
    state: float = 0.0
    """Memory of parameters, gradients and optimizer state."""
    stash: float = 0.0
    """Memory kept for backward of one microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive layers, from `first` up to but not including `end`, counted from 0."""

    first: int
    end: int
    work: float
    activation: float
    state: float
    stash: float


def merge_layers(layers: Sequence[Layer], max_blocks: int, joined: Collection[int] = ()) -> tuple[Block, ...]:
    """Merge layers into at most `max_blocks` blocks: the two neighbours with the least work, again and again.

    Args:
        layers: In the model's order.
        max_blocks: 1 or more.
        joined: Layers, from 0, behind which no cut is allowed.

    Raises:
        UsageError: No layers, a number below 1, names that occur twice, or a layer in `joined` that has none after it.

    Cost: O(layers x merges).
    """
    _check_layers(layers, max_blocks, joined)
    bounds = [0, *(end for end in range(1, len(layers)) if end - 1 not in joined), len(layers)]
    work = [math.fsum(layer.work for layer in layers[a:b]) for a, b in itertools.pairwise(bounds)]
    while len(work) > max_blocks:
        at = min(range(len(work) - 1), key=lambda pair: work[pair] + work[pair + 1])
        work[at : at + 2] = [work[at] + work[at + 1]]
        del bounds[at + 1]
    return tuple(_make_block(layers, first, end) for first, end in itertools.pairwise(bounds))


def check_complete(names: Sequence[str], held: Iterable[Sequence[str]]) -> None:
    """Raise unless the stages together are the model: every layer once, in order.

    `held`: the names of the layers of each block or stage, in order.

    Raises:
        UsageError: Another count, or another checksum.
    """
    found = [name for part in held for name in part]
    do = "Build the blocks from the model's list of layers again"
    if len(found) != len(names):
        odd = sorted(set(names) ^ set(found)) or sorted({name for name in found if found.count(name) > 1})
        expected = f"{len(names)}, as the model has; look at {', '.join(odd[:3])}"
        raise UsageError("layers in all blocks", got=len(found), expected=expected, do=do)
    if layer_checksum(found) != layer_checksum(names):
        at = next(index for index, pair in enumerate(zip(found, names, strict=True)) if pair[0] != pair[1])
        expected = f"{names[at]!r}, as in the model"
        raise UsageError(f"layer {at + 1} of all blocks", got=found[at], expected=expected, do=do)


def layer_checksum(names: Iterable[str]) -> str:
    """Return a checksum that depends on the names and their order."""
    return hashlib.sha256("\n".join(map(repr, names)).encode()).hexdigest()


def _check_layers(layers: Sequence[Layer], max_blocks: int, joined: Collection[int]) -> None:
    if not layers:
        raise UsageError("layers", got=0, expected="1 or more", do="Give the model's layers in their order")
    if max_blocks < 1:
        raise UsageError("blocks", got=max_blocks, expected="1 or more", do="Say how many at most")
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise UsageError("name of a layer", got=twice, expected="a name of its own", do="Rename one of the two")
    for index in joined:
        if not 0 <= index < len(layers) - 1:
            expected = f"the index of a layer that has one after it, 0 to {len(layers) - 2}"
            raise UsageError("joined layer", got=index, expected=expected, do="Leave it out")


def _make_block(layers: Sequence[Layer], first: int, end: int) -> Block:
    part = layers[first:end]
    return Block(
        first=first,
        end=end,
        work=math.fsum(layer.work for layer in part),
        activation=part[-1].activation,
        state=math.fsum(layer.state for layer in part),
        stash=math.fsum(layer.stash for layer in part),
    )
