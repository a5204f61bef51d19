"""Jobs over unequal nodes train the same as one group: 10+5, 8+3 and 3+3+4 CPU workers beside one node with as many.

    python bench/jobs/training.py [--steps 8] [--out bench/results/DATE-jobs-training.json]

Each pair runs examples/01_train_text.py with a tiny model through `ringweave submit`; the losses of every train step
are compared. Measured on this machine, all nodes being it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPLITS = {"10+5": (15, (10, 5)), "8+3": (11, (10, 5)), "3+3+4": (10, (3, 3, 4))}


def train(name: str, total: int, capacities: tuple[int, ...], steps: int, home: Path) -> dict[str, object]:
    """Submit the job and wait for it; its split, losses and time."""
    out = home / name
    arguments = ["--out", out, "--steps", steps, "--batch", 2 * total, "--layers", 1, "--width", 32, "--heads", 2]
    arguments += ["--max-bytes", 400_000, "--held-out-windows", 16, "--evaluate-every", steps]
    job = home / f"{name}.yaml"
    document = {
        "name": name,
        "cpu_workers": total,
        "directory": str(ROOT),
        "script": "examples/01_train_text.py",
        "arguments": [str(argument) for argument in arguments],
        "environment": {"OMP_NUM_THREADS": "1"},
        "nodes": [{"capacity": capacity} for capacity in capacities],
    }
    job.write_text(json.dumps(document))  # JSON is YAML
    environ = {**os.environ, "XDG_STATE_HOME": str(home / "state")}
    ask = [sys.executable, "-m", "ringweave"]
    started_s = time.monotonic()
    subprocess.run([*ask, "submit", str(job), "-y"], env=environ, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - started_s
    status = subprocess.run([*ask, "status", name, "--json"], env=environ, check=True, capture_output=True, text=True)
    nodes = [
        {key: node[key] for key in ("name", "workers", "iterations", "last_loss")}
        for node in json.loads(status.stdout)["nodes"]
    ]
    subprocess.run([*ask, "delete", name], env=environ, check=True, stdout=subprocess.DEVNULL)
    losses = [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
    return {"nodes": nodes, "losses": losses, "wall_s": wall_s}


def main() -> None:
    """Train in pairs, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--splits", default=",".join(SPLITS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for name in asked.splits.split(","):
        total, capacities = SPLITS[name]
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            unequal = train("unequal", total, capacities, asked.steps, home)
            equal = train("equal", total, (total,), asked.steps, home)
        pairs = zip(unequal["losses"], equal["losses"], strict=True)
        difference = max(abs(one - other) for one, other in pairs)
        rows.append(
            {"split": name, "workers": total, "largest_difference": difference, "unequal": unequal, "equal": equal}
        )
        counts = "+".join(str(node["workers"]) for node in unequal["nodes"])
        print(
            f"{name}: trained on {counts}, {len(unequal['losses'])} steps, last loss {unequal['losses'][-1]:.6f} "
            f"against {equal['losses'][-1]:.6f} (measured); largest difference of a step {difference:.2e}; "
            f"{unequal['wall_s']:.0f} and {equal['wall_s']:.0f} s"
        )
    if asked.out:
        asked.out.write_text(json.dumps({"machine": platform.platform(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
