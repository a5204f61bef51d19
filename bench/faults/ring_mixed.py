"""Faults of many kinds at random in a job of rings: no deadlock, no push lost or doubled, every sample accounted.

    python bench/faults/ring_mixed.py --faults 60                 # five minutes
    python bench/faults/ring_mixed.py --faults 250 --seed 2       # a quarter of an hour

A job in a lab in mode ps-hra under --elastic with --standby. Kills and stops of workers and of the coordinator that
decides, cuts and slow links of nodes without a server, drawn as those of mixed.py; besides, the server that leads is
killed every so often, never twice before the one that is started in its place has everything again: of both at once
nobody could go on. Afterwards all workers have to train again. Parameters of a ring's members are compared bit by bit,
push by push; each push of a ring must have made one version on the server, and no other one; and accounts of epochs
have to add up. No longest wait is asked for: faults overlap, and at the end of an epoch rings wait for each other.
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
from ringweave.benchmarks.chaos import histories, session
from ringweave.benchmarks.chaos.faults import COORDINATOR, CUT, KILL, PAUSE, SERVER, SLOW, Fault
from ringweave.benchmarks.chaos.session import Plan

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
    """All faults, those of the server among them, by their time."""
    targets = session.targets(lab_jobs.cluster(options))
    hit = replace(targets, nodes=targets.nodes[_SERVERS:], services=(COORDINATOR,))
    found = list(draw(hit, [KILL, PAUSE, CUT, SLOW], options.kills, options.seed, EVERY_S))
    rng, at_s, last_s = random.Random(options.seed), SERVER_S, found[-1].at_s
    while at_s < last_s:
        found.append(Fault(at_s=round(at_s, 2), kind=KILL, target=SERVER))
        at_s += SERVER_S + rng.uniform(-5, 5)
    return tuple(sorted(found, key=lambda fault: fault.at_s)[: options.kills])


def plan_of(options: argparse.Namespace, happens: Sequence[Fault], out: Path) -> Plan:
    """The job of these rings, under these faults."""
    script = ring_runs.script(options, out / "checks")
    flags = [f"--elastic=1:{options.workers}", "--mode=ps-hra", "--standby"]
    until_s = happens[-1].at_s + happens[-1].lasts_s + BACK_S
    return Plan(system="ringweave", script=script, faults=happens, out=out, options=flags, until_s=until_s)


def silent(steps: Mapping[str, Sequence[Done]], workers: int) -> list[int]:
    """Slots no process of which trains at the end."""
    end_s = max((each[-1].time_s for each in steps.values()), default=0.0)
    back = {histories.slot_of(name)[0] for name, each in steps.items() if each[-1].time_s > end_s - LAST_S}
    return sorted(set(range(workers)) - back)


def num_gone(happens: Sequence[Fault]) -> int:
    """Workers that a fault may have put out: each may take the samples of a step with it."""
    return sum(fault.hits_worker or fault.kind == CUT for fault in happens)


def missed(said: Mapping[str, Any]) -> list[str]:
    """What was not as it has to be, in words."""
    found = ring_runs.missed({**said, "never_went_on": 0})
    found += [f"workers {said['silent']} do not train any more"] if said["silent"] else []
    found += [f"{fault}: never began" for fault in said["never_began"]]
    found += [f"the job was started {said['attempts']} times"] if said["attempts"] != 1 else []
    return found + ([f"the job ended by itself: {said['outcome']}"] if said["outcome"] != "stopped" else [])


def main() -> int:
    """So many faults; 1 if something is not as it has to be."""
    options = ring_runs.parse(__doc__, kills=60, repeat=15, option="--faults")  # so that rings meet often
    out = Path(tempfile.mkdtemp(prefix="ringweave-rings-"))
    print(f"events and logs: {out}", file=sys.stderr, flush=True)
    happens = draw_all(options)
    plan = plan_of(options, happens, out)
    report = session.run(plan, lab_jobs.cluster(options), lambda text: print(text, file=sys.stderr, flush=True))
    steps = ring_runs.read(out / "checks")
    begun = Counter(fault.target if fault.target in (COORDINATOR, SERVER) else fault.kind for fault in happens)
    said = {
        "bench": f"ring-mixed-{options.kills}-seed-{options.seed}",
        "faults": len(happens),
        "wanted": dict(begun),
        "never_began": list(report.never_began),
        "attempts": report.attempts,
        "outcome": histories.outcome(list(telemetry.read(out / "events.jsonl"))),
        "processes": len(steps),
        "silent": silent(steps, options.workers),
        **ring_runs.books(out, out / "checks", steps, num_gone(happens)),
    }
    ring_runs.conclude(options, said, [], "")
    return lab_jobs.verdict(missed(said))


if __name__ == "__main__":
    sys.exit(main())
