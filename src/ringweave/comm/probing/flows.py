"""Flows and echoes between probing ranks: each on a TCP connection of its own, admitted by a token.

A connection per flow starts as the streams of a job do, and leaves nothing in queues for the next flow. The start of a
flow is discarded, while TCP finds its rate and token buckets empty. The receiver then measures a window; at both of its
ends it first reads all that the kernel holds, so amount and time match even where the process was not scheduled.
"""

import contextlib
import hmac
import os
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ringweave.comm.group_info import TOKEN_BYTES, GroupInfo
from ringweave.comm.transport.connect import IncomingConnections

_PROBE_HELLO = struct.Struct(f"<{TOKEN_BYTES}sBIIB")


class ProbeConnectionKind(IntEnum):
    """Purpose of a connection."""

    COMMANDS = 0
    FLOW = 1
    ECHO = 2
    REACH = 3
    """No data: only checks that the address is reachable."""


@dataclass(frozen=True, slots=True)
class ProbeCaller:
    """Identity of a connecting rank, and the purpose of its connection."""

    index: int
    """Index among the probing ranks."""
    kind: ProbeConnectionKind
    number: int
    rail: int = 0
    """Index of the address, at both ends."""


def connect_prober(
    probers: GroupInfo, index: int, kind: ProbeConnectionKind, number: int, timeout_s: float, rail: int = 0
) -> socket.socket:
    """Open a blocking connection to a probing rank, between the addresses of the given rail.

    Raises:
        OSError: The rank cannot be reached.
    """
    callee, own = probers.ranks[index], probers.own_info.location
    address = (callee.location.addresses[rail], callee.endpoints[0].ports[rail])
    leaving_by = (own.addresses[rail], 0) if own.more_addresses else None
    hello = _PROBE_HELLO.pack(probers.token, kind, number, probers.group_rank, rail)
    sock = socket.create_connection(address, timeout=timeout_s, source_address=leaving_by)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(hello)
    except OSError:
        sock.close()
        raise
    return sock


def incoming_probers(listeners: Sequence[socket.socket]) -> IncomingConnections:
    """Accept connections on these listeners without waiting for silent ones."""
    return IncomingConnections(listeners, _PROBE_HELLO.size, time.monotonic)


def accept_prober(
    incoming: IncomingConnections, probers: GroupInfo, timeout_s: float
) -> tuple[ProbeCaller, socket.socket] | None:
    """Accept an identified connection; it does not block.

    None if there is none within `timeout_s`, or earlier after a connection that is silent or not admitted.

    Raises:
        OSError: The listeners are closed.
    """
    try:
        received = incoming.wait_hello(timeout_s)
    except BlockingIOError:  # the caller has closed the connection before the answer
        return None
    except ValueError as cause:
        raise OSError(str(cause)) from cause
    if received is None:
        return None
    hello, sock = received
    caller = _identify_prober(hello, probers)
    if caller is None:
        sock.close()
        return None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return caller, sock


def _identify_prober(hello: bytes, probers: GroupInfo) -> ProbeCaller | None:
    token, kind, number, index, rail = _PROBE_HELLO.unpack(hello)
    may_call = (
        hmac.compare_digest(token, probers.token) and index < probers.group_size and kind in set(ProbeConnectionKind)
    )
    return ProbeCaller(index, ProbeConnectionKind(kind), number, rail) if may_call else None


_NUM_ECHOES = 31
_NUM_WARM_UP_ECHOES = 5
_ECHO_BYTES = 8
_ECHO_TIMEOUT_S = 10.0


def measure_latency(probers: GroupInfo, peer: int, number: int) -> float:
    """Return seconds of a small message to `peer`: half of the median round trip.

    Raises:
        OSError: The peer cannot be reached, or is silent.
    """
    seconds = []
    with connect_prober(probers, peer, ProbeConnectionKind.ECHO, number, _ECHO_TIMEOUT_S) as sock:
        for _ in range(_NUM_WARM_UP_ECHOES + _NUM_ECHOES):
            started = time.perf_counter()
            sock.sendall(bytes(_ECHO_BYTES))
            if len(sock.recv(_ECHO_BYTES, socket.MSG_WAITALL)) < _ECHO_BYTES:
                raise ConnectionResetError("connection closed by peer")
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_NUM_WARM_UP_ECHOES:]) / 2


def echo_messages(probers: GroupInfo, listeners: Sequence[socket.socket], peer: int, number: int) -> None:
    """Echo the messages of `peer` until it closes the connection.

    Raises:
        OSError: The peer does not connect, or is silent.
    """
    with _accept_caller(ProbeCaller(peer, ProbeConnectionKind.ECHO, number), probers, listeners) as sock:
        sock.settimeout(_ECHO_TIMEOUT_S)
        while message := sock.recv(_ECHO_BYTES, socket.MSG_WAITALL):
            sock.sendall(message)


def _accept_caller(wanted: ProbeCaller, probers: GroupInfo, listeners: Sequence[socket.socket]) -> socket.socket:
    """Accept the connection of this caller; close all others."""
    incoming, until_s = incoming_probers(listeners), time.monotonic() + _ECHO_TIMEOUT_S
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            accepted = accept_prober(incoming, probers, left_s)
            if accepted is None:
                continue
            caller, sock = accepted
            if caller == wanted:
                return sock
            sock.close()
    finally:
        incoming.close()
    raise TimeoutError(f"no call of {probers.rank_text(wanted.index)} within {_ECHO_TIMEOUT_S:g} s")


_SEND_BYTES = 1 << 16
_RECEIVE_BYTES = 1 << 18
_UNSENT_BYTES = 1 << 17
"""Limit on data in the sender's kernel: enough to keep a fast link busy, little enough to drain soon."""
_SELECT_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowTiming:
    """Duration of a flow."""

    warm_up_s: float = 0.12
    """Discarded: slow start takes a few round trips, a token bucket of tbf some milliseconds."""
    window_s: float = 0.22
    """Measured."""
    tail_s: float = 0.06
    """Extra sending time, so that a late receiver still measures a running flow."""
    silence_s: float = 10.0
    """A flow that moves nothing for so long has failed."""

    @property
    def flow_s(self) -> float:
        """Duration of sending."""
        return self.warm_up_s + self.window_s + self.tail_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFlows:
    """Flows of one rank in a batch."""

    number: int
    sends_to: Sequence[int]
    receives_from: Sequence[int]
    timing: FlowTiming
    rails: Sequence[int] = (0,)
    """Addresses that every flow uses at the same time, a connection on each."""


@dataclass(slots=True)
class _IncomingFlow:
    sock: socket.socket
    num_bytes: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)
    """Time and bytes at the ends of the window."""
    last: tuple[float, int] = (0.0, 0)

    def read(self, buffer: memoryview, clock: Callable[[], float]) -> bool:
        """Read all that is there; return True if more may come."""
        while True:
            try:
                count = self.sock.recv_into(buffer)
            except BlockingIOError:
                return True
            if count == 0:
                return False
            self.num_bytes += count
            self.last = (clock(), self.num_bytes)

    def rate(self) -> float:
        """Return bytes per second within the window, or within as much of it as there was."""
        begin, end = (self.marks + [self.last] * 2)[:2]
        return max(0.0, end[1] - begin[1]) / max(end[0] - begin[0], 1e-3)


class FlowRun:
    """Runs one rank's flows of a batch."""

    def __init__(
        self, rank_flows: RankFlows, probers: GroupInfo, listeners: Sequence[socket.socket], clock: Callable[[], float]
    ) -> None:
        self._rank_flows = rank_flows
        self._probers = probers
        self._listeners = listeners
        self._incoming_probers = incoming_probers(listeners)
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._incoming_flows: dict[tuple[int, int], _IncomingFlow] = {}
        self._num_expected = len(rank_flows.receives_from) * len(rank_flows.rails)
        self._num_open = 0
        self._payload = memoryview(os.urandom(_SEND_BYTES))
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))

    def run(self) -> dict[int, list[float]]:
        """Return sender -> bytes per second on each address, for every incoming flow.

        Raises:
            OSError: A peer cannot be reached, or a flow broke.
            TimeoutError: Nothing moved for too long.
        """
        timing, started = self._rank_flows.timing, self._clock()
        ends = (started + timing.warm_up_s, started + timing.warm_up_s + timing.window_s)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        try:
            for peer in self._rank_flows.sends_to:
                for rail in self._rank_flows.rails:
                    self._open(peer, rail)
            limit = started + timing.flow_s + timing.silence_s
            while self._num_open or len(self._incoming_flows) < self._num_expected:
                if self._clock() > limit:
                    raise TimeoutError(f"nothing from {self._silent_peers()} for {timing.silence_s:g} s")
                moved = self._move_bytes(started + timing.flow_s)
                self._mark_window(ends)
                limit = max(limit, self._clock() + timing.silence_s) if moved else limit
        finally:
            self._close()
        part = self._rank_flows
        return {peer: [self._incoming_flows[peer, rail].rate() for rail in part.rails] for peer in part.receives_from}

    def _open(self, peer: int, rail: int) -> None:
        sock = connect_prober(
            self._probers,
            peer,
            ProbeConnectionKind.FLOW,
            self._rank_flows.number,
            self._rank_flows.timing.silence_s,
            rail,
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        sock.setblocking(False)
        self._num_open += 1
        self._selector.register(sock, selectors.EVENT_WRITE)

    def _move_bytes(self, end: float) -> bool:
        """Move all bytes that can be moved; return True if any was."""
        ready = self._selector.select(_SELECT_S)
        for key, events in ready:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock in self._listeners:
                continue
            if isinstance(key.data, _IncomingFlow):
                if not key.data.read(self._buffer, self._clock):
                    self._close_flow(sock)
            elif events & selectors.EVENT_WRITE:
                self._send(sock, end)
            elif not sock.recv(1):  # the receiver has it all
                self._close_flow(sock)
        if self._incoming_probers.pending_sockets() or any(key.fileobj in self._listeners for key, _ in ready):
            self._accept_flow()
        return bool(ready)

    def _send(self, sock: socket.socket, end: float) -> None:
        if self._clock() >= end:
            sock.shutdown(socket.SHUT_WR)
            self._selector.modify(sock, selectors.EVENT_READ)
            return
        with contextlib.suppress(BlockingIOError):
            sock.send(self._payload)

    def _accept_flow(self) -> None:
        accepted = accept_prober(self._incoming_probers, self._probers, 0.0)
        if accepted is None:
            return
        caller, sock = accepted
        is_expected = caller.kind == ProbeConnectionKind.FLOW and caller.number == self._rank_flows.number
        is_expected = (
            is_expected and caller.index in self._rank_flows.receives_from and caller.rail in self._rank_flows.rails
        )
        if not is_expected or (caller.index, caller.rail) in self._incoming_flows:
            sock.close()
            return
        self._incoming_flows[caller.index, caller.rail] = flow = _IncomingFlow(sock)
        self._num_open += 1
        self._selector.register(sock, selectors.EVENT_READ, flow)

    def _mark_window(self, ends: Sequence[float]) -> None:
        now = self._clock()
        for flow in self._incoming_flows.values():
            if len(flow.marks) < len(ends) and now >= ends[len(flow.marks)] and flow.sock.fileno() >= 0:
                flow.read(self._buffer, self._clock)
                flow.marks.append((self._clock(), flow.num_bytes))

    def _close_flow(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
        self._num_open -= 1

    def _silent_peers(self) -> str:
        part = self._rank_flows
        absent = [p for p in part.receives_from if any((p, rail) not in self._incoming_flows for rail in part.rails)]
        return self._probers.ranks_text(absent) if absent else "any peer"

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            sock = key.fileobj
            if isinstance(sock, socket.socket) and sock not in self._listeners:
                sock.close()
        self._selector.close()
        self._incoming_probers.close()
        for listener in self._listeners:
            listener.setblocking(True)


def run_rank_flows(
    rank_flows: RankFlows,
    probers: GroupInfo,
    listeners: Sequence[socket.socket],
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, list[float]]:
    """Return sender -> bytes per second of each incoming flow, on each address.

    The bytes are TCP's payload, like a job's messages.

    Raises:
        OSError: A peer cannot be reached or is silent, or a flow broke.
    """
    return FlowRun(rank_flows, probers, listeners, clock).run()
