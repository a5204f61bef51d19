"""What fault tolerance costs while nothing fails: seconds of a train step with --elastic and without, in turns.

    python bench/faults/overhead.py --rounds 2 --steps 100   # three minutes

The same job in a lab, first in one way and then in the other, again and again, the order reversed each round. A round's
figure is the median over its steps after the first few; the ratio is of the medians over rounds, beside the ratios of
each round.
"""

import itertools
import statistics
import sys

import lab_jobs

from ringweave.telemetry import Event

BAR = 1.03
_WARM_STEPS = 30
"""Trials of schedules happen in them."""


def step_s(events: list[Event]) -> float:
    """Median seconds from one step of a rank to the next, over all ranks."""
    times: dict[int, list[float]] = {}
    for event in events:
        if event["kind"] == "train_step_done":
            times.setdefault(event["rank"], []).append(event["time"])
    gaps = [after - before for each in times.values() for before, after in itertools.pairwise(each[_WARM_STEPS:])]
    return statistics.median(gaps)


def main() -> int:
    """So many rounds; 1 if the bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(options.rounds):
        for way in ("on", "off") if number % 2 == 0 else ("off", "on"):
            ended = lab_jobs.run(
                options,
                [],
                until_s=600.0,
                elastic=lab_jobs.bounds(options) if way == "on" else None,
                steps=options.steps,
                name=f"{number}-{way}",
            )
            found[way].append(round(step_s(ended.events), 5))
    ratio = statistics.median(found["on"]) / statistics.median(found["off"])
    each = [round(on / off, 4) for on, off in zip(found["on"], found["off"], strict=True)]
    rows: list[tuple[object, ...]] = [("round", "step with --elastic, s", "without, s", "ratio")]
    rows += [
        (number, on, off, of) for number, (on, off, of) in enumerate(zip(found["on"], found["off"], each, strict=True))
    ]
    rows.append(
        ("medians (bar 1.03)", statistics.median(found["on"]), statistics.median(found["off"]), round(ratio, 4))
    )
    document = {"rounds": options.rounds, "steps": options.steps, "step_s": found, "ratio": ratio, "ratios": each}
    lab_jobs.conclude(options, "overhead", document, rows)
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
