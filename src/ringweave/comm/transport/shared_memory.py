"""Shared-memory connections: short frames over a Unix socket give a rank of the same node each piece's place.

The sender copies a piece into its arena once, however many ranks read it. The receiver combines or copies straight out
of the arena and acknowledges the read, so that the slot can be reused. Large pieces are not copied at all where the
receiver can read the sender's memory; they are sent once the receiver acknowledges the read.
Arenas are memfds: they have no name, end with the processes that map them, and do not use /dev/shm, which containers
keep small.
"""

import collections
import ctypes
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringweave.comm.transport.interface import MismatchError, ReceivedContent, TransferFailedError
from ringweave.schedules.program import NO_SLOT, StagingLayout

_READ_SLICE_BYTES = 256 * 2**10
"""Slice that is read and combined at a time: it is still in the caches when it is combined."""
_SCAN, _IS_HUGE, _MAX_REGIONS = struct.Struct("<12Q"), 1 << 6, 8
_PAGEMAP_SCAN = 3 << 30 | _SCAN.size << 16 | ord("f") << 8 | 16
"""Linux's struct pm_scan_arg, PAGE_IS_HUGE, number of regions, and _IOWR('f', 16, struct pm_scan_arg)."""
_SECRET = struct.Struct("<QQ")
_PID, _CREDENTIALS_BYTES = struct.Struct("i"), 12
"""Linux's struct ucred: process, user, group."""


class _IoVector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_process_vm_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t


def is_readable_by_peers(address: int, num_bytes: int) -> bool:
    """Return True if the kernel reads the first and last byte of this memory of ours for others."""
    landing = ctypes.create_string_buffer(2)
    here = _IoVector(ctypes.addressof(landing), 2)
    there = (_IoVector * 2)(_IoVector(address, 1), _IoVector(address + num_bytes - 1, 1))
    return _process_vm_readv(os.getpid(), ctypes.byref(here), 1, there, 2, 0) == 2


class HugePages:
    """Finds memory of this process in huge pages, as Linux 6.7 and later report it (PAGEMAP_SCAN)."""

    def __init__(self) -> None:
        """Without the kernel's report, no memory counts as huge pages."""
        try:
            self._descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = None
        else:
            weakref.finalize(self, os.close, self._descriptor)
        self._found = (ctypes.c_uint64 * (3 * _MAX_REGIONS))()
        """Start, end and categories of each region."""

    def contain(self, address: int, num_bytes: int) -> bool:
        """Return True if at least half of these bytes are in huge pages."""
        if self._descriptor is None:
            return False
        start, end = address & -mmap.PAGESIZE, -(-(address + num_bytes) & -mmap.PAGESIZE)
        regions = ctypes.addressof(self._found), _MAX_REGIONS
        request = bytearray(_SCAN.pack(_SCAN.size, 0, start, end, 0, *regions, 0, 0, _IS_HUGE, 0, _IS_HUGE))
        try:
            count = fcntl.ioctl(self._descriptor, _PAGEMAP_SCAN, request)
        except OSError:
            return False
        return 2 * sum(self._found[3 * at + 1] - self._found[3 * at] for at in range(count)) >= num_bytes


def read_memory(pid: int, address: int, destination: Tensor) -> None:
    """Fill `destination`, contiguous and on the CPU, with another process's memory at an address.

    Raises:
        OSError: The process is dead, has no such memory, or the kernel forbids it.
    """
    into, left = destination.data_ptr(), destination.nbytes
    while left:
        here, there = _IoVector(into, left), _IoVector(address, left)
        count = _process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            cause = os.strerror(ctypes.get_errno()) if count else "nothing came"
            raise OSError(f"memory of process {pid} cannot be read: {cause}")
        into, address, left = into + count, address + count, left - count


def array_address(array: Any) -> int:
    """Return the address of a numpy array."""
    return array.__array_interface__["data"][0]


class CrossMemory:
    """Permission of a rank of this node and this one to read each other's memory."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is connected to the peer."""
        self.pid = _PID.unpack_from(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS_BYTES))[0]
        """Process id of the peer as seen by this process; 0 if it is not visible."""
        self.peer_can_read = False
        """The peer has proved that it can read our memory."""
        self._secret = torch.frombuffer(bytearray(secrets.token_bytes(_SECRET.size)), dtype=torch.uint8)
        self._huge_pages = HugePages()
        self._disconnect_poll = select.poll()
        self._disconnect_poll.register(sock, select.POLLRDHUP)

    @property
    def token(self) -> tuple[int, int, int]:
        """Address and value of a secret in this process's memory: a peer that finds it there can read the memory."""
        low, high = _SECRET.unpack(bytes(self._secret.tolist()))
        return self._secret.data_ptr(), low, high

    def can_read_peer(self, address: int, low: int, high: int) -> bool:
        """Return True if the peer's token is found in its memory."""
        landing = torch.zeros(_SECRET.size, dtype=torch.uint8)
        try:
            read_memory(self.pid, address, landing)
        except OSError:
            return False
        return bytes(landing.tolist()) == _SECRET.pack(low, high)

    def is_worth_reading(self, array: Any) -> bool:
        """Return True if the peer can read this memory of ours, and gains by it.

        Small pages are looked up one by one. The kernel does not read the memory of some devices.
        """
        if not self.peer_can_read:
            return False
        address = array_address(array)
        return self._huge_pages.contain(address, array.nbytes) and is_readable_by_peers(address, array.nbytes)

    def is_disconnected(self) -> bool:
        """Return True if either end of the connection was closed or shut down."""
        return bool(self._disconnect_poll.poll(0))


class CrossMemoryContent:
    """A piece in another rank's message; it does not change until that rank receives the acknowledgement."""

    def __init__(self, peer: int, pid: int, address: int) -> None:
        """`peer` is the rank of the process `pid`."""
        self._peer = peer
        self._pid = pid
        self._address = address

    def copy_to(self, region: Tensor) -> None:
        """Copy once, by the kernel."""
        self._read(self._address, region)

    def combine_into(self, region: Tensor, scratch: Tensor, combine: Callable[[Tensor, Tensor], object]) -> None:
        """Combine slice by slice, each copied into the same few pages of `scratch`."""
        address = self._address
        for part in region.split(_READ_SLICE_BYTES // region.element_size()):
            landing = scratch[: part.numel()]
            self._read(address, landing)
            combine(part, landing)
            address += part.nbytes

    def _read(self, address: int, destination: Tensor) -> None:
        try:
            read_memory(self._pid, address, destination)
        except OSError as cause:
            raise TransferFailedError(self._peer, str(cause), hung=False) from cause


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals that fix the size, so that no rank can truncate memory that another one is reading."""

_REGION_GRAIN_BYTES = 2 * 2**20
_NUM_REGIONS = 2
"""Collectives of a channel that may have content in the arena: while slow readers are at one, the next is under way."""


class SharedArena:
    """Shared memory of a fixed size, mapped into this process; it ends when nothing refers to it any more."""

    def __init__(self, descriptor: int) -> None:
        """Map memory of `make_arena`, from this or another rank, and take over its descriptor.

        Raises:
            OSError: It is not such memory.
        """
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)  # first of all, so that any failure closes it, exactly once
        os.set_inheritable(descriptor, False)  # a descriptor received over a socket is
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("shared memory whose size is not fixed")
        self.num_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.num_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.array: Any = np.frombuffer(self._map, dtype=np.uint8)


class ArenaContent:
    """A piece in another rank's arena."""

    def __init__(self, arena: SharedArena, offset: int, num_bytes: int) -> None:
        """`offset` and `num_bytes` are in bytes."""
        self._bytes = arena.tensor[offset : offset + num_bytes]

    def copy_to(self, region: Tensor) -> None:
        region.copy_(self._bytes.view(region.dtype))

    def combine_into(self, region: Tensor, scratch: Tensor, combine: Callable[[Tensor, Tensor], object]) -> None:
        """Combine straight out of the arena."""
        combine(region, self._bytes.view(region.dtype))


class ArenaSlot:
    """Content of one collective in a region of an arena."""

    def __init__(
        self,
        arena: SharedArena,
        start: int,
        layout: StagingLayout,
        element_bytes: int,
        previous: "ArenaSlot | None" = None,
    ) -> None:
        """`previous` is the slot that had the region; its readers have to finish first."""
        self.arena = arena
        self._start = start
        self._layout = layout
        self._element_bytes = element_bytes
        self._previous = previous
        self._num_readers_left = [stage.num_readers for stage in layout.slots]
        self._total_readers_left = sum(self._num_readers_left)
        self._is_written = [False] * len(layout.slots)

    @property
    def is_read(self) -> bool:
        """True once every reader of every stage has finished."""
        return self._total_readers_left == 0

    def write_stage(self, stage: int, payload: Any) -> int | None:
        """Write the content of a stage and return its offset in bytes; None while readers use the earlier content."""
        offset = self._start + self._layout.slots[stage].offset * self._element_bytes
        if self._is_written[stage]:
            return offset
        if self._previous is not None and not self._previous.is_read:
            return None
        self._previous = None
        if not self._is_free(stage):
            return None
        self.arena.array[offset : offset + payload.nbytes] = payload
        self._is_written[stage] = True
        return offset

    def _is_free(self, stage: int) -> bool:
        """Return True if all readers of earlier stages at its place have finished.

        A piece read by cross-memory never was in the arena, but earlier stages at its place may be.
        """
        stages, after = self._layout.slots, self._layout.slots[stage].previous_slot
        while after != NO_SLOT and not self._num_readers_left[after] and not self._is_written[after]:
            after = stages[after].previous_slot
        return after == NO_SLOT or not self._num_readers_left[after]

    def is_awaited(self, stage: int) -> bool:
        """Return True if the same collective needs the place again."""
        return self._layout.slots[stage].is_reused

    def record_read(self, stage: int) -> bool:
        """Record that one reader has finished, or needs no arena; return True if it was the last."""
        self._num_readers_left[stage] -= 1
        self._total_readers_left -= 1
        return self._num_readers_left[stage] == 0


class ArenaPool:
    """A rank's own shared memory, which the collectives of a channel use in turn."""

    def __init__(self) -> None:
        self._arena: SharedArena | None = None
        self._region_bytes = 0
        self._latest_slots: list[ArenaSlot | None] = []
        self._num_begun = 0

    def begin_collective(self, layout: StagingLayout, element_bytes: int) -> ArenaSlot | None:
        """Return the slot of the next collective; None if it shares no content."""
        if not layout.slots:
            return None
        num_bytes = layout.num_elements * element_bytes
        if self._arena is None or num_bytes > self._region_bytes:
            self._region_bytes = -(-num_bytes // _REGION_GRAIN_BYTES) * _REGION_GRAIN_BYTES
            self._arena = make_arena(_NUM_REGIONS * self._region_bytes)
            self._latest_slots = [None] * _NUM_REGIONS
        region = self._num_begun % _NUM_REGIONS
        self._num_begun += 1
        previous = self._latest_slots[region]
        if previous is not None and previous.is_read:
            previous = None  # or they would keep each other alive for ever if none of their content is shared
        slot = ArenaSlot(self._arena, region * self._region_bytes, layout, element_bytes, previous)
        self._latest_slots[region] = slot
        return slot


def make_arena(num_bytes: int) -> SharedArena:
    """Make shared memory, zeroed when first touched."""
    descriptor = os.memfd_create("ringweave", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return SharedArena(descriptor)


_FRAME = struct.Struct("<QQQQ")
"""Kind, then by kind: tag, bytes and offset or address of a piece; number of pieces read; nothing, for an arena that is
attached or memory that can be read; address and value of a token."""

_PIECE, _AWAITED_PIECE, _READ, _ARENA, _CROSS_MEMORY_PIECE, _TOKEN, _CAN_READ = 1, 2, 3, 4, 5, 6, 7
_CONTENT_KINDS = frozenset({_PIECE, _AWAITED_PIECE, _ARENA, _CROSS_MEMORY_PIECE})
"""Kinds that a closed peer would have needed."""
_MAX_UNACKNOWLEDGED = 64
"""Unacknowledged pieces with places that no rank waits for; an acknowledgement wakes the peer up."""
MIN_CROSS_MEMORY_BYTES = 64 * 2**10
"""Smaller pieces are copied: waiting until a peer has read them takes longer."""


class ShmSend:
    """A piece being sent to another rank of this node."""

    __slots__ = ("done", "is_cross_memory", "payload", "peer", "slot", "stage", "tag")

    def __init__(
        self, peer: int, tag: int, payload: Any, slot: ArenaSlot, stage: int, *, is_cross_memory: bool
    ) -> None:
        self.peer = peer
        self.tag = tag
        self.payload = payload
        self.slot = slot
        self.stage = stage
        self.is_cross_memory = is_cross_memory
        self.done = False

    @property
    def content(self) -> None:
        """None: only a received piece has content."""
        return None

    def complete(self) -> None:
        """Mark it as sent: its memory may be used again."""
        self.done = True
        self.payload = None


class ShmRecv:
    """A piece expected from another rank of this node."""

    __slots__ = ("content", "is_awaited", "is_cross_memory", "num_bytes", "peer", "tag")

    def __init__(self, peer: int, tag: int, num_bytes: int) -> None:
        self.peer = peer
        self.tag = tag
        self.num_bytes = num_bytes
        self.content: ReceivedContent | None = None
        self.is_awaited = False
        self.is_cross_memory = False

    @property
    def done(self) -> bool:
        """True once it can be read."""
        return self.content is not None


class ShmAck:
    """Frames that the kernel did not take yet, among them acknowledgements."""

    __slots__ = ("_frames", "peer")

    def __init__(self, peer: int, frames: Sized) -> None:
        self.peer = peer
        self._frames = frames

    @property
    def done(self) -> bool:
        return not len(self._frames)

    @property
    def content(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _ShmArrival:
    """A piece that the peer has shared."""

    tag: int
    num_bytes: int
    content: ReceivedContent
    is_awaited: bool
    is_cross_memory: bool


class ShmConnection:
    """Connection to one peer on this node, over a Unix socket and shared memory."""

    def __init__(
        self, peer: int, sock: socket.socket, on_space_freed: Callable[[], None], *, allows_cross_memory: bool = False
    ) -> None:
        """`on_space_freed` is called when a place is free again, which another peer's piece may wait for.

        `allows_cross_memory` lets the peer read this process's memory, where it can.
        """
        sock.setblocking(False)
        self.peer = peer
        self.sock = sock
        self.watched = 0
        self._on_space_freed = on_space_freed
        self._outgoing: collections.deque[ShmSend] = collections.deque()
        self._unread: collections.deque[ShmSend] = collections.deque()
        self._incoming: collections.deque[ShmRecv] = collections.deque()
        self._arrived: collections.deque[_ShmArrival] = collections.deque()
        self._frames: collections.deque[tuple[bytes, int | None]] = collections.deque()
        self._num_unacknowledged = 0
        self._is_ack_awaited = False
        self._announced_arena: SharedArena | None = None
        self._peer_arena: SharedArena | None = None
        self._is_peer_closed = False
        self._cross_memory = CrossMemory(sock) if allows_cross_memory else None
        if self._cross_memory is not None:
            self._frames.append((_FRAME.pack(_TOKEN, *self._cross_memory.token), None))

    @property
    def wanted(self) -> int:
        """Poll events that let something of this connection move."""
        if self._is_peer_closed:
            return 0
        return select.EPOLLIN | (select.EPOLLOUT if self._frames else 0)

    def send(self, payload: Any, tag: int, slot: ArenaSlot, stage: int) -> ShmSend:
        """Share a piece as soon as its place is free."""
        if self._is_peer_closed:
            raise ConnectionResetError("connection closed by peer")
        is_cross_memory = (
            self._cross_memory is not None
            and payload.nbytes >= MIN_CROSS_MEMORY_BYTES
            and self._cross_memory.is_worth_reading(payload)
        )
        handle = ShmSend(self.peer, tag, payload, slot, stage, is_cross_memory=is_cross_memory)
        if is_cross_memory and slot.record_read(stage):
            self._on_space_freed()
        self._outgoing.append(handle)
        self.flush_sends()
        return handle

    def receive(self, num_bytes: int, tag: int) -> ShmRecv:
        """Expect the next piece."""
        handle = ShmRecv(self.peer, tag, num_bytes)
        self._incoming.append(handle)
        self._match_receives()
        if not handle.done and self._is_peer_closed:
            raise ConnectionResetError("connection closed by peer")
        return handle

    def release(self, handle: ShmRecv) -> None:
        """Release a read piece; acknowledge it now if the peer needs its place, or before the next wait.

        Raises:
            ConnectionResetError: It was read by cross-memory, and the peer has closed: its content is uncertain.
        """
        if handle.is_cross_memory and (self._cross_memory is None or self._cross_memory.is_disconnected()):
            raise ConnectionResetError("connection closed by peer")
        self._num_unacknowledged += 1
        self._is_ack_awaited |= handle.is_awaited
        if self._is_ack_awaited and not self._incoming:
            self.write()  # this rank may never wait for the peer again

    @property
    def pending_ack(self) -> ShmAck:
        """Frames that still have to be sent."""
        return ShmAck(self.peer, self._frames)

    def request_ack(self) -> None:
        """Acknowledge all reads before the next wait: another collective begins."""
        self._is_ack_awaited = self._num_unacknowledged > 0

    def flush_sends(self) -> None:
        """Share pieces that have a free place, in the order of sending."""
        while self._outgoing:
            handle = self._outgoing[0]
            if handle.is_cross_memory:
                address = array_address(handle.payload)
                self._frames.append(
                    (_FRAME.pack(_CROSS_MEMORY_PIECE, handle.tag, handle.payload.nbytes, address), None)
                )
            elif not self._copy_to_arena(handle):
                break
            self._unread.append(self._outgoing.popleft())
        self.write()

    def _copy_to_arena(self, handle: ShmSend) -> bool:
        """Copy a piece into the arena, if its place is free."""
        offset = handle.slot.write_stage(handle.stage, handle.payload)
        if offset is None:
            return False
        if handle.slot.arena is not self._announced_arena:
            self._announced_arena = handle.slot.arena
            self._frames.append((_FRAME.pack(_ARENA, 0, 0, 0), self._announced_arena.descriptor))
        kind = _AWAITED_PIECE if handle.slot.is_awaited(handle.stage) else _PIECE
        self._frames.append((_FRAME.pack(kind, handle.tag, handle.payload.nbytes, offset), None))
        handle.complete()
        return True

    def write(self) -> None:
        """Send waiting frames, as many as the kernel takes, then the acknowledgement.

        A closed peer gets none: the frame would wait for ever, and `pending_ack` with it.
        """
        self._write_frames()
        if (
            not self._frames
            and not self._is_peer_closed
            and (self._is_ack_awaited or self._num_unacknowledged > _MAX_UNACKNOWLEDGED)
        ):
            self._is_ack_awaited = False
            self._frames.append((_FRAME.pack(_READ, self._num_unacknowledged, 0, 0), None))
            self._num_unacknowledged = 0
            self._write_frames()

    def _write_frames(self) -> None:
        while self._frames and not self._is_peer_closed:
            frame, descriptor = self._frames[0]
            try:
                if descriptor is None:
                    self.sock.send(frame)
                else:
                    socket.send_fds(self.sock, [frame], [descriptor])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                if any(kind in _CONTENT_KINDS for kind, *_ in map(_FRAME.unpack, (frame for frame, _ in self._frames))):
                    raise
                self._frames.clear()  # the peer has closed and needs no place; its sent frames are still unread
                return
            self._frames.popleft()

    def read(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sock, _FRAME.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the peer closed with frames unread: reported once, then its earlier frames follow
            if not data:
                self._handle_peer_closed()
                return
            if len(data) != _FRAME.size:
                raise ConnectionError(f"a frame of {len(data)} bytes came, expected {_FRAME.size}")
            self._handle_frame(_FRAME.unpack(data), descriptors)
            self._match_receives()

    def _handle_peer_closed(self) -> None:
        """Handle a closed peer: it reads no more, and all that it has sent is here."""
        self._is_peer_closed = True
        is_cross_memory = any(handle.is_cross_memory for handle in self._unread)
        if self._outgoing or is_cross_memory or any(not expected.done for expected in self._incoming):
            raise ConnectionResetError("connection closed by peer")
        self._record_reads(len(self._unread))
        self._frames.clear()

    def _handle_frame(self, frame: tuple[int, int, int, int], descriptors: list[int]) -> None:
        kind, first, second, third = frame
        if kind in (_PIECE, _AWAITED_PIECE):
            content = self._arena_content(second, third)
            self._arrived.append(_ShmArrival(first, second, content, kind == _AWAITED_PIECE, is_cross_memory=False))
        elif kind == _CROSS_MEMORY_PIECE and self._cross_memory is not None:
            cross_memory_content = CrossMemoryContent(self.peer, self._cross_memory.pid, third)
            self._arrived.append(
                _ShmArrival(first, second, cross_memory_content, is_awaited=True, is_cross_memory=True)
            )
        elif kind == _TOKEN and self._cross_memory is not None:
            if self._cross_memory.can_read_peer(first, second, third):
                self._frames.append((_FRAME.pack(_CAN_READ, 0, 0, 0), None))
                self.write()
        elif kind == _CAN_READ and self._cross_memory is not None:
            self._cross_memory.peer_can_read = True
        elif kind == _READ:
            self._record_reads(first)
        elif kind == _ARENA and descriptors:
            self._peer_arena = SharedArena(descriptors.pop(0))
        else:
            raise ConnectionError(f"a frame of kind {kind} came that cannot be")

    def _record_reads(self, count: int) -> None:
        if count > len(self._unread):
            raise ConnectionError(f"{count} pieces read of {len(self._unread)} that were sent")
        has_freed = False
        for handle in (self._unread.popleft() for _ in range(count)):
            if handle.is_cross_memory:
                handle.complete()
            else:
                has_freed |= handle.slot.record_read(handle.stage)
        if has_freed:
            self._on_space_freed()

    def _match_receives(self) -> None:
        """Give arrived pieces to the receives that expect them."""
        while self._arrived and self._incoming:
            arrival, handle = self._arrived.popleft(), self._incoming.popleft()
            if (arrival.tag, arrival.num_bytes) != (handle.tag, handle.num_bytes):
                got, expected = (arrival.tag, arrival.num_bytes), (handle.tag, handle.num_bytes)
                raise MismatchError(self.peer, got=got, expected=expected)
            handle.is_awaited, handle.is_cross_memory = arrival.is_awaited, arrival.is_cross_memory
            handle.content = arrival.content

    def _arena_content(self, num_bytes: int, offset: int) -> ArenaContent:
        if self._peer_arena is None or offset + num_bytes > self._peer_arena.num_bytes:
            raise ConnectionError(f"{num_bytes} bytes at {offset} are outside of the peer's shared memory")
        return ArenaContent(self._peer_arena, offset, num_bytes)
