"""How a pipeline trains."""

from dataclasses import dataclass

import torch

from ringweave.errors import UsageError, explain
from ringweave.sim.pipelines import Order, warm_up

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a pipeline trains, the same on every rank.

    Raises:
        UsageError: A value that means nothing.
    """

    num_microbatches: int
    """Parts that a batch is cut into; the batch divides by it."""
    schedule: str | Order = "1f1b"
    """`gpipe`, `1f1b`, `1f1b-overlap`, or any order in which each stage has each microbatch's forward and backward
    and no stage waits for ever."""
    splits: tuple[int, ...] | None = None
    """Last blocks, from 1, of all stages but the last, as `ringweave partition` prints them; None means as many blocks
    in each stage."""
    num_stages: int | None = None
    """None means what `splits` says; without splits, all ranks are stages of one pipeline. Fewer stages than ranks make
    replicas."""
    reduction: str = "mean"
    """`mean` if the loss of a batch is the mean over its microbatches and replicas, `sum` if it is their sum."""
    seed: int = 0
    """Of what blocks draw (dropout); each draws by seed, block, train step, microbatch and replica, so that partitions
    do not matter."""
    autocast: torch.dtype | None = None
    """Blocks and loss are computed under torch.autocast with it; None: they are not. What crosses stages may have this
    type, so it is said here and not around the loop."""
    device: torch.device | None = None
    """Where this rank computes; None means its own GPU (LOCAL_RANK) if there is one, else the CPU."""

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            do = "Say how many parts a batch is cut into"
            raise UsageError(explain("microbatches", got=self.num_microbatches, expected="1 or more", do=do))
        if isinstance(self.schedule, str):
            warm_up(self.schedule, 0, 1, self.num_microbatches)
        elif self.schedule.num_microbatches != self.num_microbatches:
            expected = f"{self.num_microbatches}, as in num_microbatches"
            got = self.schedule.num_microbatches
            do = "Generate the order for this number"
            raise UsageError(explain("microbatches of the order", got=got, expected=expected, do=do))
        if self.reduction not in REDUCTIONS:
            do = "Say how the loss of a batch follows from those of its microbatches"
            raise UsageError(explain("reduction", got=self.reduction, expected="mean or sum", do=do))
        _check_stages(self.num_stages, self.splits)

    @property
    def schedule_name(self) -> str:
        """Of the schedule; `order` for one that was given as data."""
        return self.schedule if isinstance(self.schedule, str) else "order"


def _check_stages(num_stages: int | None, splits: tuple[int, ...] | None) -> None:
    if num_stages is None:
        return
    if num_stages < 1:
        raise UsageError(
            explain("stages", got=num_stages, expected="1 or more", do="Leave it out for one on each rank")
        )
    if splits is not None and len(splits) + 1 != num_stages:
        expected = f"{len(splits) + 1}, one more than there are splits"
        raise UsageError(explain("stages", got=num_stages, expected=expected, do="Give one of the two"))
