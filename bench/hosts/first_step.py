"""Seconds from the command to the first train step on three hosts: `ringweave run --hosts` beside torchrun.

    python bench/hosts/first_step.py --rounds 5            # five minutes

The nodes of the lab run Debian's sshd, each with its own disk. torchrun is started at the same moment on all nodes, as
nobody could by hand: its time is a lower bound. A round starts each system once, in turns of changing order; the time
is that of the slowest rank. Prints one JSON document.
"""

import argparse
import json
import statistics
import sys
import time

from ringweave_bench import machine_description
from ringweave_bench.ssh_lab import SshLab, ssh_lab

SYSTEMS = ("torchrun", "ringweave")
COUNTS = (2, 1, 1)
SCRIPT = """
import os, pathlib, time, torch, torch.distributed as dist
dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 64)).sum().backward()
optimizer.step()
folder = pathlib.Path.home() / "steps"
folder.mkdir(exist_ok=True)
(folder / os.environ["RANK"]).write_text(str(time.time()))
dist.destroy_process_group()
"""
PATIENCE_S = 300.0


def start_torchrun(lab: SshLab, port: int) -> None:
    """Run the script by torchrun on all nodes at once."""
    commands = []
    for index, (node, count) in enumerate(zip(lab.nodes, COUNTS, strict=True)):
        options = ["--nnodes", str(len(COUNTS)), "--node-rank", str(index), "--nproc-per-node", str(count)]
        options += ["--master-addr", lab.nodes[0].address, "--master-port", str(port)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "project/train.py"]
        commands.append(node.popen(command, environ={"GLOO_SOCKET_IFNAME": "eth0"}))
    for command in commands:
        assert command.wait(PATIENCE_S) == 0


def start_ringweave(lab: SshLab) -> None:
    """Run the script by `ringweave run --hosts` on the first node."""
    hosts = ",".join(f"{node.name}:{count}" for node, count in zip(lab.nodes, COUNTS, strict=True))
    words = [sys.executable, "-m", "ringweave", "run", "--hosts", hosts, "train.py"]
    lab.nodes[0].run(["sh", "-c", 'cd project && exec "$@"', "sh", *words], timeout_s=PATIENCE_S)


def first_step_s(lab: SshLab, system: str, port: int) -> float:
    """Start the system; return the seconds until the slowest rank's first step."""
    for node in lab.nodes:
        node.run(["rm", "-rf", "steps"])
    started_s = time.time()
    if system == "torchrun":
        start_torchrun(lab, port)
    else:
        start_ringweave(lab)
    times = [float(path.read_text()) for node in lab.nodes for path in node.path("steps").iterdir()]
    assert len(times) == sum(COUNTS), times
    return max(times) - started_s


def main() -> int:
    """Measure, print the document, and return 1 if the bar of 5 s is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    with ssh_lab(num_nodes=len(COUNTS)) as lab:
        for node in lab.nodes:
            node.write("project/train.py", SCRIPT)
        for number in range(options.rounds):
            for system in SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]:
                found[system].append(first_step_s(lab, system, 29500 + number))
                print(f"round {number + 1}: {system} {found[system][-1]:.2f} s", file=sys.stderr, flush=True)
    more = [ours - theirs for ours, theirs in zip(found["ringweave"], found["torchrun"], strict=True)]
    document = {
        "kind": "measured",
        "workers": COUNTS,
        "rounds": options.rounds,
        "machine": machine_description.describe_machine(),
        "first_step_s": {system: round(statistics.median(times), 2) for system, times in found.items()},
        "more_s": {"median": round(statistics.median(more), 2), "most": round(max(more), 2)},
    }
    print(json.dumps(document))
    return 1 if document["more_s"]["median"] > 5.0 else 0


if __name__ == "__main__":
    sys.exit(main())
