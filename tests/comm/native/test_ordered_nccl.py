"""NCCL with its ranks in a plan's order: who is which rank, who is the root, and how it ends."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d

from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.native_backend import NativeBackends, OrderedNccl
from ringweave.comm.transport.interface import TransferFailedError
from tests.comm.native.stub_nccl import StubNccl
from tests.fakes.gpus import FakeGpus

ORDER = (2, 0, 3, 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return FakeGpus().install(monkeypatch)


class Factory:
    """As the class ProcessGroupNCCL; notes what it is called with."""

    Options = SimpleNamespace

    def __init__(self) -> None:
        self.made: list[tuple[int, int, list[int]]] = []
        self.stubs: list[StubNccl] = []

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> StubNccl:
        self.made.append((rank, size, options.global_ranks_in_group))
        self.stubs.append(StubNccl())
        return self.stubs[-1]


@pytest.fixture
def factory(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Factory:
    made = Factory()
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", made, raising=False)
    return made


def members(own: int) -> GroupInfo:
    infos = [RankInfo(10 + rank, RankLocation("ab"[rank % 2], "127.0.0.1"), ()) for rank in range(4)]
    return GroupInfo(tuple(infos), own, b"")


def nccl_of(rank: int) -> OrderedNccl:
    return OrderedNccl(dist.HashStore(), members(rank), timedelta(seconds=20))


def test_each_rank_has_its_place_in_the_ring(factory: Factory, gpus: FakeGpus) -> None:
    for rank in range(4):
        nccl_of(rank).allreduce(ORDER, gpus.zeros(0, 3), ReduceOp.SUM)
    assert [(place, size) for place, size, _ in factory.made] == [(1, 4), (3, 4), (0, 4), (2, 4)]
    assert {tuple(global_ranks) for _, _, global_ranks in factory.made} == {(12, 10, 13, 11)}


def test_a_communicator_is_made_once_for_each_order(factory: Factory, gpus: FakeGpus) -> None:
    nccl = nccl_of(0)
    for order in (ORDER, ORDER, (0, 1, 2, 3)):
        nccl.allreduce(order, gpus.zeros(0, 3), ReduceOp.SUM)
    assert len(factory.made) == 2


@pytest.mark.parametrize("root", range(4))
def test_the_root_is_named_by_its_place(
    factory: Factory, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, root: int
) -> None:
    roots: list[int] = []
    monkeypatch.setattr(StubNccl, "broadcast", lambda _self, _tensors, opts: roots.append(opts.rootRank), raising=False)
    nccl_of(1).broadcast(ORDER, gpus.zeros(0, 3), root)
    assert roots == [ORDER.index(root)]


def test_the_current_stream_waits_for_it_on_the_tensors_gpu(factory: Factory, gpus: FakeGpus) -> None:
    torch.cuda.set_device(2)
    nccl, side = nccl_of(0), gpus.gpus[2].make_stream()
    with gpus.stream(side):
        nccl.allreduce(ORDER, gpus.zeros(2, 3), ReduceOp.SUM)
    assert side.num_enqueued == 1, "the wait for NCCL's stream"
    assert gpus.contexts == {2}


def test_an_error_of_nccl_is_a_failed_transfer(factory: Factory, gpus: FakeGpus) -> None:
    nccl = nccl_of(0)
    nccl.allreduce(ORDER, gpus.zeros(0, 3), ReduceOp.SUM)
    factory.stubs[0].error_at_call = dist.DistBackendError("NCCL error: remote process exited")
    with pytest.raises(TransferFailedError, match="NCCL error: remote process exited"):
        nccl.allreduce(ORDER, gpus.zeros(0, 3), ReduceOp.SUM)


def test_it_ends_with_its_group(factory: Factory, gpus: FakeGpus) -> None:
    for method, end in (("shutdown", NativeBackends.close), ("abort", NativeBackends.abort)):
        natives = NativeBackends(dist.HashStore(), members(0), timedelta(seconds=20), lambda: None)
        nccl = natives.ordered_nccl = nccl_of(0)
        nccl.allreduce(ORDER, gpus.zeros(0, 3), ReduceOp.SUM)
        stub = factory.stubs[-1]
        end(natives)
        if method == "abort":
            assert stub.was_aborted.wait(60), "in a thread of its own"
        natives.close()
        assert stub.called == ["allreduce", method]
        assert nccl.is_aborted
        with pytest.raises(TransferFailedError, match="the connections of this group were cut"):
            nccl.allreduce(ORDER, gpus.zeros(0, 3), ReduceOp.SUM)
