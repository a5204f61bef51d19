"""Blocks that move between fake GPUs: two pinned buffers, the right device, and copies that wait for each other."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringweave.pipeline import migration, profiling
from ringweave.pipeline.runtime import staged_transfer
from ringweave.pipeline.runtime.staged_transfer import StagedTransfer
from tests.comm.bridge.simulated_device import EARLY, LATE
from tests.fakes.gpus import FakeGpus

CHUNK_BYTES, PATIENCE_S = 64, 10.0


class Wire:
    """Messages between two ranks in order; what is sent is taken when the receiver asks, as late as may be."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def send(self, raw: Tensor, peer: int) -> Any:
        assert type(raw) is Tensor
        done = threading.Event()
        self.messages.put((raw, done))  # type: ignore[arg-type]
        return SimpleNamespace(wait=lambda: done.wait(PATIENCE_S))

    def receive(self, raw: Tensor, peer: int) -> Any:
        assert type(raw) is Tensor

        def wait() -> None:
            sent, done = self.messages.get(timeout=PATIENCE_S)  # type: ignore[misc]
            assert len(sent) == len(raw)
            raw.copy_(sent)
            sent.fill_(99)  # the buffer is free, and is used again
            done.set()

        return SimpleNamespace(wait=wait)


def make_allocate(made: list[int]) -> Any:
    def allocate(num_bytes: int) -> Tensor:
        made.append(num_bytes)
        return torch.full((num_bytes,), 77, dtype=torch.uint8)

    return allocate


def transfer(gpus: FakeGpus, sizes: list[int]) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """(what was sent, what arrived, bytes of buffers) between GPU 1 and GPU 2, the current one being another."""
    made: list[int] = []
    wire, allocate = Wire(), make_allocate(made)
    source = [torch.arange(size, dtype=torch.uint8) + place for place, size in enumerate(sizes)]
    with gpus:
        late = [gpus.gpus[1].place(torch.zeros_like(each)) for each in source]
        into = [gpus.gpus[2].place(torch.zeros_like(each)) for each in source]
    stream = gpus.current_stream("cuda:1")
    for each, value in zip(late, source, strict=True):
        plain = each.as_subclass(Tensor)
        stream.enqueue(lambda to=plain, value=value: to.copy_(value))  # an update that is still under way
    ways: list[StagedTransfer] = []
    for items, index, is_sending in ((late, 1, True), (into, 2, False)):
        exchange = wire.send if is_sending else wire.receive
        todo = [(raw, 3 - index) for raw in items]
        ways.append(
            StagedTransfer(
                todo,
                torch.device("cuda", index),
                exchange,
                is_sending=is_sending,
                chunk_bytes=CHUNK_BYTES,
                allocate=allocate,
            )
        )
    for way in ways:
        way.wait()
    return source, [each.as_subclass(Tensor) for each in into], made


@pytest.mark.parametrize("kind", [LATE, EARLY])
@pytest.mark.parametrize("sizes", [[1], [64, 64], [1000], [7, 500, 64, 65, 1]])
def test_blocks_cross_in_two_pinned_buffers(monkeypatch: pytest.MonkeyPatch, kind: str, sizes: list[int]) -> None:
    gpus = FakeGpus(4, kind).install(monkeypatch)
    torch.cuda.set_device(3)
    source, arrived, made = transfer(gpus, sizes)
    for sent, got in zip(source, arrived, strict=True):
        assert torch.equal(sent, got)
    assert len(made) == 4
    assert max(made) <= CHUNK_BYTES
    assert gpus.current == 3
    assert gpus.contexts == {1, 2, 3}, "no other GPU is touched"


@pytest.mark.parametrize("dropped", ["ready", "fetched", "put", "reused"])
def test_a_missing_wait_shows(monkeypatch: pytest.MonkeyPatch, dropped: str) -> None:
    """Each of the four waits, undone, makes the test above fail."""
    gpus = FakeGpus(4, EARLY if dropped == "ready" else LATE).install(monkeypatch)
    if dropped == "ready":
        monkeypatch.setattr(type(gpus.gpus[1].make_stream()), "wait_event", lambda *_: None)
    elif dropped == "fetched":
        send = StagedTransfer._send
        monkeypatch.setattr(
            StagedTransfer,
            "_send",
            lambda self, _: send(self, SimpleNamespace(synchronize=lambda: None)),  # type: ignore[arg-type]
        )
    elif dropped == "put":
        receive = StagedTransfer._receive
        without = SimpleNamespace(synchronize=lambda: None, record_event=lambda: None)
        monkeypatch.setattr(StagedTransfer, "_receive", lambda self, _: receive(self, without))  # type: ignore[arg-type]
    else:
        monkeypatch.setattr(staged_transfer, "_wait_work", lambda *_: None)
    try:
        source, arrived, _ = transfer(gpus, [500, 64])
    except (RuntimeError, AssertionError):
        return
    assert not all(torch.equal(sent, got) for sent, got in zip(source, arrived, strict=True))


def test_a_peer_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGpus(4).install(monkeypatch)

    def refuse(raw: Tensor, peer: int) -> Any:
        raise RuntimeError("connection closed by peer")

    with gpus:
        raw = gpus.gpus[1].place(torch.zeros(9, dtype=torch.uint8))
    allocate = make_allocate([])
    way = StagedTransfer([(raw, 0)], torch.device("cuda", 1), refuse, is_sending=True, allocate=allocate)
    with pytest.raises(RuntimeError, match="transfer of blocks: connection closed by peer"):
        way.wait()


@pytest.mark.parametrize(
    ("name", "kept", "index"),
    [
        ("gradient weight", {}, 2),
        ("optimizer 0 exp_avg", {"device": "cuda"}, 2),
        ("optimizer 0 step", {"device": "cpu"}, None),
        ("extra ", {}, None),
    ],
)
def test_what_arrives_lies_on_the_blocks_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, kept: dict[str, str], index: int | None
) -> None:
    gpus = FakeGpus(4).install(monkeypatch)
    torch.cuda.set_device(1)
    block: Any = SimpleNamespace(
        parameters=lambda: iter([gpus.zeros(2, 3)]),
        named_parameters=lambda: iter([("weight", gpus.zeros(2, 300))]),
        named_buffers=lambda: iter([]),
    )
    header = {"facts": {"optimizer": {name: kept}}, "parts": {name: {"shape": [300], "dtype": "float32"}}}
    with gpus:
        receiver = migration.BlockReceiver(header, block)
    got = receiver.received.tensors[name].device
    assert got == (torch.device("cpu") if index is None else torch.device("cuda", index))


def test_blocks_are_timed_between_events_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGpus(4).install(monkeypatch)
    pipeline: Any = SimpleNamespace(device=torch.device("cuda", 2))
    bench = profiling._BlockBenchmark(pipeline, torch.optim.SGD, 1, lambda: pytest.fail("no clock"))  # type: ignore[arg-type]

    def act() -> None:
        gpus.gpus[2].script.enqueue(lambda: 0.25)
        gpus.gpus[0].script.enqueue(lambda: 9.0)

    assert bench._time_action(act) == pytest.approx(0.25)
    assert gpus.contexts == {2}


def test_modules_are_made_on_the_pipelines_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a migration does for a block that arrives."""
    gpus = FakeGpus(4).install(monkeypatch)
    asked: list[Any] = []
    monkeypatch.setattr(nn.Module, "to_empty", lambda self, *, device: asked.append(device) or self)
    migrator: Any = object.__new__(migration.BlockMigrator)
    migrator._at_failure_point = lambda _: None
    migrator._pipeline = SimpleNamespace(blocks=[nn.Linear(2, 2)], device=torch.device("cuda", 3))
    pending: Any = SimpleNamespace(received={0: SimpleNamespace(block=0)}, receivers={}, blocks={})
    migrator._allocate_block(pending, 0, {"facts": {}, "parts": {}})
    assert asked == [torch.device("cuda", 3)]
    assert not gpus.contexts
