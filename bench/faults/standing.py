"""Members that stand still or are cut off for half a minute: how long the others wait, and what the zombie does then.

    python bench/faults/standing.py --only pause,cut         # three minutes
    python bench/faults/standing.py                          # nine

An elastic job in a lab: SIGSTOP of a worker, its node cut off from the network both ways, deaf, and not heard; then the
same of the node of the coordinator that decides, and SIGSTOP of that coordinator just before a worker is killed. One
after the other, each when the one before has come back.
"""

import sys
from collections.abc import Sequence

import lab_jobs

from ringweave.benchmarks.chaos import faults, survivors
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.benchmarks.chaos.survivors import Epoch, Toll

KINDS = {
    "pause": "at {at}s pause worker 4 for {lasts}s",
    "cut": "at {at}s cut a-5 for {lasts}s",
    "in": "at {at}s cut a-6 in for {lasts}s",
    "out": "at {at}s cut a-7 out for {lasts}s",
    "coordinator-cut": "at {at}s cut {decides} for {lasts}s",
    "coordinator-in": "at {at}s cut {decides} in for {lasts}s",
    "coordinator-out": "at {at}s cut {decides} out for {lasts}s",
    "coordinator-pause": "at {at}s pause coordinator for {lasts}s\nat {soon}s kill worker 3",
}
"""Of each kind its faults; `decides` is the node whose coordinator decides by then: one that is hit does no more."""
BAR_S = 2.0
_BACK_S = 20.0
"""Time to come back in, after a fault."""
_CALM_S = 10.0
_SOON_S = 0.1
_PLACES = ("a-0", "a-1")
"""Of the coordinators, the one that decides first before the other."""


def script(kinds: Sequence[str], lasts_s: float) -> tuple[str, float]:
    """The faults of some kinds as text, and when the last is over."""
    lines, at_s, num_over = [], _CALM_S, 0
    for kind in kinds:
        decides = _PLACES[num_over % 2]
        lines.append(
            KINDS[kind].format(at=f"{at_s:g}", soon=f"{at_s + _SOON_S:g}", lasts=f"{lasts_s:g}", decides=decides)
        )
        at_s += lasts_s + _BACK_S
        num_over += hits_coordinator(kind)
    return "\n".join(lines), at_s


def hits_coordinator(kind: str) -> bool:
    """The other one has to take over."""
    return kind.startswith("coordinator")


def is_good(
    found: Sequence[Toll], happens: Sequence[Fault], epochs: Sequence[Epoch], num_lost: int, num_over: int
) -> bool:
    """Whether every fault was survived within the bar, no step was lost, nor one done by a zombie.

    And whether as many coordinators took over as there ought to.
    """
    num_felt = sum(fault.hits_worker or fault.kind == faults.CUT for fault in happens)
    is_whole = len(found) == num_felt and all(each.back_s for each in found)
    is_quick = all(each.stall_s is not None and each.stall_s <= BAR_S for each in found)
    num_terms = len({each.term for each in epochs})
    return is_whole and is_quick and num_terms > num_over and not num_lost and not any(e.steps_as_zombie for e in found)


def main() -> int:
    """One of each; 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--lasts", type=float, default=30.0)
    options = parser.parse_args()
    kinds = options.only.split(",")
    text, until_s = script(kinds, options.lasts)
    happens = lab_jobs.parse(text.splitlines(), options)
    ended = lab_jobs.run(options, happens, until_s=until_s, elastic=lab_jobs.bounds(options))
    found = survivors.tolls(ended.events)
    said = lab_jobs.summary(ended, found)
    rows = lab_jobs.toll_rows(found)
    lab_jobs.conclude(options, "standing", said, [*rows, *lab_jobs.summary_rows(said, len(rows[0]))])
    num_over = sum(map(hits_coordinator, kinds))
    return 0 if is_good(found, happens, survivors.epochs(ended.events), said["steps_lost"], num_over) else 1


if __name__ == "__main__":
    sys.exit(main())
