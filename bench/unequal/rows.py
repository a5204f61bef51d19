"""The clusters of the table: speeds, links, what happens to them while they train, and the bars."""

from dataclasses import dataclass

EIGHT = (1.0,) * 8
CORES = 1.4
SERVER_CORES = 0.2
"""Cores of all workers together, and of the parameter server beside them: 1.6 in all; the rest of the machine moves
data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cluster of eight workers."""

    speeds: tuple[float, ...] = EIGHT
    later_speeds: tuple[float, ...] | None = None
    """From the middle of the training on."""
    stall: float = 0.0
    """Probability that a step takes a worker four times as long."""
    slow_nic: float = 1.0
    """Rate of the last worker's NIC beside the others'."""
    ideal: float = 1.0
    """Speed-up over DDP of perfect balance (anchors, predicted)."""
    bars: tuple[float | None, float | None] = (None, None)
    """Required speeds of balanced and ps-hra, in times of DDP's samples per second."""
    is_communication_bound: bool = False
    epochs_divided: int = 1
    """So many times fewer epochs, where a train step takes seconds."""
    local_steps: int = 0
    """Local steps of ps-hra; 0 is the default."""
    batch: int | None = None
    """Samples of a train step of all together; None goes by the machine, see `sizing`."""
    steps: int = 8
    """Train steps of an epoch."""


ROWS = {
    "equal": Row(bars=(0.97, 0.95)),
    "one-quarter": Row(speeds=(1.0,) * 7 + (0.25,), ideal=3.62, bars=(2.9, 2.4)),
    "half-quarter": Row(speeds=(1.0,) * 4 + (0.25,) * 4, ideal=2.5, bars=(2.1, 2.0)),
    "mixed": Row(speeds=(1.0,) * 4 + (0.5,) * 2 + (0.25,) * 2, ideal=2.75, bars=(2.3, 2.2)),
    "stalls": Row(stall=1 / 8, ideal=2.16, bars=(None, 1.5)),
    "slow-nic": Row(
        slow_nic=0.1,
        ideal=5.6,
        bars=(None, 3.5),
        is_communication_bound=True,
        local_steps=4,
        epochs_divided=3,
        batch=2048,
        steps=12,
    ),
    "changed": Row(later_speeds=(1.0,) * 6 + (0.25,) * 2, ideal=3.25, bars=(0.85, 0.8)),
}
"""In `changed` the bars are fractions of the ideal, which is that of the speeds of the second half."""

WITHIN_STEPS = 10
"""Train steps after a change of speeds that do not count yet."""

GLOO = "gloo"
"""DDP on Gloo."""
CONTENDERS = (GLOO, "balanced", "ps-hra")
"""Systems measured together; a further choice of `auto` is measured in its own job, beside DDP as well, since a job has
one parameter server."""
