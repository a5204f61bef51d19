"""Pipelines on fake GPUs, by a stub in NCCL's place: links, times, random numbers and the current device."""

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from ringweave.pipeline import adapting, pipeline, profiling
from ringweave.pipeline.runtime.runner import BlockSeeds
from ringweave.pipeline.runtime.stopwatch import Stopwatch
from ringweave.pipeline.stage_layout import Layout, Settings
from tests.comm.native.stub_nccl import BYTES_PER_S, LATENCY_S, CircleError, StubNccl, Wires
from tests.fakes.gpus import FakeGpus, WrongGpuError

NUM_STAGES, PATIENCE_S = 4, 10.0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    return FakeGpus(NUM_STAGES).install(monkeypatch)


class HostGroup:
    """Messages of tensors in host memory; a receive waits for one."""

    def __init__(self, wires: dict[tuple[int, int], Any], rank: int) -> None:
        self.wires, self.own_rank = wires, rank

    def rank(self) -> int:
        return self.own_rank

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert all(type(each) is torch.Tensor for each in tensors), "in host memory"
        self.wires[self.own_rank, peer].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda: True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        arrived = self.wires[peer, self.own_rank].get(timeout=PATIENCE_S)
        return SimpleNamespace(wait=lambda: tensors[0].copy_(arrived))


class Meetings:
    """Maxima over ranks in threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.values = threading.Barrier(num_ranks, timeout=PATIENCE_S), list[torch.Tensor]()

    def max_over_ranks(self, own: torch.Tensor) -> torch.Tensor:
        self.values.append(own)
        self.barrier.wait()
        return torch.stack(self.values).amax(0)


def on_all_stages(gpus: FakeGpus, run: Callable[[Any], object]) -> list[Any]:
    """What each stage returns, or the error that ends it; each has a thread, a GPU and its groups."""
    wires, host = Wires(gpus), {(a, b): queue.SimpleQueue() for a in range(NUM_STAGES) for b in range(NUM_STAGES)}
    meetings, found = Meetings(NUM_STAGES), [None] * NUM_STAGES
    known = distributed_c10d._world.pg_group_ranks

    def make_groups(rank: int) -> Any:
        nccl, gloo = StubNccl(wires, rank), HostGroup(host, rank)
        for group in (nccl, gloo):
            known[group] = {each: each for each in range(NUM_STAGES)}
        return SimpleNamespace(
            rank=rank,
            pipeline=nccl,
            control=gloo,
            device_ranks=range(NUM_STAGES),
            max_over_ranks=meetings.max_over_ranks,
        )

    def run_stage(rank: int) -> None:
        groups = make_groups(rank)
        torch.cuda.set_device(rank)
        try:
            with gpus:
                found[rank] = run(groups)
        except Exception as error:
            found[rank] = error
            meetings.barrier.abort()
        finally:
            del known[groups.pipeline], known[groups.control]

    threads = [threading.Thread(target=run_stage, args=(rank,)) for rank in range(NUM_STAGES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_links_are_measured_without_a_circle(gpus: FakeGpus) -> None:
    layout = Layout(num_blocks=NUM_STAGES, splits=tuple(range(1, NUM_STAGES)))

    def measure(groups: Any) -> Any:
        device = torch.device("cuda", groups.rank)
        return profiling.measure_links(layout, groups, device, 10**6, rounds=2, clock=lambda: pytest.fail("no time"))

    found = on_all_stages(gpus, measure)
    assert not any(isinstance(each, Exception) for each in found), found
    for links in (*found[0], *found[3]):
        for link in links:
            assert link.s_per_byte == pytest.approx(1 / BYTES_PER_S, rel=1e-3)
            assert link.latency_s == pytest.approx(LATENCY_S, rel=0.1)
    assert gpus.contexts == set(range(NUM_STAGES))


def test_links_are_probed_while_training_without_a_circle(gpus: FakeGpus) -> None:
    layout = Layout(num_blocks=NUM_STAGES, splits=tuple(range(1, NUM_STAGES)))

    def probe(groups: Any) -> Any:
        prober: Any = object.__new__(adapting.LinkRateProber)
        device = torch.device("cuda", groups.rank)
        prober._pipeline = SimpleNamespace(groups=groups, device=device, layout=layout)
        prober._own, prober._clock, prober.num_bytes = groups.rank, lambda: pytest.fail("no time"), [10**6] * 3
        return [prober._exchange_on_link(each) for each in layout.placed.pieces if groups.rank in (each.src, each.dst)]

    found = on_all_stages(gpus, probe)
    for links in found:
        assert links == [pytest.approx(1e6 / BYTES_PER_S + 2 * LATENCY_S, rel=1e-3)] * len(links)


def test_the_stub_reports_the_circle_of_a_handshake_on_the_gpu(gpus: FakeGpus) -> None:
    """Of a receiver that answers on the pair's stream, behind the receive that waits for the answer's effect."""

    def shake(groups: Any) -> None:
        rank, group, device = groups.rank, groups.pipeline, torch.device("cuda", groups.rank)
        if rank > 1:
            return
        big, small = torch.zeros(9, device=device), torch.zeros(1, device=device)
        if rank == 1:
            group.recv([big], 0)
            group.send([small], 0)
        else:
            group.recv([small], 1)
            group.send([big], 1)
        torch.cuda.synchronize(device)

    found = on_all_stages(gpus, shake)
    assert all(isinstance(each, CircleError) for each in found[:2]), found


def test_compute_times_are_those_of_the_stages_gpu(gpus: FakeGpus) -> None:
    stopwatch = Stopwatch(torch.device("cuda", 2), clock=lambda: 0.0)
    stopwatch.is_on = True

    def compute() -> str:
        gpus.gpus[2].script.enqueue(lambda: 0.5)
        gpus.gpus[0].script.enqueue(lambda: 9.0)
        return "output"

    assert stopwatch.time(compute, is_forward=True) == "output"
    assert stopwatch.lap().compute_s == pytest.approx(0.5)
    assert gpus.contexts == {2}


@pytest.mark.parametrize(("device", "index"), [("cuda:2", 2), ("cuda", 1)])
def test_blocks_draw_on_their_own_gpu(gpus: FakeGpus, device: str, index: int) -> None:
    torch.cuda.set_device(1)
    before = [gpu.generator.get_state() for gpu in gpus.gpus]
    with BlockSeeds(seed=3, replica=0).seeded(5, 0, torch.device(device)) as begin:
        begin(7)
        seeds = [gpu.generator.initial_seed() for gpu in gpus.gpus]
    assert seeds[index] == BlockSeeds(seed=3, replica=0).seed_for(7, 5, 0)
    assert [seed for place, seed in enumerate(seeds) if place != index] == [
        place for place in range(NUM_STAGES) if place != index
    ]
    assert all(torch.equal(gpu.generator.get_state(), each) for gpu, each in zip(gpus.gpus, before, strict=True))


def test_a_pipeline_makes_its_gpu_the_current_one(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is sent: batches of messages hang on another one."""

    class SeenError(Exception):
        pass

    def look(*_: object) -> None:
        raise SeenError(gpus.current)

    monkeypatch.setattr(pipeline.default_group, "ensure_process_group", lambda _: None)
    monkeypatch.setattr(pipeline, "_make_layout", lambda *_: Layout(num_blocks=1, splits=()))
    monkeypatch.setattr(pipeline.boundaries, "trace_boundaries", look)
    settings = Settings(num_microbatches=1, device=torch.device("cuda", 3))
    with pytest.raises(SeenError, match="3"):
        pipeline.Pipeline(
            [torch.nn.Linear(2, 2)], torch.nn.functional.mse_loss, torch.optim.SGD, torch.ones(4), settings
        )


def test_no_time_passes_between_events_of_two_gpus(gpus: FakeGpus) -> None:
    """Of the fake, as of CUDA."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for index, event in enumerate(events):
        event.record(torch.cuda.current_stream(index))
    with pytest.raises(WrongGpuError, match="two GPUs"):
        events[0].elapsed_time(events[1])
