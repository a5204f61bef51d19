"""Goodput with a worker killed every so often: ringweave with --elastic beside torchrun with checkpoints, same faults.

    python bench/faults/goodput.py --every 15 --for 120      # three minutes for each system
    python bench/faults/goodput.py --every 60 --for 600      # the bar: 0.95; with --every 15: 0.97
    python bench/faults/goodput.py --systems ringweave --spares 1    # the bar: 0.98

    goodput = committed samples / (rate per worker-second without faults x worker-seconds that the faults leave)

The rate is that of the same run before its first fault, divided by its workers. A victim counts as away until it is
started again, 10 s at most; later delays, and the survivors' waits, are the system's.

Workers sleep for each sample, as if a device computed it, and the model is small: so N workers make N times the samples
of one, as on devices of their own, on any number of processors. A batch always has the same number of samples: if one
of eight is gone the others' steps take 8/7 of the sleep. The part of a step that does not grow so, network and
processors, is printed as measured; it favours a smaller world.

For ringweave, parameters must be equal and all samples accounted for, as in all of these benches; the others are only
compared with.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lab_jobs

from ringweave_bench.chaos import chaos_session, fault_script, member_impacts
from ringweave_bench.chaos.chaos_report import ChaosReport

RESTART_S = 10.0
BARS = {60.0: 0.95, 15.0: 0.97}
SPARES_BAR = 0.98
FORMULA = "samples that count / (rate per worker-second without faults x worker-seconds that the faults leave)"
HEAD = ("system", "kills", "goodput", "steps/s without faults", "not slept of a step", "steps", "steps lost")
HEAD += ("samples lost", "recover p50, s", "p95, s")


def main() -> int:
    """Run all systems; return 1 if ringweave misses the bar, or its goodput is not known."""
    options = parse_options()
    happens = fault_script.draw_faults(
        [fault_script.KILL],
        chaos_session.cluster_targets(lab_jobs.cluster(options)),
        seed=options.seed,
        every_s=options.every,
        until_s=options.until_s - 5,
        lasts_s=0.0,
        calm_s=options.calm,
    )
    document: dict[str, object] = {"every_s": options.every, "seconds": options.until_s, "seed": options.seed}
    document |= {"formula": FORMULA, "s_per_sample": options.s_per_sample}
    ends = {system: measure(options, happens, system) for system in options.systems.split(",")}
    rows = [HEAD, *(row(system, ended.report, slept_s(options)) for system, ended in ends.items())]
    said = note(document, ends)
    found = missed(said, ends["ringweave"].report.goodput, bar_of(options)) if said else []
    print(f"goodput = {FORMULA}")
    name = f"goodput-{options.every:g}{'-with-spares' if options.spares else ''}"
    lab_jobs.conclude(options, name, document, rows)
    return lab_jobs.verdict(found)


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--for", dest="until_s", type=float, default=120.0)
    parser.add_argument(
        "--calm",
        type=float,
        default=60.0,
        help="seconds before the first kill; a survey of links may take 0.8 s of them",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.set_defaults(width=96, s_per_sample=0.012)
    parser.add_argument(
        "--systems", default="ringweave,torchrun", help="also torchft, see docs/how-to/inject-faults.md"
    )
    return parser.parse_args()


def measure(options: argparse.Namespace, happens: Sequence[fault_script.Fault], system: str) -> lab_jobs.Ended:
    """Returns the job of one system after these faults."""
    elastic = lab_jobs.bounds(options, 3) if system == "ringweave" else None
    return lab_jobs.run(
        options,
        happens,
        until_s=options.until_s,
        system=system,
        elastic=elastic,
        restart_s=RESTART_S,
        samples_per_step=lab_jobs.BATCH,
        name=system,
    )


def note(document: dict[str, object], ends: Mapping[str, lab_jobs.Ended]) -> dict[str, Any] | None:
    """Add each system's results to a document; return ringweave's summary, if it is among them."""
    document.update({system: ended.report.to_document() for system, ended in ends.items()})
    if "ringweave" not in ends:
        return None
    said = lab_jobs.summary(ends["ringweave"], member_impacts.measure_fault_impacts(ends["ringweave"].events))
    document["checked"] = {key: said[key] for key in ("checks_alike", "samples_counted", "samples_lost", "wrong")}
    return said


def slept_s(options: argparse.Namespace) -> float:
    """Seconds that each worker sleeps in a step, while all are there."""
    return options.s_per_sample * lab_jobs.BATCH / options.workers


def row(system: str, said: ChaosReport, slept: float) -> tuple[object, ...]:
    """Returns a line of the table."""
    rate = said.fault_free_steps_per_s
    awake = round(1 - slept * rate, 3) if rate else None
    counts = (said.steps, said.steps_lost, said.samples_lost, said.recover_p50_s, said.recover_p95_s)
    return (system, said.faults, said.goodput, round(rate, 3) if rate else None, awake, *counts)


def bar_of(options: argparse.Namespace) -> float:
    """Return the least goodput that is good."""
    return SPARES_BAR if options.spares else BARS.get(options.every, min(BARS.values()))


def missed(said: Mapping[str, Any], goodput: float | None, bar: float) -> list[str]:
    """Return the missed requirements, in words; a quantity that could not be measured counts as missed."""
    is_good = goodput is not None and goodput >= bar
    found = [] if is_good else [f"goodput: {goodput}, the bar is {bar}"]
    found += [] if said["begun"] else ["nothing was killed"]
    return [*found, *lab_jobs.missed(said)]


if __name__ == "__main__":
    sys.exit(main())
