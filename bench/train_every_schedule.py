"""Training by every schedule, on two clusters in the lab, gives the losses of training on Gloo, step by step.

    python bench/train_every_schedule.py            # needs root; --steps, --schedules, --out: see --help

Six nodes of two ranks (examples/clusters/six-by-two.yaml) train the first example once on Gloo (`--schedule native`)
and
once by each schedule, five nodes of two once on Gloo and once by leader-matrix: five leaders stand in one row. A run
counts only if run.json says that the forced schedule carried the gradients of every step, and that nothing but it and
the native backend, for messages below 64 KiB, carried anything. Exit code 1 if one fails.
"""

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ringweave import lab, planning, schedules, topology
from ringweave.lab import Lab
from ringweave.planning import Plan
from ringweave.topology import Cluster
from ringweave_bench.lab_workers import run_workers

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "01_train_text.py"
SIX = ROOT / "examples" / "clusters" / "six-by-two.yaml"
TINY = "--layers 1 --width 64 --heads 2 --context 32 --batch 60 --max-bytes 300000 --held-out-windows 60"
"""60 sequences divide among 12 and among 10 ranks; about 0.3 MB of gradients, in one bucket."""
ALLOWED = 1e-5
RUN_TIMEOUT_S = 600
HOST = schedules.NATIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run of the example."""

    schedule: str
    losses: tuple[float, ...]
    by_schedule: dict[str, dict[str, int]]
    """From run.json: schedule -> collectives, bytes, messages."""
    wall_s: float


def main() -> None:
    """Train on both clusters, print tables, exit 1 if a run failed its check."""
    options = parse_options()
    six = topology.load(SIX)
    five = dataclasses.replace(six, name="five-by-two", nodes=six.nodes[:5])
    passed = train_on(six, options.schedules, options)
    if "leader-matrix" in options.schedules:
        passed = train_on(five, ["leader-matrix"], options) and passed
    print(f"largest relative difference allowed: {ALLOWED:g}; " + ("all passed" if passed else "FAILED"))
    sys.exit(0 if passed else 1)


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for name in schedules.SCHEDULE_NAMES if name != HOST]
    parser.add_argument("--steps", type=int, default=8, help="train steps of each run")
    parser.add_argument("--schedules", nargs="+", choices=every, default=every, help="which to force")
    parser.add_argument("--out", type=Path, default=Path("runs/every-schedule"), help="folder for the runs")
    return parser.parse_args()


def train_on(cluster: Cluster, names: list[str], options: argparse.Namespace) -> bool:
    """Bring the cluster up, train on Gloo and by each schedule; whether all passed."""
    plan = planning.plan_group(cluster, [node.name for node in cluster.nodes for _ in node.devices])
    place = lab.up(cluster, f"every-{cluster.name}")
    try:
        print(f"\n{describe(cluster, plan)}\n\n{HEADER}", flush=True)
        gloo = train(place, HOST, options)
        print_row(gloo, gloo, options.steps)
        results = []
        for name in names:
            results.append(print_row(train(place, name, options), gloo, options.steps))
        return all(results)
    finally:
        lab.down(place.name)


def train(place: Lab, schedule: str, options: argparse.Namespace) -> Outcome:
    """Run the example once in the lab, to its end.

    Raises:
        SystemExit: It failed; its output is shown.
    """
    out = (options.out / place.name / schedule).absolute()
    example = [*TINY.split(), "--steps", str(options.steps), "--out", str(out)]
    started_s = time.monotonic()
    forced, environ = ["--schedule", schedule], {"OMP_NUM_THREADS": "1"}
    run_workers(place, SCRIPT, example, out, timeout_s=RUN_TIMEOUT_S, options=forced, environ=environ)
    record = json.loads((out / "run.json").read_text())
    lines = (out / "losses.jsonl").read_text().splitlines()
    return Outcome(
        schedule=schedule,
        losses=tuple(json.loads(line)["loss"] for line in lines),
        by_schedule=record["collectives_by_schedule"],
        wall_s=time.monotonic() - started_s,
    )


def difference(ours: Outcome, gloo: Outcome) -> float:
    """Largest relative difference of any step's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours.losses, gloo.losses, strict=True))


def is_as_forced(outcome: Outcome, steps: int) -> bool:
    """Return True if the forced schedule carried at least a collective a step, and only the native backend others."""
    carried = outcome.by_schedule.get(outcome.schedule, {"collectives": 0})["collectives"]
    return carried >= steps and set(outcome.by_schedule) <= {outcome.schedule, HOST}


HEADER = f"{'schedule':18}{'collectives':>12}{'MB':>8}{'messages':>10}{'by host':>9}{'difference':>12}{'wall':>8}"


def print_row(outcome: Outcome, gloo: Outcome, steps: int) -> bool:
    """Print what a run did, beside Gloo's; whether it passed."""
    found = difference(outcome, gloo)
    passed = found <= ALLOWED and is_as_forced(outcome, steps) and len(outcome.losses) == steps
    own = outcome.by_schedule.get(outcome.schedule, {"collectives": 0, "bytes": 0, "messages": 0})
    by_host = outcome.by_schedule.get(HOST, {"collectives": 0})["collectives"]
    numbers = f"{own['collectives']:12}{own['bytes'] / 1e6:8.2f}{own['messages']:10}{by_host:9}"
    verdict = "" if passed else "  FAILED"
    print(f"{outcome.schedule:18}{numbers}{found:12.1e}{outcome.wall_s:6.1f} s{verdict}", flush=True)
    return passed


def describe(cluster: Cluster, plan: Plan) -> str:
    """The cluster, and the matrix of leaders that leader-matrix uses there."""
    rows = plan.matrix
    shape = f"{len(rows)} x {max(map(len, rows))}"
    return f"{cluster.name}: {len(cluster.nodes)} nodes, {len(plan.nodes)} ranks; leaders in {shape}: {rows}"


if __name__ == "__main__":
    main()
