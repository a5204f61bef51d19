"""Probe coordinator: the first probing rank runs the survey and commands the others, in JSON lines over TCP."""

import contextlib
import itertools
import json
import math
import random
import socket
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from ringweave.comm.group_info import GroupInfo
from ringweave.comm.probing import flows
from ringweave.comm.probing.flows import FlowTiming, ProbeConnectionKind, RankFlows
from ringweave.comm.transport.connect import IncomingConnections
from ringweave.errors import PeerError, shorten
from ringweave.files import file_io
from ringweave.topology.inference.fit import TreeFit
from ringweave.topology.inference.infer import SurveyLimits, infer_topology
from ringweave.topology.inference.observations import Flow, FlowBatch, Observations, round_robin_pairs

_MAX_LINE_BYTES = 1 << 22
_COMMAND_TIMEOUT_S = 300.0
"""The first rank may compute so long between two commands."""

_REACH_TIMEOUT_S = 3.0
"""An address behind a firewall answers nothing at all."""


class JsonConnection:
    """Connection that carries one JSON document per line."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        """`peer` names the other end in errors."""
        sock.settimeout(_COMMAND_TIMEOUT_S)
        self._sock = sock
        self._file = sock.makefile("rwb")
        self._peer = peer

    def send(self, document: Mapping[str, Any]) -> None:
        """Send a document.

        Raises:
            PeerError: The peer is dead.
        """
        try:
            self._file.write(json.dumps(document).encode() + b"\n")
            self._file.flush()
        except OSError as cause:
            raise self.error(str(cause)) from cause

    def receive(self) -> dict[str, Any]:
        """Receive the next document.

        Raises:
            PeerError: The peer is dead or silent, sends something else, or reports a failure.
        """
        try:
            text = self._file.readline(_MAX_LINE_BYTES)
            document = file_io.parse_json(text, _MAX_LINE_BYTES) if text.endswith(b"\n") else None
        except (OSError, ValueError) as cause:
            raise self.error(str(cause)) from cause
        if not text.endswith(b"\n"):
            raise self.error("it hung up" if len(text) < _MAX_LINE_BYTES else f"a line of {len(text)} bytes and more")
        if not isinstance(document, dict):
            raise self.error(f"something else: {shorten(text)}")
        if "failed" in document:
            raise self.error(str(document["failed"]))
        return document

    def close(self) -> None:
        with contextlib.suppress(OSError):  # bytes that could not be sent to a dead peer
            self._file.close()
        self._sock.close()

    def error(self, reason: str) -> PeerError:
        """Return the error for a peer that does not take part, with the reason."""
        do = "See whether it runs, and whether a firewall lets the nodes of the job reach each other on any TCP port"
        return PeerError("probing the network", got=reason, expected=f"{self._peer} to measure its links", do=do)


def follow_coordinator(probers: GroupInfo, listeners: Sequence[socket.socket]) -> str:
    """Execute the first probing rank's commands until it stops.

    Returns:
        The measurement text that it sends; empty if it sends none.

    Raises:
        PeerError: It is dead or silent, or sends no valid command.
    """
    first = probers.rank_text(0)
    try:
        connection = JsonConnection(
            flows.connect_prober(probers, 0, ProbeConnectionKind.COMMANDS, 0, _COMMAND_TIMEOUT_S), first
        )
    except OSError as cause:
        raise PeerError(
            "probing the network", got=str(cause), expected=f"{first} to answer", do="Look into its log"
        ) from cause
    try:
        while (command := connection.receive()).get("do") != "end":
            try:
                connection.send(execute_command(command, probers, listeners))
            except OSError as cause:
                connection.send({"failed": f"{type(cause).__name__}: {cause}"})
            except (LookupError, TypeError, ValueError, OverflowError, struct.error) as cause:
                raise connection.error(f"no order: {shorten(command)}") from cause
        return str(command.get("found", ""))
    finally:
        connection.close()


def execute_command(
    command: Mapping[str, Any], probers: GroupInfo, listeners: Sequence[socket.socket]
) -> dict[str, Any]:
    """Execute one command, and return its report.

    Raises:
        OSError: The command failed.
    """
    if command["do"] == "ask":
        return {"latency_s": flows.measure_latency(probers, command["peer"], command["number"])}
    if command["do"] == "echo":
        flows.echo_messages(probers, listeners, command["peer"], command["number"])
        return {}
    if command["do"] == "reach":
        return {"reached": _can_reach(probers, command["peers"], command["rail"])}
    rank_flows = RankFlows(
        number=command["number"],
        sends_to=command["sends_to"],
        receives_from=command["receives_from"],
        timing=FlowTiming(**command["timing"]),
        rails=command["rails"],
    )
    return {"rates": {str(peer): rates for peer, rates in flows.run_rank_flows(rank_flows, probers, listeners).items()}}


def _can_reach(probers: GroupInfo, peers: Sequence[int], rail: int) -> bool:
    """Return True if connections between the addresses of this rail get through; nothing answers them."""
    try:
        for peer in peers:
            flows.connect_prober(probers, peer, ProbeConnectionKind.REACH, 0, _REACH_TIMEOUT_S, rail).close()
    except OSError:
        return False
    return True


def stop_command(measurement_text: str) -> dict[str, Any]:
    """Return the command to stop, with the measurement unless that is too long, as with thousands of nodes."""
    return {"do": "end", "found": measurement_text if len(measurement_text) < _MAX_LINE_BYTES // 2 else ""}


def flow_command(rank_flows: RankFlows) -> dict[str, Any]:
    """Return the command to run these flows."""
    return {
        "do": "flow",
        "number": rank_flows.number,
        "sends_to": list(rank_flows.sends_to),
        "receives_from": list(rank_flows.receives_from),
        "timing": asdict(rank_flows.timing),
        "rails": list(rank_flows.rails),
    }


_MIN_ROUND_TRIPS = 25
"""A window of fewer round trips would measure the start of TCP instead of its rate."""

_NUM_REACH_CHECKS = 16
"""Number of nodes that each node tries to reach by its further NICs before the measurement."""

_ReportT = TypeVar("_ReportT")


class ProbeGroup(Protocol):
    """Ranks that measure together on command."""

    def measure_latencies(self, pairs: tuple[tuple[int, int], ...]) -> list[float]:
        """Return seconds of a small message between each of these disjoint pairs."""
        ...

    def measure_rates(self, batch: FlowBatch, timing: FlowTiming) -> list[float]:
        """Return bytes per second of each flow of a batch."""
        ...


class ProbeCoordinator:
    """Commands the other probing ranks; runs on the first one."""

    def __init__(self, probers: GroupInfo, listeners: Sequence[socket.socket], timeout_s: float) -> None:
        """Wait until all probing ranks have connected.

        Raises:
            PeerError: Some did not connect in time.
        """
        self._probers = probers
        self._listeners = listeners
        self._batch_number = 0
        self._rails = [0]
        self._best_rates: list[list[float]] = []
        self._connections: dict[int, JsonConnection] = {}
        incoming, deadline = flows.incoming_probers(listeners), time.monotonic() + timeout_s
        try:
            while len(self._connections) < probers.group_size - 1:
                self._accept_rank(incoming, deadline)
        finally:
            incoming.close()

    def find_rails(self) -> None:
        """Use all addresses at which every node reaches the nodes after it.

        Raises:
            PeerError: A rank is dead.
        """
        count = self._probers.group_size
        after = range(1, min(count, _NUM_REACH_CHECKS + 1))
        for rail in range(1, len(self._probers.own_info.location.addresses)):
            commands = {
                index: {"do": "reach", "peers": [(index + step) % count for step in after], "rail": rail}
                for index in range(count)
            }
            reports = self._run_commands(commands)
            if all(self._read_report(index, lambda report: report["reached"] is True, reports) for index in reports):
                self._rails.append(rail)

    @property
    def nic_rates(self) -> dict[str, dict[str, float]]:
        """Node -> NIC that carried flows -> highest bytes per second seen on it."""
        places = [member.location for member in self._probers.ranks]
        return {
            place.node: {place.nics[rail]: rate for rail, rate in zip(self._rails, best, strict=True)}
            for place, best in zip(places, self._best_rates, strict=False)
            if place.nics and all(best)
        }

    def measure_latencies(self, pairs: tuple[tuple[int, int], ...]) -> list[float]:
        """Return seconds of a small message between each of these disjoint pairs.

        Raises:
            PeerError: A rank is dead, or cannot reach its partner.
        """
        self._batch_number += 1
        commands = {}
        for caller, callee in pairs:
            commands[callee] = {"do": "echo", "peer": caller, "number": self._batch_number}
            commands[caller] = {"do": "ask", "peer": callee, "number": self._batch_number}
        reports = self._run_commands(commands)
        return [
            self._read_report(caller, lambda report: _check_measured(report["latency_s"]), reports)
            for caller, _ in pairs
        ]

    def measure_rates(self, batch: FlowBatch, timing: FlowTiming) -> list[float]:
        """Return bytes per second of each flow of a batch.

        Raises:
            PeerError: A rank is dead, or cannot reach its partner.
        """
        self._batch_number += 1
        sends_to, receives_from = defaultdict(list), defaultdict(list)
        for flow in batch.flows:
            sends_to[flow.src].append(flow.dst)
            receives_from[flow.dst].append(flow.src)
        commands = {}
        for index in sends_to.keys() | receives_from.keys():
            rank_flows = RankFlows(
                number=self._batch_number,
                sends_to=sends_to[index],
                receives_from=receives_from[index],
                timing=timing,
                rails=self._rails,
            )
            commands[index] = flow_command(rank_flows)
        reports = self._run_commands(commands)
        return [self._record_rate(flow, self._flow_rates(reports, flow)) for flow in batch.flows]

    def close(self, measurement_text: str = "") -> None:
        """Stop all ranks and send them the measurement; dead ranks are skipped."""
        for connection in self._connections.values():
            try:
                connection.send(stop_command(measurement_text))
            except PeerError:
                continue
            finally:
                connection.close()

    def _flow_rates(self, reports: Mapping[int, dict[str, Any]], flow: Flow) -> list[float]:
        """Return a flow's rate on each address."""

        def read(report: dict[str, Any]) -> list[float]:
            return [_check_measured(rate) for rate, _ in zip(report["rates"][str(flow.src)], self._rails, strict=True)]

        return self._read_report(flow.dst, read, reports)

    def _read_report(
        self, index: int, read: Callable[[dict[str, Any]], _ReportT], reports: Mapping[int, dict[str, Any]]
    ) -> _ReportT:
        """Read a value from a rank's report."""
        try:
            return read(reports[index])
        except (LookupError, TypeError, ValueError, OverflowError) as cause:
            raise PeerError(
                "probing the network",
                got=reports[index],
                expected=f"what {self._probers.rank_text(index)} has measured",
                do="Run the same ringweave on all ranks",
            ) from cause

    def _record_rate(self, flow: Flow, rates: Sequence[float]) -> float:
        """Return a flow's rate over all NICs together, and update the best rates."""
        self._best_rates = self._best_rates or [[0.0] * len(self._rails) for _ in self._probers.ranks]
        for index in (flow.src, flow.dst):
            self._best_rates[index] = list(map(max, self._best_rates[index], rates))
        return float(sum(rates))

    def _run_commands(self, commands: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        for index, command in commands.items():
            if index:
                self._connections[index].send(command)
        reports = {}
        if 0 in commands:
            try:
                reports[0] = execute_command(commands[0], self._probers, self._listeners)
            except OSError as cause:
                raise PeerError(
                    "probing the network",
                    got=f"{type(cause).__name__}: {cause}",
                    expected=f"{self._probers.rank_text(0)} to reach the other nodes",
                    do="See whether a firewall lets the nodes of the job reach each other on any TCP port",
                ) from cause
        return reports | {index: self._connections[index].receive() for index in commands if index}

    def _accept_rank(self, incoming: IncomingConnections, deadline: float) -> None:
        absent = [index for index in range(1, self._probers.group_size) if index not in self._connections]
        left_s = deadline - time.monotonic()
        try:
            accepted = flows.accept_prober(incoming, self._probers, max(left_s, 0.0))
        except OSError as cause:
            raise self._absence_error(absent, str(cause)) from cause
        if accepted is None and left_s <= 0:
            raise self._absence_error(absent, "timed out")
        if accepted is None:
            return
        caller, sock = accepted
        if caller.kind == ProbeConnectionKind.COMMANDS and caller.index in absent:
            self._connections[caller.index] = JsonConnection(sock, self._probers.rank_text(caller.index))
        else:
            sock.close()

    def _absence_error(self, absent: list[int], reason: str) -> PeerError:
        return PeerError(
            "probing the network",
            got=reason,
            expected=f"a call of {self._probers.ranks_text(absent)}",
            do="Look into its log, and see whether it reaches this node",
        )


def measure_network(
    probe_group: ProbeGroup,
    num_nodes: int,
    generator: random.Random,
    effort: SurveyLimits,
    on_progress: Callable[[str], None],
) -> tuple[dict[tuple[int, int], float], Observations, TreeFit]:
    """Measure latencies, rates and the switch tree.

    Returns:
        Latency in seconds of each measured pair, all rates, and the tree.

    Raises:
        PeerError: A rank is dead.
    """
    latencies: dict[tuple[int, int], float] = {}
    for pairs in itertools.islice(round_robin_pairs(num_nodes), effort.limit_rounds(num_nodes)):
        on_progress("latency of pairs")
        latencies.update(zip(pairs, probe_group.measure_latencies(pairs), strict=True))
    timing = flow_timing(statistics.median(latencies.values()))
    survey = infer_topology(num_nodes, generator, effort)
    try:
        batch = next(survey)
        while True:
            on_progress(batch.purpose)
            batch = survey.send(probe_group.measure_rates(batch, timing))
    except StopIteration as end:
        return (latencies, *end.value)


def _check_measured(value: object) -> float:
    """Check a measured time or rate."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no time and no rate")
    return float(value)


def flow_timing(latency_s: float) -> FlowTiming:
    """Return the timing of flows for a message latency: longer where the ends are far apart."""
    usual, round_trips_s = FlowTiming(), 2 * latency_s * _MIN_ROUND_TRIPS
    return FlowTiming(warm_up_s=max(usual.warm_up_s, round_trips_s), window_s=max(usual.window_s, round_trips_s))
