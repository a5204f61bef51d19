"""Allreduce of 10,000 nodes on virtual time: `python bench/simulation/ten_thousand.py --out FILE`.

100 MB, alpha 10 us, a NIC of 100 Gbit/s each: a ring, and leaders in a matrix of 100 x 100, beside their formulas
2 (N-1) alpha + 2 (N-1)/N S/B and 2 (r+c-2) alpha + 2 (N-1)/N S/B. Then `ringweave plan` on 10,000 nodes in 100 racks,
no two of them alike (`big_tree.py`), as a program of its own. Exit code 1 if a simulated time is more than 1 % off its
formula, or the plan takes 60 s or 2 GiB. Processor time hardly depends on what else the machine does; the plan's bar
is wall-clock time, so it wants a machine that is not busy.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringweave import schedules, sim, topology
from ringweave.schedules import Schedule
from ringweave_bench import machine_description

NUM_NODES, NUM_BYTES, ALPHA_S, BYTES_PER_S = 10_000, 100_000_000, 10e-6, 12.5e9
ALLOWED_ERROR, ALLOWED_S, ALLOWED_BYTES = 0.01, 60, 2 * 2**30
BIG_TREE = Path(__file__).parents[1] / "big_tree.py"


def main() -> None:
    """Simulate, plan, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    rounds = {"ring": 2 * (NUM_NODES - 1), "100 x 100 matrix": 2 * (100 + 100 - 2)}
    matrix = [[rank] for rank in range(NUM_NODES)]
    rows = [
        simulated("ring", schedules.ring(NUM_NODES), rounds["ring"]),
        simulated("100 x 100 matrix", schedules.leader_matrix(matrix, 100), rounds["100 x 100 matrix"]),
    ]
    plan = planned()
    good = all(abs(row["error"]) <= ALLOWED_ERROR for row in rows)
    good &= plan["wall_s"] < ALLOWED_S and plan["peak_bytes"] < ALLOWED_BYTES
    document = {
        "good": good,
        "simulated": rows,
        "plan_of_unequal_racks": plan,
        **machine_description.describe_machine(),
    }
    print(json.dumps(document, indent=1))
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(0 if good else 1)


def simulated(name: str, schedule: Schedule, num_rounds: int) -> dict[str, Any]:
    """Simulate one schedule; return the result beside its formula, and the simulation's own cost."""
    text = f"name: large\nnodes: [{{name: n, nic: 100Gbit/s, devices: 1, count: {NUM_NODES}}}]\nlatency: 10us\n"
    cluster = topology.loads(text)
    begun_s = time.process_time()
    found = sim.simulate(schedule, cluster, [node.name for node in cluster.nodes], NUM_BYTES)
    formula_s = num_rounds * ALPHA_S + 2 * (NUM_NODES - 1) / NUM_NODES * NUM_BYTES / BYTES_PER_S
    return {
        "schedule": name,
        "simulated_s": found.seconds,
        "formula_s": formula_s,
        "error": found.seconds / formula_s - 1,
        "processor_s": round(time.process_time() - begun_s, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def planned() -> dict[str, Any]:
    """Measure `ringweave plan` on the tree of unequal racks, its start included.

    Raises:
        SystemExit: It did not print its choice.
    """
    with tempfile.TemporaryDirectory() as folder:
        begun_s = time.monotonic()
        command = [sys.executable, str(BIG_TREE), "--nodes", str(NUM_NODES), "--measure", f"{folder}/big.yaml"]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    if "bound" not in said:
        raise SystemExit(f"ringweave plan: it printed {said!r}, expected a plan with its bound.")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": round(time.monotonic() - begun_s, 1),
        "processor_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_bytes": used.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
