"""What a partition is asked for: the work of blocks, the speed of devices, what crosses the cuts, and memory.

Units only have to be consistent: the time of a block is its work divided by the device's capability, that of a cut is
what crosses it divided by the link's bandwidth. A capability of 1 and work in seconds are measured times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.errors import UsageError, explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What blocks hold and devices have, in one unit, such as bytes."""

    limit: tuple[float, ...]
    """Of each device."""
    state: tuple[float, ...]
    """Of each block: parameters, gradients and optimizer state."""
    stash: tuple[float, ...]
    """Of each block: what it keeps for backward, for one microbatch in flight."""
    in_flight: tuple[int, ...]
    """Of each device: microbatches whose activations it holds at the same time, by the schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Blocks 1..n in their order, devices 1..M in theirs; stage m is the blocks that device m gets.

    Raises:
        UsageError: Lengths that do not fit each other, values that are not numbers of the right sign, or fewer blocks
            than devices where every device has to get one.
    """

    work: tuple[tuple[float, ...], ...]
    """A row for each kind of device, a number for each block: forward and backward of one microbatch."""
    capability: tuple[float, ...]
    """Of each device: work per second; positive."""
    kinds: tuple[int, ...] = ()
    """Of each device: its row of `work`; empty where there is one row."""
    activation: tuple[float, ...] = ()
    """Of each block: all that crosses a cut behind it for one microbatch, both ways. The last is not used, since
    nothing crosses there; empty: cuts cost nothing."""
    bandwidth: tuple[float, ...] = ()
    """Of the link into each device but the first; empty: cuts cost nothing."""
    memory: Memory | None = None
    """None: nothing is limited."""
    allow_empty: bool = False
    """A device may get no block. What crosses it is passed on, by both of its links."""

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
        """N."""
        return len(self.work[0])

    @property
    def num_devices(self) -> int:
        """M."""
        return len(self.capability)


def _check_counts(problem: Problem) -> None:
    if not problem.work or not problem.work[0]:
        raise UsageError(explain("work", got=problem.work, expected="a number for each block", do="Give one or more"))
    if not problem.capability:
        do = "Give one or more"
        raise UsageError(explain("capability", got=problem.capability, expected="a number for each device", do=do))
    num_kinds = len(problem.work)
    kinds = problem.kinds or (0,) * problem.num_devices
    if (num_kinds > 1 and not problem.kinds) or len(kinds) != problem.num_devices:
        do = "Say for each device which row of work is its own"
        raise UsageError(explain("kinds", got=problem.kinds, expected=f"{problem.num_devices} indices", do=do))
    if not all(0 <= kind < num_kinds for kind in kinds):
        do = "Name rows that there are"
        raise UsageError(explain("kinds", got=problem.kinds, expected=f"indices below {num_kinds}", do=do))
    if not problem.allow_empty and problem.num_blocks < problem.num_devices:
        expected = f"at least one for each of the {problem.num_devices} devices"
        do = "Leave devices out, cut the model finer, or allow empty stages (--allow-empty)"
        raise UsageError(explain("number of blocks", got=problem.num_blocks, expected=expected, do=do))


def _check_numbers(what: str, values: Sequence[float], count: int, of: str, *, positive: bool = False) -> None:
    """As many as expected, finite, and of the right sign."""
    if len(values) != count:
        do = f"Give one for each {of}"
        raise UsageError(explain(f"{what}: how many", got=len(values), expected=str(count), do=do))
    for number, value in enumerate(values, start=1):
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            expected = "a finite number above 0" if positive else "a finite number, 0 or more"
            noun = of.split(maxsplit=1)[0]
            raise UsageError(explain(f"{what} of {noun} {number}", got=value, expected=expected, do="Mend it"))
