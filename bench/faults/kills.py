"""Steps lost, and how long survivors stall, when members are killed at random moments of a train step.

    python bench/faults/kills.py --kills 10                  # three minutes
    python bench/faults/kills.py --kills 50 --seed 1         # a quarter of an hour
    python bench/faults/kills.py --coordinators --kills 10   # four minutes
    python bench/faults/kills.py --spares 1 --kills 10       # victims are replaced at once
    python bench/faults/kills.py --width 96 --s-per-sample 0.012 --kills 50   # workers that compute, on a small model

An elastic job in a lab. Each kill is a SIGKILL that a worker sends itself at a moment drawn from forward, backward,
inside a bucket, commit (before and after) and optimizer. The report counts the moments at which workers really died; a
death at another one than was drawn is a miss. --outside sends it from outside, whenever it is time. The next one comes
when all victims train again, or later. The parameters of all members are compared bit by bit, step by step.

With --coordinators each kill is of the active coordinator, and of a member right after it, from outside: the
other coordinator has taken over when it publishes the generation without that member. Fail-over is the time
until then.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import lab_jobs

from ringweave_bench.chaos import fault_script, member_impacts
from ringweave_bench.chaos.fault_script import COORDINATOR, KILL, MOMENTS, Fault

BAR_S = 0.5
"""95 % of stalls are shorter, less the time in which the survivors compute the missing samples."""
FAILOVER_BAR_S = 3.0
"""95 % of fail-overs take less."""
_SOON_S = 0.3
"""From a coordinator's death to that of a member."""
_BACK_S = 30.0
"""For the last victim to come back in."""


def draw(num_kills: int, workers: int, *, seed: int, every_s: float, calm_s: float, outside: bool) -> list[Fault]:
    """Draw victims and moments, each moment as often as the others; no worker twice in a row."""
    rng, found, last = random.Random(seed), [], -1
    moments = [MOMENTS[index % len(MOMENTS)] for index in range(num_kills)]
    rng.shuffle(moments)
    for index, moment in enumerate(moments):
        victim = rng.choice([rank for rank in range(workers) if rank != last])
        last, at_s = victim, calm_s + index * every_s + rng.random()
        said = "" if outside else fault_script.draw_moment(rng, [moment], lab_jobs.NUM_SUMS)
        found.append(Fault(at_s=round(at_s, 2), kind=KILL, target=str(victim), moment=said))
    return found


def with_coordinators(kills: Sequence[Fault]) -> list[Fault]:
    """Insert a kill of the active coordinator right before each kill."""
    before = [Fault(at_s=round(each.at_s - _SOON_S, 2), kind=KILL, target=COORDINATOR) for each in kills]
    return sorted([*kills, *before], key=lambda each: each.at_s)


def main() -> int:
    """Run the kills; return 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=14.0, help="seconds from one kill to the next")
    parser.add_argument("--calm", type=float, default=10.0, help="seconds before the first")
    parser.add_argument("--outside", action="store_true", help="kill whenever it is time, not at moments")
    parser.add_argument("--coordinators", action="store_true", help="the coordinator before each of them")
    options = parser.parse_args()
    happens = draw(
        options.kills,
        options.workers,
        seed=options.seed,
        every_s=options.every,
        calm_s=options.calm,
        outside=options.outside or options.coordinators,
    )
    happens = with_coordinators(happens) if options.coordinators else happens
    until_s = options.calm + options.kills * options.every + _BACK_S
    ended = lab_jobs.run(options, happens, until_s=until_s, elastic=lab_jobs.bounds(options), restart_s=10.0)
    found = member_impacts.measure_fault_impacts(ended.events)
    said = lab_jobs.summary(ended, found)
    rows = lab_jobs.toll_rows(found)
    rows += [(f"killed during {moment}", number, *[""] * 3) for moment, number in sorted(said["moments"].items())]
    name = "kills-of-coordinators" if options.coordinators else "kills"
    name += "-with-spares" if options.spares else ""
    lab_jobs.conclude(
        options, name, {"seed": options.seed, **said}, [*rows, *lab_jobs.summary_rows(said, len(rows[0]))]
    )
    missing_s = options.s_per_sample * lab_jobs.BATCH / options.workers / (options.workers - 1)
    return lab_jobs.verdict(missed(said, options.kills, BAR_S + missing_s, of_coordinators=options.coordinators))


def missed(said: dict[str, Any], num_kills: int, bar_s: float, *, of_coordinators: bool) -> list[str]:
    """Return the missed bars, in words; `bar_s` is that of the survivors' stalls."""
    found = lab_jobs.missed(said, are_back=True)
    found += lab_jobs.over("samples lost", said["samples_lost"], 0)
    found += [f"{said['faults']} members were killed, not {num_kills}"] if said["faults"] != num_kills else []
    num_known = sum(each["stall_s"] is not None for each in said["each"])
    found += [f"{num_known} stalls are known, not {num_kills}"] if num_known != num_kills else []
    if not of_coordinators:
        return found + lab_jobs.over("stall of survivors, p95 in s", said["stall_p95_s"], bar_s)
    num_replaced = sum(each["taken_over_s"] is not None for each in said["takeovers"])
    found += [f"{num_replaced} coordinators were replaced, not {num_kills}"] if num_replaced != num_kills else []
    found += lab_jobs.over("fail-over, p95 in s", said["taken_over_p95_s"], FAILOVER_BAR_S)
    return found + lab_jobs.over("stall by it, p95 in s", said["takeover_stall_p95_s"], FAILOVER_BAR_S)


if __name__ == "__main__":
    sys.exit(main())
