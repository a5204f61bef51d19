"""Processor costs of messages and bytes, fitted to allreduces in labs.

    python bench/simulation/processor_costs.py bench/results/simulated/measured/*.json

`measure_every_schedule.py` records the processor time of all ranks for each allreduce. It is explained here by their
programs' operations: messages to other nodes and their bytes, messages inside a node and theirs, a start for each rank,
and the number of times that a rank slept until a message had come, which the simulation gives. That in turn depends on
the costs: they are fitted again with the simulation at the last ones, until they stay. No cost is below zero, and the
squares of relative errors are minimal. Additions are among the bytes. The results are the constants of `sim.scenario`;
nothing is fitted to the seconds that simulations are compared with. A pass simulates everything, which takes minutes of
processor time.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from lab_cases import Case, cases_of
from scipy.optimize import nnls

from ringweave import sim
from ringweave.schedules.program import Opcode, RankProgram
from ringweave.sim.simulation import ELEMENT_BYTES
from ringweave_bench import machine_description

COSTS = ("message_s", "kernel_s_per_byte", "inside_message_s", "inside_s_per_byte", "start_s", "wake_s")
MOST_PASSES, ENOUGH = 6, 0.02
"""Passes end when in half of the cases no cost's part of the processor time changed by more than that."""


def main() -> None:
    """Fit, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="+", type=Path, help="what measure_every_schedule.py wrote")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    cases = [case for path in options.measured for case in cases_of(json.loads(path.read_text()))]
    seconds = np.array([statistics.median(case.measured["processor_s"]) for case in cases])
    done = np.array([counts_of(case) for case in cases])
    machine = sim.HostModel.assumed()
    with ProcessPoolExecutor() as pool:
        for number in range(1, MOST_PASSES + 1):
            wakes = list(pool.map(num_wakes, cases, itertools.repeat(machine), chunksize=4))
            parts = np.column_stack([done, wakes]) / seconds[:, None]
            costs, _ = nnls(parts, np.ones(len(cases)))
            errors = np.abs(parts @ costs - 1)
            before = np.array([getattr(machine, name) for name in COSTS])
            machine = dataclasses.replace(machine, **dict(zip(COSTS, costs.tolist(), strict=True)))
            changed = float(np.median(np.abs(parts * (costs - before)).max(axis=1)))
            print(f"pass {number}: {', '.join(f'{name} {cost:.3g}' for name, cost in zip(COSTS, costs, strict=True))}")
            print(
                f"pass {number}: half of the cases off by more than {np.median(errors):.1%}, changed by {changed:.1%}"
            )
            if changed < ENOUGH:
                break
    found = {
        "kind": "measured",
        "costs": {**dict(zip(COSTS, costs.tolist(), strict=True)), "combine_s_per_byte": 0.0},
        "num_rows": len(cases),
        "median_error": float(np.median(errors)),
        "high_error": float(np.percentile(errors, 95)),
    }
    for index in np.argsort(-errors)[:8]:
        case, measured = cases[index], cases[index].measured
        what = f"{case.cluster:18} {measured['schedule']:18} {measured['bytes']:9}"
        print(f"{what} {seconds[index]:.3f} s, off by {errors[index]:.0%}")
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found | machine_description.describe_machine(), indent=1) + "\n")


def num_wakes(case: Case, machine: sim.HostModel) -> int:
    """Return the number of times that ranks sleep on such a machine, simulated."""
    return case.simulate(machine).num_wakes


def counts_of(case: Case) -> list[float]:
    """Count the operations of all ranks, in the order of COSTS, without waking up."""
    each = [counts(program, node, case.nodes) for program, node in zip(case.programs(), case.nodes, strict=True)]
    return np.sum(each, axis=0).tolist()


def counts(program: RankProgram, node: str, nodes: tuple[str, ...]) -> list[float]:
    """Count a rank's operations, in the order of COSTS; a byte inside a node is sent and read, half its cost each."""
    found = [0.0, 0.0, 0.0, 0.0, 1.0]
    for step in program.instructions:
        if step.opcode in (Opcode.SEND, Opcode.WAIT_RECV):
            is_inside = nodes[step.peer] == node
            num_bytes = (step.stop - step.start) * ELEMENT_BYTES
            found[2 if is_inside else 0] += 1
            found[3 if is_inside else 1] += num_bytes / 2 if is_inside else num_bytes
    return found


if __name__ == "__main__":
    main()
