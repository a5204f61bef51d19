"""Simulation of one collective: the executor's own programs in virtual time, over links that streams share.

Messages between nodes use one stream for each pair of ranks; streams share links max-min fairly. Ranks of a node share
memory. The simulation ignores headers (pass measured rates), TCP's rate control and losses, acknowledgements on the way
back, and other traffic.

`trace_document` makes a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: one process for each node with a
thread for each of its ranks, and one for the switches. The load of each link is a counter of the process at its lower
end. Times are simulated.

Source: "Trace Event Format" (Google), JSON object format: events X (complete), C (counter), i (instant), M (names).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringweave import cost, schedules
from ringweave.cost.network import Floats, Ints
from ringweave.errors import UsageError, explain
from ringweave.schedules import ReceiveOp, Round, Schedule
from ringweave.schedules.program import Pipelining, RankProgram, compile_program
from ringweave.sim.rank import DedicatedProcessors, RankEnvironment, SharedProcessors, SimulatedRank
from ringweave.sim.scenario import (
    Fault,
    HostModel,
    LinkLoad,
    LinkRateChange,
    NodeSlowdown,
    ProgressCallback,
    RankFailure,
    RankSpan,
    Routes,
    SimulationResult,
    StartDelay,
    ignore_progress,
)
from ringweave.sim.streams import Callback, FluidNetwork, QueuedNetwork, VirtualClock
from ringweave.topology import Cluster

_TOLERANCE = 1e-9
_NOTHING = -1
Ranks = NDArray[np.int32]


class IrregularScheduleError(Exception):
    """The schedule cannot be simulated round by round; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class RegularResult:
    """Finish time of each rank, and bytes of each link."""

    finish_s: Floats
    carried: Floats
    """Bytes by link number."""


def simulate_regular(
    schedule: Schedule,
    routes: Routes,
    num_bytes: int,
    machine: HostModel,
    faults: Sequence[Fault] = (),
    progress: ProgressCallback = ignore_progress,
) -> RegularResult:
    """Simulate a schedule in one segment.

    Args:
        schedule: Any schedule; most are refused.
        routes: The links between its ranks.
        num_bytes: Size of the message.
        machine: Costs of the hosts.
        faults: Faults; only those that hold from the beginning.
        progress: Called after each round with the numbers of simulated and of all rounds.

    Raises:
        IrregularScheduleError: It has to be simulated event by event.

    Cost:
        About 0.5 ms for each round of 10,000 ranks.
    """
    return _RegularRun(schedule, routes, num_bytes, machine, faults).run(progress)


class _RegularRun:
    """State of all ranks between two rounds."""

    def __init__(
        self, schedule: Schedule, routes: Routes, num_bytes: int, machine: HostModel, faults: Sequence[Fault]
    ) -> None:
        if machine.num_processors is not None:
            raise IrregularScheduleError("ranks share processors")
        if schedule.encoding is not None:
            raise IrregularScheduleError("some transfers are encoded")
        count = schedule.num_ranks
        self._schedule, self._machine = schedule, machine
        self._latency_s = routes.latency_s
        borders = np.concatenate([[0.0], np.cumsum(np.array(schedule.shares, np.float64))])
        self._borders = borders * (num_bytes / borders[-1])
        self._free_s, self._slowdowns, capacities = _with_faults(routes, faults, count)
        self._free_s += machine.start_s * self._slowdowns
        self._paths = _PathCache(routes, capacities)
        self._last_first = np.full(count, _NOTHING, np.int64)
        self._last_end = np.full(count, _NOTHING, np.int64)
        self._stream_free_s = np.zeros(count)
        self._stream_to = np.full(count, _NOTHING, np.int64)
        self._link_free_s = np.zeros(len(capacities))
        self._carried = np.zeros(len(capacities))

    def run(self, progress: ProgressCallback) -> RegularResult:
        for index, round_ in enumerate(self._schedule.rounds):
            if len(round_):
                self._simulate_round(index, round_)
            progress(index + 1, len(self._schedule.rounds))
        return RegularResult(self._free_s, self._carried)

    def _simulate_round(self, index: int, round_: Round) -> None:
        src, dst, sizes = self._checked(index, round_)
        machine, handling_s = self._machine, self._handling_s(sizes)
        sends_s = self._free_s[src] + handling_s * self._slowdowns[src]
        self._free_s[src] = sends_s
        same = self._stream_to[src] == dst
        begin_s = np.where(same, np.maximum(sends_s, self._stream_free_s[src]), sends_s)
        path = self._paths.path_of(round_)
        end_s = begin_s + sizes / path.rates(sizes, begin_s)
        self._occupy(index, path, begin_s, end_s)
        self._stream_free_s[src], self._stream_to[src] = end_s, dst
        added = np.where(round_.how == ReceiveOp.REDUCE, machine.combine_s_per_byte, 0.0) * sizes
        free_s, comes_s = self._free_s[dst], end_s + self._latency_s
        waking_s = np.where(comes_s > free_s, machine.wake_s, 0.0)
        self._free_s[dst] = np.maximum(free_s, comes_s) + (waking_s + handling_s + added) * self._slowdowns[dst]
        self._carried += path.carried(sizes)

    def _handling_s(self, sizes: Floats) -> Floats | float:
        """Return the CPU time of each message at each of its ends, without additions."""
        machine = self._machine
        if not machine.kernel_s_per_byte:
            return machine.message_s
        return machine.message_s + machine.kernel_s_per_byte * np.minimum(sizes, machine.burst_bytes)

    def _checked(self, index: int, round_: Round) -> tuple[Ranks, Ranks, Floats]:
        """Return sender, receiver and bytes of each message, if the round is regular."""
        src, dst = round_.src, round_.dst
        first, end = round_.first_chunk.astype(np.int64), round_.first_chunk + round_.num_chunks.astype(np.int64)
        if not self._paths.is_known(round_) and not (_are_distinct(src) and _are_distinct(dst)):
            raise IrregularScheduleError(f"a rank sends or receives several messages in round {index}")
        last_first, last_end = self._last_first[src], self._last_end[src]
        waits = (first < last_end) & (last_first < end)
        if not (waits | (last_end == _NOTHING)).all():
            raise IrregularScheduleError(f"a rank sends in round {index} what it did not receive last")
        sizes = self._borders[end] - self._borders[first]
        if not (sizes > 0).all():
            raise IrregularScheduleError(f"round {index} has empty messages")
        if sizes.max() > min(self._machine.send_buffer_bytes, self._machine.receive_buffer_bytes):
            raise IrregularScheduleError(f"messages of round {index} do not fit into the buffers of the kernel")
        self._last_first[dst], self._last_end[dst] = first, end
        return src, dst, sizes

    def _occupy(self, index: int, path: "_RoundPath", begin_s: Floats, end_s: Floats) -> None:
        """Record how long each link is busy, if it carries no other messages."""
        flow, link = path.flow, path.link
        overlaps = begin_s[flow] < self._link_free_s[link] * (1 - _TOLERANCE)
        if overlaps.any():
            raise IrregularScheduleError(f"messages of round {index} meet those of earlier rounds on a link")
        self._link_free_s[link] = np.maximum(self._link_free_s[link], end_s[flow])


class _RoundPath:
    """Links of the messages of a round: pairs of message and link."""

    def __init__(self, round_: Round, routes: Routes, capacities: Floats) -> None:
        self.round = round_
        self.flow, self.link = routes.flow_link_pairs(round_.src, round_.dst)
        if len(np.unique(self.flow)) < len(round_):
            raise IrregularScheduleError("ranks of one node send each other messages")
        self._capacities = capacities
        self._num_users = np.bincount(self.link, minlength=len(capacities))
        self._is_alone = bool((self._num_users <= 1).all())
        self._alone_rates: Floats | None = None
        self._last: tuple[Floats, Floats] | None = None

    def rates(self, sizes: Floats, begin_s: Floats) -> Floats:
        """Return bytes per second of each message; messages that meet must be alike."""
        if self._alone_rates is None:
            count = len(self.round)
            self._alone_rates = (
                _min_by_owner(self._capacities[self.link], self.flow, count)
                if self._is_alone
                else _fair_rates(self.flow, self.link, self._capacities, count)
            )
        if not self._is_alone:
            self._check_together(begin_s, sizes / self._alone_rates)
        return self._alone_rates

    def carried(self, sizes: Floats) -> Floats:
        """Return the bytes by link."""
        if self._last is None or not np.array_equal(self._last[0], sizes):
            carried = np.bincount(self.link, sizes[self.flow], len(self._capacities)).astype(np.float64)
            self._last = sizes, carried
        return self._last[1]

    def _check_together(self, begin_s: Floats, took_s: Floats) -> None:
        shared = self._num_users[self.link] > 1
        flow, link = self.flow[shared], self.link[shared]
        for times in (begin_s, begin_s + took_s):
            least = np.full(len(self._capacities), np.inf)
            most = np.zeros(len(self._capacities))
            np.minimum.at(least, link, times[flow])
            np.maximum.at(most, link, times[flow])
            if (most[link] > least[link] * (1 + _TOLERANCE)).any():
                raise IrregularScheduleError("messages that meet at a link do not begin and end together")


class _PathCache:
    """Caches the path of the last round, which often has the ranks of the next one."""

    def __init__(self, routes: Routes, capacities: Floats) -> None:
        self._routes = routes
        self._capacities = capacities
        self._last: _RoundPath | None = None

    def is_known(self, round_: Round) -> bool:
        """Return whether the round has the same ranks as the last one."""
        last = self._last
        return last is not None and last.round.src is round_.src and last.round.dst is round_.dst

    def path_of(self, round_: Round) -> _RoundPath:
        if self._last is None or not self.is_known(round_):
            self._last = _RoundPath(round_, self._routes, self._capacities)
        return self._last


def _with_faults(routes: Routes, faults: Sequence[Fault], num_ranks: int) -> tuple[Floats, Floats, Floats]:
    """Return the start time and slowdown of each rank, and the rate of each link."""
    start_s, times, capacities = np.zeros(num_ranks), np.ones(num_ranks), np.array(routes.capacities)
    for fault in faults:
        if isinstance(fault, StartDelay):
            start_s[routes.checked_rank(fault.rank)] += fault.seconds
        elif isinstance(fault, NodeSlowdown):
            times[routes.ranks_on_node(fault.node)] *= fault.times
        elif isinstance(fault, LinkRateChange) and not fault.at_s and fault.bytes_per_s:
            capacities[routes.link_number(fault.link)] = fault.bytes_per_s
        else:
            raise IrregularScheduleError(f"{fault} comes in the middle")
    return start_s, times, capacities


def _are_distinct(ranks: np.ndarray) -> bool:
    return len(np.unique(ranks)) == len(ranks)


def _min_by_owner(values: Floats, owner: Ints, count: int) -> Floats:
    found = np.full(count, np.inf)
    np.minimum.at(found, owner, values)
    return found


def _fair_rates(flow: Ints, link: Ints, capacities: Floats, count: int) -> Floats:
    """Return max-min fair rates: `max_min_fair_rates` in columns."""
    found, left = np.full(count, np.inf), capacities.copy()
    pairs = np.ones(len(flow), np.bool_)
    while pairs.any():
        users = np.bincount(link[pairs], minlength=len(left))
        level = np.divide(left, users, out=np.full(len(left), np.inf), where=users > 0)
        full = level <= level.min() * (1 + _TOLERANCE)
        done = np.zeros(count, np.bool_)
        done[flow[pairs & full[link]]] = True
        found[done] = level.min()
        ends = pairs & done[flow]
        left -= np.bincount(link[ends], minlength=len(left)) * level.min()
        np.maximum(left, 0.0, out=left)
        pairs &= ~ends
    return found


ELEMENT_BYTES = 4
_PROGRESS_EVERY = 2_000
"""Number of event times between two progress reports."""


class CollectiveSimulator:
    """Simulates one collective, from beginning to end."""

    def __init__(
        self, programs: Sequence[RankProgram], routes: Routes, machine: HostModel, *, keeps_trace: bool
    ) -> None:
        """Takes one program per rank; `machine` holds for all ranks."""
        self._routes = routes
        self._clock = VirtualClock()
        links = FluidNetwork if math.isinf(machine.burst_bytes) else QueuedNetwork
        self._network = links(self._clock, routes.capacities, routes.latency_s, machine)
        self._spans, self._loads = list[RankSpan](), list[LinkLoad]()
        shared = (
            SharedProcessors(self._clock, machine.num_processors)
            if machine.num_processors
            else DedicatedProcessors(self._clock)
        )
        environment = RankEnvironment(
            clock=self._clock,
            network=self._network,
            machine=machine,
            processors=shared,
            element_bytes=ELEMENT_BYTES,
            record_span=self._spans.append if keeps_trace else None,
            on_failure=self._disconnect_rank,
        )
        if keeps_trace:
            self._network.note_rate = self._record_load
        self._ranks = [SimulatedRank(number, program, environment) for number, program in enumerate(programs)]
        self._streams: dict[tuple[int, int], Any] = {}
        self._start_s = [0.0] * len(programs)
        self._connect()

    def apply_faults(self, faults: Sequence[Fault]) -> None:
        """Apply faults to ranks, nodes and links.

        Raises:
            UsageError: One names no rank, node or link of this group.
        """
        for fault in faults:
            if isinstance(fault, StartDelay):
                self._start_s[self._routes.checked_rank(fault.rank)] += fault.seconds
            elif isinstance(fault, NodeSlowdown):
                for rank in self._routes.ranks_on_node(fault.node):
                    self._ranks[rank].slowdown *= fault.times
            elif isinstance(fault, LinkRateChange):
                self._schedule_rate_change(self._routes.link_number(fault.link), fault)
            else:
                self._schedule_kill(self._ranks[self._routes.checked_rank(fault.rank)], fault)

    def run(self, timeout_s: float, progress: ProgressCallback = ignore_progress) -> SimulationResult:
        """Run to the end; `progress` is called now and then with the numbers of arrived and of all messages."""
        for rank in self._ranks:
            self._clock.call_at(self._start_s[rank.number], rank.resume)
        self._clock.run(self._make_settle(progress))
        left = [rank for rank in self._ranks if not rank.is_done]
        noticed_s = {rank.number: rank.failed_s for rank in self._ranks if rank.failed_s is not None}
        noticed_s |= {rank.number: self._start_s[rank.number] + timeout_s for rank in left}
        finish_s = tuple(math.inf if rank.finish_s is None else rank.finish_s for rank in self._ranks)
        return SimulationResult(
            finish_s=finish_s,
            bytes_on_link=self._routes.values_by_link(self._network.carried),
            died=tuple(rank.number for rank in self._ranks if rank.is_dead),
            noticed_s=noticed_s,
            num_wakes=sum(rank.num_wakes for rank in self._ranks),
            spans=tuple(self._spans),
            loads=tuple(self._loads),
        )

    def _make_settle(self, progress: ProgressCallback) -> Callback:
        total, calls = sum(rank.num_messages for rank in self._ranks), itertools.count(1)

        def settle() -> None:
            self._network.settle()
            if next(calls) % _PROGRESS_EVERY == 0:
                progress(sum(rank.num_arrived for rank in self._ranks), total)

        return settle

    def _connect(self) -> None:
        for rank in self._ranks:
            out, into, arenas = dict[int, Any](), dict[int, Any](), {}
            for peer in sorted(rank.peers):
                if route := self._routes.route(rank.number, peer):
                    out[peer] = self._open_stream(rank.number, peer, route)
                    into[peer] = self._open_stream(peer, rank.number, self._routes.route(peer, rank.number))
                else:
                    arenas[peer] = self._ranks[peer].arena
            rank.connect(out, into, arenas)

    def _open_stream(self, src: int, dst: int, route: tuple[int, ...]) -> Any:
        if (src, dst) not in self._streams:
            self._streams[src, dst] = self._network.open_stream(route, self._ranks[dst].notify)
        return self._streams[src, dst]

    def _schedule_rate_change(self, link: int, change: LinkRateChange) -> None:
        self._clock.call_at(change.at_s, lambda: self._network.set_capacity(link, change.bytes_per_s))

    def _schedule_kill(self, rank: SimulatedRank, death: RankFailure) -> None:
        def die() -> None:
            if not rank.is_done:
                rank.kill()
                self._disconnect_rank(rank)

        self._clock.call_at(death.at_s, die)

    def _disconnect_rank(self, rank: SimulatedRank) -> None:
        """End the connections of a rank; its peers notice a latency later."""
        for peer in sorted(rank.peers):
            for ends in ((rank.number, peer), (peer, rank.number)):
                if ends in self._streams:
                    self._network.close_stream(self._streams[ends])
            self._clock.call_at(self._clock.now_s + self._routes.latency_s, self._peer_notice(peer, rank.number))

    def _peer_notice(self, peer: int, lost: int) -> Callback:
        return lambda: self._ranks[peer].disconnect_peer(lost)

    def _record_load(self, link: int, bytes_per_s: float) -> None:
        self._loads.append(LinkLoad(self._routes.names[link - 2], self._clock.now_s, bytes_per_s))


DEFAULT_TIMEOUT_S = 1800.0
"""Default timeout of torch.distributed."""
REGULAR_FROM_MESSAGES, MAX_MESSAGES = 20_000, 2_000_000
"""From the first number on, regular schedules are simulated round by round; above the second, no others are."""


def simulate(  # noqa: PLR0913 - schedule, cluster, options, machine and faults
    schedule: Schedule,
    cluster: Cluster,
    node_of_rank: Sequence[str],
    num_bytes: int,
    *,
    pipelining: Pipelining | None = None,
    rates: Mapping[str, float] | None = None,
    machine: HostModel | None = None,
    faults: Iterable[Fault] = (),
    keeps_trace: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    progress: ProgressCallback = ignore_progress,
) -> SimulationResult:
    """Simulate a schedule in virtual time, event by event.

    Every rank follows the executor's own program. Large regular schedules are simulated round by round instead
    (`regular.py`): the result is the same, except for the rounding of chunks to elements.

    Args:
        schedule: Any schedule.
        cluster: Cluster that runs it.
        node_of_rank: Name of the node of each rank.
        num_bytes: Size of the message; chunks have whole elements of four bytes.
        pipelining: Division of the message into segments; None is one segment.
        rates: Measured bytes per second by directed link name.
        machine: Costs of processors, memory and kernels; None is none, the network alone.
        faults: Faults to inject.
        keeps_trace: Keep the activities of ranks and the loads of links; for small schedules only.
        timeout_s: Time after which a rank that waits in vain gives up.
        progress: Called now and then with the numbers of simulated and of all rounds, or messages.

    Raises:
        PlacementError: Not one node per rank.
        UsageError: A node, link, rank or rate is none of this cluster's; or there are too many messages to follow.

    Cost:
        About 75 us for each message of each segment; of a regular schedule 0.5 ms for each round of 10,000 ranks.
    """
    pipelining, machine, faults = pipelining or Pipelining(), machine or HostModel(), tuple(faults)
    routes = Routes(cost.group_network(cluster, node_of_rank, rates), node_of_rank, schedule.num_ranks)
    if not has_few_messages(schedule, pipelining, REGULAR_FROM_MESSAGES):
        try:
            _check_regular(pipelining, keeps_trace=keeps_trace)
            found = simulate_regular(schedule, routes, num_bytes, machine, faults, progress)
            carried = routes.values_by_link(found.carried.tolist())
            return SimulationResult(finish_s=tuple(found.finish_s.tolist()), bytes_on_link=carried)
        except IrregularScheduleError as reason:
            if not has_few_messages(schedule, pipelining, MAX_MESSAGES):
                raise UsageError(_too_many_messages_text(schedule, pipelining, str(reason))) from reason
    world = CollectiveSimulator(
        compile_all_programs(schedule, node_of_rank, num_bytes, pipelining), routes, machine, keeps_trace=keeps_trace
    )
    world.apply_faults(faults)
    return world.run(timeout_s, progress)


def has_few_messages(schedule: Schedule, pipelining: Pipelining, max_messages: int) -> bool:
    """Return whether a schedule has at most so many messages, counting those of every segment.

    Where chunks have owners, each of several segments has a message for each chunk of a transfer.

    Cost:
        One pass over the rounds, until there are too many.
    """
    is_split, count = pipelining.num_segments > 1 and schedule.collective.owners is not None, 0
    for round_ in schedule.rounds:
        num_messages = int(round_.num_chunks.sum()) if is_split else len(round_)
        count += num_messages * pipelining.num_segments
        if count > max_messages:
            return False
    return True


def _check_regular(pipelining: Pipelining, *, keeps_trace: bool) -> None:
    if pipelining.num_segments > 1:
        raise IrregularScheduleError(f"there are {pipelining.num_segments} segments")
    if keeps_trace:
        raise IrregularScheduleError("a trace is to be kept")


def _too_many_messages_text(schedule: Schedule, pipelining: Pipelining, reason: str) -> str:
    expected = f"at most {MAX_MESSAGES}, or a schedule that is regular; here {reason}"
    another = "another schedule, such as ring or leader-matrix with one rank a node"
    do = f"Take one segment (simulate --segments 1), or {another}" if pipelining.num_segments > 1 else f"Take {another}"
    return explain(f"messages of {schedule.name}", got=f"more than {MAX_MESSAGES}", expected=expected, do=do)


def compile_all_programs(
    schedule: Schedule, node_of_rank: Sequence[str], num_bytes: int, pipelining: Pipelining
) -> list[RankProgram]:
    """Return every rank's program, as the executors of the ranks compile it."""
    parts = schedules.project_all_ranks(schedule)
    members: dict[str, set[int]] = {}
    for rank, node in enumerate(node_of_rank):
        members.setdefault(node, set()).add(rank)
    return [
        compile_program(schedule, part, num_bytes // ELEMENT_BYTES, pipelining, members[node] - {rank})
        for rank, (part, node) in enumerate(zip(parts, node_of_rank, strict=True))
    ]


_US_PER_S = 1e6
_SWITCHES = "switches"
TraceEvent = dict[str, Any]


def trace_document(
    simulation: SimulationResult, cluster: Cluster, node_of_rank: Sequence[str], title: str
) -> dict[str, Any]:
    """Return the trace document, to be written as JSON. `title`: description of the simulation, in a line."""
    processes = {name: pid for pid, name in enumerate([*dict.fromkeys(node_of_rank), _SWITCHES], start=1)}
    of_rank = [processes[node] for node in node_of_rank]
    events = [
        *_name_events(processes, of_rank),
        *_span_events(simulation, of_rank),
        *_failure_events(simulation, of_rank),
    ]
    events += _counter_events(simulation, cluster, processes)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title, "times": "simulated"}}


def _name_events(processes: dict[str, int], of_rank: Sequence[int]) -> Iterator[TraceEvent]:
    for name, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for rank, pid in enumerate(of_rank):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank + 1, "args": {"name": f"rank {rank}"}}


def _span_events(simulation: SimulationResult, of_rank: Sequence[int]) -> Iterator[TraceEvent]:
    for span in simulation.spans:
        yield {
            "ph": "X",
            "name": f"{span.what} {span.peer}",
            "cat": span.what,
            "pid": of_rank[span.rank],
            "tid": span.rank + 1,
            "ts": span.begin_s * _US_PER_S,
            "dur": (span.end_s - span.begin_s) * _US_PER_S,
            "args": {"peer": span.peer},
        }


def _failure_events(simulation: SimulationResult, of_rank: Sequence[int]) -> Iterator[TraceEvent]:
    for rank, time_s in simulation.noticed_s.items():
        at = {"pid": of_rank[rank], "tid": rank + 1, "ts": time_s * _US_PER_S}
        yield {"ph": "i", "name": "gives up", "cat": "fault", "s": "t", **at}


def _counter_events(simulation: SimulationResult, cluster: Cluster, processes: dict[str, int]) -> Iterator[TraceEvent]:
    """Yield counter events; of several loads of one link at one time only the last one is valid."""
    switches = {switch.name for switch in cluster.switches}
    last = {(load.link, load.at_s): load for load in simulation.loads}
    for load in last.values():
        src, dst = load.link.split("->")
        node = next((name for name in (src, dst) if name in processes and name not in switches), _SWITCHES)
        args = {"Mbit/s": load.bytes_per_s * 8 / 1e6}
        at = {"pid": processes[node], "tid": 0, "ts": load.at_s * _US_PER_S}
        yield {"ph": "C", "name": load.link, "cat": "link", **at, "args": args}
