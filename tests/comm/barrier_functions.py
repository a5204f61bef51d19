"""Functions of the ranks in tests/comm/test_barriers.py."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions

NUM_SUMS = 6
_ELEMENTS = 500_000


def pass_barriers() -> dict[str, Any]:
    """Pass and fail barriers of several groups; return what was found, by topic."""
    found = {
        "sums done": [_is_done_after(wait) for wait in (_wait, _wait_async, _wait_for_future, _wait_monitored)],
        "crossed": _cross_messages(),
        "overrun": _run_out_of_time(),
        "mismatches": _call_different_collectives(),
        "absent": _stay_away(),
        "aborted": _abort_during_barriers(),
    }
    dist.barrier()
    return found


def _wait() -> None:
    dist.barrier()


def _wait_async() -> None:
    work: Any = dist.barrier(async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()


def _wait_for_future() -> None:
    group: Any = dist.group.WORLD
    assert group.barrier().get_future().wait() == []


def _wait_monitored() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=100))


def _is_done_after(wait: Callable[[], None]) -> bool:
    """Start allreduces whose works are dropped; return True if the barrier waits for them."""
    tensors = [torch.full((_ELEMENTS,), index + 1.0) for index in range(NUM_SUMS)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    wait()
    return all((tensor == (index + 1.0) * dist.get_world_size()).all() for index, tensor in enumerate(tensors))


def _cross_messages() -> float:
    """Rank 1 starts its allreduce after a message that rank 0 sends behind its barrier; return the sum."""
    tensor, message = torch.ones(_ELEMENTS), torch.ones(1)
    if dist.get_rank() == 1:
        dist.recv(message, 0)
    dist.all_reduce(tensor, async_op=True)
    work: Any = dist.barrier(async_op=True)
    if dist.get_rank() == 0:
        dist.send(message, 1)
    work.wait()
    return float(tensor.mean())


def _run_out_of_time() -> str:
    """Rank 0 alone calls an allreduce, with a timeout of 1 ms; the others do once it has failed. Return the error."""
    group: Any = dist.new_group()
    opts = AllreduceOptions()
    for timeout_s in (100.0, 0.001):
        opts.timeout = timedelta(seconds=timeout_s)
        if timeout_s < 1 and dist.get_rank() != 0:
            dist.recv(torch.ones(1), 0)
        try:
            group.allreduce([torch.ones(_ELEMENTS)], opts).wait()
        except RuntimeError as error:
            if dist.get_rank() == 0:
                for rank in range(1, dist.get_world_size()):
                    dist.send(torch.ones(1), rank)
            return str(error)
    return ""


def _call_different_collectives() -> list[str]:
    """Make different calls in a group that checks them; return the errors, and the sum of an equal call after them."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group: Any = dist.new_group()
    dist.set_debug_level(dist.DebugLevel.OFF)
    rank = dist.get_rank()
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(2 + rank), group=group),
        lambda: dist.barrier(group) if rank else dist.all_reduce(torch.ones(2), group=group),
        lambda: dist.broadcast(torch.ones(2, dtype=torch.int64 if rank else torch.float32), 0, group=group),
    ]
    errors = []
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.ones(1), group=group)
    tensor = torch.ones(_ELEMENTS)
    dist.all_reduce(tensor, group=group)
    return [*errors, str(float(tensor.mean() + sum(gathered)))]


def _stay_away() -> dict[str, str]:
    """Rank 1 stays away from monitored barriers of two groups; return the others' errors."""
    errors = {}
    for kind, waits_all in (("first", False), ("all", True)):
        group: Any = dist.new_group()
        if dist.get_rank() != 1:
            try:
                group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=waits_all)
            except RuntimeError as error:
                errors[kind] = str(error)
        dist.barrier()
    return errors


def _abort_during_barriers() -> list[str]:
    """Abort a group on rank 0 while barriers wait for an allreduce that no other rank calls; return their errors."""
    group: Any = dist.new_group()
    if dist.get_rank() != 0:
        return []
    group.allreduce([torch.ones(_ELEMENTS)])
    work, errors = group.barrier(), []

    def wait(barrier: Callable[[], Any]) -> None:
        try:
            barrier()
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait, args=(each,)) for each in (work.wait, lambda: dist.barrier(group))]
    for thread in threads:
        thread.start()
    group.abort()
    for thread in threads:
        thread.join(100)
    return errors
