"""Device of a measurement: the GPU, or the CPU in its place, so that every program here also runs without a GPU."""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

NUM_STREAMS = 6


@final
class BenchDevice:
    """Streams, synchronisation, busy time and memory of one device; on the CPU most of it does nothing."""

    def __init__(self, kind: str) -> None:
        """Make it the current device; `kind` is `cuda` or `cpu`."""
        self.is_cuda = kind == "cuda"
        self.device = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")
        self._cycles_per_s = 1.7e9
        if self.is_cuda:
            torch.cuda.set_device(0)
            self._streams = [torch.cuda.Stream() for _ in range(NUM_STREAMS)]

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def calibrate_busy(self) -> None:
        """Measure the clock of `torch.cuda._sleep`."""
        if not self.is_cuda:
            return
        torch.cuda._sleep(1_000_000)
        self.synchronize()
        started_s = time.perf_counter()
        torch.cuda._sleep(50_000_000)
        self.synchronize()
        self._cycles_per_s = 50_000_000 / (time.perf_counter() - started_s)

    def keep_busy(self, seconds: float) -> None:
        """Keep the current stream busy; the call returns at once. The CPU sleeps instead."""
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
        else:
            time.sleep(seconds)

    def use_stream(self, index: int) -> contextlib.AbstractContextManager[object]:
        """Return a context in which stream `index` is the current one."""
        return torch.cuda.stream(self._streams[index % NUM_STREAMS]) if self.is_cuda else contextlib.nullcontext()

    def order_after(self, index: int) -> None:
        """Make the current stream wait for stream `index`."""
        if self.is_cuda:
            torch.cuda.current_stream().wait_stream(self._streams[index % NUM_STREAMS])

    @contextlib.contextmanager
    def forbid_synchronization(self, *, is_on: bool = True) -> Iterator[None]:
        """Make a call that synchronises with the device an error."""
        if not (self.is_cuda and is_on):
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def memory(self) -> dict[str, int]:
        """Return this process's bytes in the caching allocator, and the bytes used on the whole device."""
        if not self.is_cuda:
            return {}
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "used_on_device_bytes": total_bytes - free_bytes,
        }


def rank_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs that run as ranks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--result", type=Path, required=True, help="JSON file; ranks above 0 write beside it")
    parser.add_argument("--budget-s", type=float, default=60.0, help="time to measure in")
    parser.add_argument("--short", action="store_true", help="tiny sizes")
    parser.add_argument("--without", default="", help="names that are left out, with commas")
    return parser


def join_world(timeout_s: float = 60.0) -> dist.ProcessGroup:
    """Make ringweave's default group, and return a Gloo group of all ranks for control messages.

    NCCL refuses two ranks of one host on one GPU; a host name of its own for every rank lets it run.
    """
    os.environ["NCCL_HOSTID"] = f"one-gpu-{os.environ.get('RANK', '0')}"
    os.environ.setdefault("NCCL_P2P_DISABLE", "1")
    os.environ.setdefault("NCCL_SHM_DISABLE", "1")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_NET", "Socket")
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo").split(",")[0])
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.set_num_threads(1)
    dist.init_process_group("ringweave", timeout=timedelta(seconds=timeout_s))
    return new_group("gloo", timeout_s)


def new_group(backend: str, timeout_s: float = 60.0) -> Any:
    """Return a group of all ranks on torch's own backend of that name."""
    return dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))


def agree_max(value: float, control: Any) -> float:
    """Return the largest value of all ranks; also a barrier."""
    message = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=control)
    return message.item()


def first_line(error: BaseException) -> str:
    """Return type and first line of an error's text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def save_json(path: Path, document: Any) -> None:
    """Replace a JSON file at once, so that a reader never sees half of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def clock(action: Callable[[], object], device: BenchDevice, control: Any) -> float:
    """Return the seconds of the slowest rank, from a common begin to the end of all work on the device."""
    device.synchronize()
    agree_max(0.0, control)
    started_s = time.perf_counter()
    action()
    device.synchronize()
    return agree_max(time.perf_counter() - started_s, control)


def reduce_with_limit(tensor: Tensor, group: Any, limit_s: float = 20.0) -> None:
    """Allreduce on NCCL, whose wait never ends by itself; at the limit its communicator is aborted.

    Raises:
        TimeoutError: The limit has passed.
    """
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    deadline_s = time.monotonic() + limit_s
    while not work.is_completed():
        if time.monotonic() > deadline_s:
            group._get_backend(tensor.device).abort()
            raise TimeoutError(f"NCCL: not finished after {limit_s:g} s")
        time.sleep(1e-4)
    work.wait()


def reduce_and_wait(tensor: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
    """Allreduce by an asynchronous call and its wait: the form that DDP uses."""
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    assert work is not None
    work.wait()
