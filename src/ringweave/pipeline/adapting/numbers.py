"""What ranks tell each other at every train step: what each one computed, and what rank 0 asks all to do."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Ask(enum.IntEnum):
    """What all ranks do at the end of the step in which they hear of it."""

    NOTHING = 0
    PROBE = 1
    """Time the links, then hear what rank 0 rules."""
    LISTEN = 2
    """Hear what rank 0 rules."""


class Told(NamedTuple):
    """What has come from all ranks."""

    compute_s: Sequence[float]
    """Of each rank: what it had to say when the train step began; 0 for nothing."""
    ask: Ask


class Numbers:
    """One number for each rank, and one more from rank 0. They leave at a train step and are there at its end."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._leaving = torch.zeros(world_size + 1, dtype=torch.float64)
        self._slots = self._leaving.numpy()
        """The same memory: a tensor's item takes microseconds to set."""
        self.compute_s = 0.0
        """Of the newest train step that counts; 0: it does not count."""
        self.ask = Ask.NOTHING
        """Rank 0's; what the others set is not looked at."""
        self._totals: Tensor | None = None

    def leaving(self) -> Tensor:
        """This rank's numbers, zeros for those of others: [world size + 1]; the next call changes the same ones."""
        self._slots[self._rank] = self.compute_s
        if self._rank == 0:
            self._slots[-1] = self.ask
        return self._leaving

    def arrived(self, totals: Tensor) -> None:
        """Keep them until they are taken; of several forwards in one train step the last one's."""
        self._totals = totals

    def take(self) -> Told | None:
        """What has arrived since the last call; None: nothing. What was asked has been heard then."""
        if self._totals is None:
            return None
        *compute_s, ask = self._totals.tolist()
        self._totals, self.ask = None, Ask.NOTHING
        return Told(compute_s, Ask(int(ask)))
