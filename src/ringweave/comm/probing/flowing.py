"""One rank's part of a batch: all its flows at once, each as fast as it goes, for a moment.

The beginning is discarded, while TCP finds its rate and buckets of credit empty themselves. Then a window is measured
by the receiver: at both of its ends everything that the kernel has is read first, so that a rank that was not scheduled
for a while still gets the amount and the time that belong together.
"""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ringweave.comm.members import Members
from ringweave.comm.probing import calls
from ringweave.comm.probing.calls import Kind

_PIECE_BYTES = 1 << 16
_ROOM_BYTES = 1 << 18
_UNSENT_BYTES = 1 << 17
"""What may wait in the sender's kernel: enough to keep a fast link busy, little enough to be through soon."""
_LOOK_UP_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long a flow lasts."""

    warm_up_s: float = 0.12
    """Discarded: slow start takes a few round trips, a bucket of tbf some milliseconds."""
    window_s: float = 0.22
    """Measured."""
    tail_s: float = 0.06
    """Flows go on that long, so that a receiver that is late still finds them."""
    silence_s: float = 10.0
    """Nothing moves for so long: the flow has failed."""

    @property
    def flow_s(self) -> float:
        """How long a sender sends."""
        return self.warm_up_s + self.window_s + self.tail_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank does in a batch."""

    number: int
    """Of the batch."""
    sends_to: Sequence[int]
    """Probing ranks."""
    receives_from: Sequence[int]
    timing: Timing
    rails: Sequence[int] = (0,)
    """Addresses that every flow goes between: a connection for each, all at the same time."""


@dataclass(slots=True)
class _Incoming:
    """One flow that comes in."""

    sock: socket.socket
    num_bytes: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)
    """Time and bytes at the ends of the window."""
    last: tuple[float, int] = (0.0, 0)

    def read(self, room: memoryview, clock: Callable[[], float]) -> bool:
        """Take all that is there; whether more may come."""
        while True:
            try:
                count = self.sock.recv_into(room)
            except BlockingIOError:
                return True
            if count == 0:
                return False
            self.num_bytes += count
            self.last = (clock(), self.num_bytes)

    def rate(self) -> float:
        """Bytes per second within the window, or as much of it as there was."""
        begin, end = (self.marks + [self.last] * 2)[:2]
        return max(0.0, end[1] - begin[1]) / max(end[0] - begin[0], 1e-3)


class FlowRun:
    """A part of a batch while it runs."""

    def __init__(self, part: Part, probers: Members, door: Sequence[socket.socket], clock: Callable[[], float]) -> None:
        self._part = part
        self._probers = probers
        self._door = door
        self._calling = calls.callers(door)
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._num_expected = len(part.receives_from) * len(part.rails)
        self._num_open = 0
        self._payload = memoryview(os.urandom(_PIECE_BYTES))
        self._room = memoryview(bytearray(_ROOM_BYTES))

    def run(self) -> dict[int, list[float]]:
        """Sender -> bytes per second by each of the addresses, for every flow that came in.

        Raises:
            OSError: A peer cannot be reached, or a flow broke.
            TimeoutError: Nothing moved for too long.
        """
        timing, started = self._part.timing, self._clock()
        ends = (started + timing.warm_up_s, started + timing.warm_up_s + timing.window_s)
        for listener in self._door:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        try:
            for peer in self._part.sends_to:
                for rail in self._part.rails:
                    self._open(peer, rail)
            limit = started + timing.flow_s + timing.silence_s
            while self._num_open or len(self._incoming) < self._num_expected:
                if self._clock() > limit:
                    raise TimeoutError(f"nothing from {self._silent()} for {timing.silence_s:g} s")
                moved = self._turn(started + timing.flow_s)
                self._mark(ends)
                limit = max(limit, self._clock() + timing.silence_s) if moved else limit
        finally:
            self._close()
        part = self._part
        return {peer: [self._incoming[peer, rail].rate() for rail in part.rails] for peer in part.receives_from}

    def _open(self, peer: int, rail: int) -> None:
        sock = calls.call(self._probers, peer, Kind.FLOW, self._part.number, self._part.timing.silence_s, rail)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        sock.setblocking(False)
        self._num_open += 1
        self._selector.register(sock, selectors.EVENT_WRITE)

    def _turn(self, end: float) -> bool:
        """Move what can be moved; whether anything did."""
        ready = self._selector.select(_LOOK_UP_S)
        for key, events in ready:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock in self._door:
                continue
            if isinstance(key.data, _Incoming):
                if not key.data.read(self._room, self._clock):
                    self._end(sock)
            elif events & selectors.EVENT_WRITE:
                self._send(sock, end)
            elif not sock.recv(1):  # the receiver has it all
                self._end(sock)
        if self._calling.socks() or any(key.fileobj in self._door for key, _ in ready):
            self._take_call()
        return bool(ready)

    def _send(self, sock: socket.socket, end: float) -> None:
        if self._clock() >= end:
            sock.shutdown(socket.SHUT_WR)
            self._selector.modify(sock, selectors.EVENT_READ)
            return
        with contextlib.suppress(BlockingIOError):
            sock.send(self._payload)

    def _take_call(self) -> None:
        answered = calls.answer(self._calling, self._probers, 0.0)
        if answered is None:
            return
        caller, sock = answered
        wanted = caller.kind == Kind.FLOW and caller.number == self._part.number
        wanted = wanted and caller.index in self._part.receives_from and caller.rail in self._part.rails
        if not wanted or (caller.index, caller.rail) in self._incoming:
            sock.close()
            return
        self._incoming[caller.index, caller.rail] = flow = _Incoming(sock)
        self._num_open += 1
        self._selector.register(sock, selectors.EVENT_READ, flow)

    def _mark(self, ends: Sequence[float]) -> None:
        now = self._clock()
        for flow in self._incoming.values():
            if len(flow.marks) < len(ends) and now >= ends[len(flow.marks)] and flow.sock.fileno() >= 0:
                flow.read(self._room, self._clock)
                flow.marks.append((self._clock(), flow.num_bytes))

    def _end(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
        self._num_open -= 1

    def _silent(self) -> str:
        part = self._part
        absent = [p for p in part.receives_from if any((p, rail) not in self._incoming for rail in part.rails)]
        return self._probers.names(absent) if absent else "any peer"

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            sock = key.fileobj
            if isinstance(sock, socket.socket) and sock not in self._door:
                sock.close()
        self._selector.close()
        self._calling.close()
        for listener in self._door:
            listener.setblocking(True)


def run_part(
    part: Part, probers: Members, door: Sequence[socket.socket], clock: Callable[[], float] = time.monotonic
) -> dict[int, list[float]]:
    """Sender -> bytes per second of each flow that came in, by each of its addresses.

    That is TCP's content, as a job's messages are.

    Raises:
        OSError: A peer cannot be reached or is silent, or a flow broke.
    """
    return FlowRun(part, probers, door, clock).run()
