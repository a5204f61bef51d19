"""NCCL inside a group, by a stub in its place: when it is made and with which options, how it ends, and batches."""

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d

from ringweave.comm import autoload, backend, native_backend
from ringweave.comm.bridge import CudaRuntime
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.native_backend import NativeProcessGroup
from ringweave.errors import CommunicationError, UsageError
from ringweave.training.elastic.retained_reductions import ReductionRow, RetainedReduction, SumBuffers
from tests.comm.native.stub_nccl import CircleError, StubNccl, Wires
from tests.fakes.gpus import FakeGpus, OnGpu

GROUP_OPTIONS = dist.distributed_c10d._DistributedBackendOptions
_GROUPS: list[backend.RingweaveProcessGroup] = []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return FakeGpus().install(monkeypatch)


class Options:
    """As ProcessGroupNCCL.Options."""

    is_high_priority_stream = False


class NcclFactory:
    """As the class ProcessGroupNCCL: makes real backends of another kind, which torch can register."""

    Options = Options
    made: list[tuple[str, Any]]

    def __init__(self) -> None:
        self.made = []

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> Any:
        self.made.append((f"{rank} of {size}", options))
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))


@pytest.fixture
def nccl(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclFactory]:
    """A machine with NCCL; its worker has the environment that a test sets."""
    factory = NcclFactory()
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", factory, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    for name in [name for name in os.environ if name.startswith("RINGWEAVE_")]:
        monkeypatch.delenv(name)
    yield factory
    while _GROUPS:
        _GROUPS.pop().shutdown()


def make_group(pg_options: object = None) -> backend.RingweaveProcessGroup:
    """As torch makes a group of one rank."""
    options = GROUP_OPTIONS()
    options.store, options.group_rank, options.group_size = dist.HashStore(), 0, 1
    options.timeout, options.group_id, options.global_ranks_in_group = timedelta(seconds=20), "a group", [5]
    made = backend.create_group(options, pg_options)
    _GROUPS.append(made)
    return made


def test_nccl_gets_the_scripts_options_the_groups_name_and_its_ranks(nccl: NcclFactory) -> None:
    own = Options()
    own.is_high_priority_stream = True
    make_group(own)
    ((place, options),) = nccl.made
    assert place == "0 of 1"
    assert options is own
    assert (options.group_name, options.global_ranks_in_group) == ("a group", [5])
    assert options._timeout == timedelta(seconds=20)
    make_group(SimpleNamespace(of="gloo"))
    assert isinstance(nccl.made[1][1], Options), "another backend's options are not NCCL's"


def test_nccl_in_the_plans_order_is_there_beside_a_bridge(nccl: NcclFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_group()._native.ordered_nccl is None
    monkeypatch.setenv("RINGWEAVE_SCHEDULE", "ring")
    assert make_group()._native.ordered_nccl is not None


def test_options_survive_the_replacement_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def init_process_group(backend: str | None = None, pg_options: object = None) -> None:
        seen.update(backend=backend, pg_options=pg_options)

    autoload._with_own_backend(init_process_group)("nccl", pg_options="mine")
    assert seen == {"backend": "ringweave", "pg_options": "mine"}


def test_our_own_groups_bypass_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], str]] = []

    def new_group(ranks: list[int], backend: str) -> None:
        seen.append((ranks, backend))

    monkeypatch.setattr(dist, "new_group", autoload._with_own_backend(new_group))
    autoload.new_native_group([0, 1], "nccl")
    dist.new_group([0], backend="nccl")
    assert seen == [([0, 1], "nccl"), ([0], "ringweave")]


def test_nccl_uses_the_nics_of_the_group(nccl: NcclFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [
        RankInfo(rank, RankLocation(node, "127.0.0.1", nics=("eth1", "eth2")), ()) for rank, node in enumerate("ab")
    ]
    group: Any = SimpleNamespace(members=GroupInfo(tuple(infos), 0, b""), _timeout=timedelta(seconds=1))
    group._store = dist.HashStore()
    monkeypatch.setattr(
        NcclFactory, "__call__", lambda *_: SimpleNamespace(_set_sequence_number_for_group=lambda: None)
    )
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    NativeProcessGroup._make_nccl(group, None, "g")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7", "the user's own"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    NativeProcessGroup._make_nccl(group, None, "g")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1,eth2"


def test_an_elastic_job_makes_no_nccl_and_refuses_to(nccl: NcclFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGWEAVE_COORDINATORS", "127.0.0.1:9")
    group = make_group()
    assert nccl.made == []
    assert group._bridge is not None
    assert group._native.ordered_nccl is None
    assert not group._bridge._orders_streams, "a wait knows of a failure before a step counts"
    monkeypatch.setenv("RINGWEAVE_DEVICE_PATH", "native")
    text = "RINGWEAVE_DEVICE_PATH: 'native', expected auto or bridge in an elastic job, since NCCL does not survive"
    with pytest.raises(UsageError, match=text):
        make_group()


def test_buckets_of_an_elastic_job_start_without_a_meeting(
    nccl: NcclFactory, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's lock is held meanwhile. NCCL's first collective would wait for all ranks; the bridge does not."""
    monkeypatch.setenv("RINGWEAVE_COORDINATORS", "127.0.0.1:9")
    group: Any = make_group()
    stub = StubNccl()
    stub.may_meet.clear()
    monkeypatch.setattr(backend.RingweaveProcessGroup, "_get_backend", lambda *_: stub, raising=False)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group, async_op: group.allreduce([tensor], ReduceOp.SUM))
    reduction, buffers = RetainedReduction(number=1), SumBuffers()
    with gpus:
        gradients = gpus.gpus[0].place(torch.full((20_000,), 3.0))
        reduction.add_bucket(gradients, buffers)
        reduction.complete(ReductionRow(), 0, buffers)
        started = threading.Thread(target=reduction.start, args=(group,))
        started.start()
        started.join(60)  # a meeting ends with an error before
        reduction.wait_done()
        assert reduction.sums[0].tolist()[:2] == [3.0, 3.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_allreduce_on_nccl_has_nccls_work_or_none_and_names_errors(
    nccl: NcclFactory, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    group, stub, opts = make_group(), StubNccl(), dist.AllreduceOptions()
    opts.asyncOp = is_async
    monkeypatch.setattr(backend.RingweaveProcessGroup, "_get_backend", lambda *_: stub, raising=False)
    work = group.allreduce([gpus.zeros(0, 3)], opts)
    assert (work is None) == (not is_async)
    stub.error_at_call = dist.DistBackendError("NCCL error: remote process exited")
    with pytest.raises(
        CommunicationError, match=r"allreduce on cuda: rank 5 \(node .*NCCL error: remote process exited"
    ):
        group.allreduce([gpus.zeros(0, 3)], opts)


def test_a_destroyed_group_shuts_nccl_down_once_and_a_failed_one_aborts_it(nccl: NcclFactory) -> None:
    group: Any = make_group()
    group._nccl = stub = StubNccl()
    group.shutdown()
    group.shutdown()
    assert stub.called == ["shutdown"]
    group = make_group()
    group._nccl = stub = StubNccl()
    group.abort()
    assert stub.was_aborted.wait(60)
    group.shutdown()
    assert stub.called == ["abort"]


def test_a_barrier_is_glooss_and_waits_for_the_current_stream(nccl: NcclFactory, gpus: FakeGpus) -> None:
    """NCCL's would take a GPU that it guesses, and its wait could not be given up after an abort."""
    group: Any = make_group()
    calls: list[Any] = []
    waits: list[Any] = []
    group.native_group = SimpleNamespace(barrier=lambda opts: calls.append(opts) or "a work")
    group.wrap_gloo_work = lambda work, operation: waits.append(work)
    gpus.set_device(2)
    out = torch.zeros(1)
    side = gpus.gpus[2].make_stream()
    side.enqueue(lambda: out.fill_(7.0))
    with gpus.stream(side):
        opts = dist.distributed_c10d.BarrierOptions()
        opts.device = torch.device("cuda")  # pyrefly: ignore[read-only]
        group.barrier(opts=opts)
    assert out.item() == 7.0
    assert calls[0].device == torch.device("cpu")
    assert len(waits) == 1, "in slices"
    assert gpus.contexts == {2}, "no other context is made"


def test_the_bridge_looks_at_the_tensors_gpu_alone(gpus: FakeGpus) -> None:
    """A look at the current one would make a context there."""
    assert CudaRuntime(torch.device("cuda", 2)).current_stream() is gpus.gpus[2].script
    assert gpus.contexts == {2}


class Messages(NativeProcessGroup):
    """A group of two ranks whose messages are NCCL's."""

    def __init__(self, stub: StubNccl) -> None:
        infos = tuple(RankInfo(0, RankLocation("a", "127.0.0.1"), ()) for _ in range(1))
        super().__init__(dist.HashStore(), GroupInfo(infos, 0, b""), timedelta(seconds=10))
        self.native_group: Any = stub
        self._uses_nccl, self.stub = True, stub

    def rank(self) -> int:
        return self.stub.own_rank

    def _get_backend(self, device: torch.device) -> Any:  # type: ignore[override]
        return self.stub

    def _start_coalescing(self, device: torch.device) -> None:
        self.stub._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.stub._end_coalescing(device)

    def count_native(self, num_bytes: int) -> None:
        pass


def exchange_in_batches(gpus: FakeGpus, batch: Any, monkeypatch: pytest.MonkeyPatch) -> list[OnGpu | Exception]:
    """Both ranks send, then receive; what they got."""
    wires, found = Wires(gpus), [RuntimeError("nothing"), RuntimeError("nothing")]
    groups = [Messages(StubNccl(wires, rank)) for rank in (0, 1)]
    for group in groups:
        monkeypatch.setitem(distributed_c10d._world.pg_group_ranks, group, {0: 0, 1: 1})

    def run(rank: int) -> None:
        torch.cuda.set_device(rank)
        group, peer = groups[rank], 1 - rank
        sent, received = gpus.gpus[rank].place(torch.full((4,), float(rank + 1))), gpus.zeros(rank, 4)
        ops = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        try:
            for work in batch(ops):
                work.wait()
            torch.cuda.synchronize(rank)
            found[rank] = received
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found  # type: ignore[return-value]


def test_a_batch_in_a_group_of_ours_is_grouped(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    found = exchange_in_batches(gpus, dist.batch_isend_irecv, monkeypatch)
    assert [each.tolist() for each in found] == [[2.0] * 4, [1.0] * 4]  # type: ignore[union-attr]


def test_torchs_own_function_would_not_group_it(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails torch treats subclasses as its own class, and the replacement can go."""
    found = exchange_in_batches(gpus, dist.batch_isend_irecv.__wrapped__, monkeypatch)  # type: ignore[attr-defined]
    assert all(isinstance(each, CircleError) for each in found)


def test_batches_of_other_groups_and_backends_stay_torchs(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Messages(StubNccl(Wires(gpus)))
    monkeypatch.setitem(distributed_c10d._world.pg_group_ranks, group, {0: 0, 1: 1})
    op = dist.P2POp(dist.isend, torch.zeros(1), group=group, group_peer=1)
    assert native_backend.group_of_batch([op]) is group
    group.stub.supports_coalescing = False  # Gloo's
    assert native_backend.group_of_batch([op]) is None
    assert native_backend.group_of_batch([]) is None
    assert native_backend.group_of_batch(["no op"]) is None
