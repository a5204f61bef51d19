"""Allreduce of four systems by turns on ranks that share one device; the time is the slowest rank's, values checked.

Systems: ringweave on device tensors, ringweave on CPU tensors, Gloo on device tensors, NCCL over sockets. A system that
fails on any rank is left out from then on, and its error is recorded.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import (
    BenchDevice,
    agree_max,
    clock,
    first_line,
    join_world,
    new_group,
    rank_parser,
    reduce_and_wait,
    reduce_with_limit,
    save_json,
)
from torch import Tensor

PERIOD = 97
"""Values repeat after so many elements, and every sum of them is exact in fp32."""


class ReduceSystem:
    """One system: a group, the place of its tensors, and its measured seconds by size."""

    def __init__(self, name: str, make_group: Callable[[], Any], place: torch.device) -> None:
        self.name, self.place = name, place
        self._make_group = make_group
        self.group: Any = None
        self.seconds: dict[int, list[float]] = {}
        self.error: str | None = None

    def reduce(self, message: Tensor) -> None:
        """Run one allreduce."""
        (reduce_with_limit if self.name == "nccl" else reduce_and_wait)(message, self.group)

    def form(self) -> None:
        """Make its group."""
        self.group = self._make_group()

    def summary(self) -> dict[str, Any]:
        """Return medians by size, and the error if it was left out."""
        sizes = {
            str(size): {"median_s": statistics.median(seconds), "min_s": min(seconds), "rounds_s": seconds}
            for size, seconds in self.seconds.items()
            if seconds
        }
        return {"error": self.error, "sizes": sizes}


def main() -> None:
    """Measure all systems, by turns, and write the result after every round."""
    parser = rank_parser(__doc__)
    parser.add_argument("--sizes", default="25000000", help="bytes, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = BenchDevice(options.device)
    control = join_world()
    systems = make_systems(device, control, options.without.split(","))
    document: dict[str, Any] = {"world_size": dist.get_world_size(), "device": options.device, "rounds_done": 0}
    document["link_bytes_per_s"] = measure_link(control, 2_000_000 if options.short else 12_500_000)
    deadline_s = time.monotonic() + options.budget_s
    sizes = [int(text) for text in options.sizes.split(",")]
    for system in systems:
        guard(system, lambda system=system: system.form(), control)
        guard(system, lambda system=system: [check_once(system, size, device, control) for size in sizes], control)
        report(document, systems, options)
    for number in range(options.rounds):
        for system in sorted(systems, key=lambda each: each.name, reverse=number % 2 == 1):
            for size in sizes:
                guard(system, lambda system=system, size=size: take_turn(system, size, device, control), control)
        document["rounds_done"] = number + 1
        report(document, systems, options)
        if agree_max(float(time.monotonic() > deadline_s), control):
            break
    document["call_s"] = guard(systems[0], lambda: call_times(systems[0], device, control), control)
    document["done"] = True
    report(document, systems, options)
    dist.destroy_process_group()


def make_systems(device: BenchDevice, control: Any, without: list[str]) -> list[ReduceSystem]:
    """Return the systems that can run on this device; NCCL is the last, since it may hang."""
    cpu = torch.device("cpu")
    systems = [
        ReduceSystem("ringweave_device", lambda: dist.group.WORLD, device.device),
        ReduceSystem("ringweave_cpu", lambda: dist.group.WORLD, cpu),
        ReduceSystem("gloo_device", lambda: control, device.device),
        ReduceSystem("nccl", lambda: new_group("nccl"), device.device),
    ]
    for system in systems:
        if system.name in without:
            system.error = "left out by --without"
        elif system.name == "nccl" and not device.is_cuda:
            system.error = "skipped: NCCL needs a GPU"
    return systems


def guard(system: ReduceSystem, action: Callable[[], Any], control: Any) -> Any:
    """Run a part of a system on all ranks; after an error on any rank the system is left out on all."""
    if system.error is not None:
        return None
    result = None
    try:
        result = action()
    except Exception as error:
        system.error = first_line(error)
    if agree_max(float(system.error is not None), control) and system.error is None:
        system.error = "failed on another rank"
    return result


def pattern(num_elements: int, place: torch.device) -> Tensor:
    """Return this rank's message: small whole numbers."""
    values = torch.arange(num_elements, device=place, dtype=torch.int32) % PERIOD
    return (values * (dist.get_rank() + 1)).float()


def check_once(system: ReduceSystem, num_bytes: int, device: BenchDevice, control: Any) -> None:
    """Run once without a clock, which also connects the ranks, and compare every element."""
    message = pattern(num_bytes // 4, system.place)
    system.reduce(message)
    device.synchronize()
    check_sum(message)
    agree_max(0.0, control)


def check_sum(message: Tensor) -> None:
    """Compare a reduced message with the sum that every rank can compute.

    Raises:
        ValueError: An element is wrong.
    """
    size = dist.get_world_size()
    expected = (torch.arange(message.numel(), device=message.device, dtype=torch.int32) % PERIOD).float()
    num_wrong = int((message != expected * (size * (size + 1) // 2)).sum())
    if num_wrong:
        raise ValueError(f"allreduce: {num_wrong} of {message.numel()} elements wrong, expected 0")


def take_turn(system: ReduceSystem, num_bytes: int, device: BenchDevice, control: Any) -> None:
    """Measure one allreduce, and compare every element."""
    message = pattern(num_bytes // 4, system.place)
    seconds = clock(lambda: system.reduce(message), device, control)
    check_sum(message)
    system.seconds.setdefault(num_bytes, []).append(seconds)


def call_times(system: ReduceSystem, device: BenchDevice, control: Any) -> dict[str, float]:
    """Return the seconds that the asynchronous call itself takes, for 1 MB."""
    seconds = []
    for _ in range(30):
        message = pattern(250_000, device.device)
        device.synchronize()
        agree_max(0.0, control)
        started_s = time.perf_counter()
        work = dist.all_reduce(message, group=system.group, async_op=True)
        seconds.append(time.perf_counter() - started_s)
        assert work is not None
        work.wait()
    device.synchronize()
    return {"median_s": statistics.median(seconds), "max_s": max(seconds)}


def measure_link(control: Any, num_bytes: int) -> float:
    """Return the bytes per second of one stream from the first rank to the farthest node's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    by_rank: list[Any] = [None] * size
    dist.all_gather_object(by_rank, node_letter(), group=control)
    far = next((other for other in range(size) if by_rank[other] != by_rank[0]), size - 1)
    message = torch.ones(num_bytes // 4)
    seconds = 0.0
    for _ in range(2):
        agree_max(0.0, control)
        started_s = time.perf_counter()
        if rank == 0:
            dist.send(message, far, group=control)
        elif rank == far:
            dist.recv(message, 0, group=control)
        seconds = agree_max(time.perf_counter() - started_s if rank == far else 0.0, control)
    return num_bytes / seconds


def node_letter() -> str:
    """Return the first letter of this rank's node, which is its rack in the two-racks lab."""
    return os.environ.get("RINGWEAVE_NODE", "x")[:1]


def report(document: dict[str, Any], systems: list[ReduceSystem], options: Any) -> None:
    """Write the present state, by rank 0."""
    if dist.get_rank() == 0:
        save_json(options.result, document | {"systems": {each.name: each.summary() for each in systems}})


if __name__ == "__main__":
    main()
