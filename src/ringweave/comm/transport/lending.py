"""Memory of this process that other ranks of the node read where it is, where the kernel lets them.

`process_vm_readv` copies out of another process's memory without its help. Whether it may depends on users, on Yama, on
the container's filter of system calls and on its process numbers; so a rank proves that it can by reading a secret.
Only huge pages are lent (decision 0032).
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

from ringweave.comm.transport.seam import TransferFailedError

_SLICE_BYTES = 256 * 2**10
"""Read and combined by so much at a time: what was read is still in the caches when it is combined."""
_SCAN, _IS_HUGE, _MAX_REGIONS = struct.Struct("<12Q"), 1 << 6, 8
_PAGEMAP_SCAN = 3 << 30 | _SCAN.size << 16 | ord("f") << 8 | 16
"""Linux's struct pm_scan_arg, PAGE_IS_HUGE, how many regions are asked for, and _IOWR('f', 16, struct pm_scan_arg)."""
_SECRET = struct.Struct("<QQ")
_PID, _CREDENTIALS_BYTES = struct.Struct("i"), 12
"""Linux's struct ucred: process, user, group."""


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_process_vm_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t


def is_readable(address: int, num_bytes: int) -> bool:
    """Whether the kernel reads this memory of ours, the first byte and the last, for others."""
    landing = ctypes.create_string_buffer(2)
    here = _Span(ctypes.addressof(landing), 2)
    there = (_Span * 2)(_Span(address, 1), _Span(address + num_bytes - 1, 1))
    return _process_vm_readv(os.getpid(), ctypes.byref(here), 1, there, 2, 0) == 2


class HugePages:
    """Which memory of this process lies in huge pages, as Linux 6.7 and later say (PAGEMAP_SCAN)."""

    def __init__(self) -> None:
        """Knows of none where the kernel does not say."""
        try:
            self._descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = None
        else:
            weakref.finalize(self, os.close, self._descriptor)
        self._found = (ctypes.c_uint64 * (3 * _MAX_REGIONS))()
        """Start, end and categories of each region."""

    def hold(self, address: int, num_bytes: int) -> bool:
        """Whether at least half of these bytes are in some."""
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


def read_memory(pid: int, address: int, landing: Tensor) -> None:
    """Fill `landing`, contiguous and on the CPU, with what a process has at an address.

    Raises:
        OSError: It is gone, has no such memory, or the kernel forbids it.
    """
    into, left = landing.data_ptr(), landing.nbytes
    while left:
        here, there = _Span(into, left), _Span(address, left)
        count = _process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            cause = os.strerror(ctypes.get_errno()) if count else "nothing came"
            raise OSError(f"memory of process {pid} cannot be read: {cause}")
        into, address, left = into + count, address + count, left - count


def address_of(array: Any) -> int:
    """Where a numpy array lies."""
    return array.__array_interface__["data"][0]


class Lending:
    """Whether a rank of this node and this one may read each other's memory."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock` is connected to it."""
        self.pid = _PID.unpack_from(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS_BYTES))[0]
        """Of its process, as this one sees it; 0 if it does not."""
        self.is_reached = False
        """It has shown that it can read ours."""
        self._secret = torch.frombuffer(bytearray(secrets.token_bytes(_SECRET.size)), dtype=torch.uint8)
        self._huge_pages = HugePages()
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)

    @property
    def token(self) -> tuple[int, int, int]:
        """Where a secret lies in this process's memory, and what it is: who finds it there can read it."""
        low, high = _SECRET.unpack(bytes(self._secret.tolist()))
        return self._secret.data_ptr(), low, high

    def can_borrow(self, address: int, low: int, high: int) -> bool:
        """Whether the other one's token can be found in its memory."""
        landing = torch.zeros(_SECRET.size, dtype=torch.uint8)
        try:
            read_memory(self.pid, address, landing)
        except OSError:
            return False
        return bytes(landing.tolist()) == _SECRET.pack(low, high)

    def can_lend(self, array: Any) -> bool:
        """Whether the other one can read this memory of ours, and gains by it: small pages are looked up one by one.

        The kernel does not read the memory of some devices.
        """
        if not self.is_reached:
            return False
        address = address_of(array)
        return self._huge_pages.hold(address, array.nbytes) and is_readable(address, array.nbytes)

    def has_ended(self) -> bool:
        """Whether either end of the connection was closed or shut down."""
        return bool(self._hang_up.poll(0))


class LentContent:
    """A piece that lies in another rank's message; it stays as it is until that rank hears that it was read."""

    def __init__(self, peer: int, pid: int, address: int) -> None:
        """Where it lies; `peer` is the rank whose process that is."""
        self._peer = peer
        self._pid = pid
        self._address = address

    def copy_to(self, region: Tensor) -> None:
        """Copied once, by the kernel."""
        self._read(self._address, region)

    def combine_into(self, region: Tensor, scratch: Tensor, combine: Callable[[Tensor, Tensor], object]) -> None:
        """Slice by slice, each copied into the same few pages of `scratch` and combined there."""
        address = self._address
        for part in region.split(_SLICE_BYTES // region.element_size()):
            landing = scratch[: part.numel()]
            self._read(address, landing)
            combine(part, landing)
            address += part.nbytes

    def _read(self, address: int, landing: Tensor) -> None:
        try:
            read_memory(self._pid, address, landing)
        except OSError as cause:
            raise TransferFailedError(self._peer, str(cause), hung=False) from cause
