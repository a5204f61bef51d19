"""Simulated rank: follows the executor's own program in virtual time; with its processors and its shared memory.

Pieces between ranks of one node are staged once in the sender's shared memory, and each reader reads them from there.
The slots are those of the program's layout. A piece whose slot is in use waits until all readers of the earlier piece
are done; what is sent to the same rank after it waits as well. A rank keeps its processor until it has to wait, as a
thread does.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ringweave.schedules.program import IN_PLACE, NO_SLOT, Instruction, Opcode, RankProgram, StagingSlot
from ringweave.sim.scenario import HostModel, RankSpan
from ringweave.sim.streams import Callback, TimeCallback, VirtualClock

_NOT_COPIED, _COPYING = -1.0, -2.0


class SimulatedArena:
    """Shared memory that one rank shows to the others of its node."""

    def __init__(self, stages: Sequence[StagingSlot], show: Callable[[float, TimeCallback], None]) -> None:
        """`show` starts to copy the bytes of a piece into it, and calls back when that is done."""
        self._stages = stages
        self._show = show
        self._shown_s = [_NOT_COPIED] * len(stages)
        self._unread = [stage.num_readers for stage in stages]
        self._lines: dict[int, ReaderQueue] = {}

    def reader_queue(self, reader: int) -> "ReaderQueue":
        return self._lines.setdefault(reader, ReaderQueue())

    def send_piece(self, reader: int, stage: int, num_bytes: float) -> int:
        """Copy a piece in as soon as its slot is free; return its number among those for this reader."""
        line = self.reader_queue(reader)
        line.waiting.append((stage, num_bytes))
        self._advance(line)
        return len(line.arrivals) + len(line.waiting) - 1

    def mark_read(self, stage: int) -> None:
        """Record that a reader is done with a slot."""
        self._unread[stage] -= 1
        if not self._unread[stage] and self._stages[stage].is_reused:
            for line in self._lines.values():
                self._advance(line)

    def _advance(self, line: "ReaderQueue") -> None:
        while line.waiting:
            stage, num_bytes = line.waiting[0]
            after = self._stages[stage].previous_slot
            if self._shown_s[stage] == _NOT_COPIED:
                if after != NO_SLOT and self._unread[after]:
                    return
                self._shown_s[stage] = _COPYING
                self._show(num_bytes, partial(self._on_copied, stage, line))
                return
            if self._shown_s[stage] == _COPYING:
                return
            line.waiting.popleft()
            line.arrive(stage, self._shown_s[stage])

    def _on_copied(self, stage: int, line: "ReaderQueue", time_s: float) -> None:
        self._shown_s[stage] = time_s
        for each in self._lines.values() if self._stages[stage].num_readers > 1 else [line]:
            self._advance(each)


class ReaderQueue:
    """Pieces for one reader, in order."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, float]] = deque()
        """Slot and bytes of pieces without a free slot."""
        self.arrivals: list[float] = []
        """Time at which each piece can be read."""
        self.stages: list[int] = []
        """Slot of each piece."""
        self._awaited: dict[int, list[TimeCallback]] = {}

    def when_arrived(self, index: int, tell: TimeCallback) -> None:
        """Call back when piece number `index` can be read; at once if that time is known already."""
        if index < len(self.arrivals):
            tell(self.arrivals[index])
        else:
            self._awaited.setdefault(index, []).append(tell)

    def arrive(self, stage: int, time_s: float) -> None:
        """Record that the next piece can be read at that time."""
        index = len(self.arrivals)
        self.arrivals.append(time_s)
        self.stages.append(stage)
        for tell in self._awaited.pop(index, ()):
            tell(time_s)


class DedicatedProcessors:
    """One processor per rank."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def acquire(self, begin: Callback) -> bool:
        """Return whether a processor is free; else call `begin` once one is."""
        return True

    def release(self) -> None:
        """Release the acquired processor."""

    def run_in_background(self, seconds: float, done: Callback) -> None:
        """Run work that the rank does not wait for."""
        self._clock.call_at(self._clock.now_s + seconds, done)


class SharedProcessors:
    """A few processors for all ranks, first come, first served; a rank keeps one until it releases it."""

    def __init__(self, clock: VirtualClock, count: int) -> None:
        self._clock, self._num_free = clock, count
        self._waiting: deque[Callback] = deque()

    def acquire(self, begin: Callback) -> bool:
        """Return whether a processor is free; else call `begin` once one is."""
        if self._num_free:
            self._num_free -= 1
            return True
        self._waiting.append(begin)
        return False

    def release(self) -> None:
        """Release the acquired processor; the rank that waits longest gets it next."""
        if self._waiting:
            self._clock.call_at(self._clock.now_s, self._waiting.popleft())
        else:
            self._num_free += 1

    def run_in_background(self, seconds: float, done: Callback) -> None:
        """Run work that the rank does not wait for, on a processor of its own."""

        def end() -> None:
            self.release()
            done()

        def begin() -> None:
            self._clock.call_at(self._clock.now_s + seconds, end)

        if self.acquire(begin):
            begin()


_RankSteps = Generator[float | None, None, None]
"""Yields the time to resume at; None: another event resumes it."""


class Processors(Protocol):
    """Processors that run the ranks' work."""

    def acquire(self, begin: Callback) -> bool:
        """Return whether a processor is free; else call `begin` once one is."""
        ...

    def release(self) -> None: ...

    def run_in_background(self, seconds: float, done: Callback) -> None:
        """Run work that the rank does not wait for."""
        ...


class NetworkModel(Protocol):
    """Carries messages between nodes. Its stream objects are opaque to ranks."""

    def send_message(self, stream: Any, num_bytes: float) -> float:
        """Queue a message; return its end position."""
        ...

    def post_receive(self, stream: Any, num_bytes: float) -> None:
        """Make room for the next message."""
        ...

    def when_sent(self, stream: Any, end: float, tell: TimeCallback) -> None:
        """Call back when everything up to `end` has left the sender's memory."""
        ...

    def when_arrived(self, stream: Any, index: int, tell: TimeCallback) -> None:
        """Call back when message number `index` has arrived."""
        ...


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Objects that all ranks of a simulation share."""

    clock: VirtualClock
    network: NetworkModel
    machine: HostModel
    processors: Processors
    element_bytes: int
    record_span: Callable[[RankSpan], None] | None
    on_failure: Callable[["SimulatedRank"], None]
    """Called when a rank notices that a peer is gone."""


class SimulatedRank:
    """Interpreter of one rank's program."""

    def __init__(self, number: int, program: RankProgram, environment: RankEnvironment) -> None:
        """`number` is the rank's index in the group."""
        self.number = number
        self.finish_s: float | None = None
        self.failed_s: float | None = None
        self.is_dead = False
        self.num_wakes = 0
        """Number of times that it woke up."""
        self._is_running = False
        """It holds a processor."""
        self._is_waking = False
        self._awaited: list[float] | None = None
        """Receives the time of the event that the rank sleeps for; None while it is awake."""
        self._program = program
        self._environment = environment
        self.slowdown = 1.0
        """Factor on the time of its work."""
        self._steps = self._run()
        self._out: Mapping[int, Any] = {}
        self._in: Mapping[int, Any] = {}
        self._arenas: Mapping[int, SimulatedArena] = {}
        self._num_arrived: Counter[int] = Counter()
        self._send_positions: dict[int, float | int] = {}
        self._num_pending: Counter[int] = Counter()
        self._lost_peers: dict[int, float] = {}
        self.arena = SimulatedArena(program.layout.slots, self._copy_to_arena)

    def connect(self, out: Mapping[int, Any], into: Mapping[int, Any], arenas: Mapping[int, SimulatedArena]) -> None:
        """Set the streams to and from each peer, and the arenas of the peers on its own node."""
        self._out, self._in, self._arenas = out, into, arenas

    @property
    def is_done(self) -> bool:
        """True once it is finished, failed or dead."""
        return self.is_dead or self.finish_s is not None or self.failed_s is not None

    @property
    def num_messages(self) -> int:
        return sum(step.opcode == Opcode.WAIT_RECV for step in self._program.instructions)

    @property
    def num_arrived(self) -> int:
        """Number of messages that it has received, or waits for."""
        return self._num_arrived.total()

    def resume(self) -> None:
        """Run until the next wait."""
        if self.is_done:
            return
        try:
            time_s = next(self._steps)
        except StopIteration:
            self.finish_s = self._environment.clock.now_s
            self._release_processor()
            return
        if time_s is not None:
            self._environment.clock.call_at(time_s, self.resume)

    def kill(self) -> None:
        self.is_dead = True
        self._release_processor()

    def disconnect_peer(self, peer: int) -> None:
        """End the connection to a peer; the rank fails as soon as it depends on that peer."""
        self._lost_peers[peer] = self._environment.clock.now_s
        if self._num_pending[peer]:
            self._fail()

    @property
    def peers(self) -> frozenset[int]:
        return self._program.peers

    def _run(self) -> _RankSteps:
        yield from self._use_processor(self._environment.machine.start_s)
        for step in self._program.instructions:
            if step.peer in self._lost_peers and step.opcode in (Opcode.SEND, Opcode.POST_RECV):
                self._fail()
            if self.is_done:
                yield None
            if step.opcode == Opcode.SEND:
                yield from self._send_piece(step)
            elif step.opcode == Opcode.POST_RECV:
                self._num_pending[step.peer] += 1
                if step.peer in self._in:
                    self._environment.network.post_receive(self._in[step.peer], self._bytes(step))
            elif step.opcode == Opcode.WAIT_RECV:
                yield from self._receive_piece(step)
            else:
                yield from self._wait_sent(step)

    def _send_piece(self, step: Instruction) -> _RankSteps:
        yield from self._process_message("send", step, is_outside=step.peer in self._out)
        self._num_pending[step.peer] += 1
        if step.peer in self._out:
            self._send_positions[step.piece] = self._environment.network.send_message(
                self._out[step.peer], self._bytes(step)
            )
        else:
            self._send_positions[step.piece] = self.arena.send_piece(step.peer, step.buffer, self._bytes(step))

    def _receive_piece(self, step: Instruction) -> _RankSteps:
        index, peer, machine = self._num_arrived[step.peer], step.peer, self._environment.machine
        self._num_arrived[peer] += 1
        if peer in self._in:
            s_per_byte = 0.0 if step.buffer == IN_PLACE else machine.combine_s_per_byte
            yield from self._wait_until(
                "wait for", step, lambda tell: self._environment.network.when_arrived(self._in[peer], index, tell)
            )
        else:
            s_per_byte = machine.inside_s_per_byte / 2
            line = self._arenas[peer].reader_queue(self.number)
            yield from self._wait_until("wait for", step, lambda tell: line.when_arrived(index, tell))
        what = "copy" if step.buffer == IN_PLACE else "add"
        yield from self._process_message(what, step, is_outside=peer in self._in, s_per_byte=s_per_byte)
        self._num_pending[peer] -= 1
        if peer not in self._in:
            self._arenas[peer].mark_read(self._arenas[peer].reader_queue(self.number).stages[index])

    def _wait_sent(self, step: Instruction) -> _RankSteps:
        peer, end = step.peer, self._send_positions.pop(step.piece)
        if peer in self._out:
            yield from self._wait_until(
                "let go", step, lambda tell: self._environment.network.when_sent(self._out[peer], end, tell)
            )
        else:
            line = self.arena.reader_queue(peer)
            yield from self._wait_until("let go", step, lambda tell: line.when_arrived(int(end), tell))
        self._num_pending[peer] -= 1

    def _wait_until(self, what: str, step: Instruction, ask: Callable[[TimeCallback], None]) -> _RankSteps:
        """Wait until the time that `ask` reports, now or later."""
        clock, told, begin_s = self._environment.clock, list[float](), self._environment.clock.now_s
        is_asking = True

        def tell(time_s: float) -> None:
            told.append(time_s)
            if not is_asking:
                clock.call_at(time_s, self.notify)

        ask(tell)
        is_asking = False
        if not told or told[0] > clock.now_s:
            if told:
                clock.call_at(told[0], self.notify)
            self._release_processor()
            self._awaited = told
            yield None
            self._awaited = None
        self._record_span(what, step, begin_s)

    def notify(self) -> None:
        """Wake the rank if it sleeps, because bytes or the awaited event have come; that costs CPU time."""
        if self._awaited is None or self._is_waking or self.is_done:
            return
        if not self._environment.machine.wake_s:
            if self._has_arrived():
                self.num_wakes += 1
                self.resume()
            return
        self._is_waking = True
        self.num_wakes += 1
        if self._environment.processors.acquire(self._start_waking):
            self._start_waking()

    def _start_waking(self) -> None:
        clock = self._environment.clock
        clock.call_at(clock.now_s + self._environment.machine.wake_s * self.slowdown, self._check_awaited)

    def _check_awaited(self) -> None:
        """Resume if the awaited event is there; else sleep on."""
        self._is_waking = False
        if self._has_arrived() and not self.is_done:
            self._is_running = True
            self.resume()
        else:
            self._environment.processors.release()

    def _has_arrived(self) -> bool:
        return bool(self._awaited) and self._awaited[0] <= self._environment.clock.now_s

    def _process_message(
        self, what: str, step: Instruction, *, is_outside: bool, s_per_byte: float = 0.0
    ) -> _RankSteps:
        """Process a message. It waits for the kernel's copy of one burst; further copies run beside the network."""
        machine, num_bytes = self._environment.machine, self._bytes(step)
        near = min(num_bytes, machine.burst_bytes)
        kernel_s_per_byte = machine.kernel_s_per_byte if is_outside else 0.0
        message_s = machine.message_s if is_outside else machine.inside_message_s
        exact_bytes = (step.stop - step.start) * self._environment.element_bytes
        if step.coding is not None:
            s_per_byte += machine.coding_s_per_byte
            message_s += machine.coding_message_s
        seconds = message_s + s_per_byte * exact_bytes + kernel_s_per_byte * near
        yield from self._work(what, step, seconds)
        if beside_s := kernel_s_per_byte * (num_bytes - near):
            self._environment.processors.run_in_background(beside_s * self.slowdown, _do_nothing)

    def _work(self, what: str, step: Instruction, seconds: float) -> _RankSteps:
        begin_s = self._environment.clock.now_s
        yield from self._use_processor(seconds)
        self._record_span(what, step, begin_s)

    def _use_processor(self, seconds: float) -> _RankSteps:
        if not seconds:
            return
        if not self._is_running:
            self._is_running = True
            if not self._environment.processors.acquire(self._on_processor):
                yield None
        yield self._environment.clock.now_s + seconds * self.slowdown

    def _on_processor(self) -> None:
        """Continue on the processor that it waited for."""
        if self.is_done:
            self._environment.processors.release()
        else:
            self.resume()

    def _release_processor(self) -> None:
        """Release the processor, because it waits or is done."""
        if self._is_running:
            self._is_running = False
            self._environment.processors.release()

    def _copy_to_arena(self, num_bytes: float, tell: TimeCallback) -> None:
        """Copy a piece to the shared memory of the node."""
        clock, seconds = self._environment.clock, num_bytes * self._environment.machine.inside_s_per_byte / 2
        if seconds:
            self._environment.processors.run_in_background(seconds * self.slowdown, lambda: tell(clock.now_s))
        else:
            tell(clock.now_s)

    def _bytes(self, step: Instruction) -> int:
        return step.wire_bytes(self._environment.element_bytes)

    def _record_span(self, what: str, step: Instruction, begin_s: float) -> None:
        now_s = self._environment.clock.now_s
        if self._environment.record_span is not None and now_s > begin_s:
            self._environment.record_span(RankSpan(self.number, what, step.peer, begin_s, now_s))

    def _fail(self) -> None:
        if not self.is_done:
            self.failed_s = self._environment.clock.now_s
            self._release_processor()
            self._environment.on_failure(self)


def _do_nothing() -> None:
    """Do nothing when the background work ends."""
