"""FSDP2 and HSDP on ringweave beside the same on Gloo, in the lab: seconds per train step, and losses.

    python bench/fsdp_in_lab.py --steps 8                # needs root; another cluster: --cluster FILE
    python bench/fsdp_in_lab.py --kinds HSDP,HSDP-near   # both orders of ranks in the mesh

One job, and GPTs (of examples/support) with the same first weights and samples, each on ringweave and on Gloo: FSDP2
over all ranks; HSDP with two replicas, each of half of the ranks, as init_device_mesh(2, N/2) has it, which shards
inside a rack; HSDP-near with replicas on neighbouring ranks, which shards across the racks. They take turns, with a
barrier in between, so all meet the same machine. A step is forward, backward and update; its time is the slowest
rank's. The first steps warm up: in them, ringweave's schedules are tried.

On a CPU FSDP waits for each collective before it goes on. Under `ringweave.prepare`, and so here, collectives run
beside computing. So no step is shorter than the busiest link needs for what the groups of the mesh pass over it.
Exit code 1 if a loss differs by more than 1e-6 from that on Gloo, or a step is less than 1.5 times faster.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ddp_in_lab import clock, gloo_group

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from ringweave import cost, topology  # noqa: E402
from ringweave.training.sharded_model import overlap_collectives  # noqa: E402
from ringweave_bench.lab_workers import lab_of, run_workers  # noqa: E402
from ringweave_bench.results import WIRE_PER_PAYLOAD  # noqa: E402
from support.gpt import GPT, NUM_BYTES, GPTConfig  # noqa: E402

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
"""FSDP gathers each block twice a step: the class of sizes of a block has its trials in the first steps."""
ALLOWED, TARGET = 1e-6, 1.5
KINDS = ("FSDP2", "HSDP", "HSDP-near")
CALLS = {"all_gather_single": "allgather", "reduce_scatter_single": "reduce-scatter", "all_reduce": "allreduce"}
"""Functions of torch.distributed that FSDP calls, and their collectives."""
RUN_TIMEOUT_S = 1800


@dataclass(kw_only=True, slots=True)
class Contender:
    """One sharded model, and its measurements."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    """Of all ranks together, in each step."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the last step by collective."""


def main() -> None:
    """Under a launcher a worker; else bring the lab up, run the workers in it and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=ROOT / "examples" / "clusters" / "two-racks.yaml")
    parser.add_argument("--steps", type=int, default=8, help="measured train steps of each")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--width", type=int, default=256, help="width of the model: 4 blocks of 256 are 13 MB")
    parser.add_argument("--kinds", default="FSDP2,HSDP", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp-in-lab"), help="folder for the run")
    options = parser.parse_args()
    if unknown := set(options.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds: {', '.join(unknown)}, expected some of {', '.join(KINDS)}")
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(report(run_in_lab(options), options))


def run_in_lab(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers; return their measurements and run.json's counts.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    out = options.out.absolute()
    own = [f"--{name}={getattr(options, name)}" for name in ("steps", "layers", "width", "kinds")] + [f"--out={out}"]
    with lab_of(topology.load(options.cluster), f"fsdp-{options.cluster.stem}") as place:
        run_workers(place, __file__, own, out, timeout_s=RUN_TIMEOUT_S)
    counts = json.loads((out / "run.json").read_text())["collectives_by_schedule"]
    return json.loads((out / "measured.json").read_text()) | {"by_schedule": counts, "cluster": options.cluster.stem}


def work(options: argparse.Namespace) -> None:
    """Run one rank's measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    control = gloo_group()
    config = GPTConfig(layers=options.layers, width=options.width)
    contenders = {
        f"{kind} {backend}": shard(config, mesh(kind, backend), overlaps=backend == "ringweave")
        for kind in options.kinds.split(",")
        for backend in ("ringweave", "gloo")
    }
    for number in range(WARM_UP_STEPS + options.steps):
        for name in sorted(contenders, reverse=number % 2 == 1):
            take_turn(contenders[name], number, control)
    if dist.get_rank() == 0:
        num_bytes = sum(parameter.nbytes for parameter in GPT(config).parameters())
        measured = {
            name: {
                "losses": each.losses,
                "steps_s": each.step_s,
                "processor_s": each.processor_s,
                "num_bytes": each.num_bytes,
            }
            for name, each in contenders.items()
        }
        document = {"workers": dist.get_world_size(), "model_bytes": num_bytes, "contenders": measured}
        (options.out / "measured.json").write_text(json.dumps(document, indent=2) + "\n")
    dist.destroy_process_group()


def mesh_ranks(kind: str, size: int) -> torch.Tensor:
    """Return the ranks of a mesh, (replicas, shards)."""
    if kind == "FSDP2":
        return torch.arange(size)[None]
    return torch.arange(size).view(2, size // 2) if kind == "HSDP" else torch.arange(size).view(size // 2, 2).t()


def mesh(kind: str, backend: str) -> DeviceMesh:
    """Return a mesh of all ranks on a backend: one dimension, or two replicas of shards."""
    rank, rows = dist.get_rank(), mesh_ranks(kind, dist.get_world_size())

    def group_of_own(groups: list[list[int]]) -> dist.ProcessGroup:
        made = {tuple(ranks): dist.new_group(ranks, backend=backend) for ranks in groups}
        return next(group for ranks, group in made.items() if rank in ranks)

    if kind == "FSDP2":
        return DeviceMesh.from_group(group_of_own(rows.tolist()), "cpu")
    pair, half = group_of_own(rows.t().tolist()), group_of_own(rows.tolist())
    return DeviceMesh.from_group([pair, half], "cpu", mesh=rows, mesh_dim_names=("replicas", "shards"))


def shard(config: GPTConfig, over: DeviceMesh, *, overlaps: bool) -> Contender:
    """Return a model with the same first weights whatever the mesh; `overlaps` as ringweave.prepare has it."""
    torch.manual_seed(0)
    model = GPT(config)
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    if overlaps:
        overlap_collectives(model)
    return Contender(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def take_turn(contender: Contender, number: int, control: dist.ProcessGroup) -> None:
    """Run a train step."""
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    content = torch.randint(NUM_BYTES, (1, 17), generator=generator)

    def step() -> torch.Tensor:
        with counted_collectives(contender.num_bytes):
            contender.optimizer.zero_grad()
            loss = contender.model(content[:, :-1], content[:, 1:])
            loss.backward()
            contender.optimizer.step()
        return loss.detach()

    contender.num_bytes.clear()
    used_s = time.process_time()
    loss, seconds = clock(step, control)
    used = torch.tensor(time.process_time() - used_s, dtype=torch.float64)
    dist.all_reduce(used, group=control)
    dist.all_reduce(loss, group=control)
    contender.losses.append(loss.item() / dist.get_world_size())
    if number >= WARM_UP_STEPS:
        contender.step_s.append(seconds)
        contender.processor_s.append(used.item())


@contextmanager
def counted_collectives(num_bytes: Counter[str]) -> Iterator[None]:
    """Add the sizes of the collectives that FSDP calls to `num_bytes`."""
    originals = {name: getattr(dist, name) for name in CALLS}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tensors = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
            num_bytes[CALLS[name]] += max(tensor.nbytes for tensor in tensors)
            return originals[name](*args, **options)

        return call

    for name in CALLS:
        setattr(dist, name, counted(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def step_bound_s(cluster: topology.Cluster, kind: str, num_bytes: Mapping[str, int]) -> float:
    """Return the least time of a step's collectives, one beside the other, at the rates of TCP's content.

    Args:
        cluster: The cluster, a rank on each device.
        kind: One of `KINDS`.
        num_bytes: Bytes of the messages of one rank in a step, by collective.
    """
    nodes = [node.name for node in cluster.nodes for _ in node.devices]
    net, rows = cost.group_network(cluster), mesh_ranks(kind, len(nodes)).tolist()
    groups = {"allgather": rows, "reduce-scatter": rows, "allreduce": list(zip(*rows, strict=True))}
    links_s = []
    for collective, size in num_bytes.items():
        seconds: list[float] = []
        for vertex in range(1, len(net)):
            below = set(net.nodes_below(vertex))
            parts = [(sum(nodes[rank] in below for rank in group), len(group)) for group in groups[collective]]
            leaving, entering = (
                sum(ways) for ways in zip(*(_passing(collective, *part) for part in parts), strict=True)
            )
            seconds += [size * leaving / net.up_bytes_per_s[vertex], size * entering / net.down_bytes_per_s[vertex]]
        links_s.append(seconds)
    return max(map(sum, zip(*links_s, strict=True))) * WIRE_PER_PAYLOAD


def _passing(collective: str, num_below: int, size: int) -> tuple[float, float]:
    """Return the fractions of a message that have to leave and enter a subtree with so many ranks of the group."""
    if not 0 < num_below < size:
        return 0.0, 0.0
    owned = num_below / size
    return {"allgather": (owned, 1 - owned), "reduce-scatter": (1 - owned, owned)}.get(collective, (1.0, 1.0))


def report(found: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the comparison; the exit code."""
    print(f"{found['cluster']}: {found['workers']} workers, {found['model_bytes'] / 1e6:.1f} MB of parameters,")
    print(f"{options.steps} steps of each; medians of the slowest rank; measured, but for bounds\n")
    cluster, missed = topology.load(options.cluster), False
    for kind in options.kinds.split(","):
        ours, gloo = found["contenders"][f"{kind} ringweave"], found["contenders"][f"{kind} gloo"]
        times = statistics.median(ours["steps_s"]), statistics.median(gloo["steps_s"])
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], gloo["losses"], strict=True))
        print(f"{kind:9} ringweave {times[0]:.3f} s, gloo {times[1]:.3f} s a step: {times[1] / times[0]:.2f} times")
        print(f"          losses {ours['losses'][0]:.4f} to {ours['losses'][-1]:.4f}, apart by {apart:.1e} at most")
        for name, each in (("ringweave", ours), ("gloo", gloo)):
            print(f"          {name}: {statistics.median(each['processor_s']):.2f} processor s of all ranks")
        bound_s = step_bound_s(cluster, kind, ours["num_bytes"])
        print(f"          bound of its collectives, beside each other: {bound_s:.3f} s")
        missed |= times[1] / times[0] < TARGET or apart > ALLOWED
    carried = {name: counts["collectives"] for name, counts in found["by_schedule"].items()}
    print(f"\nringweave's collectives by schedule: {carried}")
    print(f"expected: {TARGET} times or more, losses apart by {ALLOWED:g} or less")
    return 1 if missed else 0


if __name__ == "__main__":
    main()
