"""Numbers that travel with the losses of a train step, in the message that all ranks take part in anyway."""

from typing import Protocol

import torch
from torch import Tensor

from ringweave.pipeline.running.groups import Groups


class Rider(Protocol):
    """Whoever has small numbers for all ranks after every train step, and can wait for the next one's end."""

    def leaving(self) -> Tensor:
        """This rank's numbers, float64 [n] in host memory; n is the same on all ranks."""
        ...

    def arrived(self, totals: Tensor) -> None:
        """The sums over all ranks, float64 [n]; where one rank alone gave a value, exactly that."""
        ...


def total_with(rider: Rider | None, table: Tensor, groups: Groups) -> Tensor:
    """The sum of a float64 table over all ranks; the rider's numbers go along in the same message."""
    if rider is None:
        return groups.total(table)
    totals = groups.total(torch.cat((table.flatten(), rider.leaving())))
    rider.arrived(totals[table.numel() :])
    return totals[: table.numel()].reshape(table.shape)
