"""Stalls of rings, and of the other rings, when members and representatives of rings are killed.

    python bench/faults/ring_kills.py --kills 10                  # three minutes
    python bench/faults/ring_kills.py --kills 50 --seed 1         # a quarter of an hour

A job in a lab in mode ps-hra under --elastic. Each kill is a SIGKILL from outside at a random moment; by turns it hits
a ring's representative and another member. Stalls are the longest time between two steps around the kill, less the
usual time of a step. For the other rings the same longest time before the kill is measured too, since a busy machine
makes gaps of its own. Another ring has stalled if a worker of it waited a whole step longer than before the kill. At
the end of a pass over the data all rings meet at a barrier, and wait for a ring that lost a member in its last step:
that time is reported separately, and is bounded like a ring's own stall. The parameters of a ring's members are
compared bit by bit, push by push; each push must have made exactly one version on the server, and there must be no
other version; and the accounts of the passes must add up.
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

from ringweave_bench.chaos import chaos_session
from ringweave_bench.chaos.member_impacts import quantile

BAR_S = 1.5
WINDOW_S = 3.0
"""Time after a kill in which stalls of its ring are attributed to it."""
OTHERS_S = 0.9
"""The same for other rings. It is short because a second later the victim restarts, which takes seconds of a
processor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Measured effects of one kill."""

    victim: str
    was_representative: bool
    at_s: float
    """Time of the kill, on the clock of the processes."""
    ring_s: float | None
    """Longest stall of a survivor of its ring; None if one made no step any more."""
    others_s: float | None
    """Longest stall of a worker of another ring before the victim was started again, without waits at the barrier; None
    if one made no step any more."""
    meeting_s: float
    """Time at the barrier, from the last step of a pass to the first of the next one, less a usual step; 0 if no pass
    ended."""
    quiet_s: float
    """Longest stall of the same workers in an equally long window before the kill."""
    step_s: float
    """Their usual step time."""
    num_peers: int
    """Survivors of its ring."""
    num_others: int
    """Workers of other rings."""

    @property
    def stopped_others(self) -> bool:
        """True if another ring stalled for a step."""
        return self.others_s is None or self.others_s - self.quiet_s >= self.step_s


def judge(victim: str, was_representative: bool, at_s: float, steps: Mapping[str, Sequence[Done]]) -> Stall:
    """Measure the effects of a kill from the steps of all processes."""
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
    """Return the waits, less a usual step."""
    found = longest_apart(each, since_s, since_s + OTHERS_S)
    return found and Waits(*(max(0.0, wait_s - usual_s(each)) for wait_s in found))


def _longest(stalls: Sequence[float | None]) -> float | None:
    """Return the longest stall; None if one of them has no end."""
    known = [each for each in stalls if each is not None]
    return max(known, default=0.0) if len(known) == len(stalls) else None


def hurt(run: Run, options: argparse.Namespace) -> list[tuple[str, bool, float]]:
    """Kill so many times; return (victim, True for a representative, time) of each."""
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
    """Summarise a run."""
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
    """Return the missed requirements, in words."""
    found = ring_runs.missed(said)
    num_alone = said["kills_that_nobody_felt"]
    found += [f"{num_alone} kills without a survivor in the ring, or a worker in another one"] if num_alone else []
    num_stopped = said["kills_that_stopped_other_rings"]
    found += [f"{num_stopped} kills stopped another ring for a step"] if num_stopped else []
    found += lab_jobs.over("rings that met waited in s", said["rings_met_for_max_s"], BAR_S)
    return found + lab_jobs.over("stall of the ring, p95 in s", said["ring_stall_p95_s"], BAR_S)


def main() -> int:
    """Run the kills; return 1 if a bar is missed."""
    options = ring_runs.parse(__doc__, kills=10)
    with tempfile.TemporaryDirectory(prefix="ringweave-rings-") as name:
        with chaos_session.signals_as_interrupt(), Run(options, Path(name)) as run:
            killed = hurt(run, options)
            printed = run.end()
        steps = ring_runs.read(run.checks)
        stalls = [judge(*each, steps) for each in killed]
        said = summary(stalls, steps) | ring_runs.books(run.run_dir, run.checks, steps, options.kills)
    ring_runs.conclude(options, said, stalls, printed)
    return lab_jobs.verdict(missed(said))


if __name__ == "__main__":
    sys.exit(main())
