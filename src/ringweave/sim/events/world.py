"""All ranks and wires of one simulation, and what goes wrong with them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ringweave.schedules.programs import Program
from ringweave.sim.events.clock import Action, Clock
from ringweave.sim.events.processors import OwnProcessors, SharedProcessors
from ringweave.sim.events.queues import Queues
from ringweave.sim.events.ranks import Rank, Surroundings
from ringweave.sim.events.streams import SharedLinks
from ringweave.sim.faults import Death, Delay, Fault, RateChange, Slowdown
from ringweave.sim.machine import Machine
from ringweave.sim.results import LinkLoad, Simulation, Span, Tell, silent
from ringweave.sim.routes import Routes

ELEMENT_BYTES = 4
_TOLD_EVERY = 2_000
"""Times at which something happens."""


class World:
    """One collective, from its beginning to its end."""

    def __init__(self, programs: Sequence[Program], routes: Routes, machine: Machine, *, keeps_trace: bool) -> None:
        """One program per rank; `machine` is everybody's."""
        self._routes = routes
        self._clock = Clock()
        links = SharedLinks if math.isinf(machine.burst_bytes) else Queues
        self._wires = links(self._clock, routes.capacities, routes.latency_s, machine)
        self._spans, self._loads = list[Span](), list[LinkLoad]()
        shared = (
            SharedProcessors(self._clock, machine.num_processors)
            if machine.num_processors
            else OwnProcessors(self._clock)
        )
        around = Surroundings(
            clock=self._clock,
            wires=self._wires,
            machine=machine,
            processors=shared,
            element_bytes=ELEMENT_BYTES,
            note=self._spans.append if keeps_trace else None,
            give_up=self._lose,
        )
        if keeps_trace:
            self._wires.note_rate = self._note_load
        self._ranks = [Rank(number, program, around) for number, program in enumerate(programs)]
        self._streams: dict[tuple[int, int], Any] = {}
        self._start_s = [0.0] * len(programs)
        self._connect()

    def apply(self, faults: Sequence[Fault]) -> None:
        """Have these things go wrong.

        Raises:
            UsageError: One names no rank, node or link of this group.
        """
        for fault in faults:
            if isinstance(fault, Delay):
                self._start_s[self._routes.rank(fault.rank)] += fault.seconds
            elif isinstance(fault, Slowdown):
                for rank in self._routes.on_node(fault.node):
                    self._ranks[rank].times *= fault.times
            elif isinstance(fault, RateChange):
                self._change(self._routes.number(fault.link), fault)
            else:
                self._kill(self._ranks[self._routes.rank(fault.rank)], fault)

    def run(self, timeout_s: float, tell: Tell = silent) -> Simulation:
        """Let it happen; `tell` gets now and then how many of how many messages have arrived."""
        for rank in self._ranks:
            self._clock.at(self._start_s[rank.number], rank.resume)
        self._clock.run(self._settling(tell))
        left = [rank for rank in self._ranks if not rank.is_through]
        noticed_s = {rank.number: rank.failed_s for rank in self._ranks if rank.failed_s is not None}
        noticed_s |= {rank.number: self._start_s[rank.number] + timeout_s for rank in left}
        finish_s = tuple(math.inf if rank.finish_s is None else rank.finish_s for rank in self._ranks)
        return Simulation(
            finish_s=finish_s,
            bytes_on_link=self._routes.by_name(self._wires.carried),
            died=tuple(rank.number for rank in self._ranks if rank.is_dead),
            noticed_s=noticed_s,
            num_wakes=sum(rank.num_wakes for rank in self._ranks),
            spans=tuple(self._spans),
            loads=tuple(self._loads),
        )

    def _settling(self, tell: Tell) -> Action:
        total, calls = sum(rank.num_messages for rank in self._ranks), itertools.count(1)

        def settle() -> None:
            self._wires.settle()
            if next(calls) % _TOLD_EVERY == 0:
                tell(sum(rank.num_arrived for rank in self._ranks), total)

        return settle

    def _connect(self) -> None:
        for rank in self._ranks:
            out, into, arenas = dict[int, Any](), dict[int, Any](), {}
            for peer in sorted(rank.peers):
                if route := self._routes.between(rank.number, peer):
                    out[peer] = self._stream(rank.number, peer, route)
                    into[peer] = self._stream(peer, rank.number, self._routes.between(peer, rank.number))
                else:
                    arenas[peer] = self._ranks[peer].arena
            rank.connect(out, into, arenas)

    def _stream(self, src: int, dst: int, route: tuple[int, ...]) -> Any:
        if (src, dst) not in self._streams:
            self._streams[src, dst] = self._wires.stream(route, self._ranks[dst].poke)
        return self._streams[src, dst]

    def _change(self, link: int, change: RateChange) -> None:
        self._clock.at(change.at_s, lambda: self._wires.set_capacity(link, change.bytes_per_s))

    def _kill(self, rank: Rank, death: Death) -> None:
        def die() -> None:
            if not rank.is_through:
                rank.die()
                self._lose(rank)

        self._clock.at(death.at_s, die)

    def _lose(self, rank: Rank) -> None:
        """Its connections end; its peers notice a latency later."""
        for peer in sorted(rank.peers):
            for ends in ((rank.number, peer), (peer, rank.number)):
                if ends in self._streams:
                    self._wires.cut(self._streams[ends])
            self._clock.at(self._clock.now_s + self._routes.latency_s, self._telling(peer, rank.number))

    def _telling(self, peer: int, lost: int) -> Action:
        return lambda: self._ranks[peer].lose(lost)

    def _note_load(self, link: int, bytes_per_s: float) -> None:
        self._loads.append(LinkLoad(self._routes.names[link - 2], self._clock.now_s, bytes_per_s))
