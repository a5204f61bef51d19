"""A library in NCCL's place, on fake GPUs: strict where NCCL hangs, quiet where NCCL is.

- A synchronous collective returns no work. A work's `wait` orders the current stream, and blocks only with a limit.
- Messages of a pair of ranks share one stream, unless they are grouped. Two ends that both wait are reported.
- Tensors on another GPU than the current one are refused.
- The first collective is a meeting: it can be made to block.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from tests.comm.bridge.simulated_device import Event
from tests.fakes.gpus import FakeGpus, GpuEvent, GpuStream, OnGpu, WrongGpuError

PATIENCE_S = 5.0
LATENCY_S, BYTES_PER_S = 1e-5, 1e9


class CircleError(RuntimeError):
    """Ranks wait for one another on their GPUs, for ever."""


class Wires:
    """Messages between the ranks of a world."""

    def __init__(self, gpus: FakeGpus) -> None:
        self.gpus = gpus
        self.running: dict[tuple[int, int], Transfer] = {}
        """The transfer at the head of (rank, peer)'s stream, until its peer has come to its own."""
        self.circle = ""


class Transfer(Event):
    """Sends and receives that one stream runs as one operation, when the peers' streams come to theirs."""

    def __init__(self, wires: Wires, rank: int, stream: GpuStream, messages: Sequence[tuple[str, int, Any]]) -> None:
        super().__init__()
        self.wires, self.rank, self.on_stream = wires, rank, stream
        self.messages = list(messages)
        self.waits_for = {peer for _, peer, _ in messages}
        self.has_started, self.done_s = False, 0.0

    def with_peer(self, way: str, peer: int) -> list[torch.Tensor]:
        return [tensor for each, to, tensor in self.messages if (each, to) == (way, peer)]

    @property
    def time_s(self) -> float:
        return self.done_s

    def query(self) -> bool:
        """Called where this is the next on its stream, which starts it."""
        if not self.has_started:
            self.has_started, self.done_s = True, self.on_stream.now_s
            for peer in list(self.waits_for):
                self.wires.running[self.rank, peer] = self
                other = self.wires.running.get((peer, self.rank))
                if other is not None:
                    self._meet(peer, other)
        return not self.waits_for

    def synchronize(self) -> None:
        wires = self.wires
        wires.gpus.changed.wait_for(lambda: self.query() or bool(wires.circle), PATIENCE_S)
        if wires.circle or not self.query():
            raise CircleError(wires.circle or f"rank {self.rank} waits for {sorted(self.waits_for)}")

    def _meet(self, peer: int, other: "Transfer") -> None:
        ways = [(self.with_peer("send", peer), other.with_peer("recv", self.rank))]
        ways.append((other.with_peer("send", self.rank), self.with_peer("recv", peer)))
        if any(len(sent) != len(received) for sent, received in ways):
            self.wires.circle = f"ranks {self.rank} and {peer}: both send, or both receive"
        else:
            took_s = LATENCY_S
            for sent, received in ways:
                for source, target in zip(sent, received, strict=True):
                    target.copy_(source)
                    took_s += source.nbytes / BYTES_PER_S
            del self.wires.running[self.rank, peer], self.wires.running[peer, self.rank]
            self.waits_for.discard(peer)
            other.waits_for.discard(self.rank)
            self.done_s = other.done_s = max(self.done_s, other.done_s) + took_s
            other.on_stream.device.advance()
        self.wires.gpus.changed.notify_all()


class StubWork:
    """Of an asynchronous call: `wait` only orders streams."""

    def __init__(self, gpus: FakeGpus | None, done: GpuEvent | None, error: RuntimeError | None = None) -> None:
        self.gpus, self.done, self.error = gpus, done, error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.error:
            raise self.error
        if self.gpus is not None and self.done is not None:
            assert self.done.stream is not None
            self.gpus.current_stream(self.done.stream.device.name).wait_event(self.done)  # type: ignore[attr-defined]
            if timeout is not None:
                self.done.synchronize()
        return True

    def is_completed(self) -> bool:
        return self.done is None or self.done.query()


class StubNccl:
    """One rank's end."""

    supports_coalescing, supports_splitting = True, False

    def __init__(self, wires: Wires | None = None, rank: int = 0) -> None:
        self.wires, self.own_rank = wires, rank
        self.called: list[str] = []
        self.error_at_call: RuntimeError | None = None
        self.error_in_wait: RuntimeError | None = None
        self.may_meet = threading.Event()
        self.may_meet.set()
        self.was_aborted = threading.Event()
        self._streams: dict[Any, GpuStream] = {}
        self._batch: list[tuple[str, int, Any]] | None = None

    def rank(self) -> int:
        return self.own_rank

    def shutdown(self) -> None:
        self.called.append("shutdown")

    def abort(self) -> None:
        self.called.append("abort")
        self.was_aborted.set()

    def __getattr__(self, name: str) -> Callable[..., StubWork | None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def collective(tensors: Any, *more: Any, **named: Any) -> StubWork | None:
            options = [each for each in (tensors, *more, *named.values()) if hasattr(each, "asyncOp")]
            work = self._start(name, tensors, lambda stream: stream.enqueue(lambda: LATENCY_S))
            return work if not options or options[0].asyncOp else self._synchronous(work)

        return collective

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> StubWork:
        return self._message("send", tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> StubWork:
        return self._message("recv", tensors, peer)

    def _message(self, way: str, tensors: list[torch.Tensor], peer: int) -> StubWork:
        if self._batch is not None:
            self._check(tensors)
            self._batch.append((way, peer, _plain(tensors[0])))
            return StubWork(None, None)
        return self._start(way, tensors, lambda stream: self._enqueue(stream, [(way, peer, _plain(tensors[0]))]), peer)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> StubWork:
        assert self.wires is not None
        batch, self._batch = self._batch or [], None
        on = self.wires.gpus.zeros(self.wires.gpus.index(device), 1)
        return self._start("batch", [on], lambda stream: self._enqueue(stream, batch))

    def _enqueue(self, stream: GpuStream, messages: Sequence[tuple[str, int, Any]]) -> None:
        if self.wires is not None:
            stream.enqueue(Transfer(self.wires, self.own_rank, stream, messages))

    def _start(
        self, name: str, tensors: Any, enqueue: Callable[[GpuStream], object], key: Any = "collectives"
    ) -> StubWork:
        self.called.append(name)
        if self.error_at_call:
            raise self.error_at_call
        assert self.may_meet.wait(PATIENCE_S), "the others do not come"
        found = self._check(tensors)
        if not found:
            return StubWork(None, None, self.error_in_wait)
        gpu = found[0].gpu
        if key not in self._streams:
            self._streams[key] = gpu.stream_class(gpu, eager=True)
            gpu.streams.append(self._streams[key])
        stream = self._streams[key]
        stream.wait_event(gpu.world.current_stream(gpu.name).record_event())
        enqueue(stream)
        return StubWork(gpu.world, stream.record_event(), self.error_in_wait)

    def _synchronous(self, work: StubWork) -> None:
        work.wait()

    def _check(self, tensors: Any) -> list[OnGpu]:
        """The tensors on GPUs, in nested lists."""
        nested = tensors if isinstance(tensors, list | tuple) else [tensors]
        found = [each for one in nested for each in (one if isinstance(one, list | tuple) else [one])]
        on_gpus = [each for each in found if isinstance(each, OnGpu)]
        for each in on_gpus:
            if each.gpu.index != each.gpu.world.current:
                raise WrongGpuError(f"a tensor on GPU {each.gpu.index} where {each.gpu.world.current} is current")
        return on_gpus


def _plain(tensor: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)
