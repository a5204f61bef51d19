"""Large regular schedules on virtual time: whole rounds in numpy columns, no object for any message.

A ring of 10,000 ranks has 2e8 messages, too many to follow one by one. In schedules like it every rank sends and
receives at most one message a round, and sends on what it received last. Then each rank's times follow from those of
the round before, and rates are constant while a message is under way, as long as the messages that meet at a link begin
and end together, or do not meet at all. Both is looked at round by round: what is not regular in this sense is refused,
and what is comes out as it does event by event, on unequal clusters too.

Bytes are those of the shares, not of whole elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.cost.network import Floats, Ints
from ringweave.schedules import How, Round, Schedule
from ringweave.sim.faults import Delay, Fault, RateChange, Slowdown
from ringweave.sim.machine import Machine
from ringweave.sim.results import Tell, silent
from ringweave.sim.routes import Routes

_SAME = 1e-9
_NOTHING = -1
Ranks = NDArray[np.int32]


class IrregularError(Exception):
    """The schedule cannot be followed round by round here; the text says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """When each rank is through, and what links have carried."""

    finish_s: Floats
    carried: Floats
    """Bytes by number of the link."""


def follow(
    schedule: Schedule,
    routes: Routes,
    num_bytes: int,
    machine: Machine,
    faults: Sequence[Fault] = (),
    tell: Tell = silent,
) -> Outcome:
    """Times of a schedule in one segment.

    Args:
        schedule: Any schedule; most are refused.
        routes: The links between its ranks.
        num_bytes: Size of the message.
        machine: What machines add.
        faults: What goes wrong; only what holds from the beginning.
        tell: Gets how many of how many rounds are done, after each.

    Raises:
        IrregularError: It has to be simulated event by event.

    Cost:
        About 0.5 ms for each round of 10,000 ranks.
    """
    return _Rounds(schedule, routes, num_bytes, machine, faults).run(tell)


class _Rounds:
    """The state of all ranks between two rounds."""

    def __init__(
        self, schedule: Schedule, routes: Routes, num_bytes: int, machine: Machine, faults: Sequence[Fault]
    ) -> None:
        if machine.num_processors is not None:
            raise IrregularError("ranks share processors")
        count = schedule.num_ranks
        self._schedule, self._machine = schedule, machine
        self._latency_s = routes.latency_s
        borders = np.concatenate([[0.0], np.cumsum(np.array(schedule.shares, np.float64))])
        self._borders = borders * (num_bytes / borders[-1])
        self._free_s, self._times, capacities = _with_faults(routes, faults, count)
        self._free_s += machine.start_s * self._times
        self._paths = _Paths(routes, capacities)
        self._last_first = np.full(count, _NOTHING, np.int64)
        self._last_end = np.full(count, _NOTHING, np.int64)
        self._stream_free_s = np.zeros(count)
        self._stream_to = np.full(count, _NOTHING, np.int64)
        self._link_free_s = np.zeros(len(capacities))
        self._carried = np.zeros(len(capacities))

    def run(self, tell: Tell) -> Outcome:
        for index, round_ in enumerate(self._schedule.rounds):
            if len(round_):
                self._follow(index, round_)
            tell(index + 1, len(self._schedule.rounds))
        return Outcome(self._free_s, self._carried)

    def _follow(self, index: int, round_: Round) -> None:
        src, dst, sizes = self._checked(index, round_)
        machine, handling_s = self._machine, self._handling_s(sizes)
        sends_s = self._free_s[src] + handling_s * self._times[src]
        self._free_s[src] = sends_s
        same = self._stream_to[src] == dst
        begin_s = np.where(same, np.maximum(sends_s, self._stream_free_s[src]), sends_s)
        path = self._paths.of(round_)
        end_s = begin_s + sizes / path.rates(sizes, begin_s)
        self._occupy(index, path, begin_s, end_s)
        self._stream_free_s[src], self._stream_to[src] = end_s, dst
        added = np.where(round_.how == How.REDUCE, machine.combine_s_per_byte, 0.0) * sizes
        free_s, comes_s = self._free_s[dst], end_s + self._latency_s
        waking_s = np.where(comes_s > free_s, machine.wake_s, 0.0)
        self._free_s[dst] = np.maximum(free_s, comes_s) + (waking_s + handling_s + added) * self._times[dst]
        self._carried += path.carried(sizes)

    def _handling_s(self, sizes: Floats) -> Floats | float:
        """Processor time of each message at each of its ends, but for additions."""
        machine = self._machine
        if not machine.kernel_s_per_byte:
            return machine.message_s
        return machine.message_s + machine.kernel_s_per_byte * np.minimum(sizes, machine.burst_bytes)

    def _checked(self, index: int, round_: Round) -> tuple[Ranks, Ranks, Floats]:
        """Sender, receiver and bytes of each message, if the round is regular."""
        src, dst = round_.src, round_.dst
        first, end = round_.first_chunk.astype(np.int64), round_.first_chunk + round_.num_chunks.astype(np.int64)
        if not self._paths.is_known(round_) and not (_are_different(src) and _are_different(dst)):
            raise IrregularError(f"a rank sends or receives several messages in round {index}")
        last_first, last_end = self._last_first[src], self._last_end[src]
        waits = (first < last_end) & (last_first < end)
        if not (waits | (last_end == _NOTHING)).all():
            raise IrregularError(f"a rank sends in round {index} what it did not receive last")
        sizes = self._borders[end] - self._borders[first]
        if not (sizes > 0).all():
            raise IrregularError(f"round {index} has empty messages")
        if sizes.max() > min(self._machine.send_buffer_bytes, self._machine.receive_buffer_bytes):
            raise IrregularError(f"messages of round {index} do not fit into the buffers of the kernel")
        self._last_first[dst], self._last_end[dst] = first, end
        return src, dst, sizes

    def _occupy(self, index: int, path: "_Path", begin_s: Floats, end_s: Floats) -> None:
        """Note how long each link is busy, if nobody else's messages are on it."""
        flow, link = path.flow, path.link
        overlaps = begin_s[flow] < self._link_free_s[link] * (1 - _SAME)
        if overlaps.any():
            raise IrregularError(f"messages of round {index} meet those of earlier rounds on a link")
        self._link_free_s[link] = np.maximum(self._link_free_s[link], end_s[flow])


class _Path:
    """The links that the messages of a round pass: pairs of message and link."""

    def __init__(self, round_: Round, routes: Routes, capacities: Floats) -> None:
        self.round = round_
        self.flow, self.link = routes.pairs(round_.src, round_.dst)
        if len(np.unique(self.flow)) < len(round_):
            raise IrregularError("ranks of one node send each other messages")
        self._capacities = capacities
        self._num_users = np.bincount(self.link, minlength=len(capacities))
        self._is_alone = bool((self._num_users <= 1).all())
        self._alone_rates: Floats | None = None
        self._last: tuple[Floats, Floats] | None = None

    def rates(self, sizes: Floats, begin_s: Floats) -> Floats:
        """Bytes per second of each message; those that meet must be alike."""
        if self._alone_rates is None:
            count = len(self.round)
            self._alone_rates = (
                _smallest(self._capacities[self.link], self.flow, count)
                if self._is_alone
                else _filled(self.flow, self.link, self._capacities, count)
            )
        if not self._is_alone:
            self._check_together(begin_s, sizes / self._alone_rates)
        return self._alone_rates

    def carried(self, sizes: Floats) -> Floats:
        """Bytes by link."""
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
            if (most[link] > least[link] * (1 + _SAME)).any():
                raise IrregularError("messages that meet at a link do not begin and end together")


class _Paths:
    """The path of the last round, again where the next one has the same ranks."""

    def __init__(self, routes: Routes, capacities: Floats) -> None:
        self._routes = routes
        self._capacities = capacities
        self._last: _Path | None = None

    def is_known(self, round_: Round) -> bool:
        """Whether the round has the same ranks as the last one."""
        last = self._last
        return last is not None and last.round.src is round_.src and last.round.dst is round_.dst

    def of(self, round_: Round) -> _Path:
        """What the round passes."""
        if self._last is None or not self.is_known(round_):
            self._last = _Path(round_, self._routes, self._capacities)
        return self._last


def _with_faults(routes: Routes, faults: Sequence[Fault], num_ranks: int) -> tuple[Floats, Floats, Floats]:
    """When each rank begins, how many times as long its work takes, and what links carry."""
    start_s, times, capacities = np.zeros(num_ranks), np.ones(num_ranks), np.array(routes.capacities)
    for fault in faults:
        if isinstance(fault, Delay):
            start_s[routes.rank(fault.rank)] += fault.seconds
        elif isinstance(fault, Slowdown):
            times[routes.on_node(fault.node)] *= fault.times
        elif isinstance(fault, RateChange) and not fault.at_s and fault.bytes_per_s:
            capacities[routes.number(fault.link)] = fault.bytes_per_s
        else:
            raise IrregularError(f"{fault} comes in the middle")
    return start_s, times, capacities


def _are_different(ranks: np.ndarray) -> bool:
    return len(np.unique(ranks)) == len(ranks)


def _smallest(values: Floats, owner: Ints, count: int) -> Floats:
    found = np.full(count, np.inf)
    np.minimum.at(found, owner, values)
    return found


def _filled(flow: Ints, link: Ints, capacities: Floats, count: int) -> Floats:
    """Max-min fair rates: `cost.sharing.fair_rates` in columns."""
    found, left = np.full(count, np.inf), capacities.copy()
    pairs = np.ones(len(flow), np.bool_)
    while pairs.any():
        users = np.bincount(link[pairs], minlength=len(left))
        level = np.divide(left, users, out=np.full(len(left), np.inf), where=users > 0)
        full = level <= level.min() * (1 + _SAME)
        done = np.zeros(count, np.bool_)
        done[flow[pairs & full[link]]] = True
        found[done] = level.min()
        ends = pairs & done[flow]
        left -= np.bincount(link[ends], minlength=len(left)) * level.min()
        np.maximum(left, 0.0, out=left)
        pairs &= ~ends
    return found
