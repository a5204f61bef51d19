"""Faults of many kinds at random in a job of rings: no deadlock, no push lost or doubled, every sample accounted.

    python bench/faults/ring_mixed.py --faults 60                 # five minutes
    python bench/faults/ring_mixed.py --faults 250 --seed 2       # a quarter of an hour

A job in a lab in mode ps-hra under --elastic with --standby. Kills and stops of workers and of the active coordinator,
cuts and slow links of nodes without a server, drawn as those of mixed.py. Besides, the leading server is killed every
so often, but not again before its replacement is up to date, since the job cannot survive the loss of both. Afterwards
all workers must train again. The parameters of a ring's members are compared bit by bit, push by push; each push of a
ring must have made exactly one version on the server, and there must be no other version; and the accounts of passes
must add up. The longest wait has no bar: faults overlap, and at the end of a pass rings wait for each other.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lab_jobs
import ring_runs
from mixed import draw
from ring_runs import Done

from ringweave import telemetry
from ringweave_bench.chaos import chaos_session, job_history
from ringweave_bench.chaos.chaos_session import ChaosPlan
from ringweave_bench.chaos.fault_script import COORDINATOR, CUT, KILL, PAUSE, SERVER, SLOW, Fault

EVERY_S = 4.0
SERVER_S = 25.0
"""From one kill of the server to the next, 5 s more or less."""
BACK_S = 75.0
"""After the last fault: time for all to train again."""
LAST_S = 15.0
"""At the end of it: each worker has to have made a step in it."""
_SERVERS = 2
"""Nodes that servers are on: the first ones, where all nodes are alike."""


def draw_all(options: argparse.Namespace) -> tuple[Fault, ...]:
    """Draw all faults, including those of the server, sorted by time."""
    targets = chaos_session.cluster_targets(lab_jobs.cluster(options))
    hit = replace(targets, nodes=targets.nodes[_SERVERS:], services=(COORDINATOR,))
    found = list(draw(hit, [KILL, PAUSE, CUT, SLOW], options.kills, options.seed, EVERY_S))
    rng, at_s, last_s = random.Random(options.seed), SERVER_S, found[-1].at_s
    while at_s < last_s:
        found.append(Fault(at_s=round(at_s, 2), kind=KILL, target=SERVER))
        at_s += SERVER_S + rng.uniform(-5, 5)
    return tuple(sorted(found, key=lambda fault: fault.at_s)[: options.kills])


def plan_of(options: argparse.Namespace, happens: Sequence[Fault], out: Path) -> ChaosPlan:
    """Return the job of these rings under these faults."""
    script = ring_runs.script(options, out / "checks")
    flags = [f"--elastic=1:{options.workers}", "--mode=ps-hra", "--standby"]
    until_s = happens[-1].at_s + happens[-1].lasts_s + BACK_S
    return ChaosPlan(system="ringweave", script=script, faults=happens, out=out, options=flags, until_s=until_s)


def silent(steps: Mapping[str, Sequence[Done]], workers: int) -> list[int]:
    """Return the slots without a process that trains at the end."""
    end_s = max((each[-1].time_s for each in steps.values()), default=0.0)
    back = {job_history.parse_member(name)[0] for name, each in steps.items() if each[-1].time_s > end_s - LAST_S}
    return sorted(set(range(workers)) - back)


def num_gone(happens: Sequence[Fault]) -> int:
    """Count the workers that a fault may have evicted; the samples of a step may be lost with each."""
    return sum(fault.hits_worker or fault.kind == CUT for fault in happens)


def missed(said: Mapping[str, Any]) -> list[str]:
    """Return the missed requirements, in words."""
    found = ring_runs.missed({**said, "never_went_on": 0})
    found += [f"workers {said['silent']} do not train any more"] if said["silent"] else []
    found += [f"{fault}: never began" for fault in said["never_began"]]
    found += [f"the job was started {said['attempts']} times"] if said["attempts"] != 1 else []
    return found + ([f"the job ended by itself: {said['outcome']}"] if said["outcome"] != "stopped" else [])


def main() -> int:
    """Run the faults; return 1 if a requirement is missed."""
    options = ring_runs.parse(__doc__, kills=60, repeat=15, option="--faults")  # so that rings meet often
    out = Path(tempfile.mkdtemp(prefix="ringweave-rings-"))
    print(f"events and logs: {out}", file=sys.stderr, flush=True)
    happens = draw_all(options)
    plan = plan_of(options, happens, out)
    report = chaos_session.run_chaos(
        plan, lab_jobs.cluster(options), lambda text: print(text, file=sys.stderr, flush=True)
    )
    steps = ring_runs.read(out / "checks")
    begun = Counter(fault.target if fault.target in (COORDINATOR, SERVER) else fault.kind for fault in happens)
    said = {
        "bench": f"ring-mixed-{options.kills}-seed-{options.seed}",
        "faults": len(happens),
        "wanted": dict(begun),
        "never_began": list(report.never_began),
        "attempts": report.attempts,
        "outcome": job_history.chaos_outcome(list(telemetry.read_events(out / "events.jsonl"))),
        "processes": len(steps),
        "silent": silent(steps, options.workers),
        **ring_runs.books(out, out / "checks", steps, num_gone(happens)),
    }
    ring_runs.conclude(options, said, [], "")
    return lab_jobs.verdict(missed(said))


if __name__ == "__main__":
    sys.exit(main())
