"""A NIC is cut to a quarter while a job runs, and given back: steps until there is a new plan, and how good it is.

    python bench/adapting/drift.py                  # eight-nodes, 5 MB a step; needs root, about 3 minutes
    python bench/adapting/drift.py --ddp            # a step is a train step of a DDP model with 5 MB of gradients
    python bench/adapting/drift.py --noise 0.1      # all links jump by 10 % every second: no new plan may come
    python bench/adapting/drift.py --cluster examples/clusters/two-racks.yaml --node a-1

A step is one allreduce of float32, or a train step; its time is that of the slowest rank by the machine's clock. First
the job runs in a lab whose cluster file has the quarter from the start: what a fresh plan makes of it. Then the lab is
as the file says, and the rates of the node's NIC change in both directions when the job is at `--cut` and `--restore`.
Exit code 1 if a new plan takes more than 20 steps, or is slower than 0.9 of a fresh one's speed, or noise brings one.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import lab_steps
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringweave import telemetry, topology
from ringweave.lab import Lab

ALLOWED_STEPS, ALLOWED_SPEED = 20, 0.9
NUM_LAST = 12
"""Steps at the end of a phase whose median is its speed."""


def main() -> None:
    """Under a launcher a worker; else bring labs up and watch."""
    options = parse_options()
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(watch(options))


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=lab_steps.ROOT / "examples" / "clusters" / "eight-nodes.yaml")
    parser.add_argument("--node", default="", help="whose NIC is cut; default: the second node")
    parser.add_argument("--bytes", type=int, default=5_000_000, help="of each step's allreduce")
    parser.add_argument("--ddp", action="store_true", help="train a model with so many bytes of gradients by DDP")
    parser.add_argument("--cut", type=int, default=45, help="step at which the NIC is cut")
    parser.add_argument("--restore", type=int, default=100, help="step at which it is given back")
    parser.add_argument("--steps", type=int, default=150, help="of the whole job")
    parser.add_argument("--noise", type=float, default=0.0, help="instead: links jump by this fraction every second")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--folder", type=Path, default=Path("runs/drift"), help="folder for the runs")
    return parser.parse_args()


def work(options: argparse.Namespace) -> None:
    """Run the steps of one rank, and write a line for each to its own file."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    take_step = training_step(options.bytes) if options.ddp else allreduce_step(options.bytes)
    lines = lab_steps.Lines(options.folder, dist.get_rank())
    for _ in range(options.steps):
        begun_s = time.time()
        take_step()
        lines.write(begun_s)
    dist.destroy_process_group()


def allreduce_step(num_bytes: int) -> Callable[[], None]:
    """Return a step of one allreduce whose values are checked."""
    gradient = torch.ones(num_bytes // 4)

    def step() -> None:
        gradient.fill_(1.0)
        dist.all_reduce(gradient)
        assert (gradient == dist.get_world_size()).all()

    return step


def training_step(num_bytes: int) -> Callable[[], None]:
    """Return a train step by DDP of two square layers with so many bytes of gradients."""
    torch.manual_seed(dist.get_rank())
    width = int((num_bytes / 8) ** 0.5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.randn(4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()

    return step


def watch(options: argparse.Namespace) -> int:
    """Run everything, print it; the exit code."""
    cluster = topology.load(options.cluster)
    node = options.node or cluster.nodes[1].name
    links = links_of(cluster, node)
    if options.noise:
        changed = run(options, cluster, "noise", options.steps, lambda place, step: jump(place, options.noise))
        document: dict[str, Any] = {"noise": options.noise, "plan_changes": len(changed["changes"]), "good": False}
        document["good"] = not changed["changes"]
    else:
        fresh = run(options, slowed(cluster, node), "fresh", options.cut, lambda place, step: None)
        both = run(options, cluster, "drift", options.steps, lambda place, step: cut(place, links, step, options))
        document = judge(options, fresh, both)
    document |= {
        "cluster": cluster.name,
        "node": node,
        "bytes": options.bytes,
        "ddp": options.ddp,
        "steps": options.steps,
    }
    document |= {"date": str(date.today()), "commit": lab_steps.commit()}
    text = json.dumps(document, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if document["good"] else 1


def judge(options: argparse.Namespace, fresh: dict[str, Any], both: dict[str, Any]) -> dict[str, Any]:
    """Judge the steps until new plans, and speeds beside those of fresh plans."""
    steps_s = both["steps_s"]
    phases = {"before": options.cut, "cut": options.restore, "restored": options.steps}
    ends = {name: statistics.median(steps_s[end - NUM_LAST : end]) for name, end in phases.items()}
    fresh_s = statistics.median(fresh["steps_s"][-NUM_LAST:])
    first = {"cut": options.cut, "restored": options.restore}
    replanned = {
        name: next((c["step"] - begin for c in both["changes"] if begin <= c["step"] < phases[name]), None)
        for name, begin in first.items()
    }
    speed = {"cut": fresh_s / ends["cut"], "restored": ends["before"] / ends["restored"]}
    unmended_s = statistics.median(steps_s[options.cut + 1 : options.cut + 5])
    is_soon = all(steps is not None and steps <= ALLOWED_STEPS for steps in replanned.values())
    return {
        "good": is_soon and all(value >= ALLOWED_SPEED for value in speed.values()),
        "steps_until_new_plan": replanned,
        "speed_of_fresh_plan": speed,
        "median_step_s": ends | {"fresh_plan": fresh_s, "old_plan_after_cut": unmended_s},
        "changes": both["changes"],
        "fresh_tuned": fresh["tuned"],
        "tuned": both["tuned"],
        "steps_s": steps_s,
    }


def run(
    options: argparse.Namespace, cluster: topology.Cluster, name: str, steps: int, on_step: Callable[[Lab, int], None]
) -> dict[str, Any]:
    """Run the job in a lab of its own; `on_step` is called with each step that the first rank has begun.

    Raises:
        SystemExit: The job failed.
    """
    folder = (options.folder / name).absolute()
    own = ["--steps", str(steps), "--bytes", str(options.bytes), "--folder", str(folder)]
    own += ["--ddp"] if options.ddp else []
    environ = {"XDG_CACHE_HOME": str(folder / "no-cache" / str(os.getpid()))}
    return gather(folder, lab_steps.run(__file__, own, cluster, folder, on_step, environ))


def gather(folder: Path, steps: list[lab_steps.Step]) -> dict[str, Any]:
    """Return the seconds of each step on the slowest rank, and the plan events with their steps."""
    events = list(telemetry.read_events(folder / "events.jsonl"))
    changes = [
        {"step": sum(step.ended_s < event["time"] for step in steps), "why": event["why"], "rates": event["rates"]}
        for event in events
        if event["kind"] == "plan_changed"
    ]
    tuned = [event for event in events if event["kind"] == "schedule_tuned"]
    keys = ("version", "schedule", "bytes", "measured_s")
    return {
        "steps_s": [step.ended_s - step.last_begun_s for step in steps],
        "changes": changes,
        "tuned": [{key: event[key] for key in keys} for event in tuned],
    }


def cut(place: Lab, links: tuple[str, str], step: int, options: argparse.Namespace) -> None:
    """Cut both directions at one step, and give them back at another."""
    if step in (options.cut, options.restore):
        for link in links:
            place.set_rate(link, place.rate(link) * (0.25 if step == options.cut else 4))
        print(f"step {step}: {', '.join(links)} at {place.rate(links[0]) * 8e-6:g} Mbit/s", file=sys.stderr)


LAST_JUMP = [0.0]


def jump(place: Lab, noise: float) -> None:
    """Give every link of the lab a rate near to its own, once a second."""
    if time.monotonic() < LAST_JUMP[0] + 1:
        return
    LAST_JUMP[0] = time.monotonic()
    for node in place.cluster.nodes:
        for link in links_of(place.cluster, node.name):
            place.set_rate(link, node.rate_bytes_per_s * random.uniform(1 - noise, 1 + noise))


def links_of(cluster: topology.Cluster, node: str) -> tuple[str, str]:
    """Return both directions of a node's NIC."""
    switch = cluster.node(node).switch or "core"
    return f"{node}->{switch}", f"{switch}->{node}"


def slowed(cluster: topology.Cluster, node: str) -> topology.Cluster:
    """Return the same cluster with a quarter of the rate on that node's NICs."""
    from dataclasses import replace

    nodes = []
    for each in cluster.nodes:
        nics = [replace(nic, rate_bytes_per_s=nic.rate_bytes_per_s / 4) for nic in each.nics]
        nodes.append(replace(each, nics=tuple(nics)) if each.name == node else each)
    return replace(cluster, nodes=tuple(nodes))


if __name__ == "__main__":
    main()
