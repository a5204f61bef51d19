"""Fast simulation of large regular schedules: whole rounds in numpy columns, no object per message.

A ring of 10,000 ranks has 2e8 messages, too many to follow one by one. In regular schedules every rank sends and
receives at most one message a round, and sends on what it received last. Then each rank's times follow from those of
the round before. Rates are constant while a message is in flight, as long as the messages that meet at a link begin and
end together, or no messages meet. Both conditions are checked round by round. A schedule that breaks one is refused;
for all others the result equals the event-by-event simulation, on unequal clusters too.

Bytes are those of the shares, not of whole elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.cost.network import Floats, Ints
from ringweave.schedules import ReceiveOp, Round, Schedule
from ringweave.sim.scenario import (
    Fault,
    HostModel,
    LinkRateChange,
    NodeSlowdown,
    ProgressCallback,
    Routes,
    StartDelay,
    ignore_progress,
)

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
