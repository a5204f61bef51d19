"""Training on fake GPUs: marks, random numbers and memory on the model's GPU, whatever thread and stream."""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ringweave
from ringweave.comm.engine.reductions import reduction_for
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.native_backend import NativeProcessGroup
from ringweave.comm.plan_choice import num_ranks_per_gpu
from ringweave.training import preparation, speed_test, timing
from ringweave.training.checkpoints import format
from ringweave.training.elastic.commit import CommitProtocol, _PreparedCommit
from ringweave.training.elastic.recovery import ReplayLog
from ringweave.training.elastic.retained_reductions import (
    Commit,
    FetchOnceBroadcast,
    ReductionRow,
    RetainedReduction,
    SumBuffers,
)
from ringweave.training.elastic.session import SessionThread
from ringweave.training.elastic.wire_choice import WireChoice
from ringweave.training.memory import meters, microbatches
from tests.fakes.gpus import GIB, FakeGpus, OnGpu

COMMIT = Commit(number=1, members=("0.0",), rows=(ReductionRow(),))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return FakeGpus().install(monkeypatch)


@pytest.fixture
def summed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of a world of one member."""
    finished = SimpleNamespace(wait=lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: finished)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: finished)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)


def in_thread(run: Callable[[], Any]) -> Any:
    """What another thread returns: its current GPU is the first one, and its streams are the default ones."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def test_a_steps_time_is_of_the_models_gpu_whichever_is_current(gpus: FakeGpus) -> None:
    timeline = timing.choose_timeline(gpus.model(2, 2))
    begin = timeline.mark()
    gpus.gpus[2].script.enqueue(lambda: 0.25)
    gpus.gpus[0].script.enqueue(lambda: 7.0)
    end = in_thread(timeline.mark)  # as DDP's hook
    assert timeline.has_passed(end)
    assert timeline.seconds((begin, end)) == pytest.approx(0.25)
    assert gpus.contexts == {2}


def test_a_model_in_host_memory_makes_no_context(gpus: FakeGpus) -> None:
    model = nn.Linear(3, 2)
    assert isinstance(timing.choose_timeline(model), timing.HostTimeline)
    speed_test.run_forward_backward(model, [torch.ones(4, 3)])
    with speed_test.preserve_model_state(model):
        pass
    assert format.capture_rng_state()["cuda"] is None
    assert gpus.contexts == set()


class OneParameter(nn.Module):
    """Multiplies by a parameter on a GPU."""

    def __init__(self, gpus: FakeGpus, index: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(gpus.zeros(index, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def test_a_trial_waits_for_the_models_gpu(gpus: FakeGpus) -> None:
    waited: list[int] = []
    model = OneParameter(gpus, 2)
    side = gpus.gpus[2].make_stream()
    side.enqueue(lambda: waited.append(2))
    speed_test.run_forward_backward(model, [gpus.gpus[2].place(torch.ones(3))])
    assert waited == [2]
    assert gpus.contexts == {2}


def test_a_trial_leaves_the_random_numbers_of_the_models_gpu(gpus: FakeGpus) -> None:
    before = gpus.gpus[2].generator.get_state()
    with speed_test.preserve_model_state(gpus.model(2)):
        gpus.gpus[2].generator.manual_seed(99)
    assert torch.equal(gpus.gpus[2].generator.get_state(), before)


def test_checkpoints_have_the_random_numbers_of_the_models_gpu(gpus: FakeGpus) -> None:
    model, device = gpus.model(3), torch.device("cuda", 3)
    assert timing.cuda_devices(model) == [device]
    gpus.gpus[3].generator.manual_seed(42)
    state = format.capture_rng_state(device)
    gpus.gpus[3].generator.manual_seed(1)
    first = gpus.gpus[0].generator.get_state()
    format.restore_rng_state(state, device)
    assert gpus.gpus[3].generator.initial_seed() == 42
    assert torch.equal(gpus.gpus[0].generator.get_state(), first)


def test_prepare_makes_the_models_gpu_the_current_one(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(preparation, "_prepare_static", lambda *_: seen.append(gpus.current))
    monkeypatch.setattr(timing, "freeze_garbage_collector", lambda: None)
    loader = DataLoader(list(range(8)), batch_size=4)
    for model in (gpus.model(2), gpus.model(1, 3), nn.Linear(2, 2)):
        ringweave.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert seen == [2, 2, 2], "a model on several GPUs, or on none, changes nothing"


def test_a_newcomers_zeros_lie_on_its_own_gpu(gpus: FakeGpus) -> None:
    """The others tell the type of their device only; the session's thread would begin with the first GPU."""
    found: list[RetainedReduction] = []
    anything: Any = None
    thread = SessionThread(anything, anything, anything)
    torch.cuda.set_device(2)

    def run_once() -> bool:
        with gpus:
            found.append(ReplayLog([[4, "float32", "cuda"]], 0, max_bytes=1e9).zero_reduction(1))
        return False

    thread._run_once = run_once  # type: ignore[method-assign]
    thread.start()
    thread.wait_stopped(5)
    (message,) = found[0].messages
    assert message.summed.device == message.buckets[0].gradients.device == torch.device("cuda", 2)
    assert gpus.contexts == {2}


def test_sums_are_copied_to_the_host_before_the_lock_is_held(
    gpus: FakeGpus, summed_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReplayLog([], 0, max_bytes=1e9)
    log._zeros = [gpus.zeros(2, 4)]
    with gpus:
        reduction = log.zero_reduction(1)
    reduction.start()
    reduction.wait_done()
    reduction.copy_to_host()
    monkeypatch.setattr(OnGpu, "cpu", lambda _: pytest.fail("with the lock held"))
    log.append_reduction(COMMIT, reduction, [])
    assert [each.device.type for each in log.pop_reduction().sums] == ["cpu"]


def run_on_side_stream(gpus: FakeGpus, values: torch.Tensor, use: Callable[[OnGpu], Any]) -> Any:
    """As a script does under `with torch.cuda.stream(s)`: its gradients are written when the GPU comes to them."""
    gradients = gpus.gpus[2].place(torch.zeros_like(values))
    side: Any = gpus.gpus[2].make_stream()
    with gpus.stream(side):
        with torch._C.DisableTorchFunctionSubclass():
            plain = gradients.detach().as_subclass(torch.Tensor)
        side.enqueue(lambda: plain.copy_(values))
        return use(gradients)


def test_gradients_of_any_stream_are_summed_by_the_sessions_thread(gpus: FakeGpus, summed_alone: None) -> None:
    """After a death, the session's thread starts the reduction again."""
    values = torch.arange(40_000, dtype=torch.float32)
    reduction, buffers = RetainedReduction(number=1), SumBuffers()

    def hand_in(gradients: OnGpu) -> None:
        with gpus:
            reduction.add_bucket(gradients, buffers)
            reduction.complete(ReductionRow(), 0, buffers)

    run_on_side_stream(gpus, values, hand_in)
    in_thread(reduction.start)
    stream = gpus.gpus[2].script
    stream.run_until(stream.num_enqueued)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(reduction.sums[0].as_subclass(torch.Tensor), values)


def test_futures_of_buckets_take_tensors_of_their_gpu(gpus: FakeGpus, summed_alone: None) -> None:
    reduction, buffers = RetainedReduction(number=1), SumBuffers()
    with gpus:
        futures = [reduction.add_bucket(gpus.zeros(1, size), buffers) for size in (3, 40_000)]
        reduction.complete(ReductionRow(), 0, buffers)
        reduction.start()
        reduction.wait_done()
        reduction.deliver(COMMIT, is_mean=False)
    assert [each.wait().shape for each in futures] == [(3,), (40_000,)]


def test_a_ring_pushes_the_gradients_of_any_stream(gpus: FakeGpus, summed_alone: None) -> None:
    """A thread of its own reads them."""
    values, pushed = torch.arange(5, dtype=torch.float32), list[torch.Tensor]()

    def push(gradients: OnGpu) -> None:
        def fetch() -> dict[str, Any]:
            outbox = torch.zeros(5)
            with torch._C.DisableTorchFunctionSubclass():
                come_from = gradients.detach().as_subclass(torch.Tensor)
            stream: Any = gpus.current_stream("cuda:2")
            stream.enqueue(lambda: outbox.copy_(come_from))
            stream.synchronize()
            pushed.append(outbox)
            return {"version": 1}

        broadcast = FetchOnceBroadcast(1, fetch, [gpus.zeros(2, 5)], lambda: 0)
        broadcast.start()
        broadcast.wait_done()

    run_on_side_stream(gpus, values, push)
    assert torch.equal(pushed[0], values)


def test_buffers_are_there_when_the_script_goes_on(gpus: FakeGpus) -> None:
    """Whatever stream the script reads them on."""
    state: Any = SimpleNamespace(lock=threading.Condition(), trainer=SimpleNamespace(wires=WireChoice()))
    protocol = CommitProtocol(state, list, is_mean=False, num_parameters=0)
    own, first = gpus.zeros(2, 2), gpus.gpus[2].place(torch.tensor([5.0, 6.0]))
    side: Any = gpus.gpus[2].make_stream()
    with gpus.stream(side):
        protocol._deliver(_PreparedCommit(COMMIT, [(own, first)]), RetainedReduction(number=1))
    with torch._C.DisableTorchFunctionSubclass():
        assert own.as_subclass(torch.Tensor).tolist() == [5.0, 6.0]


def test_a_factor_on_a_gpu_multiplies_messages_in_host_memory(gpus: FakeGpus) -> None:
    kind = dist.ReduceOp.PREMUL_SUM
    op = SimpleNamespace(op=kind, __getstate__=lambda: (kind, gpus.gpus[1].place(torch.tensor([3.0]))))
    message = torch.ones(2)
    reduction_for(op, torch.float32).prepare(message)
    assert message.tolist() == [3.0, 3.0]


def test_a_cards_limit_is_what_this_worker_may_have(gpus: FakeGpus) -> None:
    gpu, device = gpus.gpus[2], torch.device("cuda", 2)
    gpu.used_by_others, gpu.reserved_bytes = 14 * GIB, 60 * GIB
    assert meters.CudaMeter(device, 1).limit_bytes() == 66 * GIB, "its cached bytes, without those of others"
    assert meters.CudaMeter(device, 4).limit_bytes() == 20 * GIB, "an equal part"
    gpu.used_by_others, gpu.reserved_bytes = 70 * GIB, 2 * GIB
    assert meters.CudaMeter(device, 4).limit_bytes() == 10 * GIB, "no more than is free"
    gpus.fraction = 0.05
    assert meters.CudaMeter(device, 4).limit_bytes() == 4 * GIB, "torch.cuda.set_per_process_memory_fraction"
    assert gpus.contexts == {2}


def test_a_cards_peaks_are_its_own(gpus: FakeGpus) -> None:
    gpu, meter = gpus.gpus[2], meters.CudaMeter(torch.device("cuda", 2), 1)
    gpu.allocated_bytes, gpu.peak_bytes, gpus.gpus[0].peak_bytes = 3 * GIB, 5 * GIB, 40 * GIB
    assert meter.peak_bytes() == 5 * GIB
    meter.reset_peak()
    assert meter.peak_bytes() == 3 * GIB, "what is there now"
    gpu.reserved_bytes = 9 * GIB
    meter.release_freed()
    assert gpu.reserved_bytes == 3 * GIB


def test_workers_share_a_card_if_they_see_the_same_one() -> None:
    def locations(*seen: tuple[str, ...]) -> list[RankLocation]:
        return [RankLocation("a", "127.0.0.1", gpus=each) for each in seen]

    assert num_ranks_per_gpu(locations(("0",), ("1",), ("2",)), "a") == 1, "a card for each"
    assert num_ranks_per_gpu(locations(*[("0", "1")] * 4), "a") == 2
    assert num_ranks_per_gpu(locations(*[("0", "1")] * 3), "a") == 2
    assert num_ranks_per_gpu(locations((), ()), "a") == 1
    assert num_ranks_per_gpu(locations(("0",), ("0",)), "b") == 1


def test_the_group_tells_who_shares_a_card(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one card for each worker, a worker sees one card and eight neighbours."""
    model = gpus.model(0)

    def limit_of(seen: list[tuple[str, ...]]) -> float:
        places = [RankLocation("a", "127.0.0.1", gpus=each) for each in seen]
        infos = tuple(RankInfo(rank, place, ()) for rank, place in enumerate(places))
        group = NativeProcessGroup(dist.HashStore(), GroupInfo(infos[:1], 0, b""), timedelta(seconds=9))
        group.members = GroupInfo(infos, 0, b"")
        monkeypatch.setattr(meters, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=group)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(seen)))
        meter = meters.find_meter(model)
        assert meter is not None
        return meter.limit_bytes()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert limit_of([(str(rank),) for rank in range(8)]) == 80 * GIB
    assert limit_of([("0",)] * 8) == 10 * GIB


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_what_cudas_libraries_say_is_out_of_memory(text: str) -> None:
    assert microbatches.is_out_of_memory(RuntimeError(text))
    assert not microbatches.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
