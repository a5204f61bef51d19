"""Goodput with a worker killed every so often: ringweave with --elastic beside torchrun with checkpoints, same faults.

    python bench/faults/goodput.py --every 15 --for 120      # three minutes for each system
    python bench/faults/goodput.py --every 60 --for 600      # the bar: 0.95; with --every 15: 0.88

Goodput = samples that count / (fault-free rate x worker-seconds that the faults leave); the fault-free rate is that of
the same run before its first fault. A victim counts as away until it is started again, 10 s at most.
"""

import argparse
import sys
from collections.abc import Sequence

import lab_jobs

from ringweave.benchmarks.chaos import faults, session
from ringweave.benchmarks.chaos.accounts import Report

RESTART_S = 10.0
BARS = {60.0: 0.95, 15.0: 0.88}


HEAD = ("system", "kills", "goodput", "steps/s without faults", "steps", "steps lost", "samples lost")
HEAD += ("recover p50, s", "p95, s")


def main() -> int:
    """All systems; 1 if ringweave misses the bar, or its goodput is not known."""
    options = parse_options()
    happens = faults.draw(
        [faults.KILL],
        session.targets(lab_jobs.cluster(options)),
        seed=options.seed,
        every_s=options.every,
        until_s=options.until_s - 5,
        lasts_s=0.0,
        calm_s=options.calm,
    )
    document: dict[str, object] = {"every_s": options.every, "seconds": options.until_s, "seed": options.seed}
    reports = {system: measure(options, happens, system) for system in options.systems.split(",")}
    document.update({system: said.to_document() for system, said in reports.items()})
    rows = [HEAD, *(row(system, said) for system, said in reports.items())]
    lab_jobs.conclude(options, f"goodput-{options.every:g}", document, rows)
    return int("ringweave" in reports and not is_good(reports["ringweave"].goodput, options.every))


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--for", dest="until_s", type=float, default=120.0)
    parser.add_argument("--calm", type=float, default=20.0, help="seconds before the first kill")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--systems", default="ringweave,torchrun", help="also torchft, see docs/chaos.md")
    return parser.parse_args()


def measure(options: argparse.Namespace, happens: Sequence[faults.Fault], system: str) -> Report:
    """Returns what the faults cost one system."""
    elastic = lab_jobs.bounds(options, 3) if system == "ringweave" else None
    return lab_jobs.run(
        options, happens, until_s=options.until_s, system=system, elastic=elastic, restart_s=RESTART_S, name=system
    ).report


def row(system: str, said: Report) -> tuple[object, ...]:
    """Returns a line of the table."""
    rate = said.fault_free_steps_per_s
    counts = (said.steps, said.steps_lost, said.samples_lost, said.recover_p50_s, said.recover_p95_s)
    return (system, said.faults, said.goodput, round(rate, 3) if rate else None, *counts)


def is_good(goodput: float | None, every_s: float) -> bool:
    """Whether the bar is met; what could not be measured is not good."""
    return goodput is not None and goodput >= BARS.get(every_s, min(BARS.values()))


if __name__ == "__main__":
    sys.exit(main())
