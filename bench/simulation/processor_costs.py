"""What messages and bytes cost processors, out of what allreduces in labs did.

    python bench/simulation/processor_costs.py bench/results/simulated/measured/*.json

`measure_every_schedule.py` notes the processor time of all ranks for each allreduce. Here it is explained by what their
programs do: messages to other nodes and their bytes, messages inside a node and theirs, and a beginning for each rank;
no cost is below zero, relative errors are least in squares. Additions are among the bytes. What comes out are the
constants of `sim.machine`; nothing is fitted to the seconds that simulations are compared with.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ringweave import planning, topology
from ringweave.benchmarks import machine
from ringweave.schedules.programs import Do, Program
from ringweave.sim.simulation import ELEMENT_BYTES, compile_all

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
COSTS = ("message_s", "kernel_s_per_byte", "inside_message_s", "inside_s_per_byte", "start_s")


def main() -> None:
    """Fit, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="+", type=Path, help="what measure_every_schedule.py wrote")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    rows = [row for path in options.measured for row in counted(json.loads(path.read_text()))]
    counts = np.array([row["counts"] for row in rows])
    seconds = np.array([row["processor_s"] for row in rows])
    costs, _ = nnls(counts / seconds[:, None], np.ones(len(rows)))
    errors = np.abs(counts @ costs / seconds - 1)
    found = {
        "kind": "measured",
        "costs": {**dict(zip(COSTS, costs.tolist(), strict=True)), "combine_s_per_byte": 0.0},
        "num_rows": len(rows),
        "median_error": float(np.median(errors)),
        "high_error": float(np.percentile(errors, 95)),
    }
    for row, error in sorted(zip(rows, errors, strict=True), key=lambda pair: -pair[1])[:8]:
        print(
            f"{row['cluster']:18} {row['schedule']:18} {row['bytes']:9} {row['processor_s']:.3f} s, off by {error:.0%}"
        )
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found | machine.describe(), indent=1) + "\n")


def counted(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Each schedule and size of one cluster: the median of its processor time, and how often what was done."""
    cluster = topology.load(CLUSTERS / f"{document['cluster']}.yaml")
    plan = planning.plan_group(cluster, [node.name for node in cluster.nodes for _ in node.devices])
    rows = []
    for measured in document["measured"]:
        choice = plan.choose(measured["bytes"], forced=measured["schedule"])
        programs = compile_all(plan.generate(choice.schedule), plan.nodes, measured["bytes"], choice.pipelining)
        each = [counts(program, node, plan.nodes) for program, node in zip(programs, plan.nodes, strict=True)]
        row = {key: measured[key] for key in ("schedule", "bytes")} | {"cluster": document["cluster"]}
        rows.append(row | {"counts": np.sum(each, axis=0), "processor_s": statistics.median(measured["processor_s"])})
    return rows


def counts(program: Program, node: str, nodes: tuple[str, ...]) -> list[float]:
    """What a rank does, in the order of COSTS; a byte inside a node is shown and read, half of its cost each."""
    found = [0.0, 0.0, 0.0, 0.0, 1.0]
    for step in program.instructions:
        if step.do in (Do.SEND, Do.ARRIVE):
            is_inside = nodes[step.peer] == node
            num_bytes = (step.stop - step.start) * ELEMENT_BYTES
            found[2 if is_inside else 0] += 1
            found[3 if is_inside else 1] += num_bytes / 2 if is_inside else num_bytes
    return found


if __name__ == "__main__":
    main()
