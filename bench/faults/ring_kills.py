"""How long rings stall, and how long the others do, when members and representatives of rings are killed.

    python bench/faults/ring_kills.py --kills 10                  # two minutes
    python bench/faults/ring_kills.py --kills 50 --seed 1         # eight minutes

A job on this machine in mode ps-hra under --elastic. Each kill is a SIGKILL from outside at a random moment; by turns
it hits a ring's representative and another member. Stalls are the longest time between two steps around the kill, less
the usual time of a step. The same longest time where nothing was killed is printed beside those of the other rings: a
busy machine makes gaps of its own. Parameters of a ring's members are compared bit by bit, push by push.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab_jobs import RESULTS, quantile

from ringweave import telemetry
from ringweave.benchmarks import machine

BAR_S = 1.5
WINDOW_S = 3.0
"""After a kill: what the ring does in it is laid to the kill."""
OTHERS_S = 0.9
"""The same for other rings: after a second the victim is started again, which takes a processor for seconds."""
JOB = Path(__file__).with_name("ring_job.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A step of one process."""

    time_s: float
    ring: int
    num_pushed: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """What one kill cost; measured."""

    victim: str
    was_representative: bool
    at_s: float
    """On the clock of the processes."""
    ring_s: float | None
    """Of the survivor of its ring that it was longest for; None if one made no step any more."""
    others_s: float
    """Of the worker of another ring that it was longest for, before the victim was started again."""
    quiet_s: float
    """Of the same workers in a window as long before the kill."""


def longest_s(steps: Sequence[Done], since_s: float, until_s: float) -> float | None:
    """The longest time between two steps that overlaps a window; None if there is no step after it."""
    gaps = [
        (before.time_s, after.time_s)
        for before, after in itertools.pairwise(steps)
        if after.time_s > since_s and before.time_s < until_s
    ]
    if not gaps or steps[-1].time_s < until_s:
        return None
    return max(end - begin for begin, end in gaps)


def usual_s(steps: Sequence[Done]) -> float:
    """Seconds of a step."""
    return statistics.median(after.time_s - before.time_s for before, after in itertools.pairwise(steps))


def judge(victim: str, was_representative: bool, at_s: float, steps: Mapping[str, Sequence[Done]]) -> Stall:
    """What a kill cost, by the steps of all processes."""
    ring = steps[victim][0].ring
    alive = {
        name: each for name, each in steps.items() if each[0].time_s < at_s - 1 and name != victim and len(each) > 10
    }
    alive = {name: each for name, each in alive.items() if each[-1].time_s > at_s}
    own = {name: each for name, each in alive.items() if each[0].ring == ring}
    others = [each for each in alive.values() if each[0].ring != ring]

    def stall(each: Sequence[Done], since_s: float, window_s: float) -> float | None:
        found = longest_s(each, since_s, since_s + window_s)
        return None if found is None else max(0.0, found - usual_s(each))

    of_ring = [stall(each, at_s, WINDOW_S) for each in own.values()]
    known = [each for each in of_ring if each is not None]
    return Stall(
        victim=victim,
        was_representative=was_representative,
        at_s=at_s,
        ring_s=max(known) if known and len(known) == len(of_ring) else None,
        others_s=max((stall(each, at_s, OTHERS_S) or 0.0 for each in others), default=0.0),
        quiet_s=max((stall(each, at_s - WINDOW_S, OTHERS_S) or 0.0 for each in others), default=0.0),
    )


def read(checks: Path) -> dict[str, list[Done]]:
    """Steps of each process."""
    found: dict[str, list[Done]] = {}
    for path in checks.glob("*.txt"):
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        steps = [
            Done(time_s=float(row[0]), ring=int(row[1]), num_pushed=int(row[2]), digest=row[3])
            for row in rows
            if len(row) == 4 and row[0] != "account" and len(row[3]) == 16
        ]
        if steps:
            found[path.stem] = steps
    return found


def check_alike(steps: Mapping[str, Sequence[Done]]) -> int:
    """How many (process, push) pairs have the parameters of their ring after that push.

    Raises:
        AssertionError: Two differ by a bit.
    """
    known: dict[tuple[int, int], str] = {}
    for name, each in steps.items():
        for done in each:
            if known.setdefault((done.ring, done.num_pushed), done.digest) != done.digest:
                raise AssertionError(f"parameters of {name} after push {done.num_pushed} of ring {done.ring} differ")
    return sum(map(len, steps.values()))


def lost_pushes(steps: Mapping[str, Sequence[Done]]) -> int:
    """Pushes that no member of a ring has seen the parameters after, though there was a later one."""
    seen: dict[int, set[int]] = {}
    for each in steps.values():
        seen.setdefault(each[0].ring, set()).update(done.num_pushed for done in each)
    return sum(max(pushes) - min(pushes) + 1 - len(pushes) for pushes in seen.values())


class Run:
    """The job, and who is in it now."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, *, flags: Sequence[str] = (), place: Sequence[str] = ()
    ) -> None:
        """`flags` are further ones of `ringweave run`; `place` is the command without them, if it is not that one."""
        self._folder = folder
        self.checks = folder / "checks"
        command = [*(place or ["ringweave", "run", "--workers", str(options.workers)])]
        command += [
            "--elastic",
            f"1:{options.workers}",
            "--mode",
            "ps-hra",
            *flags,
            "--run-dir",
            str(folder / "run"),
            str(JOB),
            "--checks",
            str(self.checks),
        ]
        command += ["--rings", str(options.rings), "--width", str(options.width), "--pause-s", str(options.pause_s)]
        command += ["--repeat", str(options.repeat)]
        self._log = (folder / "run.log").open("w")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def run_dir(self) -> Path:
        """Its files."""
        return self._folder / "run"

    @property
    def process_id(self) -> int:
        """Of the command."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """It has ended."""
        return self._process.poll() is not None

    def members(self) -> dict[str, list[str]]:
        """Part -> members of its newest epoch."""
        events = list(telemetry.read(self._folder / "run" / "events.jsonl"))
        return {event["part"]: event["members"] for event in events if event["kind"] == "epoch_begun"}

    def pid(self, member: str) -> int:
        """Of the process."""
        slot = int(member.partition(".")[0])
        events = telemetry.read(self._folder / "run" / "events.jsonl")
        return [event["pid"] for event in events if event["kind"] == "worker_started" and event["rank"] == slot][-1]

    def num_steps(self, member: str) -> int:
        """Steps that it has done, and epochs."""
        path = self.checks / f"{member}.txt"
        return path.read_text(encoding="ascii").count("\n") if path.exists() else 0

    def end(self) -> str:
        """Stop it; what it has printed."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()
        self._log.close()
        return (self._folder / "run.log").read_text(encoding="utf-8")


def wait_whole(run: Run, options: argparse.Namespace, limit_s: float = 120.0) -> None:
    """Until all slots have a worker that trains."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s and not run.is_over:
        members = [member for each in run.members().values() for member in each]
        if len(members) == options.workers and all(run.num_steps(member) > 12 for member in members):
            return
        time.sleep(0.1)
    raise SystemExit(f"the job was not whole within {limit_s:g} s: {run.members()}\n{run.end()[-3000:]}")


def hurt(run: Run, options: argparse.Namespace) -> list[tuple[str, bool, float]]:
    """Kill so often; (victim, whether it was a representative, when)."""
    rng, killed = random.Random(options.seed), []
    for number in range(options.kills):
        wait_whole(run, options)
        time.sleep(WINDOW_S + rng.random())
        rings = [each for _, each in sorted(run.members().items()) if len(each) > 1]
        ring, is_first = rng.choice(rings), number % 2 == 0
        victim = ring[0] if is_first else rng.choice(ring[1:])
        os.kill(run.pid(victim), signal.SIGKILL)
        killed.append((victim, is_first, time.monotonic()))
        time.sleep(WINDOW_S)
    wait_whole(run, options)
    time.sleep(WINDOW_S)
    return killed


def parse(description: str | None, *, workers: int, kills: int) -> argparse.Namespace:
    """What is asked for, of a job of rings and kills; workers and kills if nothing is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--rings", type=int, default=2)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pause-s", type=float, default=0.15)
    parser.add_argument("--repeat", type=int, default=50, help="times the data in an epoch: all rings meet at its end")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def summary(
    options: argparse.Namespace, stalls: Sequence[Stall], steps: Mapping[str, Sequence[Done]]
) -> dict[str, Any]:
    """What is said of a run.

    Raises:
        AssertionError: Parameters of two members of a ring differ by a bit.
    """
    ring = [each.ring_s for each in stalls if each.ring_s is not None]
    others, quiet = [each.others_s for each in stalls], [each.quiet_s for each in stalls]
    return {
        "kind": "measured",
        "bench": "ring_kills",
        "workers": options.workers,
        "rings": options.rings,
        "seed": options.seed,
        "kills": len(stalls),
        "usual_step_s": round(statistics.median(usual_s(each) for each in steps.values() if len(each) > 10), 3),
        "ring_stall_p50_s": quantile(ring, 0.5),
        "ring_stall_p95_s": quantile(ring, 0.95),
        "other_rings_stall_p50_s": quantile(others, 0.5),
        "other_rings_stall_max_s": round(max(others), 3),
        "other_rings_without_a_kill_p50_s": quantile(quiet, 0.5),
        "other_rings_without_a_kill_max_s": round(max(quiet), 3),
        "never_went_on": len(stalls) - len(ring),
        "pushes_lost": lost_pushes(steps),
        "parameters_alike": check_alike(steps),
    }


def conclude(options: argparse.Namespace, said: dict[str, Any], stalls: Sequence[Any], printed: str) -> None:
    """Print what is said of a run and what each kill cost, and write both, with the machine, to a file."""
    said["server"] = next((line for line in printed.splitlines() if "pushes applied" in line), "")
    for key, value in said.items():
        print(f"{key}: {value}")
    for each in stalls:
        print(json.dumps(asdict(each)))
    said |= {"each": [asdict(each) for each in stalls], "date": time.strftime("%Y-%m-%d", time.gmtime())}
    said |= {"machine": {"cpus": os.cpu_count(), "load": [round(each, 1) for each in os.getloadavg()]}}
    said |= {"git_commit": machine.describe()["git_commit"]}
    out = options.out or RESULTS / f"{said['date']}-{said['bench'].replace('_', '-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """So many kills; 1 if a bar is missed."""
    options = parse(__doc__, workers=6, kills=10)
    with tempfile.TemporaryDirectory(prefix="ringweave-rings-") as name:
        run = Run(options, Path(name))
        killed = hurt(run, options)
        printed = run.end()
        steps = read(run.checks)
    stalls = [judge(*each, steps) for each in killed]
    said = summary(options, stalls, steps)
    conclude(options, said, stalls, printed)
    is_right = not said["never_went_on"] and not said["pushes_lost"]
    return 0 if is_right and said["ring_stall_p95_s"] <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
