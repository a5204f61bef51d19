"""Steps lost, and how long survivors stall, when members are killed at random moments of a train step.

    python bench/faults/kills.py --kills 10                  # three minutes
    python bench/faults/kills.py --kills 50 --seed 1         # a quarter of an hour

An elastic job in a lab. Each kill is a SIGKILL that a worker sends itself at a moment drawn from forward, backward,
inside a bucket, commit (before and after) and optimizer; --outside sends it from outside, whenever it is time. The next
one follows when all victims train again, or later. The parameters of all members are compared bit by bit, step by step.
"""

import random
import sys

import lab_jobs

from ringweave.benchmarks.chaos import faults, survivors
from ringweave.benchmarks.chaos.faults import KILL, MOMENTS, Fault

BAR_S = 1.5
"""95 % of stalls are shorter."""


def draw(num_kills: int, workers: int, *, seed: int, every_s: float, calm_s: float, outside: bool) -> list[Fault]:
    """Victims and moments at random, each moment as often as the others; no worker twice in a row."""
    rng, found, last = random.Random(seed), [], -1
    moments = [MOMENTS[index % len(MOMENTS)] for index in range(num_kills)]
    rng.shuffle(moments)
    for index, moment in enumerate(moments):
        victim = rng.choice([rank for rank in range(workers) if rank != last])
        last, at_s = victim, calm_s + index * every_s + rng.random()
        said = "" if outside else faults.draw_moment(rng, [moment])
        found.append(Fault(at_s=round(at_s, 2), kind=KILL, target=str(victim), moment=said))
    return found


def main() -> int:
    """So many kills; 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=14.0, help="seconds from one kill to the next")
    parser.add_argument("--calm", type=float, default=10.0, help="seconds before the first")
    parser.add_argument("--outside", action="store_true", help="kill whenever it is time, not at moments")
    options = parser.parse_args()
    happens = draw(
        options.kills,
        options.workers,
        seed=options.seed,
        every_s=options.every,
        calm_s=options.calm,
        outside=options.outside,
    )
    until_s = options.calm + (options.kills + 1) * options.every
    ended = lab_jobs.run(options, happens, until_s=until_s, elastic=lab_jobs.bounds(options), restart_s=10.0)
    found = survivors.tolls(ended.events)
    said = lab_jobs.summary(ended, found)
    rows = lab_jobs.toll_rows(found)
    lab_jobs.conclude(
        options, "kills", {"seed": options.seed, **said}, [*rows, *lab_jobs.summary_rows(said, len(rows[0]))]
    )
    is_whole = len(found) == options.kills and not said["never_went_on"]
    return 0 if is_whole and not said["steps_lost"] and said["stall_p95_s"] <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
