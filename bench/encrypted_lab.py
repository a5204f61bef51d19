"""Encryption in a lab: what a reader of packets finds of a planted pattern, and what a step costs beside a plain one.

    python bench/encrypted_lab.py wire      # needs root; six minutes
    python bench/encrypted_lab.py wire --modes hosts
    python bench/encrypted_lab.py cost --rounds 3

`wire` plants a pattern of 32 bytes in parameters, gradients, samples and objects, and reads all packets of all links of
the run. In a plain run it must be found (or the reader is blind), in an encrypted one no 8 bytes of it may be. Mode
`hosts` runs between machines with sshd, where `--encrypt auto` is on.
`cost` lets a plain and an encrypted group of one run take turns in a lab of 1 Gbit/s, and prints the times of an
allreduce of 22 MB and of a step that computes beside it, their ratios, and processor seconds per GB that a rank sends.
Exit code 1 if something is found, or a step costs more than 3 %.
"""

import argparse
import functools
import itertools
import json
import os
import re
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORDS = tuple(struct.unpack("<f", bytes([0xA1 + i, 0x5B - i, 0x90 | i, 0x3F]))[0] for i in range(8))
PATTERN = struct.pack("<8f", *WORDS)
WINDOW_BYTES, ALLOWED = 8, 1.03
FORWARD_S = 0.1
NUM_VALUES, NUM_STEPS = 400_000, 6
CLUSTER = """
name: {name}
nodes:
  - {{name: n, nic: {nic}, devices: 1, count: {count}}}
latency: 50us
"""
FLAGS = {
    "balanced": ["--mode", "balanced"],
    "elastic": ["--mode", "balanced", "--elastic", "2:3"],
    "ps-hra": ["--mode", "ps-hra"],
    "local": ["--mode", "local"],
    "pipeline": [],
    "hosts": ["--mode", "balanced"],
}


def main() -> None:
    """Be a worker, a reader of packets, or the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["wire", "cost", "work-train", "work-pipeline", "work-cost", "read"])
    parser.add_argument("--modes", default=",".join(FLAGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/encrypted-lab"))
    options = parser.parse_args()
    action = {"work-train": train, "work-pipeline": train_pipeline, "work-cost": time_steps, "read": read_packets}
    if options.action in action:
        action[options.action](options.out)
        return
    os.chdir(ROOT)
    found = compare_wire(options) if options.action == "wire" else compare_cost(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.action}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(found["failed"])


def compare_wire(options: argparse.Namespace) -> dict[str, Any]:
    """Run each mode plain and encrypted, and count the pattern in all packets."""
    from ringweave import lab, topology

    rows: list[dict[str, Any]] = []

    def note(mode: str, encrypt: str, found: dict[str, Any]) -> None:
        rows.append({"mode": mode, "encrypt": encrypt} | found)
        print(json.dumps(rows[-1]), flush=True)

    modes = options.modes.split(",")
    lab.up(topology.loads(CLUSTER.format(name="encrypted", nic="1Gbit/s", count=3)), "encrypted")
    try:
        for mode, encrypt in itertools.product([each for each in modes if each != "hosts"], ("off", "on")):
            folder = options.out / f"{mode}-{encrypt}"
            flags = [*FLAGS[mode], "--encrypt", encrypt, "--run-dir", str(folder)]
            work = "work-pipeline" if mode == "pipeline" else "work-train"
            arguments = [work, "--out", str(folder)]
            note(mode, encrypt, observe(lab.find("encrypted"), functools.partial(run_in_lab, flags, arguments)))
    finally:
        lab.down("encrypted")
    if "hosts" in modes:
        for encrypt, found in compare_hosts().items():
            note("hosts", encrypt, found)
    failed = any((row["windows_found"] > 0) != (row["encrypt"] == "off") or row["exit_code"] for row in rows)
    return {"rows": rows, "failed": int(failed)}


def compare_hosts() -> dict[str, dict[str, Any]]:
    """Run on machines with sshd, plain and as `auto` decides."""
    from ringweave_bench.ssh_lab import ssh_lab

    found = {}
    with ssh_lab(num_nodes=2) as machines:
        first = machines.nodes[0]
        first.write("/home/trainer/project/job.py", Path(__file__).read_text(encoding="utf-8"))
        for encrypt in ("off", "auto"):
            words = [sys.executable, "-m", "ringweave", "run", "--hosts", "n0,n1", "--name", f"wire-{encrypt}"]
            words += [*FLAGS["hosts"], "--encrypt", encrypt, "job.py", "work-train", "--out", "/tmp/out"]
            run = functools.partial(first.run, ["sh", "-c", 'cd project && exec "$@"', "sh", *words], check=False)
            found[encrypt] = observe(machines.network, run)
    return found


def observe(there: Any, run: "Callable[[], subprocess.CompletedProcess[str]]") -> dict[str, Any]:
    """Run something with a reader of packets in each node."""
    nodes = [node.name for node in there.cluster.nodes]
    reader = [sys.executable, str(Path(__file__).absolute()), "read"]
    readers = [
        subprocess.Popen(there.command(node, reader), stdin=subprocess.PIPE, stdout=subprocess.PIPE) for node in nodes
    ]
    for each in readers:
        assert each.stdout is not None
        each.stdout.readline()
    done = run()
    counts = [json.loads(each.communicate()[0]) for each in readers]
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
    return {key: sum(count[key] for count in counts) for key in counts[0]} | {"exit_code": done.returncode}


def run_in_lab(flags: Sequence[str], arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run this script's worker in the lab."""
    command = [
        sys.executable,
        "-m",
        "ringweave",
        "lab",
        "run",
        "--lab",
        "encrypted",
        *flags,
        str(Path(__file__).absolute()),
        *arguments,
    ]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=600
    )


def read_packets(_: Path) -> None:
    """Keep all packets of this node's links until standard input ends; print what was found."""
    reader = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    reader.setsockopt(socket.SOL_SOCKET, 33, 2**28)  # SO_RCVBUFFORCE
    reader.settimeout(0.2)
    print("ready", flush=True)
    os.set_blocking(0, False)
    content, num_packets = bytearray(), 0
    while True:
        try:
            packet, address = reader.recvfrom(2**17)
        except TimeoutError:
            if sys.stdin.buffer.read(1) == b"":
                break
            continue
        if address[0] != "lo":
            num_packets += 1
            content += packet + b"\0" * WINDOW_BYTES
    doubled = PATTERN * 2
    windows = [re.escape(doubled[start : start + WINDOW_BYTES]) for start in range(len(PATTERN))]
    found = len(re.findall(b"|".join(windows), bytes(content)))
    (_, dropped) = struct.unpack("II", reader.getsockopt(263, 6, 8))
    print(json.dumps({"windows_found": found, "packets": num_packets, "bytes": len(content), "dropped": dropped}))


def train(_: Path) -> None:
    """Train a model whose parameters, gradients and samples are the pattern; then call collectives of all kinds."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import ringweave

    planted = torch.tensor(WORDS).repeat(NUM_VALUES // len(WORDS))

    class Planted(nn.Module):
        """Its gradient is its sample."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(planted.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum(dim=1)

    model: Any = Planted()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    loader: Any = DataLoader(TensorDataset(planted.repeat(24, 1)), batch_size=12)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
    for _epoch in range(NUM_STEPS // 2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    if "RINGWEAVE_COORDINATORS" in os.environ or os.environ.get("RINGWEAVE_MODE") == "ps-hra":
        print("trained", flush=True)
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, PATTERN * 20)
    for length in (32, 4096, 400_000):
        part = planted[:length].clone()
        dist.broadcast(part, 0)
        if rank == 0:
            dist.send(part, size - 1)
        elif rank == size - 1:
            dist.recv(part, 0)
        blocks = [torch.empty(length) for _ in range(size)]
        dist.all_gather(blocks, part)
        dist.reduce(part.clone(), 0)
    dist.barrier()
    print("trained", flush=True)


def train_pipeline(_: Path) -> None:
    """Train a pipeline whose activations are the pattern."""
    import torch
    from torch import nn

    from ringweave import pipeline

    width = 1024
    planted = torch.tensor(WORDS).repeat(width // len(WORDS))

    class Pass(nn.Module):
        """Hands its input on."""

        def __init__(self) -> None:
            super().__init__()
            self.zero = nn.Parameter(torch.zeros(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.zero

    blocks = [Pass() for _ in range(6)]
    settings = pipeline.Settings(num_microbatches=4)
    example = torch.empty(64, width, device="meta")
    model = pipeline.Pipeline(
        blocks, nn.functional.mse_loss, lambda b: torch.optim.SGD(b.parameters(), lr=0.0), example, settings
    )
    for _step in range(NUM_STEPS):
        batch = planted.repeat(64, 1)
        model.train_step(batch, target=torch.zeros(64, width))
    print("trained", flush=True)


def compare_cost(options: argparse.Namespace) -> dict[str, Any]:
    """Run two ranks with an encrypted and a plain group, which take turns; repeat it in new processes."""
    from ringweave import lab, topology

    rows: list[dict[str, Any]] = []
    lab.up(topology.loads(CLUSTER.format(name="encrypted", nic="1Gbit/s", count=2)), "encrypted")
    try:
        for number in range(options.rounds):
            folder = (options.out / f"cost-{number}").absolute()
            flags = ["--encrypt", "on", "--schedule", "ring", "--run-dir", str(folder)]
            done = run_in_lab(flags, ["work-cost", "--out", str(folder)])
            if done.returncode:
                raise SystemExit(done.stdout[-3000:])
            rows.append(json.loads((folder / "cost.json").read_text(encoding="utf-8")))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        lab.down("encrypted")
    ratio = statistics.median(row["step_ratio"] for row in rows)
    print(json.dumps({"measured, median of runs: step, encrypted / plain": round(ratio, 4)}))
    return {"rows": rows, "step_ratio": ratio, "failed": int(ratio > ALLOWED)}


def time_steps(out: Path) -> None:
    """Measure allreduces of 22 MB, and steps that compute while they communicate, of both groups by turns."""
    import torch
    import torch.distributed as dist

    from ringweave.environment import ENCRYPT

    dist.init_process_group()
    os.environ[ENCRYPT] = "off"
    groups = {"on": dist.group.WORLD, "off": dist.new_group(backend="ringweave")}
    message = torch.ones(5_500_000)

    def reduce(group: Any) -> None:
        dist.all_reduce(message, group=group)

    def step(group: Any) -> None:
        time.sleep(FORWARD_S)  # the machine's processors are shared by all nodes of the lab
        work: Any = dist.all_reduce(message, group=group, async_op=True)
        time.sleep(FORWARD_S)  # backward
        work.wait()

    found: dict[str, Any] = {}
    for name, call, num_turns in (("allreduce", reduce, 12), ("step", step, 24)):
        taken_s: dict[str, list[float]] = {"on": [], "off": []}
        cpu_s = {"on": 0.0, "off": 0.0}
        for turn in range(-3, num_turns):
            for encrypt in ("on", "off") if turn % 2 else ("off", "on"):
                dist.barrier(groups["off"])
                started_s, used_s = time.perf_counter(), time.process_time()
                call(groups[encrypt])
                if turn >= 0:  # those before warm up
                    taken_s[encrypt].append(time.perf_counter() - started_s)
                    cpu_s[encrypt] += time.process_time() - used_s
        pairs = [on / off for on, off in zip(taken_s["on"], taken_s["off"], strict=True)]
        found[f"{name}_ratio"] = round(statistics.median(pairs), 4)
        found[f"{name}_ratio_quartiles"] = [round(each, 4) for each in statistics.quantiles(pairs)[::2]]
        sent_gb = num_turns * message.nbytes / 1e9  # of a ring of two ranks, each sends as much as the message has
        for encrypt in ("off", "on"):
            found[f"{name}_s_{encrypt}"] = round(statistics.median(taken_s[encrypt]), 4)
            found[f"{name}_cpu_s_per_gb_{encrypt}"] = round(cpu_s[encrypt] / sent_gb, 3)
    if dist.get_rank() == 0:
        out.joinpath("cost.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
