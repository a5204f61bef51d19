"""Jobs over unequal nodes train the same as one group: 10+5, 8+3 and 3+3+4 CPU workers beside one node with as many.

    PYTHONPATH=. python bench/jobs/training.py [--steps 8] [--on slurm] [--splits 10+5] [--out FILE]

Each pair runs examples/01_train_text.py with a tiny model through `ringweave submit`; the losses of every train step
are compared. Measured on this machine, all nodes being it; with `--on slurm` (root) on a real Slurm whose nodes `big`,
`small` and `whole` with 10, 5 and 15 pretended GPUs are namespaces of this machine.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.fakes.slurm import FakeGpuSlurmCluster

ROOT = Path(__file__).parents[2]
BAR = 1e-5
"""Largest difference of a loss."""
SPLITS = {"10+5": (15, (10, 5)), "8+3": (11, (10, 5)), "3+3+4": (10, (3, 3, 4))}


MACHINES = {10: "big", 5: "small", 15: "whole"}
"""Nodes of the Slurm cluster, by their number of GPUs."""
Enter = Callable[[list[str]], list[str]]
"""Returns the command line that runs another one on the login node."""


@contextlib.contextmanager
def place(name: str) -> Iterator[Enter]:
    """Yield the platform of the jobs."""
    if name == "local":
        yield lambda argv: argv
        return
    with FakeGpuSlurmCluster({node: gpus for gpus, node in MACHINES.items()}, name=f"bench-{os.getpid()}") as up:
        yield up.wrap_command


def described(on: str, total: int, capacities: tuple[int, ...]) -> dict[str, object]:
    """Return the job's request."""
    if on == "local":
        return {"cpu_workers": total, "nodes": [{"capacity": capacity} for capacity in capacities]}
    return {"gpus": total, "nodes": [{"name": MACHINES[capacity], "capacity": capacity} for capacity in capacities]}


def train(
    name: str, total: int, capacities: tuple[int, ...], steps: int, home: Path, on: str, enter: Enter
) -> dict[str, object]:
    """Submit the job and wait for it; its split, losses and time."""
    out = home / name
    arguments = ["--out", out, "--steps", steps, "--batch", 2 * total, "--layers", 1, "--width", 32, "--heads", 2]
    arguments += ["--max-bytes", 400_000, "--held-out-windows", 16, "--evaluate-every", steps]
    job = home / f"{name}.yaml"
    document = {
        "name": name,
        **described(on, total, capacities),
        "directory": str(ROOT),
        "script": "examples/01_train_text.py",
        "arguments": [str(argument) for argument in arguments],
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    job.write_text(json.dumps(document))  # JSON is YAML
    environ = {**os.environ, "XDG_STATE_HOME": str(home / "state")}

    def ask(*words: str) -> str:
        command = enter([sys.executable, "-m", "ringweave", *words, "--on", on])
        return subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout

    started_s = time.monotonic()
    ask("submit", str(job), "-y")
    wall_s = time.monotonic() - started_s
    nodes = [
        {key: node[key] for key in ("name", "workers", "iterations", "last_loss")}
        for node in json.loads(ask("status", name, "--json"))["nodes"]
    ]
    ask("delete", name)
    losses = [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
    return {"nodes": nodes, "losses": losses, "wall_s": wall_s}


def main() -> None:
    """Train in pairs, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--splits", default=",".join(SPLITS))
    parser.add_argument("--on", choices=("local", "slurm"), default="local")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for name in asked.splits.split(","):
        total, capacities = SPLITS[name]
        with tempfile.TemporaryDirectory() as folder, place(asked.on) as enter:
            home = Path(folder)
            unequal = train("unequal", total, capacities, asked.steps, home, asked.on, enter)
            whole = (total,) if asked.on == "local" else (15,)
            equal = train("equal", total, whole, asked.steps, home, asked.on, enter)
        pairs = zip(unequal["losses"], equal["losses"], strict=True)
        difference = max(abs(one - other) for one, other in pairs)
        rows.append(
            {"split": name, "workers": total, "largest_difference": difference, "unequal": unequal, "equal": equal}
        )
        counts = "+".join(str(node["workers"]) for node in unequal["nodes"])
        print(
            f"{name} on {asked.on}: trained on {counts}, {len(unequal['losses'])} steps, last loss "
            f"{unequal['losses'][-1]:.6f} against {equal['losses'][-1]:.6f} (measured); "
            f"largest difference of a step {difference:.2e}; {unequal['wall_s']:.0f} and {equal['wall_s']:.0f} s"
        )
    if asked.out:
        asked.out.write_text(
            json.dumps({"machine": platform.platform(), "on": asked.on, "rows": rows}, indent=2) + "\n"
        )
    if max(row["largest_difference"] for row in rows) > BAR:
        raise SystemExit(f"missed: losses differ by more than {BAR:g}")


if __name__ == "__main__":
    main()
