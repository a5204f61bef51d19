"""What the native backend hands on, with a library that does as NCCL does: no work for a synchronous collective."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringweave.comm import native_backend
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.native_backend import NativeProcessGroup, NativeWork
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.errors import CommunicationError, PeerError
from tests.comm.native.stub_nccl import StubNccl, StubWork
from tests.fakes.gpus import FakeGpus, WrongGpuError

MEMBERS = GroupInfo((RankInfo(0, RankLocation("a", "127.0.0.1"), ()),), 0, b"")
NAMES = [name for name in native_backend._DELEGATED_METHODS if hasattr(dist.ProcessGroup, name)]
MESSAGES = sorted(native_backend._POINT_TO_POINT)
COLLECTIVES = [name for name in NAMES if name not in MESSAGES]


class NativeOnly(NativeProcessGroup):
    """A group that names rank 1 for every failure."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), MEMBERS, timedelta(seconds=100))
        self.native_group: Any = StubNccl()
        self._uses_nccl = True
        self.bytes: list[int] = []

    def fail(self, failure: TransferFailedError, operation: str) -> CommunicationError:
        error = PeerError(f"{operation}: rank 1 (node b): {failure}")
        error.__cause__ = failure
        return error

    def count_native(self, num_bytes: int) -> None:
        self.bytes.append(num_bytes)


@pytest.fixture
def group() -> NativeOnly:
    return NativeOnly()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return FakeGpus().install(monkeypatch)


def argument(device: str, gpus: FakeGpus) -> list[torch.Tensor]:
    return [gpus.zeros(0, 3)] if device == "cuda" else [torch.ones(3)]


def arguments(name: str, device: str, gpus: FakeGpus, *, is_async: bool) -> tuple[Any, ...]:
    """Of a method of torch's: a barrier has options alone, messages have a peer."""
    opts = SimpleNamespace(asyncOp=is_async, device=None)
    if name == "barrier":
        return (opts,)
    tensors = argument(device, gpus)
    return (tensors, 0) if name in ("send", "recv") else (tensors, opts)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_synchronous_collective_without_a_work_has_none(
    group: NativeOnly, gpus: FakeGpus, name: str, device: str
) -> None:
    assert getattr(group, name)(*arguments(name, device, gpus, is_async=False)) is None
    assert group.native_group.called == [name]
    assert group.bytes == [0 if name == "barrier" else 12]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_an_asynchronous_collective_has_a_work(group: NativeOnly, gpus: FakeGpus, name: str, device: str) -> None:
    work = getattr(group, name)(*arguments(name, device, gpus, is_async=True))
    assert isinstance(work, NativeWork)
    assert work.wait()
    assert group.native_group.called == [name]


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_in_the_wait_is_named(group: NativeOnly, gpus: FakeGpus, name: str) -> None:
    group.native_group.error_in_wait = RuntimeError("Connection closed by peer")
    work = getattr(group, name)(*arguments(name, "cuda", gpus, is_async=True))
    with pytest.raises(PeerError, match=rf"{name.strip('_')}: rank 1 \(node b\): Connection closed by peer"):
        work.wait()


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_at_the_call_is_named(group: NativeOnly, gpus: FakeGpus, name: str) -> None:
    group.native_group.error_at_call = dist.DistBackendError("NCCL error: remote process exited")
    with pytest.raises(PeerError, match=rf"{name.strip('_')}: rank 1 \(node b\): NCCL error") as caught:
        getattr(group, name)(*arguments(name, "cuda", gpus, is_async=False))
    assert isinstance(caught.value.__cause__, TransferFailedError)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_gpu_is_refused_by_the_stub(group: NativeOnly, gpus: FakeGpus, name: str) -> None:
    """As NCCL hangs then: what ringweave sets as the current device is the model's."""
    if name == "barrier":
        return
    with gpus.device(1), pytest.raises(WrongGpuError, match="a tensor on GPU 0 where 1 is current"):
        getattr(group, name)(*arguments(name, "cuda", gpus, is_async=True))


def test_a_wrong_argument_is_the_callers_own(group: NativeOnly, gpus: FakeGpus) -> None:
    group.native_group.error_at_call = RuntimeError("Tensors must be contiguous")
    with pytest.raises(RuntimeError, match=r"^Tensors must be contiguous$"):
        group.broadcast(argument("cuda", gpus), SimpleNamespace(asyncOp=False))


@pytest.mark.parametrize("name", sorted(native_backend._CPU_ONLY_IN_GLOO & set(NAMES)))
def test_without_nccl_what_gloo_does_on_the_cpu_alone_is_refused(group: NativeOnly, gpus: FakeGpus, name: str) -> None:
    group._uses_nccl = False
    text = f"{name.strip('_')} by Gloo: .* not on the CPU.*, expected a CPU tensor.*by RINGWEAVE_DEVICE_PATH=native"
    with pytest.raises(CommunicationError, match=text):
        getattr(group, name)(*arguments(name, "cuda", gpus, is_async=True))
    assert group.native_group.called == []
    getattr(group, name)(*arguments(name, "cpu", gpus, is_async=True))
    assert group.native_group.called == [name]


def test_no_collective_looks_for_a_gpu(group: NativeOnly, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("looked for a GPU"))
    for name in NAMES:
        getattr(group, name)(*arguments(name, "cpu", gpus, is_async=True))


class Gloo:
    """Starts the work that it has."""

    def __init__(self) -> None:
        self.work = StubWork(None, None)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> StubWork:
        return self.work


def start_small_allreduce(group: NativeOnly, done: list[str], *, is_async: bool) -> NativeWork | None:
    opts: Any = SimpleNamespace(asyncOp=is_async)
    return group.allreduce_by_gloo(torch.ones(3), opts, lambda: "allreduce (sum)", lambda: done.append("after"))


def test_a_synchronous_small_allreduce_is_done_at_its_return(group: NativeOnly) -> None:
    group._gloo, done = Gloo(), []
    assert start_small_allreduce(group, done, is_async=False) is None
    assert done == ["after"]
    assert not group._awaited_works


def test_a_failure_of_a_synchronous_small_allreduce_is_named(group: NativeOnly) -> None:
    group._gloo, done = Gloo(), []
    group._gloo.work.error = RuntimeError("Connection closed by peer")
    with pytest.raises(PeerError, match=r"^allreduce \(sum\): rank 1 \(node b\): Connection closed by peer"):
        start_small_allreduce(group, done, is_async=False)
    assert done == []
    assert not group._awaited_works


def test_torch_hashes_a_reduce_operation_by_its_kind() -> None:
    """The message policies are found by it."""
    kinds = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    assert [hash(dist.ReduceOp(kind)) for kind in kinds] == [int(kind) for kind in kinds]
