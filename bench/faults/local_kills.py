"""Outer steps, accounts and loss of mode local under --elastic, when workers and whole sites are killed.

    python bench/faults/local_kills.py                                            # short: three minutes
    python bench/faults/local_kills.py --kills 20 --lost-sites 5 --epochs 20      # the bar

A job in a lab of two sites of four nodes, 10 Mbit/s between them: first without a fault, then under kills from outside
at random moments. A lost site is a SIGKILL to all its workers at once; then as to single ones, the launcher starts
them again. Each push of a site is an outer step: it must have made exactly one version on the server, and there must
be no other version; the members of a site have the same parameters after it, bit by bit; the accounts of the passes
must add up; and the held-out loss at the end is at most 1 % above that of the run without faults.
"""

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import lab_jobs
import ring_runs
from ring_runs import Run

from ringweave.errors import UsageError
from ringweave_bench.chaos import chaos_session
from ringweave_bench.lab_workers import two_sites

LOSS_BAR = 0.01
CALM_S = 2.0
"""Least time between a fault, the return of all workers, and the next fault."""
WHOLE_WITHIN_S = 180.0
END_WITHIN_S = 1800.0


def hurt(run: Run, options: Namespace) -> list[str]:
    """Kill single workers and whole sites, in random order; return the victims of each fault."""
    rng = random.Random(options.seed)
    faults = ["worker"] * options.kills + ["site"] * options.lost_sites
    rng.shuffle(faults)
    killed = []
    for fault in faults:
        ring_runs.wait_whole(run, options, WHOLE_WITHIN_S, num_lines=1, may_end=True)
        time.sleep(CALM_S + rng.random())
        if run.is_over:
            break
        site = rng.choice([each for _, each in sorted(run.members().items())])
        victims = site if fault == "site" else [rng.choice(site)]
        killed.append(" ".join(each for each in victims if kill(run, each)))
    return killed


def kill(run: Run, victim: str) -> bool:
    """Kill a worker; return False if it has ended by itself, with the job."""
    try:
        os.kill(run.pid(victim), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def train(options: Namespace, *, has_faults: bool) -> dict[str, Any]:
    """Run the job to its end; return its counts and its loss."""
    with tempfile.TemporaryDirectory(prefix="ringweave-sites-") as name:
        place, began_s = two_sites(options.workers // 2), time.monotonic()
        with chaos_session.signals_as_interrupt(), Run(options, Path(name), mode="local", cluster=place) as run:
            killed = hurt(run, options) if has_faults else []
            while not run.is_over and time.monotonic() < began_s + END_WITHIN_S:
                time.sleep(0.2)
            is_over = run.is_over
            printed = run.end()
        steps = ring_runs.read(run.checks)
        num_gone = sum(len(each.split()) for each in killed) * options.inner_steps
        said = ring_runs.books(run.run_dir, run.checks, steps, num_gone)
        losses = final_losses(run.checks)
    said |= {"killed": killed, "held_out_loss": statistics.median(losses) if losses else None}
    said |= {"never_went_on": 0 if is_over and losses else 1, "seconds": round(time.monotonic() - began_s, 1)}
    if said["never_went_on"]:
        print(printed[-3000:], file=sys.stderr)
    return said


def final_losses(checks: Path) -> list[float]:
    """Return the losses of the processes that reached the end."""
    lines = [line.split() for path in checks.glob("*.txt") for line in path.read_text(encoding="ascii").splitlines()]
    return [float(words[1]) for words in lines if words[0] == "loss" and len(words) == 2]


def missed(calm: dict[str, Any], hit: dict[str, Any], options: Namespace) -> list[str]:
    """Return the missed requirements, in words."""
    found = [f"without faults: {each}" for each in ring_runs.missed(calm)] + ring_runs.missed(hit)
    asked = options.kills + options.lost_sites
    if len(hit["killed"]) < asked:
        found.append(f"{len(hit['killed'])} faults of {asked} before the end. Give more --epochs")
    if calm["held_out_loss"] and hit["held_out_loss"]:
        found += lab_jobs.over(
            "loss above that without faults", hit["held_out_loss"] / calm["held_out_loss"] - 1, LOSS_BAR
        )
    return found


def main() -> int:
    """Run both jobs; return 1 if a bar is missed."""
    options = ring_runs.parse(__doc__, kills=3, repeat=10, sites=True)
    if options.workers % 2 or options.workers < 4:
        raise UsageError(f"--workers: {options.workers}, expected an even number from 4 on. They are in two sites.")
    calm = train(options, has_faults=False)
    print(f"without faults: {calm}", flush=True)
    hit = train(options, has_faults=True)
    ring_runs.conclude(options, {"bench": "local-kills", "without_faults": calm, **hit}, (), "")
    return lab_jobs.verdict(missed(calm, hit, options))


if __name__ == "__main__":
    sys.exit(main())
