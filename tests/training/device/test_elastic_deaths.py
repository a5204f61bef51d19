"""Deaths in an elastic job on fake GPUs: real groups and sockets, no NCCL, and only the members' own GPUs are used."""

import gc
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d

from ringweave.comm import backend, bridge, native_backend
from ringweave.training.elastic.retained_reductions import Commit, ReductionRow, RetainedReduction, SumBuffers
from tests import effort
from tests.fakes.gpus import FakeGpus

COUNT, TIMEOUT = 40_000, timedelta(seconds=60)
COMMIT = Commit(number=1, members=("0.0", "1.0"), rows=(ReductionRow(), ReductionRow()))
COUNTED = (bridge.DeviceBridge, bridge.DeviceChannel, bridge.StagingBuffer, bridge.StagedMessage)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """Members 0 and 1 have GPUs 2 and 3, and are threads; NCCL is there, and must not be made."""
    world = FakeGpus().install(monkeypatch)

    def refuse(*_: object) -> None:
        raise AssertionError("NCCL is made in an elastic job")

    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", refuse, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("RINGWEAVE_COORDINATORS", "127.0.0.1:9")
    monkeypatch.setenv("RINGWEAVE_SCHEDULE", "ring")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group, async_op: group.allreduce([tensor], ReduceOp.SUM))
    return world


def in_members(gpus: FakeGpus, run: Callable[[int], Any]) -> list[Any]:
    """What each member's thread returns, or raises."""
    found: list[Any] = [None, None]

    def run_member(rank: int) -> None:
        torch.cuda.set_device(2 + rank)
        try:
            with gpus:
                found[rank] = run(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run_member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def form_generation(gpus: FakeGpus) -> list[Any]:
    """A group of both members."""
    store = dist.HashStore()

    def form(rank: int) -> Any:
        options = distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, 2
        options.timeout, options.group_id, options.global_ranks_in_group = TIMEOUT, "generation 1", [0, 1]
        return backend.create_group(options, None)

    found = in_members(gpus, form)
    assert all(isinstance(each, backend.RingweaveProcessGroup) for each in found), found
    return found


def retained(gpus: FakeGpus, rank: int, buffers: SumBuffers) -> RetainedReduction:
    reduction = RetainedReduction(number=1)
    with gpus:
        reduction.add_bucket(gpus.gpus[2 + rank].place(torch.full((COUNT,), 1.0 + rank)), buffers)
        reduction.complete(ReductionRow(), 0, buffers)
    return reduction


def one_death(gpus: FakeGpus, rank_that_dies: int) -> list[float]:
    """A member dies within a reduction; sums of the survivor and of a successor in the next generation."""
    groups, buffers = form_generation(gpus), [SumBuffers(), SumBuffers()]
    reductions = [retained(gpus, rank, buffers[rank]) for rank in range(2)]

    def reduce_until_death(rank: int) -> str:
        if rank == rank_that_dies:
            groups[rank].abort()  # as the kernel closes the sockets of a process that is gone
            return ""
        try:
            reductions[rank].start(groups[rank])
            reductions[rank].wait_done()
        except RuntimeError as error:
            reductions[rank].detach_from_group()
            return str(error)
        raise AssertionError("the death was not noticed")

    said = in_members(gpus, reduce_until_death)
    assert all(isinstance(each, str) for each in said), said
    in_members(gpus, lambda rank: groups[rank].shutdown())
    reductions[rank_that_dies] = retained(gpus, rank_that_dies, buffers[rank_that_dies])
    groups = form_generation(gpus)

    def reduce(rank: int) -> float:
        reductions[rank].start(groups[rank])
        reductions[rank].wait_done()
        reductions[rank].deliver(COMMIT, is_mean=False)
        return reductions[rank].sums[0].tolist()[-1]

    found = in_members(gpus, reduce)
    in_members(gpus, lambda rank: groups[rank].shutdown())
    return found


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in COUNTED)


@pytest.mark.slow
def test_deaths_leave_nothing_behind_and_touch_no_other_gpu(gpus: FakeGpus) -> None:
    num_threads, of_other_tests = [], live_objects()
    for number in range(effort.share_of(50)):
        assert one_death(gpus, number % 2) == [3.0, 3.0]
        for gpu in gpus.gpus:
            del gpu.streams[2:]  # all but the script's, which torch too takes from a pool
        gpus.streams_by_handle.clear()
        assert live_objects() <= of_other_tests, number
        num_threads.append(threading.active_count())
    assert gpus.contexts == {2, 3}
    assert max(num_threads[1:]) <= num_threads[0], num_threads
    assert gpus.num_word_waits == 0, "streams do not wait in an elastic job: a failure is known before a step counts"


def test_the_end_of_an_elastic_group_has_only_sockets_to_abort(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[object] = []
    monkeypatch.setattr(native_backend, "abort_gloo", lambda gloo, _group: aborted.append(gloo))
    groups = form_generation(gpus)
    for group in groups:
        assert (group._nccl, group._native.ordered_nccl) == (None, None)
        group.abort()
    assert aborted == [group._gloo for group in groups]
    in_members(gpus, lambda rank: groups[rank].shutdown())
