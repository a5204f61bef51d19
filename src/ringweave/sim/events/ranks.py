"""One rank as it follows its program: the very instructions that the executor runs, on virtual time."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ringweave.schedules.programs import IN_PLACE, Do, Instruction, Program
from ringweave.sim.events.arenas import Arena
from ringweave.sim.events.clock import Action, Clock
from ringweave.sim.events.streams import Told
from ringweave.sim.machine import Machine
from ringweave.sim.results import Span

_Walk = Generator[float | None, None, None]
"""Yields when to go on; None: somebody will say."""


class Processors(Protocol):
    """Where a rank's work is done."""

    def take(self, begin: Action) -> bool:
        """Whether there is one at once; else `begin` is called when there is."""
        ...

    def give_back(self) -> None:
        """Of what was taken."""
        ...

    def work_beside(self, seconds: float, done: Action) -> None:
        """Work that the rank does not wait for."""
        ...


class Wires(Protocol):
    """What carries messages between nodes. Whatever it calls a stream is its own."""

    def send(self, stream: Any, num_bytes: float) -> float:
        """Queue a message; returns where it ends."""
        ...

    def post(self, stream: Any, num_bytes: float) -> None:
        """Make room for the next message."""
        ...

    def when_left(self, stream: Any, end: float, tell: Told) -> None:
        """Tell when all up to `end` has left the sender's memory."""
        ...

    def when_there(self, stream: Any, index: int, tell: Told) -> None:
        """Tell when message number `index` is there."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all ranks of a simulation share."""

    clock: Clock
    wires: Wires
    machine: Machine
    processors: Processors
    element_bytes: int
    note: Callable[[Span], None] | None
    give_up: Callable[["Rank"], None]
    """Called when a rank notices that a peer is gone."""


class Rank:
    """One interpreter of a program."""

    def __init__(self, number: int, program: Program, around: Surroundings) -> None:
        """`number` is its rank."""
        self.number = number
        self.finish_s: float | None = None
        self.failed_s: float | None = None
        self.is_dead = False
        self.num_wakes = 0
        """How often it slept."""
        self._is_running = False
        """It has a processor."""
        self._is_waking = False
        self._awaited: list[float] | None = None
        """It sleeps until this says when what it waits for is there."""
        self._program = program
        self._around = around
        self.times = 1.0
        """How many times as long its work takes."""
        self._walk = self._run()
        self._out: Mapping[int, Any] = {}
        self._in: Mapping[int, Any] = {}
        self._arenas: Mapping[int, Arena] = {}
        self._num_arrived: Counter[int] = Counter()
        self._left_at: dict[int, float | int] = {}
        self._open: Counter[int] = Counter()
        self._refused: dict[int, float] = {}
        self.arena = Arena(program.layout.stages, self._show)

    def connect(self, out: Mapping[int, Any], into: Mapping[int, Any], arenas: Mapping[int, Arena]) -> None:
        """Streams by peer, both ways; arenas of the peers on its own node."""
        self._out, self._in, self._arenas = out, into, arenas

    @property
    def is_through(self) -> bool:
        """Nothing more will happen here."""
        return self.is_dead or self.finish_s is not None or self.failed_s is not None

    @property
    def num_messages(self) -> int:
        """Messages that it is to receive."""
        return sum(step.do == Do.ARRIVE for step in self._program.instructions)

    @property
    def num_arrived(self) -> int:
        """Messages that it has received, or waits for."""
        return self._num_arrived.total()

    def resume(self) -> None:
        """Go on until there is something to wait for."""
        if self.is_through:
            return
        try:
            time_s = next(self._walk)
        except StopIteration:
            self.finish_s = self._around.clock.now_s
            self._give_back()
            return
        if time_s is not None:
            self._around.clock.at(time_s, self.resume)

    def die(self) -> None:
        """It was killed."""
        self.is_dead = True
        self._give_back()

    def lose(self, peer: int) -> None:
        """The connection to a peer is gone: notice it as soon as anything is expected from it or due to it."""
        self._refused[peer] = self._around.clock.now_s
        if self._open[peer]:
            self._fail()

    @property
    def peers(self) -> frozenset[int]:
        """Ranks that it has connections to."""
        return self._program.peers

    def _run(self) -> _Walk:
        yield from self._spend(self._around.machine.start_s)
        for step in self._program.instructions:
            if step.peer in self._refused and step.do in (Do.SEND, Do.POST):
                self._fail()
            if self.is_through:
                yield None
            if step.do == Do.SEND:
                yield from self._send(step)
            elif step.do == Do.POST:
                self._open[step.peer] += 1
                if step.peer in self._in:
                    self._around.wires.post(self._in[step.peer], self._bytes(step))
            elif step.do == Do.ARRIVE:
                yield from self._take(step)
            else:
                yield from self._wait_left(step)

    def _send(self, step: Instruction) -> _Walk:
        yield from self._handle("send", step, is_outside=step.peer in self._out)
        self._open[step.peer] += 1
        if step.peer in self._out:
            self._left_at[step.piece] = self._around.wires.send(self._out[step.peer], self._bytes(step))
        else:
            self._left_at[step.piece] = self.arena.send(step.peer, step.buffer, self._bytes(step))

    def _take(self, step: Instruction) -> _Walk:
        index, peer, machine = self._num_arrived[step.peer], step.peer, self._around.machine
        self._num_arrived[peer] += 1
        if peer in self._in:
            s_per_byte = 0.0 if step.buffer == IN_PLACE else machine.combine_s_per_byte
            yield from self._wait(
                "wait for", step, lambda tell: self._around.wires.when_there(self._in[peer], index, tell)
            )
        else:
            s_per_byte = machine.inside_s_per_byte / 2
            line = self._arenas[peer].line(self.number)
            yield from self._wait("wait for", step, lambda tell: line.when_there(index, tell))
        what = "copy" if step.buffer == IN_PLACE else "add"
        yield from self._handle(what, step, is_outside=peer in self._in, s_per_byte=s_per_byte)
        self._open[peer] -= 1
        if peer not in self._in:
            self._arenas[peer].read(self._arenas[peer].line(self.number).stages[index])

    def _wait_left(self, step: Instruction) -> _Walk:
        peer, end = step.peer, self._left_at.pop(step.piece)
        if peer in self._out:
            yield from self._wait("let go", step, lambda tell: self._around.wires.when_left(self._out[peer], end, tell))
        else:
            line = self.arena.line(peer)
            yield from self._wait("let go", step, lambda tell: line.when_there(int(end), tell))
        self._open[peer] -= 1

    def _wait(self, what: str, step: Instruction, ask: Callable[[Told], None]) -> _Walk:
        """Until the time that `ask` tells, now or later."""
        clock, told, begin_s = self._around.clock, list[float](), self._around.clock.now_s
        is_asking = True

        def tell(time_s: float) -> None:
            told.append(time_s)
            if not is_asking:
                clock.at(time_s, self.poke)

        ask(tell)
        is_asking = False
        if not told or told[0] > clock.now_s:
            if told:
                clock.at(told[0], self.poke)
            self._give_back()
            self._awaited = told
            yield None
            self._awaited = None
        self._note(what, step, begin_s)

    def poke(self) -> None:
        """Bytes have come, or what it waits for: if it sleeps it wakes up and looks, which takes processor time."""
        if self._awaited is None or self._is_waking or self.is_through:
            return
        if not self._around.machine.wake_s:
            if self._is_told():
                self.num_wakes += 1
                self.resume()
            return
        self._is_waking = True
        self.num_wakes += 1
        if self._around.processors.take(self._wake):
            self._wake()

    def _wake(self) -> None:
        clock = self._around.clock
        clock.at(clock.now_s + self._around.machine.wake_s * self.times, self._look)

    def _look(self) -> None:
        """It is awake: what it waits for is there, or it goes on sleeping."""
        self._is_waking = False
        if self._is_told() and not self.is_through:
            self._is_running = True
            self.resume()
        else:
            self._around.processors.give_back()

    def _is_told(self) -> bool:
        return bool(self._awaited) and self._awaited[0] <= self._around.clock.now_s

    def _handle(self, what: str, step: Instruction, *, is_outside: bool, s_per_byte: float = 0.0) -> _Walk:
        """Work on a message. Of the kernel's copies one burst's is waited for: the others go on beside the network."""
        machine, num_bytes = self._around.machine, self._bytes(step)
        near = min(num_bytes, machine.burst_bytes)
        kernel_s_per_byte = machine.kernel_s_per_byte if is_outside else 0.0
        message_s = machine.message_s if is_outside else machine.inside_message_s
        seconds = message_s + s_per_byte * num_bytes + kernel_s_per_byte * near
        yield from self._work(what, step, seconds)
        if beside_s := kernel_s_per_byte * (num_bytes - near):
            self._around.processors.work_beside(beside_s * self.times, _nothing)

    def _work(self, what: str, step: Instruction, seconds: float) -> _Walk:
        begin_s = self._around.clock.now_s
        yield from self._spend(seconds)
        self._note(what, step, begin_s)

    def _spend(self, seconds: float) -> _Walk:
        """Processor time."""
        if not seconds:
            return
        if not self._is_running:
            self._is_running = True
            if not self._around.processors.take(self._begin):
                yield None
        yield self._around.clock.now_s + seconds * self.times

    def _begin(self) -> None:
        """It has got the processor that it waited for."""
        if self.is_through:
            self._around.processors.give_back()
        else:
            self.resume()

    def _give_back(self) -> None:
        """It has to wait for something, or is through."""
        if self._is_running:
            self._is_running = False
            self._around.processors.give_back()

    def _show(self, num_bytes: float, tell: Told) -> None:
        """Copy a piece to where the node's other ranks read it."""
        clock, seconds = self._around.clock, num_bytes * self._around.machine.inside_s_per_byte / 2
        if seconds:
            self._around.processors.work_beside(seconds * self.times, lambda: tell(clock.now_s))
        else:
            tell(clock.now_s)

    def _bytes(self, step: Instruction) -> int:
        return (step.stop - step.start) * self._around.element_bytes

    def _note(self, what: str, step: Instruction, begin_s: float) -> None:
        now_s = self._around.clock.now_s
        if self._around.note is not None and now_s > begin_s:
            self._around.note(Span(self.number, what, step.peer, begin_s, now_s))

    def _fail(self) -> None:
        if not self.is_through:
            self.failed_s = self._around.clock.now_s
            self._give_back()
            self._around.give_up(self)


def _nothing() -> None:
    """Nobody waits for it."""
