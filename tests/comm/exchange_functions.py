"""What the ranks of tests/comm/test_exchanges.py run."""

import os
from typing import Any

import torch
import torch.distributed as dist

from ringweave.errors import DisagreementError


def _say(words: list[int]) -> list[list[int]]:
    group: Any = dist.group.WORLD
    return group.allgather_small(torch.tensor(words)).tolist()


def exchange_between_sums() -> list[list[list[int]]]:
    """What every rank said, three times, with sums in both lanes before each."""
    rank, heard = dist.get_rank(), []
    for turn in range(3):
        for work in [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(2)]:
            assert work is not None
            work.wait()
        heard.append(_say([rank, turn, -rank * 2**40]))
    return heard


def exchange_without_rank_1() -> list[str]:
    """Rank 1 exits; the errors of an exchange and of what comes after it."""
    _say([0])
    if dist.get_rank() == 1:
        os._exit(3)
    errors = []
    for _ in range(2):
        try:
            _say([1])
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def ask_late_for_the_future() -> list[float]:
    """Sums of works whose future is asked for before and after they have ended."""
    group: Any = dist.group.WORLD
    early, late = (group.allreduce([torch.ones(100_000)]) for _ in range(2))
    future = early.get_future()
    early.wait()
    late.wait()
    group.allgather_small(torch.ones(1))
    return [float(each.wait()[0].mean()) for each in (future, late.get_future())]


def exchange_different_widths(odd: int) -> tuple[str, tuple[int, ...]]:
    """One rank says more than the others; what each raises, and the group ranks that it blames."""
    try:
        _say([0] * (3 if dist.get_rank() == odd else 2))
    except DisagreementError as error:
        return str(error), error.culprits
    return "", ()
