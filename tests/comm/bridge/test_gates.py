"""Streams of a fake GPU that wait for a result which the host has still to make, and when threads wait instead."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from ringweave.comm import plan_choice
from ringweave.comm.bridge import DeviceBridge, StagedMessage, StreamGate
from ringweave.comm.device_regions import DeviceRegion
from ringweave.comm.work import PendingWork
from ringweave.environment import WorkerEnvironment
from ringweave.errors import CommunicationError
from tests.comm.bridge.simulated_device import EARLY, LATE
from tests.fakes.gpus import NOT_SUPPORTED, FakeGpus

COUNT = 64


@pytest.fixture(params=[LATE, EARLY])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    world = FakeGpus(kind=request.param).install(monkeypatch)
    torch.cuda.set_device(1)
    with world:
        yield world


def called(bridge: DeviceBridge, tensor: torch.Tensor, channel: int = 0) -> tuple[StagedMessage, PendingWork]:
    """As the script's thread calls a collective."""
    staged = bridge.open(tensor.device)
    staged.reserve(channel)
    return staged, PendingWork([tensor], staged)


def run_in_channel(staged: StagedMessage, tensor: torch.Tensor, channel: int = 0) -> None:
    """As the channel's thread runs it: twice the message."""
    region = DeviceRegion(tensor=tensor, start=0, is_input=True, is_output=True)
    message = staged.stage(channel, tensor.dtype, COUNT, [region])
    staged.fetch(0, 0, COUNT)
    staged.wait_ready()
    message.mul_(2)
    staged.put(0, COUNT)
    staged.finish()


def in_a_channel(staged: StagedMessage, tensor: torch.Tensor) -> None:
    thread = threading.Thread(target=run_in_channel, args=(staged, tensor))
    thread.start()
    thread.join()


def test_python_goes_on_and_the_stream_waits(gpus: FakeGpus) -> None:
    bridge, tensor = DeviceBridge(), gpus.zeros(1, COUNT).fill_(3.0)
    staged, work = called(bridge, tensor)
    assert work.wait()
    assert not work.is_completed()
    tensor.add_(1.0)  # what the script enqueues next
    second, later = called(bridge, tensor)
    assert later.wait()
    in_a_channel(staged, tensor)
    in_a_channel(second, tensor)
    assert tensor.tolist() == [14.0] * COUNT
    assert gpus.contexts == {1}
    bridge.close()


def test_a_stream_is_tried_once(gpus: FakeGpus) -> None:
    bridge, tensor = DeviceBridge(), gpus.zeros(1, COUNT)
    for number in range(3):
        staged, work = called(bridge, tensor)
        work.wait()
        in_a_channel(staged, tensor)
        work.set_finished()
        assert gpus.num_word_waits == number + 2
    bridge.close()


def blocks_until_the_host_is_done(bridge: DeviceBridge, gpus: FakeGpus) -> bool:
    """Whether `wait` waits for the channel, and the result is right."""
    tensor = gpus.zeros(1, COUNT)
    staged, work = called(bridge, tensor.fill_(1.0))
    has_returned = threading.Event()

    def wait() -> None:
        torch.cuda.set_device(1)
        with gpus:
            work.wait()
        has_returned.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    is_blocked = not has_returned.wait(0.5)
    in_a_channel(staged, tensor)
    work.set_finished()
    waiter.join()
    work.wait()
    return is_blocked and tensor.tolist() == [2.0] * COUNT


def test_a_stream_that_holds_up_the_copies_does_not_wait(gpus: FakeGpus) -> None:
    """As with CUDA_DEVICE_MAX_CONNECTIONS=1: it is tried a few times, as a trial may fail because all is busy."""
    gpus.gpus[1].has_one_queue = True
    bridge = DeviceBridge()
    assert all(blocks_until_the_host_is_done(bridge, gpus) for _ in range(4))
    assert gpus.num_word_waits == 3
    bridge.close()


def test_a_device_without_such_waits_blocks(gpus: FakeGpus) -> None:
    gpus.wait_error = NOT_SUPPORTED
    bridge = DeviceBridge()
    assert blocks_until_the_host_is_done(bridge, gpus)
    assert gpus.num_word_waits == 0
    bridge.close()


def test_without_the_drivers_bindings_threads_wait(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    bridge = DeviceBridge()
    assert blocks_until_the_host_is_done(bridge, gpus)
    assert gpus.num_word_waits == 0
    bridge.close()


def test_a_wait_with_a_limit_blocks(gpus: FakeGpus) -> None:
    from datetime import timedelta

    _, work = called(DeviceBridge(), gpus.zeros(1, COUNT))
    with pytest.raises(CommunicationError, match=r"collective: not finished after 0\.01 s"):
        work.wait(timedelta(milliseconds=10))


def test_a_failure_lets_the_stream_go_on(gpus: FakeGpus) -> None:
    bridge, tensor = DeviceBridge(), gpus.zeros(1, COUNT).fill_(3.0)
    staged, work = called(bridge, tensor)
    other, _ = called(bridge, tensor, channel=1)
    work.wait()
    region = DeviceRegion(tensor=tensor, start=0, is_input=True, is_output=True)
    staged.stage(0, tensor.dtype, COUNT, [region])
    other.discard()
    script = gpus.gpus[1].script
    while script.step():
        pass
    assert script.ops, "another channel's failure does not let it pass"
    staged.discard()
    torch.cuda.synchronize(1)
    assert not staged.is_complete()
    bridge.close()


def test_a_captured_stream_is_refused(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = DeviceBridge()
    _, work = called(bridge, gpus.zeros(1, COUNT))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (work.wait, lambda: bridge.open(torch.device("cuda", 1))):
        with pytest.raises(CommunicationError, match="the current stream is captured in a CUDA graph, expected none"):
            call()


def test_numbers_of_a_gate_wrap_and_never_go_back() -> None:
    word = torch.zeros(1, dtype=torch.int32)
    gate = StreamGate(word)
    assert (gate.reserve(), gate.reserve()) == (1, 2)
    gate.let_pass(2)
    gate.let_pass(1)
    assert word.item() == 2
    gate.let_pass(2**31 + 5)
    assert word.item() == -(2**31) + 5
    gate.let_pass(2**32 + 7)
    assert word.item() == 7


def test_elastic_jobs_and_users_who_ask_for_it_wait_in_threads() -> None:
    assert plan_choice.may_order_streams(WorkerEnvironment(), {})
    assert plan_choice.may_order_streams(WorkerEnvironment(), {"TORCH_NCCL_BLOCKING_WAIT": "0"})
    assert not plan_choice.may_order_streams(WorkerEnvironment(), {"TORCH_NCCL_BLOCKING_WAIT": "1"})
    assert not plan_choice.may_order_streams(WorkerEnvironment(coordinators=(("127.0.0.1", 9),)), {})
