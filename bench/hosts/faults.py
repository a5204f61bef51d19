"""Faults of an elastic run on hosts: nodes of a lab with real sshd, each with its own disk; `ringweave run --hosts`.

    python bench/hosts/faults.py --times 10                # three quarters of an hour
    python bench/hosts/faults.py --nodes 4 --times 1 --only node,cut

Each fault comes to a victim drawn by --seed; the next one comes when the victim trains again. The command runs on the
last node, which is never a victim of faults that would kill it. Measured for each fault: the longest time without a
train step of the workers that were not hit, from one second before the fault on. At the end the parameters of all
workers are compared after each step, and the run is ended by Ctrl-C: no process, port or file of it may be left.

Faults: worker, agent, service and session are SIGKILL of a worker, a node agent, a host service, an sshd session;
command is SIGKILL of the command, followed by `ringweave attach`; node is SIGKILL of all processes of a node; cut is a
network cut of 30 s; first is node for the first node, which has the active coordinator and leads the run.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from ringweave_bench import machine_description
from ringweave_bench.ssh_lab import SshLab, ssh_lab
from ringweave_bench.ssh_node import SshNode

BENCH = Path(__file__).parents[1]
JOB = BENCH / "faults" / "job.py"
RINGWEAVE = [sys.executable, "-m", "ringweave"]
FAULTS = ("worker", "agent", "service", "session", "command", "node", "cut", "first")
BARS_S = {
    "worker": 2.0,
    "agent": 2.0,
    "node": 3.0,
    "cut": 3.0,
    "first": 3.0,
    "service": 2.0,
    "session": 2.0,
    "command": 2.0,
}
"""Longest wait of the survivors, by fault."""
MODULES = {"agent": "hosts.agent_main", "service": "hosts.service"}
CUT_S = 30.0
BACK_TIMEOUT_S = 180.0
NAME = "faults"


@dataclass
class HostsRun:
    """A run in a lab, and what its workers wrote about their steps."""

    lab: SshLab
    options: argparse.Namespace
    command: "subprocess.Popen[str] | None" = None
    stalls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    returns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def commander(self) -> SshNode:
        return self.lab.nodes[-1]

    def start(self, *words: str) -> None:
        """Start a command on the last node."""
        log = self.options.log.open("a", encoding="utf-8")
        argv = ["sh", "-c", 'cd project && exec "$@"', "sh", *RINGWEAVE, *words]
        self.command = self.commander.popen(argv, stdout=log, stderr=log)

    def steps(self) -> dict[str, list[tuple[int, str, float]]]:
        """(train step, checksum, time) of each worker process, by `NODE MEMBER-PID`."""
        found = {}
        for node in self.lab.nodes:
            folder = node.path("/home/trainer/checks")
            for path in sorted(folder.glob("*.txt")) if folder.exists() else ():
                rows = [line.split() for line in path.read_text().splitlines()]
                done = [(int(row[1]), row[2], float(row[3])) for row in rows if len(row) == 4 and row[0] == "done"]
                found[f"{node.name} {path.stem}"] = done
        return found

    def last_step_s(self, node: SshNode) -> float:
        """Time of the last train step on a node; 0 before the first."""
        return max(
            (done[-1][2] for name, done in self.steps().items() if name.startswith(f"{node.name} ") and done),
            default=0.0,
        )

    def wait_training(self, since_s: float) -> None:
        """Wait until all nodes have done a step after that time."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        while not all(self.last_step_s(node) > since_s for node in self.lab.nodes):
            assert time.monotonic() < deadline_s, f"a node does not train again; see {self.options.log}"
            time.sleep(0.2)

    def kill(self, node: SshNode, word: str) -> None:
        """Kill the processes of a node with this word in their command lines."""
        for process in node.processes():
            if word in process.command and "nsenter" not in process.command:
                os.kill(process.pid, signal.SIGKILL)

    def inject(self, fault: str, victim: SshNode) -> None:
        """Let a fault happen."""
        if fault in ("node", "first"):
            victim.kill_all()
        elif fault in MODULES:
            self.kill(victim, MODULES[fault])
        elif fault == "worker":
            self.kill(victim, "files/job.py")
        elif fault == "session":
            victim.kill_ssh_sessions()
        elif fault == "cut":
            self.lab.cut(victim.name)
            time.sleep(CUT_S)
            self.lab.mend(victim.name)
        else:
            assert self.command is not None
            self.command.kill()
            self.command.wait()
            self.start("attach", NAME)

    def measure(self, fault: str, victim: SshNode) -> None:
        """Let a fault happen, wait until the victim trains again, and note the stall of the others."""
        began_s = time.time()
        self.inject(fault, victim)
        ended_s = time.time()
        self.wait_training(max(ended_s, began_s + 2.0))
        self.returns[fault].append(time.time() - ended_s)
        stall_s = 0.0
        for name, done in self.steps().items():
            times = [at_s for _, _, at_s in done]
            if name.startswith(f"{victim.name} ") or not times or times[-1] < began_s:
                continue
            gaps = [later - at for at, later in itertools.pairwise(times) if began_s - 1.0 < later < ended_s + 10.0]
            stall_s = max(stall_s, *gaps) if gaps else stall_s
        self.stalls[fault].append(stall_s)
        print(
            f"{fault} of {victim.name}: survivors {stall_s:.2f} s, trains again after {self.returns[fault][-1]:.1f} s",
            flush=True,
        )

    def count_alike(self) -> int:
        """Count the pairs of process and step with equal parameters.

        Raises:
            AssertionError: Two differ.
        """
        known: dict[int, str] = {}
        pairs = 0
        for name, done in self.steps().items():
            for step, digest, _ in done:
                pairs += 1
                assert known.setdefault(step, digest) == digest, f"{name}: other parameters after step {step}"
        missing = set(range(1, max(known) + 1)) - known.keys()
        assert not missing, f"steps that no worker did: {sorted(missing)[:10]}"
        return pairs

    def end(self) -> list[str]:
        """End the run by Ctrl-C; return what is left on the nodes."""
        for process in self.commander.processes():
            if f"--name {NAME}" in process.command or f"attach {NAME}" in process.command:
                os.kill(process.pid, signal.SIGINT)
        assert self.command is not None
        self.command.wait(timeout=60)
        time.sleep(1.0)
        left = [f"{node.name}: {process.command}" for node in self.lab.nodes for process in node.processes()]
        left += [
            f"{node.name}: port {port}" for node in self.lab.nodes for port in node.listening_ports() if port != 22
        ]
        files = [f"{node.name}: {path}" for node in self.lab.nodes for path in node.files()]
        return left + [path for path in files if re.search(r"/ringweave/hosts-[^/]+/", path)]


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--times", type=int, default=10, help="of each fault")
    parser.add_argument("--only", default=",".join(FAULTS), help="faults, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", default="100Mbit/s")
    parser.add_argument("--width", type=int, default=128, help="of the model's layers")
    parser.add_argument(
        "--s-per-sample", type=float, default=0.01, help="sleep for so long a sample, as if a device computed it"
    )
    parser.add_argument("--log", type=Path, default=Path("runs/hosts-faults.log"), help="output of the command")
    parser.add_argument("--out", type=Path, help="JSON document")
    return parser.parse_args()


def run_faults(options: argparse.Namespace) -> tuple[HostsRun, int, list[str]]:
    """Run the job with its faults; return it, the pairs of equal parameters, and what it left."""
    rng = random.Random(options.seed)
    wanted = [fault for fault in options.only.split(",") for _ in range(options.times)]
    rng.shuffle(wanted)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.log.write_text("")
    with ssh_lab(num_nodes=options.nodes, rate=options.rate) as lab:
        run = HostsRun(lab, options)
        run.commander.write("/home/trainer/project/job.py", JOB.read_text())
        hosts, elastic = ",".join(f"{node.name}:1" for node in lab.nodes), f"{options.nodes // 2}:{options.nodes}"
        folders = ["/home/trainer/disk", "--checks", "/home/trainer/checks"]
        job = ["job.py", *folders, "--fresh", "--width", str(options.width)]
        job += ["--s-per-sample", str(options.s_per_sample)]
        started_s = time.time()
        run.start("run", "--hosts", hosts, "--elastic", elastic, "--name", NAME, *job)
        run.wait_training(started_s)
        print(f"all nodes train after {time.time() - started_s:.1f} s", flush=True)
        for fault in wanted:
            run.measure(fault, lab.nodes[0] if fault == "first" else rng.choice(lab.nodes[1:-1]))
            run.wait_training(time.time() + 1.0)
        return run, run.count_alike(), run.end()


def main() -> int:
    """Run the faults, print a row for each kind, and return 1 if a bar was missed."""
    options = parse()
    run, pairs, left = run_faults(options)
    rows = {
        fault: {
            "faults": len(stalls),
            "stall_p50_s": statistics.median(stalls),
            "stall_max_s": max(stalls),
            "bar_s": BARS_S[fault],
            "back_p50_s": statistics.median(run.returns[fault]),
        }
        for fault, stalls in sorted(run.stalls.items())
    }
    missed = [fault for fault, row in rows.items() if row["stall_max_s"] > row["bar_s"]]
    for fault, row in rows.items():
        stalls = f"survivors p50 {row['stall_p50_s']:.2f} s, most {row['stall_max_s']:.2f} s (bar {row['bar_s']} s)"
        print(f"{fault:8} {row['faults']:3} times: {stalls}, trains again after {row['back_p50_s']:.1f} s")
    print(f"no step lost, {pairs} alike, left: {left or 'nothing'}, missed: {missed or 'none'}")
    if options.out:
        document = {
            "kind": "measured",
            "nodes": options.nodes,
            "seed": options.seed,
            "s_per_sample": options.s_per_sample,
            "machine": machine_description.describe_machine(),
            "checks_alike": pairs,
            "left": left,
            "faults": rows,
        }
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if missed or left else 0


if __name__ == "__main__":
    sys.exit(main())
