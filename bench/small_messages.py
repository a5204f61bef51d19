"""Rate of small allreduces of ringweave beside Gloo's, on this machine, interleaved in one run; every sum is checked.

    ringweave run --workers 2 bench/small_messages.py --rounds 60

A round times a block of calls with each system, in turns of changing order, and its rate is that of the slowest rank.
`sync` waits for each call; `async` has a window of calls in flight. The third system is a process group in Python that
only passes the call on to Gloo, the floor of any backend that is written in Python. Prints one JSON document on rank 0.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo

WINDOW = 16
"""Calls in flight in asynchronous blocks."""
BLOCK_S = 0.05
"""About the duration of a block."""


class PassThroughProcessGroup(ProcessGroup):
    """Process group that gives every allreduce to Gloo and returns Gloo's own work."""

    def __init__(self, gloo: Any) -> None:
        super().__init__(gloo.rank(), gloo.size())  # pyrefly: ignore
        self._gloo = gloo

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Pass the call on."""
        return self._gloo.allreduce(tensors, opts)


class System:
    """One system: its allreduce, with the options that `torch.distributed.all_reduce` sets."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def start(self, tensor: torch.Tensor, *, is_async: bool) -> Any:
        """Call as `torch.distributed.all_reduce` does, which refuses groups that it has not made."""
        opts = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.SUM
        opts.asyncOp = is_async
        return self._group.allreduce([tensor], opts)

    def run_block(self, tensors: list[torch.Tensor], num_calls: int, *, is_async: bool) -> float:
        """Return the seconds of a block of calls."""
        started_s = time.perf_counter()
        if is_async:
            for _ in range(num_calls // WINDOW):
                works = [self.start(tensor, is_async=True) for tensor in tensors]
                for work in works:
                    work.wait()
        else:
            tensor = tensors[0]
            for _ in range(num_calls):
                work = self.start(tensor, is_async=False)
                if work is not None:
                    work.wait()
        return time.perf_counter() - started_s


def slowest(value: float, control: ProcessGroup) -> float:
    """Return the largest value of all ranks."""
    row = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(row, op=dist.ReduceOp.MAX, group=control)
    return row.item()


def check_sums(system: System, name: str, num_elements: int) -> None:
    """Check one sum of a system."""
    size, tensor = dist.get_world_size(), torch.full((num_elements,), dist.get_rank() + 1.0)
    work = system.start(tensor, is_async=True)
    work.wait()
    if not (tensor == size * (size + 1) / 2).all():
        raise AssertionError(f"{name}: wrong sum on rank {dist.get_rank()}")


def measure(
    systems: dict[str, System], control: ProcessGroup, num_bytes: int, rounds: int, *, is_async: bool
) -> dict[str, Any]:
    """Return the median rate of each system in calls per second, and ratios to Gloo's of the same round."""
    tensors = [torch.zeros(num_bytes // 4) for _ in range(WINDOW)]
    for name, system in systems.items():
        check_sums(system, name, num_bytes // 4)
    seconds = slowest(systems["gloo"].run_block(tensors, 4 * WINDOW, is_async=is_async), control) / (4 * WINDOW)
    num_calls = max(4 * WINDOW, round(BLOCK_S / seconds / WINDOW) * WINDOW)
    rates: dict[str, list[float]] = {name: [] for name in systems}
    names = list(systems)
    for number in range(rounds):
        turn = names[number % len(names) :] + names[: number % len(names)]
        for name in turn if number % 2 else reversed(turn):
            dist.barrier(group=control)
            block_s = systems[name].run_block(tensors, num_calls, is_async=is_async)
            rates[name].append(num_calls / slowest(block_s, control))
    ratios = {
        name: statistics.median(own / gloo for own, gloo in zip(rates[name], rates["gloo"], strict=True))
        for name in systems
        if name != "gloo"
    }
    return {
        "bytes": num_bytes,
        "mode": "async" if is_async else "sync",
        "calls_per_s": {name: round(statistics.median(values)) for name, values in rates.items()},
        "of_gloo": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "quartiles_of_gloo": [
            round(each, 3)
            for each in statistics.quantiles(
                [own / gloo for own, gloo in zip(rates["ringweave"], rates["gloo"], strict=True)], n=4
            )
        ],
    }


def main() -> None:
    """Interleaves the systems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,1024,4096,16384,49152", help="bytes of the messages")
    parser.add_argument("--rounds", type=int, default=60, help="of each system, size and mode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    gloo = dist.new_group(backend="gloo")
    store = PrefixStore("pass-through/", dist.distributed_c10d._get_default_store())
    passing = PassThroughProcessGroup(ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size()))  # pyrefly: ignore
    groups = {"ringweave": dist.group.WORLD, "gloo": gloo, "pass-through": passing}
    systems = {name: System(group) for name, group in groups.items()}
    rows = [
        measure(systems, gloo, num_bytes, options.rounds, is_async=is_async)
        for num_bytes in map(int, options.sizes.split(","))
        for is_async in (False, True)
    ]
    if dist.get_rank() == 0:
        summary = {"kind": "measured", "workers": dist.get_world_size(), "rounds": options.rounds}
        print(json.dumps({**summary, "torch": torch.__version__, "rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
