from typing import Any, cast

import torch
from torch import Tensor

from ringweave.pipeline.stage_layout import sum_with_piggyback


class Twice:
    """Groups of two ranks that have the same."""

    def __init__(self) -> None:
        self.messages: list[int] = []

    def sum_over_ranks(self, own: Tensor) -> Tensor:
        self.messages.append(own.numel())
        return 2 * own


class Passenger:
    def __init__(self) -> None:
        self.got: list[float] = []

    def outgoing(self) -> Tensor:
        return torch.tensor([5.0, 7.0], dtype=torch.float64)

    def receive(self, totals: Tensor) -> None:
        self.got = totals.tolist()


def test_a_riders_numbers_go_in_the_same_message() -> None:
    groups, rider = Twice(), Passenger()
    table = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], dtype=torch.float64)
    alone = sum_with_piggyback(None, table, cast(Any, groups))
    together = sum_with_piggyback(rider, table, cast(Any, groups))
    assert torch.equal(alone, 2 * table)
    assert torch.equal(together, alone)
    assert rider.got == [10.0, 14.0]
    assert groups.messages == [6, 8]
