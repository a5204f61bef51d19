"""Faults of all kinds at random: no deadlock, no wrong sum, every sample accounted, and the loss stays what it is.

    python bench/faults/mixed.py --faults 30 --steps 400     # three minutes, and one without faults
    python bench/faults/mixed.py --faults 1000 --steps 12000 # hours

Kills at moments of a step, of coordinators too, pauses, cuts, slow links, a full disk; with --clocks wall clocks that
jump, which needs a C compiler. The same number of steps is then trained without faults. The same seed draws the same.

The losses that are compared are those on digits that were held out of the training: they do not come near to zero,
where a ratio would say nothing. The more steps are asked for, the smaller is the learning rate, so that training ends
well before the model has learnt all by heart.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lab_jobs

from ringweave.benchmarks.chaos import drawing, session, survivors
from ringweave.benchmarks.chaos.faults import CLOCK, COORDINATOR, CUT, FILL, KILL, MOMENTS, PAUSE, SLOW, Fault, Targets

BAR = 0.005
"""By so much the loss may differ."""
LEAST_LOSS = 0.05
"""One that is lower says little by its ratio to another one."""
_LASTS_S = 4.0
_CALM_S = 10.0
_LR_STEPS = 0.04
"""Learning rate times steps: 1e-4 for 400 of them."""


def draw(targets: Targets, kinds: list[str], num_faults: int, seed: int, every_s: float) -> tuple[Fault, ...]:
    """So many faults."""
    until_s = _CALM_S + 10 * every_s * num_faults
    return drawing.draw(kinds, targets, seed=seed, every_s=every_s, until_s=until_s, lasts_s=_LASTS_S, calm_s=_CALM_S)[
        :num_faults
    ]


def main() -> int:
    """With faults, then without; 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--every", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which the job is taken for stuck")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--clocks", action="store_true")
    options = parser.parse_args()
    kinds = [KILL, PAUSE, CUT, SLOW, FILL, *([CLOCK] if options.clocks else [])]
    targets = replace(session.targets(lab_jobs.cluster(options)), moments=MOMENTS, services=(COORDINATOR,))
    happens = draw(targets, kinds, options.faults, options.seed, options.every)
    elastic = lab_jobs.bounds(options)
    shared = {"until_s": options.limit, "elastic": elastic, "steps": options.steps}
    shared |= {"more": ["--lr", str(_LR_STEPS / options.steps)]}
    hurt = lab_jobs.run(options, happens, **shared, name="with-faults")
    calm = lab_jobs.run(options, [], **shared, name="without")
    found = survivors.tolls(hurt.events)
    said = lab_jobs.summary(hurt, found)
    losses = [each.end["held_out_loss"] if each.end else None for each in (hurt, calm)]
    apart = abs(losses[0] / losses[1] - 1) if None not in losses else None
    said |= {
        "seed": options.seed,
        "wanted": options.faults,
        "held_out_loss": losses[0],
        "held_out_loss_without_faults": losses[1],
        "apart": apart,
    }
    rows = lab_jobs.toll_rows(found)
    more = [("faults that began", said["begun"]), ("loss on what was held out", losses[0])]
    more += [("the same without faults", losses[1]), ("apart (bar 0.005)", apart)]
    padded = [(*row, *[""] * (len(rows[0]) - 2)) for row in more]
    lab_jobs.conclude(options, "mixed", said, [*rows, *lab_jobs.summary_rows(said, len(rows[0])), *padded])
    return lab_jobs.verdict(missed(said))


def missed(said: Mapping[str, Any]) -> list[str]:
    """What was not as it has to be, in words."""
    found = lab_jobs.missed(said)
    found += [f"{said['begun']} faults began, not {said['wanted']}"] if said["begun"] != said["wanted"] else []
    found += lab_jobs.over("losses are apart by", said["apart"], BAR)
    lowest = min(said[name] or 0.0 for name in ("held_out_loss", "held_out_loss_without_faults"))
    return found + ([f"a loss of {lowest:g} is too low to be compared"] if lowest < LEAST_LOSS else [])


if __name__ == "__main__":
    sys.exit(main())
