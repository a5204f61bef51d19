"""The same faults under ringweave, torchrun with checkpoints, and torchft: how long nobody trains, and what is lost.

    python bench/faults/beside.py                            # five minutes for each system
    python bench/faults/beside.py --systems ringweave        # that of ringweave alone

One after the other, each 45 s after the one before is over: a worker killed; one stopped for 30 s; the node of one cut
off for 30 s, both ways, and then deaf; the first node cut off, where of each system the process is that the others meet
at: ringweave's coordinator that decides, the store of torchrun's rendezvous, torchft's lighthouse; and that first
node's worker killed.

The job is that of goodput.py. A wait is the longest time without a train step that any worker has finished, a usual
step of which is printed too; of ringweave parameters have to be alike and samples those that the books know, as in all
of these benches. The others are only compared with.
"""

import sys
from collections.abc import Sequence

import goodput
import lab_jobs

from ringweave.benchmarks.chaos import survivors
from ringweave.benchmarks.chaos.accounts import Report

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
    """All systems; 1 if ringweave misses the bar."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--systems", default="ringweave,torchrun", help="also torchft, see docs/chaos.md")
    parser.add_argument("--s-per-sample", type=float, default=0.003, help="that workers sleep")
    parser.set_defaults(width=96, until_s=UNTIL_S)
    options = parser.parse_args()
    happens = lab_jobs.parse(SCRIPT, options)
    ends = {system: goodput.measure(options, happens, system) for system in options.systems.split(",")}
    document: dict[str, object] = {"faults": [str(each) for each in happens], "s_per_sample": options.s_per_sample}
    document.update({system: ended.report.to_document() for system, ended in ends.items()})
    found: list[str] = []
    if ringweave := ends.get("ringweave"):
        said = lab_jobs.summary(ringweave, survivors.tolls(ringweave.events))
        document["checked"] = {key: said[key] for key in ("checks_alike", "samples_counted", "samples_lost", "wrong")}
        found = missed(said, ringweave.report)
    lab_jobs.conclude(options, "beside", document, rows({system: ended.report for system, ended in ends.items()}))
    return lab_jobs.verdict(found)


def rows(reports: dict[str, Report]) -> Sequence[tuple[object, ...]]:
    """The table: a column for each system."""
    head = ("longest time without a step, s", *reports)
    waits = [
        (line, *({each.fault: each.stall_s for each in said.recoveries}.get(line) for said in reports.values()))
        for line in SCRIPT
    ]
    counts = (
        ("a usual step, s", lambda said: said.fault_free_steps_per_s and 1 / said.fault_free_steps_per_s),
        ("train steps that count", lambda said: said.steps),
        ("train steps lost", lambda said: said.steps_lost),
        ("samples lost", lambda said: said.samples_lost),
        ("goodput", lambda said: said.goodput),
    )
    return [head, *waits, *((name, *map(take, reports.values())) for name, take in counts)]


def missed(said: dict[str, object], report: Report) -> list[str]:
    """What was not as it has to be, in words."""
    waits = [lab_jobs.over(f"{each.fault}: longest wait in s", each.stall_s, BAR_S) for each in report.recoveries]
    return [*lab_jobs.missed(said), *(text for found in waits for text in found)]


if __name__ == "__main__":
    sys.exit(main())
