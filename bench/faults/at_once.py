"""Several faults at once: two of eight workers, the coordinator together with a member, and all but one worker.

    python bench/faults/at_once.py                           # three minutes

An elastic job in a lab; killed workers come back. A takeover by a coordinator's standby is seen by the generation that
it publishes without the member that was killed a moment after the coordinator: its time is fail-over and change of
members together. Many of them: kills.py --coordinators.
"""

import sys
from typing import Any

import lab_jobs

from ringweave_bench.chaos import job_history, member_impacts

BAR_S = 3.0
"""Time within which the standby takes over."""


def lines(workers: int) -> list[str]:
    """The script."""
    first = [
        "at 10s kill worker 2",
        f"at 10s kill worker {workers - 1}",
        "at 35s kill coordinator",
        "at 35.3s kill worker 1",
    ]
    return [*first, *(f"at 60s kill worker {rank}" for rank in range(1, workers))]


def main() -> int:
    """Run the faults; return 1 if training did not continue, or not all workers came back."""
    options = lab_jobs.parser(__doc__).parse_args()
    happens = lab_jobs.parse(lines(options.workers), options)
    ended = lab_jobs.run(options, happens, until_s=120.0, elastic=lab_jobs.bounds(options))
    found = member_impacts.measure_fault_impacts(ended.events)
    epochs = job_history.list_generations(ended.events)
    said = lab_jobs.summary(ended, found)
    said |= {
        "failover_s": said["taken_over_p50_s"],
        "terms": sorted({each.term for each in epochs}),
        "smallest": min(len(each.ranks) for each in epochs),
        "members_at_the_end": len(epochs[-1].ranks),
    }
    rows = lab_jobs.toll_rows(found)
    more = [("fail-over and new generation, s (bar 3)", said["failover_s"]), ("fewest members", said["smallest"])]
    more.append(("members at the end", said["members_at_the_end"]))
    padded = [(*row, *[""] * (len(rows[0]) - 2)) for row in more]
    lab_jobs.conclude(options, "at-once", said, [*rows, *lab_jobs.summary_rows(said, len(rows[0])), *padded])
    return lab_jobs.verdict(missed(said, options.workers))


def missed(said: dict[str, Any], workers: int) -> list[str]:
    """Return the missed requirements, in words."""
    found = lab_jobs.missed(said)
    found += [f"{said['smallest']} members at the fewest, not one"] if said["smallest"] != 1 else []
    num_end = said["members_at_the_end"]
    found += [f"{num_end} members at the end, not {workers}"] if num_end != workers else []
    return found + lab_jobs.over("fail-over in s", said["failover_s"], BAR_S)


if __name__ == "__main__":
    sys.exit(main())
