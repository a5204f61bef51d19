"""What the ranks of the fault tests run: real processes that die, stop, stay away or disagree."""

import contextlib
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringweave.testing.ranks import announce

SILENCE_S = 8.0
"""Limit of collectives that wait for a silent rank. To form a group takes longer on a busy machine: it has its own."""


def limit_silence() -> None:
    """Let collectives of the default group, which has been used, wait for so long at most from now on."""
    group: Any = dist.group.WORLD
    group._gloo.options._timeout = timedelta(seconds=SILENCE_S)


def fork_and_reduce_until_failure(num_elements: int) -> None:
    """Like `reduce_until_failure`, with a forked child that outlives its parent, as data loaders have them.

    The test is told the child's pid, and ends it.
    """
    dist.all_reduce(torch.ones(num_elements))
    dist.all_reduce(torch.ones(num_elements))  # both lanes are connected now
    child = os.fork()
    if child == 0:
        time.sleep(1000)
        os._exit(0)
    announce("child", str(child))
    reduce_until_failure(num_elements)


def fail_at_first_use() -> list[str]:
    """Rank 1 leaves; two collectives of one kind are in flight when their first use fails. Their errors."""
    if dist.get_rank() == 1:
        os._exit(3)
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(2)]
    return _errors_of(works)


def wait_for_one_that_stops() -> list[str]:
    """Rank 3 stops with collectives of both lanes under way; the errors of both."""
    for _ in range(2):
        dist.all_reduce(torch.ones(2_000_000))  # both lanes are connected now
    limit_silence()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    works: list[Any] = [dist.all_reduce(torch.ones(2_000_000), async_op=True) for _ in range(2)]
    return _errors_of(works)


def wait_for_the_rest_of_a_message() -> tuple[str, float]:
    """Rank 1 is stopped when a part of its broadcast has come to rank 0, which then cuts its connections.

    The whole broadcast is one message. Returns how the wait for it ends, and seconds from the cut on.
    """
    from ringweave.comm import gloo as gloo_groups

    rank, store = dist.get_rank(), dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    gloo: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(days=1))
    gloo.barrier().wait()
    message = torch.zeros(60_000_000)
    message[0] = message[-1] = rank
    if rank == 1:
        store.set("pid", str(os.getpid()))
    how = dist.BroadcastOptions()
    how.timeout, how.rootRank, how.rootTensor = timedelta(days=1), 1, 0
    work = gloo.broadcast([message], how)
    if rank == 1:
        time.sleep(1000)
    pid = int(store.get("pid"))
    while not message[0].item():
        pass
    os.kill(pid, signal.SIGSTOP)
    with contextlib.suppress(RuntimeError):
        gloo.recv([torch.empty(1)], 1, 7).wait(timedelta(milliseconds=1))
    began_s = time.monotonic()
    try:
        gloo_groups.wait_for_gloo(work, lambda: True)
        said = "ended"
    except gloo_groups.StuckWorkError as error:
        said = f"stuck: {error}"
        gloo_groups.leak_backend(gloo)
    except RuntimeError:
        said = "woken"
    return said, time.monotonic() - began_s


def come_late_in_an_epoch(form_s: float) -> float:
    """Rank 0 comes to its first collective later than members may to the forming of the group; what is summed."""
    from ringweave.comm.generation_group import GenerationGroups

    groups, rank = GenerationGroups("127.0.0.1", form_timeout_s=100.0), dist.get_rank()
    places: list[Any] = [groups.store_address]
    dist.broadcast_object_list(places)
    groups.form_group(places[0], "1.1", rank, dist.get_world_size(), groups.num_aborts)
    formed: Any = dist.group.WORLD
    for lane in formed._engine._channels:  # as if it had been formed within so short a time
        lane.transport._connection_manager._timeout_s = form_s
    if rank == 0:
        time.sleep(2.5 * form_s)
    tensor = torch.ones(2_000_000)
    dist.all_reduce(tensor)
    dist.barrier()  # the store is rank 0's
    return float(tensor.sum())


def fail_alone() -> str:
    """Rank 1 fails by itself in the middle; what it and the others say."""
    dist.all_reduce(torch.ones(100_000))
    if dist.get_rank() == 1:
        from ringweave.comm.engine import engine

        def fail(*_: Any, **__: Any) -> None:
            raise MemoryError("no room")

        engine.run_program = fail
    try:
        dist.all_reduce(torch.ones(100_000))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def reduce_until_failure(num_elements: int, limits_silence: bool = False) -> None:
    """Reduce again and again; ends only by an exception."""
    tensor = torch.ones(num_elements)
    dist.all_reduce(tensor)
    if limits_silence:
        limit_silence()
    announce("reducing")
    while True:
        dist.all_reduce(tensor.fill_(1.0))


def reduce_different_sizes(warm_up: bool) -> None:
    """Rank 1 reduces another size than the others, for the first time or after both sizes are known."""
    if warm_up:
        for num in (100_000, 200_000):
            dist.all_reduce(torch.ones(num))
    dist.all_reduce(torch.ones(100_000 if dist.get_rank() == 1 else 200_000))


def reduce_without_rank_1() -> None:
    """Rank 1 stays away from the second collective, alive, until it is killed."""
    dist.all_reduce(torch.ones(100_000))
    limit_silence()
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(100_000))


def leave_and_reduce_twice() -> tuple[str, str]:
    """Rank 1 exits; the errors of two collectives in a row."""
    dist.all_reduce(torch.ones(100_000))
    if dist.get_rank() == 1:
        os._exit(3)
    errors = []
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(100_000))
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors[0], errors[1]


def die_in_training(during: str) -> None:
    """Rank 1 exits between two train steps of DDP."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(500, 500))
    for _ in range(3):
        model(torch.randn(3, 500)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(3)
    if during == "backward":
        model(torch.randn(3, 500)).sum().backward()
    else:
        dist.barrier()


def _errors_of(works: list[Any]) -> list[str]:
    """What each of these collectives fails with."""
    errors = []
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(str(error))
    return errors
