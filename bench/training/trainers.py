"""Trainers of other libraries on ringweave: speed beside the library itself under torchrun, and kills.

    python bench/training/trainers.py speed                   # four workers, one of them at a quarter of the speed
    python bench/training/trainers.py kills                   # 20 kills under --elastic 2:4
    python bench/training/trainers.py kills --library lightning   # of one of the libraries

It ends with 1 where a bar is missed: 2.6 times the library's speed; no sample lost and all parameters alike.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringweave.telemetry import read_events

JOB = Path(__file__).with_name("trainer_job.py")
RINGWEAVE = [sys.executable, "-m", "ringweave", "run", "--workers", "4"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
LIBRARIES = ("transformers", "accelerate", "lightning")
SPEED_BAR = 2.6
"""Train steps a second, as a multiple of the library's under torchrun."""
NUM_WARM_UP = 15
"""Train steps that do not count: shares follow the measured speeds after some steps."""


def run(command: list[str], *options: str, out: Path) -> list[dict[str, Any]]:
    """Run a job; return the outcomes of its workers, by their numbers."""
    subprocess.run([*command, str(JOB), "--out", str(out), *options], check=True)
    return [json.loads(path.read_text()) for path in sorted(out.glob("worker-*.json"))]


def step_s(outcome: dict[str, Any]) -> float:
    """Return the median time of a train step after the warm-up."""
    ends_s = outcome["ends_s"][NUM_WARM_UP:]
    return statistics.median(after - before for before, after in itertools.pairwise(ends_s))


def measure_speed(options: argparse.Namespace, folder: Path) -> bool:
    """Print the time of a train step of both; return whether the bar is met."""
    shared = ["--library", options.library, "--has-slow-worker", "--sample-ms", str(options.sample_ms)]
    shared += ["--steps", str(options.steps)]
    plain = step_s(run(TORCHRUN, *shared, "--plain", out=folder / "plain")[0])
    own = step_s(run([*RINGWEAVE, "--run-dir", str(folder / "run")], *shared, out=folder / "own")[0])
    ratio = plain / own
    print(
        f"{options.library}: {plain * 1e3:.0f} ms a step under torchrun, {own * 1e3:.0f} ms with ringweave (measured)"
    )
    print(f"{ratio:.2f} times as fast, bar {SPEED_BAR}")
    return ratio >= SPEED_BAR


def measure_kills(options: argparse.Namespace, folder: Path) -> bool:
    """Print what 20 kills do to a run; return whether nothing is lost."""
    elastic = [*RINGWEAVE, "--elastic", "2:4", "--spares", "1", "--mode", "balanced", "--run-dir", str(folder / "run")]
    shared = ["--library", options.library, "--kills", str(options.kills), "--steps", str(options.steps)]
    started_s = time.monotonic()
    outcomes = run(elastic, *shared, "--sample-ms", str(options.sample_ms), out=folder / "own")
    events = list(read_events(folder / "run" / "events.jsonl"))
    # By epoch: the member that writes for all may have died after it wrote, so that another one wrote too.
    accounts = {each["epoch"]: each["exact"] for each in events if each["kind"] == "samples_accounted"}
    num_recomputed = sum(each["missing"] for each in events if each["kind"] == "samples_recomputed")
    num_kills = len(list((folder / "own" / "kills").iterdir()))
    digests, steps = {each["digest"] for each in outcomes}, {each["steps"] for each in outcomes}
    duration_s = time.monotonic() - started_s
    print(f"{options.library}: {num_kills} kills in {duration_s:.0f} s, {num_recomputed} samples recomputed (measured)")
    print(f"{sum(accounts.values())} of {len(accounts)} epochs with each sample exactly once")
    print(f"{len(outcomes)} workers at the end, after {steps} train steps, {len(digests)} sets of parameters")
    return num_kills == options.kills and all(accounts.values()) and len(digests) == 1 and min(steps) >= options.steps


def main() -> int:
    """Run one of the two; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=("speed", "kills"))
    parser.add_argument("--library", choices=LIBRARIES, help="one of them; all without it")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, help="train steps of a run; 40, or 400 with kills")
    parser.add_argument("--sample-ms", type=float, default=40.0, help="time of a sample on a fast worker")
    options = parser.parse_args()
    options.steps = options.steps or {"speed": 40, "kills": 400}[options.measurement]
    measure, are_met = measure_speed if options.measurement == "speed" else measure_kills, True
    for library in [options.library] if options.library else LIBRARIES:
        options.library = library
        with tempfile.TemporaryDirectory() as folder:
            are_met &= measure(options, Path(folder))
    return 0 if are_met else 1


if __name__ == "__main__":
    sys.exit(main())
