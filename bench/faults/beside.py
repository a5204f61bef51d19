"""The same faults under ringweave, torchrun with checkpoints, and torchft: the others' waits, and the losses.

    python bench/faults/beside.py                            # five minutes for each system
    python bench/faults/beside.py --systems ringweave        # that of ringweave alone

One after the other, each 45 s after the one before is over: a worker killed; one stopped for 30 s; the node of one cut
off for 30 s, both ways, and then inbound only; the first node cut off, which has each system's rendezvous process:
ringweave's active coordinator, the store of torchrun's rendezvous, torchft's lighthouse; and that first node's worker
killed.

The job is that of goodput.py. A wait is the longest time between two train steps of a worker whose node was not hit,
including a usual step, which is printed too. If one worker continues alone and the others pause, they wait. For
ringweave, parameters must be equal and all samples accounted for, as in all of these benches. The others are only
compared with.
"""

import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

import goodput
import lab_jobs

from ringweave.telemetry import Event
from ringweave_bench.chaos import fault_script
from ringweave_bench.chaos.chaos_report import HORIZON_S, ChaosReport

SCRIPT = (
    "at 20s kill worker 5",
    "at 65s pause worker 4 for 30s",
    "at 140s cut a-6 for 30s",
    "at 215s cut a-7 in for 30s",
    "at 290s cut a-0 for 30s",
    "at 365s kill worker 0",
)
UNTIL_S = 410.0
BAR_S = 2.0


def main() -> int:
    """Run all systems; return 1 if ringweave misses the bar."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument(
        "--systems", default="ringweave,torchrun", help="also torchft, see docs/how-to/inject-faults.md"
    )
    parser.set_defaults(width=96, until_s=UNTIL_S, s_per_sample=0.003)
    options = parser.parse_args()
    happens = lab_jobs.parse(SCRIPT, options)
    ends = {system: goodput.measure(options, happens, system) for system in options.systems.split(",")}
    document: dict[str, object] = {"faults": [str(each) for each in happens], "s_per_sample": options.s_per_sample}
    said = goodput.note(document, ends)
    waited = {system: waits(ended.events) for system, ended in ends.items()}
    document["longest_waits_s"] = waited
    found = missed(said, waited["ringweave"]) if said else []
    reports = {system: ended.report for system, ended in ends.items()}
    lab_jobs.conclude(options, "beside", document, rows(reports, waited))
    return lab_jobs.verdict(found)


def waits(events: Sequence[Event]) -> dict[str, float | None]:
    """Fault -> longest time in s between two steps of a node that it did not hit; None: one made no step after it."""
    node_of: dict[int, str] = {}
    steps: dict[str, list[float]] = defaultdict(list)
    hit: list[tuple[float, fault_script.Fault, str]] = []
    for event in events:
        if event["kind"] == "worker_watched":
            node_of[event["rank"]] = event["node"]
        elif event["kind"] == "train_step_done":
            steps[node_of[event["rank"]]].append(event["time"])
        elif event["kind"] == "fault_begun":
            (fault,) = fault_script.parse_faults(event["fault"])
            hit.append((event["time"], fault, node_of[int(fault.target)] if fault.hits_worker else fault.target))
    return {str(fault): _longest_s(time_s, fault, {**steps, node: []}) for time_s, fault, node in hit}


def _longest_s(time_s: float, fault: fault_script.Fault, steps: Mapping[str, Sequence[float]]) -> float | None:
    """Return the longest time of any node that made steps before the fault."""
    until_s = time_s + fault.lasts_s + HORIZON_S
    there = [each for each in steps.values() if each and each[0] < time_s]
    if not there or any(each[-1] < until_s for each in there):
        return None
    gaps = ((after, after - before) for each in there for before, after in itertools.pairwise(each) if before < until_s)
    return round(max(gap_s for after, gap_s in gaps if after > time_s), 3)


def rows(
    reports: Mapping[str, ChaosReport], waited: Mapping[str, Mapping[str, float | None]]
) -> Sequence[tuple[object, ...]]:
    """The table: a column for each system."""
    head = ("longest wait of one that was not hit, s", *reports)
    lines = [(line, *(waited[system].get(line) for system in reports)) for line in SCRIPT]
    counts = (
        ("a usual step, s", lambda said: said.fault_free_steps_per_s and 1 / said.fault_free_steps_per_s),
        ("train steps that count", lambda said: said.steps),
        ("train steps lost", lambda said: said.steps_lost),
        ("samples lost", lambda said: said.samples_lost),
        ("goodput", lambda said: said.goodput),
    )
    return [head, *lines, *((name, *map(take, reports.values())) for name, take in counts)]


def missed(said: dict[str, object], waited: Mapping[str, float | None]) -> list[str]:
    """Return the missed requirements, in words."""
    late = [lab_jobs.over(f"{fault}: longest wait in s", waited.get(fault), BAR_S) for fault in SCRIPT]
    return [*lab_jobs.missed(said), *(text for found in late for text in found)]


if __name__ == "__main__":
    sys.exit(main())
