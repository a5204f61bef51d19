"""Goodput with a worker killed every so often: ringweave with --elastic beside torchrun with checkpoints, same faults.

    python bench/faults/goodput.py --every 15 --for 120      # three minutes for each system
    python bench/faults/goodput.py --every 60 --for 600      # the bar: 0.95; with --every 15: 0.88

Goodput = samples that count / (fault-free rate x worker-seconds that the faults leave); the fault-free rate is that of
the same run before its first fault. A victim counts as away until it is started again, 10 s at most.
"""

import sys

import lab_jobs

from ringweave.benchmarks.chaos import faults, session

RESTART_S = 10.0
BARS = {60.0: 0.95, 15.0: 0.88}


def main() -> int:
    """Both systems; 1 if ringweave misses the bar."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--for", dest="until_s", type=float, default=120.0)
    parser.add_argument("--calm", type=float, default=20.0, help="seconds before the first kill")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--systems", default="ringweave,torchrun", help="also torchft, see docs/chaos.md")
    options = parser.parse_args()
    happens = faults.draw(
        [faults.KILL],
        session.targets(lab_jobs.cluster(options)),
        seed=options.seed,
        every_s=options.every,
        until_s=options.until_s - 5,
        lasts_s=0.0,
        calm_s=options.calm,
    )
    rows: list[tuple[object, ...]] = [
        (
            "system",
            "kills",
            "goodput",
            "steps/s without faults",
            "steps",
            "steps lost",
            "samples lost",
            "recover p50, s",
            "p95, s",
        )
    ]
    document: dict[str, object] = {"every_s": options.every, "seconds": options.until_s, "seed": options.seed}
    for system in options.systems.split(","):
        elastic = lab_jobs.bounds(options, 3) if system == "ringweave" else None
        said = lab_jobs.run(
            options,
            happens,
            until_s=options.until_s,
            system=system,
            elastic=elastic,
            restart_s=RESTART_S,
            name=system,
        ).report
        rate = said.fault_free_steps_per_s
        rows.append(
            (
                system,
                said.faults,
                said.goodput,
                round(rate, 3) if rate else None,
                said.steps,
                said.steps_lost,
                said.samples_lost,
                said.recover_p50_s,
                said.recover_p95_s,
            )
        )
        document[system] = said.to_document()
    lab_jobs.conclude(options, f"goodput-{options.every:g}", document, rows)
    own = next((row[2] for row in rows if row[0] == "ringweave"), None)
    bar = BARS.get(options.every, min(BARS.values()))
    return 0 if own is None or (isinstance(own, float) and own >= bar) else 1


if __name__ == "__main__":
    sys.exit(main())
