"""Simulated against measured seconds of every schedule on lab clusters: a table of errors.

    python bench/measure_every_schedule.py --clusters eight-nodes two-racks ... --out runs/measured     # needs root
    python bench/simulation/against_measured.py runs/measured/*.json --out bench/results/DATE-simulated.json

Each schedule is simulated with the plan's own pipelining, at the measured rates of the links, on a machine as the
simulator assumes it, whose processors all ranks share and whose links let a full bucket pass at once, as in the lab.
Nothing is fitted to a cluster, nor to how long anything took. What messages cost the machine's processors on that day
may be given: bench/simulation/processor_costs.py fits it to the processor time in the same files. The error is
simulated seconds over the median of the measured ones, less one. Exit code 1 if the median of the errors' sizes is
above 5 %, or their 95th percentile above 12 %.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from lab_cases import cases_of, planned

from ringweave import cost, sim, units
from ringweave.sim import scenario
from ringweave_bench.machine_description import describe_machine

MEDIAN_BAR, HIGH_BAR, HIGH_PERCENTILE = 0.05, 0.12, 95


def main() -> None:
    """Simulate what was measured, print the table, exit 1 if a bar is missed."""
    options = parse_options()
    documents = [json.loads(path.read_text()) for path in options.measured]
    machine = scenario.load_host_costs(options.processors) if options.processors else sim.HostModel.assumed()
    rows = [row for document in documents for row in compared(document, machine)]
    found = {
        **summary(rows),
        "by_schedule": by("schedule", rows),
        "by_bytes": by("bytes", rows),
        "by_cluster": by("cluster", rows),
    }
    print(table(rows))
    for name in ("by_schedule", "by_bytes", "by_cluster"):
        for value, errors in found[name].items():
            print(f"{name} {value}: median {errors['median_error']:.1%}, 95 % below {errors['high_error']:.1%}")
    print(f"all {len(rows)}: median {found['median_error']:.1%}, {HIGH_PERCENTILE} % below {found['high_error']:.1%}")
    shares = [row["others_share"] for row in rows if row["others_share"] is not None]
    if shares:
        print(f"processors that others had, kernel included: median {np.median(shares):.0%}, most {max(shares):.0%}")
    if options.out:
        about = {key: documents[0][key] for key in ("machine", "versions")}
        costs = str(options.processors) if options.processors else "Machine.assumed()"
        simulated = {"date": str(date.today()), "git_commit": describe_machine()["git_commit"], "processors": costs}
        of_each = ("cluster", "date", "git_commit", "rates_bytes_per_s")
        measured = [{key: each[key] for key in of_each} for each in documents]
        document = about | {"simulated": simulated} | found | {"clusters": measured, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(0 if found["median_error"] <= MEDIAN_BAR and found["high_error"] <= HIGH_BAR else 1)


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="+", type=Path, help="what measure_every_schedule.py wrote")
    parser.add_argument("--processors", type=Path, help="what processor_costs.py --out wrote")
    parser.add_argument("--out", type=Path, help="write everything here, as JSON")
    return parser.parse_args()


def compared(document: dict[str, Any], machine: sim.HostModel) -> list[dict[str, Any]]:
    """A row for each schedule and size of one cluster."""
    rows = []
    for case in cases_of(document):
        measured, choice, (cluster, _) = case.measured, case.choice, planned(case.cluster)
        simulated_s, measured_s = case.simulate(machine).seconds, statistics.median(measured["seconds"])
        rows.append(
            {
                "cluster": case.cluster,
                "schedule": choice.schedule,
                "bytes": measured["bytes"],
                "num_segments": choice.num_segments,
                "bound_s": cost.bound(cluster, measured["bytes"], rates=case.rates).seconds,
                "predicted_s": choice.predicted_s,
                "simulated_s": simulated_s,
                "measured_s": measured_s,
                "rounds_s": measured["seconds"],
                "others_share": others_share(measured, case.num_cpus),
                "error": simulated_s / measured_s - 1,
            }
        )
    return rows


def others_share(measured: Mapping[str, Any], num_cpus: int) -> float | None:
    """Part of the machine's processors that other programs had meanwhile; None if it was not recorded.

    The kernel's own work for the ranks is among it, about a tenth.
    """
    if "machine_s" not in measured:
        return None
    others_s = sum(measured["machine_s"]) - sum(measured["processor_s"])
    return max(0.0, others_s) / (num_cpus * sum(measured["seconds"]))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Summarise the errors' sizes."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "num_rows": len(rows),
        "median_error": float(np.median(errors)),
        "high_error": float(np.percentile(errors, HIGH_PERCENTILE)),
        "largest_error": max(errors),
    }


def by(key: str, rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The summary of each part of the rows."""
    values = dict.fromkeys(row[key] for row in rows)
    return {str(value): summary([row for row in rows if row[key] == value]) for value in values}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: segments, milliseconds measured -> simulated, and the error."""
    sizes = sorted({row["bytes"] for row in rows})
    lines = [
        "| cluster | schedule | " + " | ".join(map(units.format_bytes, sizes)) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    cells = {(row["cluster"], row["schedule"], row["bytes"]): _cell(row) for row in rows}
    for cluster, schedule in dict.fromkeys((row["cluster"], row["schedule"]) for row in rows):
        found = " | ".join(cells.get((cluster, schedule, size), "") for size in sizes)
        lines.append(f"| {cluster} | {schedule} | {found} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    measured_ms, simulated_ms = row["measured_s"] * 1e3, row["simulated_s"] * 1e3
    return f"{row['num_segments']}: {measured_ms:.0f} -> {simulated_ms:.0f} ({row['error']:+.0%})"


if __name__ == "__main__":
    main()
