"""Allreduce in wire formats, in the lab: seconds, bytes on the uplinks, and the error of the sum, by turns.

    python bench/wire_in_lab.py                     # needs root; another cluster: --cluster FILE

A round is one allreduce of float32 among all ranks, timed on the slowest; formats take turns. Bytes are those that the
kernel counted on the links of the core (`tc -s`), or on all links of a cluster without switches. Every round checks
that all ranks hold the same bits, and the relative error of the sum. CPU is the processor time of all ranks together.
Exit code 1 if int8 puts more than 0.27 of the exact bytes on the uplinks.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringweave import topology
from ringweave.comm import wire_scope
from ringweave_bench.lab_workers import LinkBytes, lab_of, run_workers

ROOT = Path(__file__).parents[1]
SAMPLE_INTERVAL_S, PAUSE_S, RUN_TIMEOUT_S = 0.1, 0.4, 600
MAX_INT8_BYTES = 0.27


def main() -> None:
    """Under a launcher a worker; else bring the lab up, run the workers in it and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=ROOT / "examples" / "clusters" / "two-racks.yaml")
    parser.add_argument("--bytes", type=int, default=25_000_000, help="size of the message")
    parser.add_argument("--rounds", type=int, default=3, help="allreduces of each turn, without the first")
    parser.add_argument("--turns", type=int, default=3, help="turns of each format")
    parser.add_argument("--formats", default="exact,bf16,int8,int4,auto", help="formats, by commas")
    parser.add_argument("--out", type=Path, default=Path("runs/wire-in-lab"), help="folder for the run")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(report(run_in_lab(options)))


def run_in_lab(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers; return their turns, each with the bytes that the links carried.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    out = options.out.absolute()
    cluster = topology.load(options.cluster)
    own = [f"--{name}={getattr(options, name)}" for name in ("bytes", "rounds", "turns", "formats")]
    with (
        lab_of(cluster, f"wire-{options.cluster.stem}") as place,
        LinkBytes(place, lambda link: "core" in link or not cluster.switches, SAMPLE_INTERVAL_S) as links,
    ):
        run_workers(place, __file__, [*own, f"--out={out}"], out / "run", timeout_s=RUN_TIMEOUT_S)
    measured = json.loads((out / "measured.json").read_text())
    for turn in measured["turns"]:
        turn["link_bytes"] = links.sent_between(turn["began"], turn["ended"]) / turn["num_rounds"]
    return measured | {"cluster": options.cluster.stem, "bytes": options.bytes}


def work(options: argparse.Namespace) -> None:
    """Run one rank's turns."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    control = dist.new_group(backend="gloo")
    count, rank, size = options.bytes // 4, dist.get_rank(), dist.get_world_size()
    own = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    wanted = own.double()
    dist.all_reduce(wanted, group=control)
    turns = []
    for _ in range(options.turns):
        for wire in options.formats.split(","):
            time.sleep(PAUSE_S)
            residual = wire_scope.new_residual(count)
            began = time.time()
            seconds, processor_s, error = [], 0.0, 0.0
            for _ in range(options.rounds + 1):
                message = own.clone()
                dist.barrier(group=control)
                started_s, used_s = time.perf_counter(), time.process_time()
                with wire_scope.encoded_as(wire, residual):
                    dist.all_reduce(message)
                took = torch.tensor(time.perf_counter() - started_s)
                processor_s = time.process_time() - used_s
                dist.all_reduce(took, dist.ReduceOp.MAX, group=control)
                seconds.append(took.item())
                error = ((message.double() - wanted).norm() / wanted.norm()).item()
                check_equal_bits(message, size, control)
            used = torch.tensor(processor_s)
            dist.all_reduce(used, group=control)
            turn = {"wire": wire, "seconds": seconds[1:], "error": error, "num_rounds": len(seconds)}
            turn["processor_s"] = used.item()
            turns.append(turn | {"began": began - PAUSE_S / 2, "ended": time.time() + PAUSE_S / 2})
    if rank == 0:
        (options.out / "measured.json").write_text(json.dumps({"turns": turns, "load": os.getloadavg()}) + "\n")
    time.sleep(2 * PAUSE_S)
    dist.destroy_process_group()


def check_equal_bits(message: torch.Tensor, size: int, control: Any) -> None:
    """Refuse results whose bits differ between ranks.

    Raises:
        ValueError: They do.
    """
    digest = message.view(torch.int32).long().sum().reshape(1)
    digests = [torch.zeros_like(digest) for _ in range(size)]
    dist.all_gather(digests, digest, group=control)
    if len({int(each) for each in digests}) > 1:
        raise ValueError(f"results of {size} ranks: checksums {digests}, expected equal ones")


def report(measured: dict[str, Any]) -> int:
    """Print the medians, and return the exit code."""
    print(f"{measured['cluster']}, {measured['bytes'] / 1e6:g} MB, load {measured['load'][0]:.1f}, measured")
    print(f"{'format':8} {'seconds':>18} {'of exact':>9} {'link bytes':>11} {'of exact':>9} {'error':>9} {'CPU':>7}")
    found = {}
    for wire in dict.fromkeys(turn["wire"] for turn in measured["turns"]):
        turns = [turn for turn in measured["turns"] if turn["wire"] == wire]
        seconds = sorted(second for turn in turns for second in turn["seconds"])
        found[wire] = (
            statistics.median(seconds),
            statistics.median(turn["link_bytes"] for turn in turns),
            max(turn["error"] for turn in turns),
            statistics.median(turn["processor_s"] for turn in turns),
        )
        (median_s, sent, error, cpu_s), (exact_s, exact_sent, *_) = found[wire], next(iter(found.values()))
        spread = f"{median_s:.3f} ({seconds[0]:.3f}-{seconds[-1]:.3f})"
        times = f"{wire:8} {spread:>18} {median_s / exact_s:9.3f}"
        print(f"{times} {sent / 1e6:8.2f} MB {sent / exact_sent:9.3f} {error:9.1e} {cpu_s:5.2f} s")
    if "int8" not in found or "exact" not in found:
        return 0
    return int(found["int8"][1] > MAX_INT8_BYTES * found["exact"][1])


if __name__ == "__main__":
    main()
