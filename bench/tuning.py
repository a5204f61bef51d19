"""The schedule chosen by trials beside all candidates: `python bench/tuning.py examples/clusters/two-racks.yaml`.

In a lab (root) one job has a group that tunes itself, a group for each schedule that is tried or predicted to need at
most `--within` times the best, and one for the native backend. First the tuning group runs until its trials are over;
then all take turns, forwards and backwards, each round begun by a barrier, its time the slowest rank's, every value
checked.
Exit code 1 if the chosen schedule is more than 5 % slower than the fastest candidate, or the tuning group than the
native backend, by medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringweave import planning, schedules, telemetry, topology, units
from ringweave.planning.autotune.tuner import pick_candidates
from ringweave.planning.group_planner import GroupPlacement
from ringweave_bench.lab_workers import lab_of, run_workers

ROOT = Path(__file__).parents[1]
ALLOWED = 1.05
NUM_TUNING = 44
"""More than the trials of one size: four candidates, a warm-up, up to nine rounds."""
SHORT_S, MORE_SHORT = 0.3, 3
"""Below so many seconds there are so many times as many rounds: noise is a larger part of short ones."""
RUN_TIMEOUT_S = 1800.0


def main() -> None:
    """Under a launcher a worker; else bring the lab up and print what the workers found."""
    options = parse_options()
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(compare(options))


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--sizes", default="1MB,25MB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--within", type=float, default=1.6, help="of the best prediction: what is measured beside it")
    parser.add_argument("--order", default="block", help="of the ranks, as `ringweave run --order` takes it")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--folder", type=Path, default=Path("runs/tuning"), help="folder for the run")
    return parser.parse_args()


def work(options: argparse.Namespace) -> None:
    """Run one rank's measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    control = dist.new_group(backend="gloo")
    cluster = topology.load(options.cluster)
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, os.environ["RINGWEAVE_NODE"])
    plan = planning.plan_group(cluster, nodes)
    found = {}
    for size in map(units.parse_bytes, options.sizes.split(",")):
        best = plan.choices(size)[0].predicted_s
        names = [choice.schedule for choice in plan.choices(size) if choice.predicted_s <= options.within * best]
        tried = pick_candidates(
            plan, size, GroupPlacement(cluster=cluster, nodes=tuple(nodes)).simulate_candidates(plan, size, {})
        )
        names = [name for name in dict.fromkeys([*names, *tried]) if name != schedules.NATIVE]
        found[size] = measure(size, [*names, schedules.NATIVE], options.rounds, control)
    if dist.get_rank() == 0:
        (options.folder / "measured.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(size: int, names: list[str], num_rounds: int, control: Any) -> dict[str, list[float]]:
    """Seconds of each round of each group."""
    groups = {"tuned": dist.group.WORLD}
    for name in names:
        os.environ["RINGWEAVE_SCHEDULE"] = name
        groups[name] = dist.new_group(backend="ringweave")  # pyrefly: ignore
    del os.environ["RINGWEAVE_SCHEDULE"]
    message = torch.empty(size // 4)
    left = NUM_TUNING
    while left:
        seconds = one(message, groups["tuned"], control)
        left = max(0, left - (1 if seconds < SHORT_S else 2))  # long ones are tried less often
    num_rounds *= MORE_SHORT if seconds < SHORT_S else 1
    found: dict[str, list[float]] = {name: [] for name in groups}
    for round_index in range(num_rounds + 1):
        for name in list(groups)[:: -1 if round_index % 2 else 1]:
            seconds = one(message, groups[name], control)
            if round_index:
                found[name].append(seconds)
    for name in names:
        dist.destroy_process_group(groups[name])
    return found


def one(message: torch.Tensor, group: Any, control: Any) -> float:
    """Seconds of the slowest rank."""
    message.fill_(dist.get_rank() + 1.0)
    dist.barrier(group=control)
    started_s = time.perf_counter()
    dist.all_reduce(message, group=group)
    taken = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=control)
    assert (message == dist.get_world_size() * (dist.get_world_size() + 1) / 2).all()
    return taken.item()


def compare(options: argparse.Namespace) -> int:
    """Run the job, print a table; the exit code."""
    cluster = topology.load(options.cluster)
    folder = (options.folder / cluster.name).absolute()
    own = [str(options.cluster.absolute()), "--sizes", options.sizes, "--rounds", str(options.rounds)]
    own += ["--within", str(options.within), "--folder", str(folder)]
    environ = {"XDG_CACHE_HOME": str(folder / "no-cache" / str(os.getpid()))}
    order = ["--order", options.order]
    with lab_of(cluster, f"tuning-{os.getpid()}") as place:
        run_workers(place, __file__, own, folder, timeout_s=RUN_TIMEOUT_S, options=order, environ=environ)
    measured = json.loads((folder / "measured.json").read_text())
    tuned = [e for e in telemetry.read_last_attempt(folder / "events.jsonl") if e["kind"] == "schedule_tuned"]
    rows = [row(int(size), rounds, tuned) for size, rounds in measured.items()]
    commit = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    document = {
        "cluster": cluster.name,
        "order": options.order,
        "date": str(date.today()),
        "commit": head,
        "results": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    for each in rows:
        print(cluster.name, {key: value for key, value in each.items() if key not in ("rounds_s", "trials_s")})
    return 0 if all(each["good"] for each in rows) else 1


def row(size: int, rounds: dict[str, list[float]], tuned: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one size."""
    event = next(event for event in tuned if event["bytes"] == size)
    chosen = event["schedule"]
    medians = {name: round(statistics.median(seconds), 6) for name, seconds in rounds.items()}
    candidates = {name: seconds for name, seconds in medians.items() if name != "tuned"}
    beside_fastest = candidates[chosen] / min(candidates.values())
    beside_host = medians["tuned"] / medians[schedules.NATIVE]
    tuned_beside_fastest = medians["tuned"] / min(candidates.values())
    return {
        "bytes": size,
        "chosen": chosen,
        "good": max(beside_fastest, tuned_beside_fastest, beside_host) <= ALLOWED,
        "chosen_beside_fastest": round(beside_fastest, 4),
        "tuned_beside_fastest": round(tuned_beside_fastest, 4),
        "tuned_beside_host": round(beside_host, 4),
        "median_s": medians,
        "trials_s": event["measured_s"],
        "rounds_s": rounds,
    }


if __name__ == "__main__":
    main()
