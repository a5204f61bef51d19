"""Faults of all kinds at random: no deadlock, no wrong sum, every sample accounted, and the loss stays what it is.

    python bench/faults/mixed.py --faults 30 --steps 400     # three minutes, and one without faults
    python bench/faults/mixed.py --faults 1000 --steps 12000 # hours

Kills at moments of a step, of coordinators too, pauses, cuts, slow links, a full disk; with --clocks wall clocks that
jump, where libfaketime is there. The same number of steps is then trained without faults. The same seed draws the same.
"""

import random
import sys
from dataclasses import replace

import lab_jobs

from ringweave.benchmarks.chaos import faults, session, survivors
from ringweave.benchmarks.chaos.faults import CLOCK, COORDINATOR, CUT, FILL, KILL, MOMENTS, PAUSE, SLOW, Fault, Targets

BAR = 0.005
"""By so much the loss may differ."""
_COORDINATORS = 0.1
"""Of the kills, so many are of the coordinator."""
_LASTS_S = 4.0
_CALM_S = 10.0


def draw(targets: Targets, kinds: list[str], num_faults: int, seed: int, every_s: float) -> list[Fault]:
    """So many faults."""
    until_s = _CALM_S + 10 * every_s * num_faults
    found = faults.draw(kinds, targets, seed=seed, every_s=every_s, until_s=until_s, lasts_s=_LASTS_S, calm_s=_CALM_S)[
        :num_faults
    ]
    rng = random.Random(seed)
    return [
        Fault(at_s=each.at_s, kind=KILL, target=COORDINATOR)
        if each.kind == KILL and rng.random() < _COORDINATORS
        else each
        for each in found
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
    targets = replace(session.targets(lab_jobs.cluster(options)), moments=MOMENTS)
    happens = draw(targets, kinds, options.faults, options.seed, options.every)
    elastic = lab_jobs.bounds(options)
    hurt = lab_jobs.run(
        options, happens, until_s=options.limit, elastic=elastic, steps=options.steps, name="with-faults"
    )
    calm = lab_jobs.run(options, [], until_s=options.limit, elastic=elastic, steps=options.steps, name="without")
    found = survivors.tolls(hurt.events)
    said = lab_jobs.summary(hurt, found)
    losses = [each.end["loss"] if each.end else None for each in (hurt, calm)]
    apart = abs(losses[0] / losses[1] - 1) if None not in losses else None
    said |= {
        "seed": options.seed,
        "begun": hurt.report.faults,
        "loss": losses[0],
        "loss_without_faults": losses[1],
        "apart": apart,
    }
    rows = lab_jobs.toll_rows(found)
    more = [("faults that began", said["begun"]), ("loss", losses[0]), ("loss without faults", losses[1])]
    more.append(("apart (bar 0.005)", apart))
    padded = [(*row, *[""] * (len(rows[0]) - 2)) for row in more]
    lab_jobs.conclude(options, "mixed", said, [*rows, *lab_jobs.summary_rows(said, len(rows[0])), *padded])
    return 0 if apart is not None and apart <= BAR and not said["steps_lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
