"""Members that stand still or are cut off for half a minute: how long the others wait, and what the zombie does then.

    python bench/faults/standing.py --only pause,cut         # three minutes
    python bench/faults/standing.py                          # five

An elastic job in a lab: SIGSTOP of a worker, its node cut off from the network both ways, deaf, and not heard; one
after the other, each when the one before has come back. No node of a coordinator is hit.
"""

import sys

import lab_jobs

from ringweave.benchmarks.chaos import survivors

KINDS = {
    "pause": "pause worker 4 for {lasts}s",
    "cut": "cut a-5 for {lasts}s",
    "in": "cut a-6 in for {lasts}s",
    "out": "cut a-7 out for {lasts}s",
}
BAR_S = 2.0
_BACK_S = 20.0
"""Time to come back in, after a fault."""
_CALM_S = 10.0


def main() -> int:
    """One of each; 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--lasts", type=float, default=30.0)
    options = parser.parse_args()
    lines, at_s = [], _CALM_S
    for kind in options.only.split(","):
        lines.append(f"at {at_s:g}s {KINDS[kind].format(lasts=f'{options.lasts:g}')}")
        at_s += options.lasts + _BACK_S
    happens = lab_jobs.parse(lines, options)
    ended = lab_jobs.run(options, happens, until_s=at_s, elastic=lab_jobs.bounds(options))
    found = survivors.tolls(ended.events)
    said = lab_jobs.summary(ended, found)
    rows = lab_jobs.toll_rows(found)
    lab_jobs.conclude(options, "standing", said, [*rows, *lab_jobs.summary_rows(said, len(rows[0]))])
    is_whole = len(found) == len(happens) and not said["never_went_on"] and all(each.back_s for each in found)
    return 0 if is_whole and not said["steps_lost"] and said["stall_max_s"] <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
