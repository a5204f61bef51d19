"""All ranks in one process: what a rank would hear from the others is computed."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ringweave.planning.balancing import SampleAccount, Speed
from ringweave.training.balancer import ShareBalancer
from ringweave.training.data import order
from ringweave.training.data.shared_loader import SharedLoader
from ringweave.training.data.sources import OrderSource, StaticMembership
from ringweave.training.elastic.accounting import EpochAccount
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.elastic.trainer import MemberDescription, TrainerState
from ringweave.training.gradients import SampleWeights
from ringweave.training.memory.meters import MemoryMeter
from ringweave.training.timing import HostTimeline, StepTimer


class FakeControl:
    """One rank's end; accounts of the others are not known, so each rank's is gathered alone."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.speeds: list[Speed] | None = None
        self.num_exchanges = 0
        self.accounts: list[SampleAccount] = []

    def start_speed_exchange(self, own: Speed | None) -> Callable[[], list[Speed] | None]:
        self.num_exchanges += 1
        speeds = self.speeds
        return lambda: speeds

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather_accounts(self, own: SampleAccount) -> list[SampleAccount]:
        self.accounts.append(own)
        return [own]


def loaders(
    loader: DataLoader, world_size: int, shares: tuple[int, ...], num_prefetched: int = 0
) -> list[SharedLoader]:
    """One for each rank; accounts are not compared, since no rank hears of the others."""
    made = []
    for rank in range(world_size):
        control: Any = FakeControl(rank, world_size)
        timer = StepTimer(HostTimeline())
        balancer = ShareBalancer(shares, timer, control, num_prefetched=num_prefetched)
        weights = SampleWeights(num_ranks=world_size, is_mean=True)
        membership = StaticMembership(control, balancer, timer, _ignore)
        source = OrderSource(loader, order.read_loader(loader), 5, membership)
        made.append(SharedLoader(loader, source, weights, timer))
    return made


def trainer_state(member: str, share_table: ShareTable, *, recomputes: bool = False, ring: Any = None) -> TrainerState:
    """Of a member whose model, server and events nobody looks at."""
    description = MemberDescription(
        member=member,
        state_address="127.0.0.1 9",
        max_samples=None,
        assumed_speed=1.0,
        must_match={"num_prefetched": 0, "on_failure": "recompute" if recomputes else "drop"},
    )
    anything: Any = MagicMock()
    return TrainerState(description, share_table, StepTimer(HostTimeline()), anything, anything, anything, ring=ring)


def _ignore(account: EpochAccount) -> None:
    del account


class Card(MemoryMeter):
    """Memory of 10 kB a sample and 100 kB fixed; allocations above its limit fail as on a card."""

    def __init__(self, limit_bytes: float, *, says_bytes: float | None = None) -> None:
        """`says_bytes`: the limit that it claims to have."""
        self._limit_bytes, self._says_bytes = limit_bytes, says_bytes or limit_bytes
        self._peak = 0.0
        self.num_releases, self.keeps_freed = 0, True
        self.at_once: list[int] = []
        """Samples of every pass with gradients."""

    def limit_bytes(self) -> float:
        return self._says_bytes

    def reset_peak(self) -> None:
        self._peak = 0.0

    def peak_bytes(self) -> float:
        return self._peak

    def release_freed(self) -> None:
        self.num_releases += 1

    def keep_freed(self, *, is_kept: bool) -> None:
        self.keeps_freed = is_kept

    def allocate(self, num_samples: int) -> None:
        used = 100e3 + 10e3 * num_samples
        if used > self._limit_bytes:
            raise torch.OutOfMemoryError(f"{num_samples} samples")
        self._peak = max(self._peak, used)
