"""Cross-memory reads: ranks of one node read each other's memory with process_vm_readv, where the kernel permits it.

Permission depends on users, Yama, the container's system call filter and its process ids, so a rank proves it by
reading a secret. Only huge pages are read this way (decision 0005).
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringweave.comm.transport.interface import TransferFailedError

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
