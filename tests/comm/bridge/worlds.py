"""Worlds of ranks in threads, each with a simulated device, that run real programs with the real executor."""

import functools
import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import ReduceOp

from ringweave import planning, schedules, topology
from ringweave.comm import bridge
from ringweave.comm.engine.engine import CollectiveEngine, CompiledProgram
from ringweave.comm.engine.executor import ScratchMemory
from ringweave.comm.engine.messages import (
    BroadcastTensor,
    CollectiveMessage,
    GatheredBlocks,
    ReducedTensor,
    ScatteredBlocks,
)
from ringweave.comm.engine.reductions import reduction_for
from ringweave.comm.work import PendingWork
from ringweave.schedules import CollectiveKind
from ringweave.schedules.program import Pipelining, compile_program, segment_bounds
from tests.comm.bridge.simulated_device import SimulatedDevice

SCHEDULES = [name for name in schedules.SCHEDULE_NAMES if name != schedules.NATIVE]
KINDS: tuple[CollectiveKind, ...] = ("allreduce", "allgather", "reduce-scatter", "broadcast")
PATIENCE_S = 5.0
VICTIM, JUNK = 7.0, 3.0
_PIPELININGS = [
    Pipelining(num_segments=segments, lag=lag, window=window)
    for segments, lag, window in ((1, 0, 2), (2, 0, 1), (3, 1, 4), (3, 0, 2), (5, 1, 2))
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective, and how its result is used."""

    schedule: str
    num_elements: int
    """Of the message, or of a block of it."""
    pipelining: Pipelining
    kind: CollectiveKind = "allreduce"
    root: int = 0
    """Of a broadcast; taken modulo the number of ranks."""
    as_list: bool = False
    """A tensor for each block, and not one for all."""
    dtype: torch.dtype = torch.float32
    op: Any = ReduceOp.SUM
    strided: bool = False
    use: str = "wait"
    """wait: on the script's stream after `wait`; ahead: the same, but `wait` comes before the channel has begun;
    future: in a callback; drop: not at all, the memory is freed."""
    seed: int = 0


class Wires:
    """Messages between threads; a piece is read when its receiver takes it, as in another rank's memory."""

    def __init__(self, num_ranks: int) -> None:
        ranks = range(num_ranks)
        self.queues: dict[Any, queue.SimpleQueue[Any]] = {(a, b): queue.SimpleQueue() for a in ranks for b in ranks}
        self.is_cut = False

    def cut(self) -> None:
        """Nobody waits any more: a rank has failed."""
        self.is_cut = True
        for each in self.queues.values():
            each.put((-1, None, None, None))


class WireTransport:
    """One rank's end."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.queues, self.rank = wires, wires.queues, rank

    def expose(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def begin_collective(self, layout: Any, element_bytes: int) -> None:
        pass

    def end_collective(self, timeout_s: float) -> None:
        pass

    def send(self, piece: torch.Tensor, peer: int, tag: int, stage: int = -1) -> threading.Lock:
        taken = threading.Lock()
        taken.acquire()
        self.queues[self.rank, peer].put((tag, piece, piece.clone(), taken))
        return taken

    def receive(self, piece: torch.Tensor, peer: int, tag: int) -> Any:
        return piece, peer, tag

    def wait(self, handle: Any, timeout_s: float) -> None:
        if not isinstance(handle, tuple):
            while not handle.acquire(timeout=0.02):
                assert not self.wires.is_cut
            return
        landing, peer, tag = handle
        got_tag, piece, sent, taken = self.queues[peer, self.rank].get(timeout=PATIENCE_S)
        assert got_tag == tag
        assert torch.equal(piece, sent), "it must not change until it is taken"
        landing.copy_(piece)
        taken.release()


@functools.cache
def planned(num_ranks: int) -> planning.Plan:
    """A plan of nodes with a rank each."""
    cluster = topology.one_machine([1] * num_ranks)
    return planning.plan_group(cluster, [f"node{rank}" for rank in range(num_ranks)])


@functools.cache
def generated(name: str, num_ranks: int, kind: CollectiveKind, root: int | None) -> schedules.Schedule:
    if kind == "allreduce":
        return schedules.generate(name, num_ranks)
    return planned(num_ranks).generate(name, kind, root)


@functools.cache
def compiled(
    name: str,
    num_ranks: int,
    rank: int,
    num_elements: int,
    pipelining: Pipelining,
    kind: CollectiveKind = "allreduce",
    root: int | None = None,
) -> CompiledProgram:
    schedule = generated(name, num_ranks, kind, root)
    transfers, others = schedules.project_rank(schedule, rank), frozenset(range(num_ranks)) - {rank}
    program = compile_program(schedule, transfers, num_elements, pipelining, others)
    num_blocks = num_ranks if kind in ("allgather", "reduce-scatter") else 1
    return CompiledProgram(program, 1, segment_bounds(num_elements, pipelining.num_segments, num_blocks))


def contribution(case: Case, rank: int, num_ranks: int) -> torch.Tensor:
    """What a rank brings: a block for each rank to a reduce-scatter."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    high = 50 if case.dtype != torch.bfloat16 else 4
    count = case.num_elements * (num_ranks if case.kind == "reduce-scatter" else 1)
    return torch.randint(1, high, (count,), generator=generator).to(case.dtype)


def expected(case: Case, rank: int, num_ranks: int) -> torch.Tensor:
    """What a rank gets, all blocks in one tensor."""
    if case.kind == "broadcast":
        return contribution(case, case.root % num_ranks, num_ranks)
    brought = [contribution(case, each, num_ranks) for each in range(num_ranks)]
    if case.kind == "allgather":
        return torch.cat(brought)
    stacked = torch.stack(brought)
    if case.kind == "reduce-scatter":
        stacked = stacked[:, rank * case.num_elements : (rank + 1) * case.num_elements]
    if case.op == ReduceOp.MAX:
        return stacked.amax(0)
    total = stacked.sum(0, dtype=case.dtype)
    is_real = case.dtype.is_floating_point
    return total.div_(num_ranks, rounding_mode=None if is_real else "trunc") if case.op == ReduceOp.AVG else total


class Fault:
    """None; tests plant others in one rank."""

    def device(self, device: SimulatedDevice) -> None:
        """Before anything."""

    def channel(self, channel: bridge.DeviceChannel) -> None:
        """Streams and pool of the rank."""

    def before_open(self, device: SimulatedDevice) -> Callable[[], object]:
        """In the call; what is returned is called after the message is opened."""
        return lambda: None

    def opened(self, staged: bridge.StagedMessage, case: Case) -> None:
        """After the call."""

    def program(self, program: CompiledProgram) -> CompiledProgram:
        return program


class Member:
    """One rank: what its script and its channel do, in one thread."""

    def __init__(self, rank: int, num_ranks: int, wires: Wires, device: SimulatedDevice, fault: Fault) -> None:
        self.rank, self.num_ranks, self.device, self.fault = rank, num_ranks, device, fault
        runtime: Any = device
        self.bridge = bridge.DeviceBridge(lambda _: runtime)
        self.channel = SimpleNamespace(transport=WireTransport(wires, rank), scratch=ScratchMemory())
        self.results: list[tuple[Case, list[torch.Tensor]]] = []
        self.victims: list[torch.Tensor] = []
        self.number = 0
        fault.device(device)

    def run(self, cases: Sequence[Case]) -> None:
        """Calls all, as a script that runs ahead does, then runs them, then uses the results."""
        started = [self._call(case) for case in cases]
        for case, message, work in started:
            self._run_in_channel(case, message)
            work.set_finished()
            work.resolve_future()
        while started:
            case, message, work = started.pop(0)
            if case.use == "wait":
                work.wait()
                self._read(case, work.result())
            elif case.use == "drop":
                del message, work
                self._reuse_memory(case)

    def check(self) -> bool:
        """Whether all results are right, and the script's other memory untouched."""
        self.device.synchronize()
        is_right = all(
            torch.equal(torch.cat(outs), expected(case, self.rank, self.num_ranks)) for case, outs in self.results
        )
        is_right &= all(bool((victim == VICTIM).all()) for victim in self.victims)
        self.results.clear()
        self.victims.clear()
        return is_right

    def _call(self, case: Case) -> tuple[Case, CollectiveMessage, PendingWork]:
        message, results = self._message(case)
        undo = self.fault.before_open(self.device)
        staged = message.staged = self.bridge.open(results[0].device)
        undo()
        if self.number == 0:
            self.fault.channel(self.bridge._channel(results[0].device, 0))
        self.number += 1
        staged.reserve(0)
        self.fault.opened(staged, case)
        work = PendingWork(results, staged)
        if case.use == "future":
            work.get_future().then(lambda done: self._use_in_callback(case, done.value()))
        elif case.use == "ahead":
            work.wait()
            assert not work.is_completed()
            self._read(case, results)
        return case, message, work

    def _message(self, case: Case) -> tuple[CollectiveMessage, list[torch.Tensor]]:
        """The message, with what the script brings, and the tensors that get the result."""
        mine, op = contribution(case, self.rank, self.num_ranks), case.op
        reduction = reduction_for(op, case.dtype)
        if case.kind == "allreduce":
            (tensor,) = self._tensors(case, mine, 1)
            return ReducedTensor.of(tensor, op, reduction), [tensor]
        if case.kind == "broadcast":
            root = case.root % self.num_ranks
            (tensor,) = self._tensors(case, mine if root == self.rank else None, 1)
            return BroadcastTensor.of(tensor, root, self.rank), [tensor]
        count = self.num_ranks if case.as_list else 1
        if case.kind == "allgather":
            (block,), outputs = self._tensors(case, mine, 1), self._tensors(case, None, count, self.num_ranks // count)
            return GatheredBlocks.of(block, outputs, self.rank), outputs
        blocks, (output,) = self._tensors(case, mine, count), self._tensors(case, None, 1)
        return ScatteredBlocks.of(blocks, output, op, reduction, self.rank), [output]

    def _tensors(self, case: Case, content: torch.Tensor | None, count: int, num_blocks: int = 1) -> list[torch.Tensor]:
        """So many tensors on the device, which the script writes: the parts of a content, or junk."""
        parts = [None] * count if content is None else content.chunk(count)
        size = case.num_elements * num_blocks if content is None else len(content) // count
        stride = 2 if case.strided and (count > 1 or case.kind not in ("allgather", "reduce-scatter")) else 1
        made = []
        for part in parts:
            memory = self.device.allocate(size * stride, case.dtype)
            made.append(memory[::stride])
            target = made[-1].data  # its own object, of the same memory
            self._write(target, part)
        return made

    def _write(self, target: torch.Tensor, content: torch.Tensor | None) -> None:
        write = functools.partial(target.fill_, JUNK) if content is None else functools.partial(target.copy_, content)
        self.device.script.enqueue(write)

    def _run_in_channel(self, case: Case, message: CollectiveMessage) -> None:
        root = case.root % self.num_ranks if case.kind == "broadcast" else None
        program = compiled(
            case.schedule, self.num_ranks, self.rank, message.num_elements, case.pipelining, case.kind, root
        )
        program = self.fault.program(program)
        message.program = program  # type: ignore[assignment]
        elements = message.begin(0, case.pipelining.num_segments, ScratchMemory())
        engine: Any = SimpleNamespace(_group=SimpleNamespace(group_size=self.num_ranks))
        channel: Any = self.channel
        CollectiveEngine._run_program(engine, program, elements, message, channel, self.number, PATIENCE_S)
        message.finish(elements, self.num_ranks)

    def _use_in_callback(self, case: Case, tensors: list[torch.Tensor]) -> None:
        """As torch does: the callback's stream waits for the one on which the future was resolved."""
        event = self.device.make_event()
        event.record(self.device.current_stream())
        self.device.callbacks.wait_event(event)
        with self.device.use(self.device.callbacks):
            self._read(case, tensors)
        event.record(self.device.callbacks)  # what comes later in the script comes after it
        self.device.script.wait_event(event)

    def _read(self, case: Case, tensors: list[torch.Tensor]) -> None:
        outs = [torch.full(tensor.shape, JUNK).to(case.dtype) for tensor in tensors]
        self.results.append((case, outs))
        for out, tensor in zip(outs, tensors, strict=True):
            self.device.copy(out, tensor)

    def _reuse_memory(self, case: Case) -> None:
        victim = self.device.allocate(case.num_elements, case.dtype)
        target = victim.data
        self.device.script.enqueue(lambda: target.fill_(VICTIM))
        self.victims.append(victim)


def run_world(
    num_ranks: int, batches: Sequence[Sequence[Case]], kind: str, fault: Fault | None = None, seed: int = 0
) -> list[bool]:
    """Whether each batch is right on all ranks; rank 0 has the fault."""
    wires = Wires(num_ranks)
    errors: list[Exception] = []
    right = [[False] * len(batches) for _ in range(num_ranks)]

    def run(rank: int) -> None:
        own_fault = fault if fault is not None and rank == 0 else Fault()
        member = Member(rank, num_ranks, wires, SimulatedDevice(kind, seed + rank), own_fault)
        try:
            for index, batch in enumerate(batches):
                member.run(batch)
                right[rank][index] = member.check()
        except Exception as error:
            errors.append(error)
            wires.cut()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors and fault is None:
        raise errors[0]
    return [all(each) for each in zip(*right, strict=True)]


def random_cases(rng: random.Random, count: int) -> list[Case]:
    """Of every kind."""
    dtypes = [torch.float32, torch.float32, torch.float64, torch.int64, torch.bfloat16]
    return [
        Case(
            kind=(kind := rng.choice(KINDS)),
            schedule=rng.choice(schedules.schedule_names(kind)),
            num_elements=rng.choice([0 if kind == "allreduce" else 2, 1, 5, 64, 211]),
            root=rng.randrange(4),
            as_list=rng.random() < 0.5,
            pipelining=rng.choice(_PIPELININGS),
            dtype=rng.choice(dtypes),
            op=rng.choice([ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX]),
            strided=rng.random() < 0.2,
            use=rng.choice(["wait", "ahead", "ahead", "future", "drop"]),
            seed=rng.randrange(1 << 20),
        )
        for _ in range(count)
    ]
