"""Facts about the machine, and its ceilings: copies, events, waits on memory, additions. One process, one JSON file."""

import argparse
import contextlib
import ctypes
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import first_line, save_json

COPY_SIZES = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
TRIALS = {
    "unshare_net": "unshare -n true",
    "unshare_uts_mount": "unshare --net --uts --mount --propagation private true",
    "veth": "unshare -n ip link add name t0 type veth peer name t1",
    "bridge": "unshare -n ip link add name t2 type bridge",
    "tbf": "unshare -n sh -c 'ip link set lo up; tc qdisc add dev lo root tbf rate 1mbit burst 80kb limit 1mb'",
    "netns": "ip netns add rwtrial && ip netns delete rwtrial",
    "ip": "ip -V",
    "tc": "tc -V",
    "gpu": "nvidia-smi -L",
    "driver": "nvidia-smi --query-gpu=driver_version,memory.total,compute_mode --format=csv,noheader",
    "pcie": "nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv,noheader",
    "kernel": "uname -r",
    "cgroup": "stat -fc %T /sys/fs/cgroup",
    "modprobe_veth": "modprobe veth; modprobe bridge; modprobe sch_tbf",
    "libc": "ldd --version | head -n 1",
    "os": "sed -n 's/^PRETTY_NAME=//p' /etc/os-release",
}
"""Name -> shell command that is really tried; a new network namespace goes away with what was made in it."""


def facts() -> dict[str, Any]:
    """Return versions, limits, and the outcome of each trial."""
    found: dict[str, Any] = {name: try_command(command) for name, command in TRIALS.items()}
    found["programs"] = {name: shutil.which(name) for name in ("ip", "tc", "nsenter", "unshare", "mount", "mountpoint")}
    found["mps_program"] = shutil.which("nvidia-cuda-mps-control")
    found["num_cpus"] = len(os.sched_getaffinity(0))
    found["locked_memory_limit"] = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found["python"], found["torch"] = platform.python_version(), torch.__version__
    found["cuda"] = torch.version.cuda
    with contextlib.suppress(Exception):
        found["nccl"] = torch.cuda.nccl.version()
    found["is_nccl_available"] = dist.is_nccl_available()
    found["uid"] = os.geteuid()
    found["load"] = os.getloadavg()
    with contextlib.suppress(Exception):
        import ringweave

        found["ringweave"] = str(Path(ringweave.__file__).parent)
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
        found["stream_mem_ops"] = stream_memory_operations()
    return found


def try_command(command: str) -> dict[str, Any]:
    """Return exit code and output of a shell command."""
    try:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"rc": -1, "said": str(error)[:300]}
    return {"rc": done.returncode, "said": (done.stdout + done.stderr).strip()[:400]}


def stream_memory_operations() -> dict[str, Any]:
    """Return the device's attributes about waits on memory, by the driver's library (its numbers, from cuda.h)."""
    numbers = {"can_use_stream_mem_ops_v1": 92, "can_use_64_bit": 122, "can_use_wait_value_nor": 123}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        value, found = ctypes.c_int(), {}
        for name, number in numbers.items():
            code = driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
            found[name] = value.value if code == 0 else f"error {code}"
    except OSError as error:
        return {"error": str(error)}
    return found


def ceilings(is_cuda: bool, *, is_short: bool) -> dict[str, Any]:
    """Return rates of copies and additions, and latencies."""
    found: dict[str, Any] = {}
    parts: dict[str, Callable[[], Any]] = {"cpu_add": lambda: additions(1_000_000 if is_short else 6_250_000)}
    if is_cuda:
        parts |= {
            "copies": lambda: {str(size): copy_rates(size) for size in COPY_SIZES},
            "both_ways": lambda: {str(size): both_ways(size) for size in COPY_SIZES[2:]},
            "events": event_latency,
            "wait_value": wait_value_latency,
            "register": register_latency,
        }
    else:
        found["skipped"] = "copies, events and waits on memory need a GPU"
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:
            found[name] = first_line(error)
    return found


def additions(num_elements: int) -> dict[str, float]:
    """Return bytes of the message added per second on one thread."""
    torch.set_num_threads(1)
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = torch.ones(num_elements, dtype=dtype), torch.ones(num_elements, dtype=dtype)
        seconds = repeat(lambda a=a, b=b: a.add_(b), lambda: None)
        found[str(dtype).removeprefix("torch.")] = a.nbytes / seconds
    return found


def repeat(action: Callable[[], object], wait: Callable[[], object], times: int = 20) -> float:
    """Return the median seconds of an action with its wait."""
    seconds = []
    for number in range(times + 3):
        started_s = time.perf_counter()
        action()
        wait()
        if number >= 3:
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def copy_rates(num_bytes: int) -> dict[str, float]:
    """Return bytes per second of each direction, from pinned and pageable memory."""
    device = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    found = {}
    for kind in ("pinned", "pageable"):
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned").copy_(device)
        down = repeat(lambda host=host: host.copy_(device, non_blocking=True), torch.cuda.synchronize)
        up = repeat(lambda host=host: device.copy_(host, non_blocking=True), torch.cuda.synchronize)
        found[f"to_host_{kind}"], found[f"to_device_{kind}"] = num_bytes / down, num_bytes / up
    return found


def both_ways(num_bytes: int) -> float:
    """Return bytes per second of each direction while both are in use."""
    one, two = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    host_one, host_two = (torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def copy() -> None:
        with torch.cuda.stream(streams[0]):
            host_one.copy_(one, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            two.copy_(host_two, non_blocking=True)

    return num_bytes / repeat(copy, torch.cuda.synchronize)


def event_latency() -> dict[str, float]:
    """Return seconds to record an event, to wait for it, and to see it by polling, after a small copy."""
    host, device = torch.zeros(1024, pin_memory=True), torch.zeros(1024, device="cuda")
    plain, blocking = torch.cuda.Event(), torch.cuda.Event(blocking=True)

    def poll() -> None:
        while not plain.query():
            pass

    def start(event: torch.cuda.Event) -> None:
        host.copy_(device, non_blocking=True)
        event.record()

    return {
        "record_s": repeat(plain.record, lambda: None),
        "copy_and_synchronize_s": repeat(lambda: start(plain), plain.synchronize),
        "copy_and_blocking_synchronize_s": repeat(lambda: start(blocking), blocking.synchronize),
        "copy_and_poll_s": repeat(lambda: start(plain), poll),
    }


def wait_value_latency() -> dict[str, Any]:
    """Return seconds from a write to pinned memory until a stream that waits for it has gone on."""
    driver = ctypes.CDLL("libcuda.so.1")
    word = torch.zeros(16, dtype=torch.int32, pin_memory=True)
    stream, event, seconds = torch.cuda.Stream(), torch.cuda.Event(), []
    wait = getattr(driver, "cuStreamWaitValue32_v2", driver.cuStreamWaitValue32)
    for number in range(1, 31):
        code = wait(ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(word.data_ptr()), ctypes.c_uint32(number), 0)
        if code != 0:
            word.fill_(2**30)
            return {"error": f"cuStreamWaitValue32: {code}"}
        event.record(stream)
        time.sleep(0.002)
        was_early = event.query()
        started_s = time.perf_counter()
        word[0] = number
        while not event.query():
            if time.perf_counter() - started_s > 2:
                word.fill_(2**30)
                return {"error": "the stream did not go on within 2 s"}
        seconds.append(time.perf_counter() - started_s)
        if was_early:
            return {"error": "the stream did not wait"}
    return {"median_s": statistics.median(seconds), "max_s": max(seconds)}


def register_latency() -> dict[str, float]:
    """Return seconds to register and release 64 MiB of ordinary memory for copies."""
    host = torch.ones(2**24)
    runtime: Any = torch.cuda.cudart()
    started_s = time.perf_counter()
    code = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    taken_s = time.perf_counter() - started_s
    runtime.cudaHostUnregister(host.data_ptr())
    return {"register_64_MiB_s": taken_s, "code": int(code)}


def main() -> None:
    """Write facts or ceilings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["facts", "ceilings"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    is_facts = options.what == "facts"
    save_json(options.result, facts() if is_facts else ceilings(options.device == "cuda", is_short=options.short))


if __name__ == "__main__":
    main()
