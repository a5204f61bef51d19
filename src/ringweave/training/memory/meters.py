"""Meters of the memory in which a rank computes: that of a card, by torch's allocator, or of a control group."""

import abc
import contextlib
import ctypes
import os

import torch
import torch.distributed as dist
from torch import nn

from ringweave.comm import plan_choice
from ringweave.comm.native_backend import NativeProcessGroup
from ringweave.topology.cgroups import ProcessMemory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt."""
_MAPPED_BYTES, _KEPT_BYTES = 2**20, 2**25
"""Values of both: pieces from this size on are mapped one by one; and glibc's own largest value, where none is set."""


class MemoryMeter(abc.ABC):
    """Meter of the memory in which this rank computes."""

    counts_freed = False
    """The peak includes freed memory that is kept between passes."""

    @abc.abstractmethod
    def limit_bytes(self) -> float:
        """Return the bytes that this process may use now."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Let `peak_bytes` start anew."""

    @abc.abstractmethod
    def peak_bytes(self) -> float:
        """Return the most bytes in use since the last reset."""

    @abc.abstractmethod
    def release_freed(self) -> None:
        """Give freed memory back: pieces of other sizes would lie between those of the next pass."""

    @abc.abstractmethod
    def keep_freed(self, *, is_kept: bool) -> None:
        """Keep freed memory between passes, which is faster, or give it back at once, as a small memory needs."""

    def num_oom_kills(self) -> int:
        """Return the processes that the kernel has killed for this memory."""
        return 0


class CudaMeter(MemoryMeter):
    """Memory of a card, of which the workers that share it get equal parts.

    Peaks are those of torch's allocator, whose calls need no wait for the card. Memory that CUDA, NCCL and other
    processes take lies outside of it, so it is left out of the limit and never part of a peak.

    Source: torch.cuda.mem_get_info, memory_reserved, max_memory_allocated, set_per_process_memory_fraction.
    """

    def __init__(self, device: torch.device, num_sharing: int) -> None:
        """Create it; `num_sharing` workers compute on this card."""
        self._device, self._num_sharing = device, num_sharing

    def limit_bytes(self) -> float:
        """Return the bytes that this process may have in tensors.

        The cached bytes of its allocator are free to it. Beside other workers an equal part of the card is the limit,
        also while they have taken less, and never more than is free; so is the script's own fraction of the card.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        own = free + torch.cuda.memory_reserved(self._device)
        fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        return min(own, fraction * total, total / self._num_sharing)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> float:
        return torch.cuda.max_memory_allocated(self._device)

    def release_freed(self) -> None:
        torch.cuda.empty_cache()

    def keep_freed(self, *, is_kept: bool) -> None:
        """Do nothing: torch keeps it, and gives it back before it reports an error."""


class HostMeter(MemoryMeter):
    """Memory of this process, limited by its control group."""

    def __init__(self, process: ProcessMemory, limit_bytes: float) -> None:
        self._process, self._limit_bytes = process, limit_bytes

    def limit_bytes(self) -> float:
        return self._process.limit_bytes() or self._limit_bytes

    def reset_peak(self) -> None:
        self._process.reset_peak()

    def peak_bytes(self) -> float:
        return self._process.peak_bytes()

    def release_freed(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def keep_freed(self, *, is_kept: bool) -> None:
        """Let glibc keep freed memory, or map each tensor by itself, which costs page faults and leaves no holes."""
        self.counts_freed = is_kept
        with contextlib.suppress(OSError, AttributeError):
            for option, name in (
                (_M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_"),
                (_M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_"),
            ):
                of_user = os.environ.get(name, "")
                kept_bytes = int(of_user) if of_user.isdecimal() else _KEPT_BYTES
                ctypes.CDLL(None).mallopt(option, kept_bytes if is_kept else _MAPPED_BYTES)

    def num_oom_kills(self) -> int:
        return self._process.num_oom_kills()


def find_meter(model: nn.Module) -> MemoryMeter | None:
    """Return the meter of the model's device; None for a CPU without a limit, or a model on several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        return None
    (device,), num_local_ranks = devices, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if device.type == "cuda":
        return CudaMeter(device, num_sharing(num_local_ranks))
    process = ProcessMemory(num_local_ranks)
    limit = process.limit_bytes() if device.type == "cpu" else None
    return None if limit is None else HostMeter(process, limit)


def num_sharing(num_local_ranks: int) -> int:
    """Return the workers of this node that share a card.

    The default group knows the cards that each of them sees: where a launcher gives every worker one of its own, each
    sees a single card, and none is shared. In a group of another backend, all are taken to see the same cards.
    """
    group = dist.group.WORLD
    if isinstance(group, NativeProcessGroup):
        locations = [member.location for member in group.members.ranks]
        return plan_choice.num_ranks_per_gpu(locations, group.members.own_info.location.node)
    return -(-num_local_ranks // torch.cuda.device_count())
