"""What the ranks of the tests of aborting run."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringweave.testing.ranks import announce
from tests.polling import wait_until

_STALLED = 101_000
_OTHER = 102_000
_NEW = 103_000
_NOT_FOR_THE_HOST = 2_000_000


def abort_while_a_first_use_waits() -> list[str]:
    """Rank 0 aborts; one lane is stalled by rank 1, the other waits for what is queued behind it. Its errors."""
    if dist.get_rank() == 1:
        return _stall()
    works: list[Any] = [dist.all_reduce(torch.ones(num), async_op=True) for num in (_STALLED, _OTHER)]
    works[1].wait()
    works += [dist.all_reduce(torch.ones(_NEW), async_op=True) for _ in range(2)]
    group: Any = dist.group.WORLD
    _wait_until_empty(group._engine._channels[0]._jobs)
    group.abort()
    errors = []
    for work in (works[0], works[2], works[3]):
        try:
            work.wait(timedelta(seconds=300))
        except RuntimeError as error:
            errors.append(str(error))
    announce("aborted")
    return errors


def abort_before_the_first_use() -> str:
    """Rank 0 aborts a group that it has not used; the error of rank 1, which waits for a call of rank 0's."""
    if dist.get_rank() == 0:
        dist.group.WORLD.abort()
        announce("aborted")
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=300))
    try:
        dist.all_reduce(torch.ones(_NOT_FOR_THE_HOST))
    except RuntimeError as error:
        return str(error)
    return ""


def explain_to_one_that_aborts() -> str:
    """Rank 0 aborts while it looks for who is to blame, for longer than the test; how its collective ended."""
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(_OTHER))
    if dist.get_rank() == 1:
        time.sleep(300)  # it is killed
    from ringweave.comm import failure_registry

    failure_registry.REPORT_GRACE_S = 1000.0
    work: Any = dist.all_reduce(torch.ones(_OTHER), async_op=True)
    announce("reducing")
    while not group._store.check(["failure/0"]):
        time.sleep(0.01)
    group.abort()
    try:
        work.wait(timedelta(seconds=1000))
    except RuntimeError as error:
        return str(error)
    return ""


def close_while_both_lanes_wait(timeout_s: float) -> tuple[float, list[float]]:
    """Rank 0 closes its engine while each of its lanes waits for rank 1.

    Returns:
        The seconds that this takes, and the limits of those waits for lanes that came to nothing.
    """
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(_OTHER))
    if dist.get_rank() == 1:
        group._store.wait(["closed"], timedelta(seconds=300))
        return 0.0, []
    works: list[Any] = [dist.all_reduce(torch.ones(_OTHER), async_op=True) for _ in range(2)]
    limits_s: list[float] = []
    for lane in group._engine._channels:
        _note_vain_joins(lane._thread, limits_s)
    started = time.monotonic()
    group._engine.close(timeout_s)
    taken_s = time.monotonic() - started
    group._store.set("closed", "1")
    assert all(work.exception() is not None for work in works)
    return taken_s, limits_s


def _note_vain_joins(thread: threading.Thread, limits_s: list[float]) -> None:
    join = thread.join

    def note(limit_s: float) -> None:
        join(limit_s)
        if thread.is_alive():
            limits_s.append(limit_s)

    thread.join = note  # type: ignore


def _stall() -> list[str]:
    """Everything but the collective of one size."""
    from ringweave.comm.engine import engine

    run_program, forever = engine.run_program, threading.Event()

    def run_most(program: Any, message: torch.Tensor, *args: Any, **settings: Any) -> None:
        if message.numel() == _STALLED:
            forever.wait(300)
        run_program(program, message, *args, **settings)

    engine.run_program = run_most
    works: list[Any] = [dist.all_reduce(torch.ones(num), async_op=True) for num in (_STALLED, _OTHER)]
    works[1].wait()
    try:
        dist.group.WORLD._store.wait(["never"], timedelta(seconds=300))
    except RuntimeError:
        return []
    return []


def _wait_until_empty(jobs: Any) -> None:
    wait_until(jobs.empty)
