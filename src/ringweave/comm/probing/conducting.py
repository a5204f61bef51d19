"""The first probing rank: carries out what the survey asks for, with the others."""

import itertools
import math
import random
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ringweave.comm.members import Members
from ringweave.comm.probing import calls, orders
from ringweave.comm.probing.calls import Kind
from ringweave.comm.probing.flowing import Part, Timing
from ringweave.comm.probing.orders import Line
from ringweave.comm.transport.callers import Callers
from ringweave.errors import PeerError, explain
from ringweave.topology import recovery
from ringweave.topology.recovery import Batch, Effort, Evidence, Fit, Flow

_LEAST_ROUND_TRIPS = 25
"""A window of fewer round trips than that would measure how TCP starts, not what it gets."""

_NUM_REACHED = 16
"""Nodes that each node tries to reach by its further NICs before they are measured."""

_Read = TypeVar("_Read")


class Ensemble(Protocol):
    """Ranks that measure together what they are told to."""

    def latencies(self, pairs: tuple[tuple[int, int], ...]) -> list[float]:
        """Seconds of a small message between each of these disjoint pairs."""
        ...

    def rates(self, batch: Batch, timing: Timing) -> list[float]:
        """Bytes per second of each flow of a batch."""
        ...


class Conductor:
    """The other probing ranks, seen from the first."""

    def __init__(self, probers: Members, door: Sequence[socket.socket], timeout_s: float) -> None:
        """Waits until all have called.

        Raises:
            PeerError: Some did not call in time.
        """
        self._probers = probers
        self._door = door
        self._number = 0
        self._rails = [0]
        self._best: list[list[float]] = []
        self._lines: dict[int, Line] = {}
        calling, deadline = calls.callers(door), time.monotonic() + timeout_s
        try:
            while len(self._lines) < probers.group_size - 1:
                self._admit(calling, deadline)
        finally:
            calling.close()

    def find_rails(self) -> None:
        """Let flows go by all addresses at which every node reaches those that come after it.

        Raises:
            PeerError: A rank is gone.
        """
        count = self._probers.group_size
        after = range(1, min(count, _NUM_REACHED + 1))
        for rail in range(1, len(self._probers.own.place.addresses)):
            told = {
                index: {"do": "reach", "peers": [(index + step) % count for step in after], "rail": rail}
                for index in range(count)
            }
            reports = self._perform(told)
            if all(self._reported(index, lambda report: report["reached"] is True, reports) for index in reports):
                self._rails.append(rail)

    @property
    def rates_of_nics(self) -> dict[str, dict[str, float]]:
        """Node -> NIC by which flows went -> the most bytes per second that it was seen to carry."""
        places = [member.place for member in self._probers.ranks]
        return {
            place.node: {place.nics[rail]: rate for rail, rate in zip(self._rails, best, strict=True)}
            for place, best in zip(places, self._best, strict=False)
            if place.nics and all(best)
        }

    def latencies(self, pairs: tuple[tuple[int, int], ...]) -> list[float]:
        """Seconds of a small message between each of these disjoint pairs.

        Raises:
            PeerError: A rank is gone, or cannot reach its partner.
        """
        self._number += 1
        told = {}
        for caller, callee in pairs:
            told[callee] = {"do": "echo", "peer": caller, "number": self._number}
            told[caller] = {"do": "ask", "peer": callee, "number": self._number}
        reports = self._perform(told)
        return [self._reported(caller, lambda report: _number(report["latency_s"]), reports) for caller, _ in pairs]

    def rates(self, batch: Batch, timing: Timing) -> list[float]:
        """Bytes per second of each flow of a batch.

        Raises:
            PeerError: A rank is gone, or cannot reach its partner.
        """
        self._number += 1
        sends_to, receives_from = defaultdict(list), defaultdict(list)
        for flow in batch.flows:
            sends_to[flow.src].append(flow.dst)
            receives_from[flow.dst].append(flow.src)
        told = {}
        for index in sends_to.keys() | receives_from.keys():
            part = Part(
                number=self._number,
                sends_to=sends_to[index],
                receives_from=receives_from[index],
                timing=timing,
                rails=self._rails,
            )
            told[index] = orders.flow_order(part)
        reports = self._perform(told)
        return [self._noted(flow, self._rates_in(reports, flow)) for flow in batch.flows]

    def close(self, found: str = "") -> None:
        """Tell all that this was it, and what was found; those who are gone need not be told."""
        for line in self._lines.values():
            try:
                line.send(orders.end_order(found))
            except PeerError:
                continue
            finally:
                line.close()

    def _rates_in(self, reports: Mapping[int, dict[str, Any]], flow: Flow) -> list[float]:
        """Of a flow, by each of the addresses."""

        def read(report: dict[str, Any]) -> list[float]:
            return [_number(rate) for rate, _ in zip(report["rates"][str(flow.src)], self._rails, strict=True)]

        return self._reported(flow.dst, read, reports)

    def _reported(
        self, index: int, read: Callable[[dict[str, Any]], _Read], reports: Mapping[int, dict[str, Any]]
    ) -> _Read:
        """What `read` takes from a rank's report.

        Raises:
            PeerError: It is not there.
        """
        try:
            return read(reports[index])
        except (LookupError, TypeError, ValueError, OverflowError) as cause:
            raise PeerError(
                explain(
                    "probing the network",
                    got=reports[index],
                    expected=f"what {self._probers.name(index)} has measured",
                    do="Run the same ringweave on all ranks",
                )
            ) from cause

    def _noted(self, flow: Flow, rates: Sequence[float]) -> float:
        """The rate of a flow, by all NICs together."""
        self._best = self._best or [[0.0] * len(self._rails) for _ in self._probers.ranks]
        for index in (flow.src, flow.dst):
            self._best[index] = list(map(max, self._best[index], rates))
        return float(sum(rates))

    def _perform(self, told: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        for index, order in told.items():
            if index:
                self._lines[index].send(order)
        reports = {}
        if 0 in told:
            try:
                reports[0] = orders.follow(told[0], self._probers, self._door)
            except OSError as cause:
                raise PeerError(
                    explain(
                        "probing the network",
                        got=f"{type(cause).__name__}: {cause}",
                        expected=f"{self._probers.name(0)} to reach the other nodes",
                        do="See whether a firewall lets the nodes of the job reach each other on any TCP port",
                    )
                ) from cause
        return reports | {index: self._lines[index].receive() for index in told if index}

    def _admit(self, calling: Callers, deadline: float) -> None:
        absent = [index for index in range(1, self._probers.group_size) if index not in self._lines]
        left_s = deadline - time.monotonic()
        try:
            answered = calls.answer(calling, self._probers, max(left_s, 0.0))
        except OSError as cause:
            raise self._absence(absent, str(cause)) from cause
        if answered is None and left_s <= 0:
            raise self._absence(absent, "timed out")
        if answered is None:
            return
        caller, sock = answered
        if caller.kind == Kind.ORDERS and caller.index in absent:
            self._lines[caller.index] = Line(sock, self._probers.name(caller.index))
        else:
            sock.close()

    def _absence(self, absent: list[int], reason: str) -> PeerError:
        return PeerError(
            explain(
                "probing the network",
                got=reason,
                expected=f"a call of {self._probers.names(absent)}",
                do="Look into its log, and see whether it reaches this node",
            )
        )


def conduct(
    ensemble: Ensemble,
    num_nodes: int,
    generator: random.Random,
    effort: Effort,
    tell: Callable[[str], None],
) -> tuple[dict[tuple[int, int], float], Evidence, Fit]:
    """Measure all there is to measure.

    Args:
        ensemble: Does it.
        num_nodes: How many nodes there are.
        generator: For the survey.
        effort: For the survey.
        tell: Is told what is being measured.

    Returns:
        Latency in seconds of each pair that has met, all rates, and the tree.

    Raises:
        PeerError: A rank is gone.
    """
    latencies: dict[tuple[int, int], float] = {}
    for pairs in itertools.islice(recovery.meetings(num_nodes), effort.rounds(num_nodes)):
        tell("latency of pairs")
        latencies.update(zip(pairs, ensemble.latencies(pairs), strict=True))
    timing = timing_for(statistics.median(latencies.values()))
    asking = recovery.survey(num_nodes, generator, effort)
    try:
        batch = next(asking)
        while True:
            tell(batch.purpose)
            batch = asking.send(ensemble.rates(batch, timing))
    except StopIteration as end:
        return (latencies, *end.value)


def _number(value: object) -> float:
    """A time or a rate.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no time and no rate")
    return float(value)


def timing_for(latency_s: float) -> Timing:
    """How long flows last where a message takes so long: longer where the ends are far from each other."""
    usual, round_trips_s = Timing(), 2 * latency_s * _LEAST_ROUND_TRIPS
    return Timing(warm_up_s=max(usual.warm_up_s, round_trips_s), window_s=max(usual.window_s, round_trips_s))
