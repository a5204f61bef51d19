"""Faults of all kinds at random: no deadlock, no wrong sum, every sample accounted, and the loss stays what it is.

    python bench/faults/mixed.py --faults 30 --steps 400     # three minutes, and one without faults
    python bench/faults/mixed.py --faults 250 --jobs 4 --steps 1600 # 1,000 faults, a good hour

Kills at moments of a step, of coordinators too, pauses, cuts, slow links, a full disk; with --clocks wall clocks that
jump, which needs a C compiler. Before, the same number of steps is trained without faults. The same seed draws the
same faults.

The losses that are compared are those on digits that were held out of the training: they do not come near to zero,
where a ratio would say nothing. The more steps are asked for, the smaller is the learning rate, so that training ends
well before the model has learnt all by heart.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lab_jobs

from ringweave_bench.chaos import chaos_session, fault_script, member_impacts
from ringweave_bench.chaos.fault_script import (
    CLOCK,
    COORDINATOR,
    CUT,
    FILL,
    KILL,
    MOMENTS,
    PAUSE,
    SLOW,
    Fault,
    FaultTargets,
)

BAR = 0.005
"""Largest relative difference of the loss."""
LEAST_LOSS = 0.05
"""Smallest loss; the ratio of smaller ones says little."""
_LASTS_S = 4.0
_CALM_S = 10.0
_LR_STEPS = 0.04
"""Learning rate times steps: 1e-4 for 400 of them."""


def draw(targets: FaultTargets, kinds: list[str], num_faults: int, seed: int, every_s: float) -> tuple[Fault, ...]:
    """Draw so many faults."""
    until_s = _CALM_S + 10 * every_s * num_faults
    return fault_script.draw_faults(
        kinds, targets, seed=seed, every_s=every_s, until_s=until_s, lasts_s=_LASTS_S, calm_s=_CALM_S
    )[:num_faults]


def main() -> int:
    """Run without faults, then with each of the seeds; return 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--faults", type=int, default=30, help="of each job")
    parser.add_argument("--every", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which a job is taken for stuck")
    parser.add_argument("--seed", type=int, default=7, help="of the first job's faults; the next has the next one")
    parser.add_argument("--jobs", type=int, default=1, help="jobs with faults, one after the other")
    parser.add_argument("--clocks", action="store_true")
    options = parser.parse_args()
    shared = {"until_s": options.limit, "elastic": lab_jobs.bounds(options), "steps": options.steps}
    shared |= {"more": ["--lr", str(_LR_STEPS / options.steps)]}
    calm = lab_jobs.run(options, [], **shared, name="without")
    found = [f"without faults: {each}" for each in lab_jobs.missed(lab_jobs.summary(calm, []))]
    for seed in range(options.seed, options.seed + options.jobs):
        hurt = lab_jobs.run(options, _happens(options, seed), **shared, name=f"seed-{seed}")
        found += [f"seed {seed}: {each}" for each in _judge(options, seed, hurt, calm)]
    return lab_jobs.verdict(found)


def _happens(options: argparse.Namespace, seed: int) -> tuple[Fault, ...]:
    kinds = [KILL, PAUSE, CUT, SLOW, FILL, *([CLOCK] if options.clocks else [])]
    targets = replace(
        chaos_session.cluster_targets(lab_jobs.cluster(options)),
        moments=MOMENTS,
        num_buckets=lab_jobs.NUM_SUMS,
        services=(COORDINATOR,),
    )
    return draw(targets, kinds, options.faults, seed, options.every)


def _judge(options: argparse.Namespace, seed: int, hurt: lab_jobs.Ended, calm: lab_jobs.Ended) -> list[str]:
    """Print and save the results of a job under faults; return the missed requirements."""
    found = member_impacts.measure_fault_impacts(hurt.events)
    said = lab_jobs.summary(hurt, found)
    losses = [each.end["held_out_loss"] if each.end else None for each in (hurt, calm)]
    apart = abs(losses[0] / losses[1] - 1) if None not in losses else None
    said |= {
        "seed": seed,
        "wanted": options.faults,
        "held_out_loss": losses[0],
        "held_out_loss_without_faults": losses[1],
        "apart": apart,
    }
    rows = lab_jobs.toll_rows(found)
    more = [("faults that began", said["begun"]), ("loss on what was held out", losses[0])]
    more += [("the same without faults", losses[1]), ("apart (bar 0.005)", apart)]
    padded = [(*row, *[""] * (len(rows[0]) - 2)) for row in more]
    out = options.out
    if out and options.jobs > 1:
        out = out.with_stem(f"{out.stem}-{seed}")
    lab_jobs.show([*rows, *lab_jobs.summary_rows(said, len(rows[0])), *padded])
    lab_jobs.leave(out, f"mixed-{options.faults}-seed-{seed}", lab_jobs.whole(options, said))
    return missed(said)


def missed(said: Mapping[str, Any]) -> list[str]:
    """Return the missed requirements, in words."""
    found = lab_jobs.missed(said)
    found += [f"{said['begun']} faults began, not {said['wanted']}"] if said["begun"] != said["wanted"] else []
    found += lab_jobs.over("losses are apart by", said["apart"], BAR)
    lowest = min(said[name] or 0.0 for name in ("held_out_loss", "held_out_loss_without_faults"))
    return found + ([f"a loss of {lowest:g} is too low to be compared"] if lowest < LEAST_LOSS else [])


if __name__ == "__main__":
    sys.exit(main())
