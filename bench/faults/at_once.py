"""Several at once: two of eight, the coordinator together with a member, and all but one, who then come back.

    python bench/faults/at_once.py                           # three minutes

An elastic job in a lab. That a coordinator's standby has taken over is seen by the epoch that it forms without the
member that was killed a moment after the coordinator: its time is fail-over and change of members together.
"""

import sys

import lab_jobs

from ringweave.benchmarks.chaos import survivors

BAR_S = 3.0
"""Within it the standby takes over."""


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
    """All of it; 1 if training did not go on, or not all came back."""
    options = lab_jobs.parser(__doc__).parse_args()
    happens = lab_jobs.parse(lines(options.workers), options)
    ended = lab_jobs.run(options, happens, until_s=120.0, elastic=lab_jobs.bounds(options))
    found = survivors.tolls(ended.events)
    epochs = survivors.epochs(ended.events)
    said = lab_jobs.summary(ended, found)
    takeover = next((each for each in found if each.fault.startswith("at 35.3s")), None)
    said |= {
        "failover_s": takeover.epoch_s + 0.3 if takeover and takeover.epoch_s else None,
        "terms": sorted({each.term for each in epochs}),
        "smallest": min(len(each.ranks) for each in epochs),
        "members_at_the_end": len(epochs[-1].ranks),
    }
    rows = lab_jobs.toll_rows(found)
    more = [("fail-over and new epoch, s (bar 3)", said["failover_s"]), ("fewest members", said["smallest"])]
    more.append(("members at the end", said["members_at_the_end"]))
    padded = [(*row, *[""] * (len(rows[0]) - 2)) for row in more]
    lab_jobs.conclude(options, "at-once", said, [*rows, *lab_jobs.summary_rows(said, len(rows[0])), *padded])
    is_back = said["smallest"] == 1 and said["members_at_the_end"] == options.workers
    return 0 if is_back and not said["steps_lost"] and said["failover_s"] and said["failover_s"] <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
