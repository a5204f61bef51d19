"""Seconds of an allreduce by every schedule on lab clusters, beside the measured rate of every link.

    python bench/measure_every_schedule.py --clusters eight-nodes two-racks --out runs/measured    # needs root

One job a cluster, one process group a schedule, no CPU quotas. The schedules take turns, forwards and backwards; in its
turn a schedule runs several times, as in training: the first two are not counted, one in each of the group's channels,
whose connections have been idle. There is a barrier before each allreduce; its time is the slowest rank's. Sums are
checked. What it writes is what simulation/against_measured.py reads: CLUSTER.json in the folder, for each cluster.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ringweave import environment, schedules, topology, units
from ringweave_bench import link_rates, machine_description
from ringweave_bench.bench_cluster import LabBenchCluster
from ringweave_bench.lab_workers import lab_of, run_workers

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
NAMES = tuple(name for name in schedules.SCHEDULE_NAMES if name != schedules.NATIVE)
TURNS = {1_000_000: (2, 4), 5_000_000: (2, 2), 25_000_000: (1, 3)}
"""Bytes -> turns of each schedule, and what is counted in one."""
NUM_UNCOUNTED = 2
RUN_TIMEOUT_S = 900


def main() -> None:
    """Under a launcher a worker; else one lab and one job for each cluster."""
    options = parse_options()
    sizes = [units.parse_bytes(size) for size in options.sizes.split(",")]
    if "RANK" in os.environ:
        work(options.out, sizes)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.clusters:
        document = measure(name, options.out.absolute() / f"run-{name}", options.sizes)
        (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", default=["eight-nodes"], help="names in examples/clusters")
    parser.add_argument("--sizes", default="1MB,5MB,25MB", help="of these")
    parser.add_argument("--out", type=Path, default=Path("runs/measured"), help="folder for the results")
    return parser.parse_args()


def measure(name: str, run_dir: Path, sizes: str) -> dict[str, Any]:
    """Rates of the links, then every schedule.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    cluster = topology.load(CLUSTERS / f"{name}.yaml")
    with lab_of(cluster, f"measure-{name}", "never") as place:
        rates = link_rates.measure_link_rates(LabBenchCluster(place))
        own = ["--out", str(run_dir), "--sizes", sizes]
        output = run_workers(place, __file__, own, run_dir, timeout_s=RUN_TIMEOUT_S)
    (run_dir / "output.log").write_text(output)
    about = {
        "cluster": name,
        **machine_description.describe_machine(),
        "rates_bytes_per_s": rates.best_known,
        "notes": list(rates.notes),
    }
    return about | {"measured": json.loads((run_dir / "measured.json").read_text())}


def work(run_dir: Path, sizes: Sequence[int]) -> None:
    """Run one rank's measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    control = dist.new_group(backend="gloo")
    groups = {name: _forced(name) for name in NAMES}
    found: list[dict[str, Any]] = []
    for num_bytes in sizes:
        num_turns, num_counted = TURNS[num_bytes]
        message = torch.empty(num_bytes // 4)
        taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in NAMES}
        for turn in range(num_turns):
            for name in NAMES if turn % 2 else reversed(NAMES):
                calls = [_timed(message, groups[name], control) for _ in range(NUM_UNCOUNTED + num_counted)]
                taken[name] += calls[NUM_UNCOUNTED:]
                if dist.get_rank() == 0:
                    print(f"{time.time():.3f} {name} {units.format_bytes(num_bytes)}", *calls, flush=True)
        for name, calls in taken.items():
            kinds = zip(("seconds", "processor_s", "machine_s"), zip(*calls, strict=True), strict=True)
            found.append({"schedule": name, "bytes": num_bytes} | {kind: list(values) for kind, values in kinds})
    if dist.get_rank() == 0:
        (run_dir / "measured.json").write_text(json.dumps(found) + "\n")
    dist.destroy_process_group()


def _forced(name: str) -> dist.ProcessGroup:
    """A group of all ranks that runs everything by one schedule."""
    os.environ[environment.SCHEDULE] = name
    group = dist.new_group(backend="ringweave")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _timed(message: torch.Tensor, group: dist.ProcessGroup, control: dist.ProcessGroup) -> tuple[float, float, float]:
    """Seconds of the slowest rank, processor time of all ranks, and of everything on the machine, in ticks of 10 ms."""
    message.fill_(dist.get_rank() + 1)
    begun_machine_s = _machine_s()
    dist.barrier(control)
    begun_s, begun_processor_s = time.perf_counter(), time.process_time()
    dist.all_reduce(message, group=group)
    took = torch.tensor([time.perf_counter() - begun_s], dtype=torch.float64)
    worked = torch.tensor([time.process_time() - begun_processor_s], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=control)
    dist.all_reduce(worked, group=control)
    machine_s = _machine_s() - begun_machine_s
    count = dist.get_world_size()
    if not bool((message == count * (count + 1) / 2).all()):
        raise SystemExit("allreduce: a wrong sum. Do not trust the times.")
    return float(took), float(worked), machine_s


def _machine_s() -> float:
    """Seconds that the processors have worked, for whomever, packets and interrupts included."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


if __name__ == "__main__":
    main()
