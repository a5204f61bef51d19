"""Overhead of fault tolerance while nothing fails: seconds of a train step with --elastic and without, in turns.

    python bench/faults/overhead.py --rounds 2 --steps 100   # three minutes

The same job in a lab, first in one way and then in the other, again and again, the order reversed each round. A round's
figure is the median over its steps after the first few; the ratio is of the medians over rounds, beside the ratios of
each round. All jobs must do all of their steps, with equal parameters.
"""

import itertools
import statistics
import sys
from collections.abc import Sequence

import lab_jobs

from ringweave.telemetry import Event

BAR = 1.03
_WARM_STEPS = 30
"""Trials of schedules happen in them."""


def step_s(events: Sequence[Event]) -> float | None:
    """Return the median seconds from one step of a rank to the next, over all ranks; None with too few steps."""
    times: dict[int, list[float]] = {}
    for event in events:
        if event["kind"] == "train_step_done":
            times.setdefault(event["rank"], []).append(event["time"])
    gaps = [after - before for each in times.values() for before, after in itertools.pairwise(each[_WARM_STEPS:])]
    return round(statistics.median(gaps), 5) if gaps else None


def main() -> int:
    """Run the rounds; return 1 if the bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    found: dict[str, list[float | None]] = {"on": [], "off": []}
    wrong: list[str] = []
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
            found[way].append(step_s(ended.events))
            what = "with --elastic" if way == "on" else "without"
            wrong += [f"round {number}, {what}: {each}" for each in lab_jobs.missed(lab_jobs.summary(ended, []))]
    medians = {way: _median(each) for way, each in found.items()}
    ratio = _ratio(medians["on"], medians["off"])
    each = [_ratio(on, off) for on, off in zip(found["on"], found["off"], strict=True)]
    rows: list[tuple[object, ...]] = [("round", "step with --elastic, s", "without, s", "ratio")]
    rows += [(number, *row) for number, row in enumerate(zip(found["on"], found["off"], each, strict=True))]
    rows.append(("medians (bar 1.03)", medians["on"], medians["off"], ratio))  # judged as it is, shown in six digits
    document = {"rounds": options.rounds, "steps": options.steps, "step_s": found, "ratio": ratio, "ratios": each}
    lab_jobs.conclude(options, "overhead", {**document, "wrong": wrong}, rows)
    return lab_jobs.verdict([*wrong, *lab_jobs.over("ratio of the medians", ratio, BAR)])


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median; None if one is not known, or there are none."""
    known = [each for each in values if each is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def _ratio(on: float | None, off: float | None) -> float | None:
    return None if on is None or not off else on / off


if __name__ == "__main__":
    sys.exit(main())
