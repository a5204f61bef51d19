"""How long rings stall, and how long the others do, when members and representatives of rings are killed.

    python bench/faults/ring_kills.py --kills 10                  # three minutes
    python bench/faults/ring_kills.py --kills 50 --seed 1         # a quarter of an hour

A job in a lab in mode ps-hra under --elastic. Each kill is a SIGKILL from outside at a random moment; by turns it hits
a ring's representative and another member. Stalls are the longest time between two steps around the kill, less the
usual time of a step. The same longest time where nothing was killed is taken of the other rings: a busy machine makes
gaps of its own. Another ring has stood still if a worker of it waited for a whole step longer than it did where nothing
was killed; but at the end of an epoch of the data all rings meet, and wait for one that lost a member in its last step:
what that takes is said apart, and is bounded like a ring's own stall. Parameters of a ring's members are compared bit
by bit, push by push; each push has to have made one version on the server, and no other one; and accounts of epochs
have to add up.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lab_jobs
import ring_runs
from ring_runs import Done, Run, Waits, longest_apart, longest_s, usual_s

from ringweave.benchmarks.chaos import session
from ringweave.benchmarks.chaos.quantiles import quantile

BAR_S = 1.5
WINDOW_S = 3.0
"""After a kill: what the ring does in it is laid to the kill."""
OTHERS_S = 0.9
"""The same for other rings: after a second the victim is started again, which takes a processor for seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """What one kill cost; measured."""

    victim: str
    was_representative: bool
    at_s: float
    """On the clock of the processes."""
    ring_s: float | None
    """Of the survivor of its ring that it was longest for; None if one made no step any more."""
    others_s: float | None
    """Of the worker of another ring that it was longest for, before the victim was started again; None likewise. What
    rings wait for each other at the end of an epoch is not in it."""
    meeting_s: float
    """That: from the last step of an epoch to the first of the next one, if one ended then, less a usual step; or 0."""
    quiet_s: float
    """Of the same workers in a window as long before the kill."""
    step_s: float
    """Their usual step."""
    num_peers: int
    """Survivors of its ring."""
    num_others: int
    """Workers of other rings."""

    @property
    def stopped_others(self) -> bool:
        """Another ring stood still for a step."""
        return self.others_s is None or self.others_s - self.quiet_s >= self.step_s


def judge(victim: str, was_representative: bool, at_s: float, steps: Mapping[str, Sequence[Done]]) -> Stall:
    """What a kill cost, by the steps of all processes."""
    rings = {name: _ring(each, at_s) for name, each in ring_runs.alive_at(steps, at_s).items()}
    ring = _ring(steps[victim], at_s)
    own = [steps[name] for name, of in rings.items() if of == ring and name != victim]
    others = [steps[name] for name, of in rings.items() if of != ring]
    of_others = [_of_another_ring(each, at_s) for each in others]
    before = [_of_another_ring(each, at_s - WINDOW_S) for each in others]
    return Stall(
        victim=victim,
        was_representative=was_representative,
        at_s=at_s,
        ring_s=_longest([_stall_s(each, at_s, WINDOW_S) for each in own]),
        others_s=_longest([each and each.inside_s for each in of_others]),
        meeting_s=max((each.meeting_s for each in of_others if each), default=0.0),
        quiet_s=max((each.inside_s for each in before if each), default=0.0),
        step_s=max((usual_s(each) for each in others), default=0.0),
        num_peers=len(own),
        num_others=len(others),
    )


def _ring(each: Sequence[Done], at_s: float) -> int:
    return next((done.ring for done in reversed(each) if done.time_s <= at_s), each[0].ring)


def _stall_s(each: Sequence[Done], since_s: float, window_s: float) -> float | None:
    found = longest_s(each, since_s, since_s + window_s)
    return None if found is None else max(0.0, found - usual_s(each))


def _of_another_ring(each: Sequence[Done], since_s: float) -> Waits | None:
    """Less a usual step."""
    found = longest_apart(each, since_s, since_s + OTHERS_S)
    return found and Waits(*(max(0.0, wait_s - usual_s(each)) for wait_s in found))


def _longest(stalls: Sequence[float | None]) -> float | None:
    """None if one of them has no end."""
    known = [each for each in stalls if each is not None]
    return max(known, default=0.0) if len(known) == len(stalls) else None


def hurt(run: Run, options: argparse.Namespace) -> list[tuple[str, bool, float]]:
    """Kill so often; (victim, whether it was a representative, when)."""
    rng, killed = random.Random(options.seed), []
    for number in range(options.kills):
        ring_runs.wait_whole(run, options)
        time.sleep(WINDOW_S + rng.random())
        rings = [each for _, each in sorted(run.members().items()) if len(each) > 1]
        ring, is_first = rng.choice(rings), number % 2 == 0
        victim = ring[0] if is_first else rng.choice(ring[1:])
        os.kill(run.pid(victim), signal.SIGKILL)
        killed.append((victim, is_first, time.monotonic()))
        time.sleep(WINDOW_S)
    ring_runs.wait_whole(run, options)
    time.sleep(WINDOW_S)
    return killed


def summary(stalls: Sequence[Stall], steps: Mapping[str, Sequence[Done]]) -> dict[str, Any]:
    """What is said of a run."""
    ring = [each.ring_s for each in stalls if each.ring_s is not None]
    others = [each.others_s for each in stalls if each.others_s is not None]
    quiet = [each.quiet_s for each in stalls]
    return {
        "bench": "ring-kills",
        "kills": len(stalls),
        "usual_step_s": round(statistics.median(usual_s(each) for each in steps.values() if len(each) > 10), 3),
        "ring_stall_p50_s": quantile(ring, 0.5),
        "ring_stall_p95_s": quantile(ring, 0.95),
        "other_rings_stall_p50_s": quantile(others, 0.5),
        "other_rings_stall_max_s": round(max(others, default=0.0), 3),
        "kills_as_rings_met": sum(each.meeting_s > 0 for each in stalls),
        "rings_met_for_max_s": round(max(each.meeting_s for each in stalls), 3),
        "other_rings_without_a_kill_p50_s": quantile(quiet, 0.5),
        "other_rings_without_a_kill_max_s": round(max(quiet), 3),
        "kills_that_stopped_other_rings": sum(each.stopped_others for each in stalls),
        "kills_that_nobody_felt": sum(not each.num_peers or not each.num_others for each in stalls),
        "never_went_on": sum(each.ring_s is None or each.others_s is None for each in stalls),
    }


def missed(said: Mapping[str, Any]) -> list[str]:
    """What was not as it has to be, in words."""
    found = ring_runs.missed(said)
    num_alone = said["kills_that_nobody_felt"]
    found += [f"{num_alone} kills without a survivor in the ring, or a worker in another one"] if num_alone else []
    num_stopped = said["kills_that_stopped_other_rings"]
    found += [f"{num_stopped} kills stopped another ring for a step"] if num_stopped else []
    found += lab_jobs.over("rings that met waited in s", said["rings_met_for_max_s"], BAR_S)
    return found + lab_jobs.over("stall of the ring, p95 in s", said["ring_stall_p95_s"], BAR_S)


def main() -> int:
    """So many kills; 1 if a bar is missed."""
    options = ring_runs.parse(__doc__, kills=10)
    with tempfile.TemporaryDirectory(prefix="ringweave-rings-") as name:
        with session.ended_cleanly(), Run(options, Path(name)) as run:
            killed = hurt(run, options)
            printed = run.end()
        steps = ring_runs.read(run.checks)
        stalls = [judge(*each, steps) for each in killed]
        said = summary(stalls, steps) | ring_runs.books(run.run_dir, run.checks, steps, options.kills)
    ring_runs.conclude(options, said, stalls, printed)
    return lab_jobs.verdict(missed(said))


if __name__ == "__main__":
    sys.exit(main())
