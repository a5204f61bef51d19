"""Shared parts of the benches of rings: a job in mode ps-hra under --elastic, the lines of its processes, and checks.

Every process writes a line for each of its steps: its time, push, ring and pass over the data, and a checksum of the
parameters; and the account of each pass.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import lab_jobs
from job import BATCH

from ringweave import lab, telemetry
from ringweave.errors import UsageError
from ringweave.topology import Cluster
from ringweave_bench.chaos import job_history
from ringweave_bench.chaos.job_history import parse_member

# A long file on purpose: all that the benches of rings share, from the job to the accounts.


JOB = Path(__file__).with_name("ring_job.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """One step of one process."""

    time_s: float
    ring: int
    num_pushed: int
    epoch: int
    digest: str


def longest_s(steps: Sequence[Done], since_s: float, until_s: float) -> float | None:
    """Return the longest time between two steps that overlaps a window; None if there is no step after it."""
    gaps = _gaps(steps, since_s, until_s)
    return None if gaps is None else max(after.time_s - before.time_s for before, after in gaps)


class Waits(NamedTuple):
    """Longest times between two steps; 0 if there is none of the kind."""

    inside_s: float
    """Longest within a pass over the data."""
    meeting_s: float
    """Longest between the last step of a pass and the first of the next one, where all rings meet at a barrier."""


def longest_apart(steps: Sequence[Done], since_s: float, until_s: float) -> Waits | None:
    """Return the same as `longest_s`, within passes and between them."""
    gaps = _gaps(steps, since_s, until_s)
    if gaps is None:
        return None
    inside = [after.time_s - before.time_s for before, after in gaps if before.epoch == after.epoch]
    meeting = [after.time_s - before.time_s for before, after in gaps if before.epoch != after.epoch]
    return Waits(max(inside, default=0.0), max(meeting, default=0.0))


def _gaps(steps: Sequence[Done], since_s: float, until_s: float) -> list[tuple[Done, Done]] | None:
    found = [
        (before, after)
        for before, after in itertools.pairwise(steps)
        if after.time_s > since_s and before.time_s < until_s
    ]
    return found if found and steps[-1].time_s >= until_s else None


def usual_s(steps: Sequence[Done]) -> float:
    """Return the usual seconds of a step."""
    return statistics.median(after.time_s - before.time_s for before, after in itertools.pairwise(steps))


def alive_at(steps: Mapping[str, Sequence[Done]], at_s: float) -> dict[str, Sequence[Done]]:
    """Return the processes that were training at a time: of each slot the newest that had begun by then.

    A process that made no step any more after it is included: it has stalled.
    """
    newest: dict[int, tuple[int, str]] = {}
    for name, each in steps.items():
        slot, number = parse_member(name)
        if each[0].time_s < at_s - 1:
            newest[slot] = max(newest.get(slot, (-1, "")), (number, name))
    return {name: steps[name] for _, name in newest.values()}


def read(checks: Path) -> dict[str, list[Done]]:
    """Read the steps of each process."""
    found: dict[str, list[Done]] = {}
    for path in checks.glob("*.txt"):
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        steps = [
            Done(time_s=float(row[0]), ring=int(row[1]), num_pushed=int(row[2]), epoch=int(row[3]), digest=row[4])
            for row in rows
            if len(row) == 5 and len(row[4]) == 16
        ]
        if steps:
            found[path.stem] = steps
    return found


def check_alike(steps: Mapping[str, Sequence[Done]]) -> int:
    """Count the (process, push) pairs that have the parameters of their ring after that push.

    Raises:
        AssertionError: Two differ by a bit, or no two are of the same push.
    """
    known: dict[tuple[int, int], str] = {}
    for name, each in steps.items():
        for done in each:
            if known.setdefault((done.ring, done.num_pushed), done.digest) != done.digest:
                raise AssertionError(f"parameters of {name} after push {done.num_pushed} of ring {done.ring} differ")
    num_pairs = sum(map(len, steps.values()))
    assert num_pairs > len(known), f"parameters: {num_pairs} checks of {len(known)} pushes, none to compare with"
    return num_pairs


def lost_pushes(steps: Mapping[str, Sequence[Done]]) -> int:
    """Count the pushes after which no member of a ring has seen the parameters, though there was a later one."""
    seen: dict[int, set[int]] = {}
    for each in steps.values():
        seen.setdefault(each[0].ring, set()).update(done.num_pushed for done in each)
    return sum(max(pushes) - min(pushes) + 1 - len(pushes) for pushes in seen.values())


def script(options: argparse.Namespace, checks: Path) -> list[str]:
    """Return the path of the job's script, and its arguments."""
    asked = ["--rings", str(options.rings), "--width", str(options.width), "--pause-s", str(options.pause_s)]
    asked += ["--inner-steps", str(getattr(options, "inner_steps", 0)), "--epochs", str(options.epochs)]
    return [str(JOB), "--checks", str(checks), *asked, "--repeat", str(options.repeat)]


class Run:
    """The job, in its own lab or on this machine as it is, and its present members."""

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        *,
        mode: str = "ps-hra",
        flags: Sequence[str] = (),
        cluster: Cluster | None = None,
    ) -> None:
        """`flags` are further ones of `ringweave run`; `cluster` is that of the lab; None: equal nodes."""
        self._folder = folder
        self.checks = folder / "checks"
        self.lab = lab.up(cluster or lab_jobs.cluster(options), f"rings-{os.getpid()}") if options.lab else None
        where = ["lab", "run", "--lab", self.lab.name] if self.lab else ["run", "--workers", str(options.workers)]
        command = [sys.executable, "-m", "ringweave", *where, "--elastic", f"1:{options.workers}", "--mode", mode]
        command += [*flags, "--run-dir", str(self.run_dir), *script(options, self.checks)]
        self._log = (folder / "run.log").open("w")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def run_dir(self) -> Path:
        """Run directory of the job."""
        return self._folder / "run"

    @property
    def process_id(self) -> int:
        """Process id of the command."""
        return self._process.pid

    @property
    def is_over(self) -> bool:
        """True if the job has ended."""
        return self._process.poll() is not None

    def members(self) -> dict[str, list[str]]:
        """Return part of the job -> members of its newest generation."""
        events = list(telemetry.read_events(self.run_dir / "events.jsonl"))
        return {event["part"]: event["members"] for event in events if event["kind"] == "generation_begun"}

    def pid(self, member: str) -> int:
        """Return the process id of a member."""
        slot = int(member.partition(".")[0])
        events = telemetry.read_events(self.run_dir / "events.jsonl")
        return [event["pid"] for event in events if event["kind"] == "worker_started" and event["rank"] == slot][-1]

    def deciding(self) -> int | None:
        """Return the index of the active coordinator, from the events."""
        return job_history.track_leaders(telemetry.read_events(self.run_dir / "events.jsonl")).coordinator

    def num_steps(self, member: str) -> int:
        """Return the lines that a member has written, for steps and passes."""
        path = self.checks / f"{member}.txt"
        return path.read_text(encoding="ascii").count("\n") if path.exists() else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> str:
        """Stop it if it has not ended; return its output."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()
        self._log.close()
        if self.lab:
            lab.down(self.lab.name)
        return (self._folder / "run.log").read_text(encoding="utf-8")


def wait_whole(
    run: Run, options: argparse.Namespace, limit_s: float = 120.0, num_lines: int = 12, *, may_end: bool = False
) -> None:
    """Wait until all slots have a worker that trains: one that has written more than so many lines; or the job ends."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s and not run.is_over:
        members = [member for each in run.members().values() for member in each]
        if len(members) == options.workers and all(run.num_steps(member) > num_lines for member in members):
            return
        time.sleep(0.1)
    if may_end and run.is_over:
        return
    raise SystemExit(f"the job was not whole within {limit_s:g} s: {run.members()}\n{run.end()[-3000:]}")


def check_accounts(checks: Path, num_gone: int) -> tuple[int, int]:
    """Return (complete passes over the data, samples of them that are known to be lost); all others were committed.

    Args:
        checks: Folder of the processes' lines.
        num_gone: Workers that were killed or cut off; the samples of one step may be lost with each.

    Raises:
        AssertionError: A pass does not add up, the processes' accounts of it differ, or more is lost than was under
            way.
    """
    known: dict[str, list[str]] = {}
    num_lost = 0
    for path in sorted(checks.glob("*.txt")):
        for line in path.read_text(encoding="ascii").splitlines():
            word, *rest = line.split()
            if word != "account" or len(rest) != 4:
                continue
            epoch, *counts = rest
            is_news = epoch not in known
            assert known.setdefault(epoch, counts) == counts, f"epoch {epoch}: {counts} and {known[epoch]}"
            expected, counted, lost = map(int, counts)
            assert counted + lost == expected, f"epoch {epoch}: {counted} counted, {lost} lost, expected {expected}"
            num_lost += lost if is_news else 0
    assert num_lost <= num_gone * BATCH, f"{num_lost} samples lost, though {num_gone} workers were gone"
    return len(known), num_lost


def num_pushes(steps: Mapping[str, Sequence[Done]]) -> int:
    """Count the pushes of all rings."""
    by_ring: dict[int, int] = {}
    for each in steps.values():
        for done in each:
            by_ring[done.ring] = max(done.num_pushed, by_ring.get(done.ring, 0))
    return sum(by_ring.values())


def counted(run_dir: Path) -> int:
    """Return the number of versions that the parameter server has made, from its newest event."""
    events = telemetry.read_events(run_dir / "events.jsonl")
    return max((event["version"] for event in events if event["kind"] == "params_counted"), default=0)


def books(run_dir: Path, checks: Path, steps: Mapping[str, Sequence[Done]], num_gone: int) -> dict[str, Any]:
    """Check the counts of a run against each other; `wrong` has the disagreements, in words.

    Args:
        run_dir: Run directory of the job.
        checks: Folder of the processes' lines.
        steps: Steps of each process.
        num_gone: Workers that were killed or cut off.
    """
    num_alike = num_epochs = num_lost = None
    wrong = []
    try:
        num_alike = check_alike(steps)
    except AssertionError as error:
        wrong.append(str(error))
    try:
        num_epochs, num_lost = check_accounts(checks, num_gone)
    except AssertionError as error:
        wrong.append(str(error))
    return {
        "pushes_of_rings": num_pushes(steps),
        "versions_of_the_server": counted(run_dir),
        "pushes_lost": lost_pushes(steps),
        "parameters_alike": num_alike,
        "epochs_accounted": num_epochs,
        "samples_lost": num_lost,
        "wrong": wrong,
    }


def missed(said: Mapping[str, Any]) -> list[str]:
    """Return the requirements of every run of rings under faults that this one missed, in words."""
    found = [*said["wrong"]]
    found += [f"after {said['never_went_on']} kills a worker made no step"] if said["never_went_on"] else []
    found += [f"{said['pushes_lost']} pushes were lost"] if said["pushes_lost"] else []
    pushed, applied = said["pushes_of_rings"], said["versions_of_the_server"]
    found += [f"rings pushed {pushed} times, the server applied {applied}"] if pushed != applied else []
    is_none = said["epochs_accounted"] == 0
    return found + (["no epoch of the data was complete, nothing was accounted"] if is_none else [])


def parse(
    description: str | None,
    *,
    kills: int,
    workers: int = 8,
    repeat: int = 50,
    option: str = "--kills",
    sites: bool = False,
) -> argparse.Namespace:
    """Parse the options of a bench of rings, or of sites; other arguments are defaults.

    `repeat`: rounds of the data in a pass.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument(
        "--lab",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a node for each worker, which needs root; or all on this machine as it is",
    )
    parser.add_argument("--rate", default="25Mbit/s", help="of every node's NIC in the lab")
    parser.add_argument("--rings", type=int, default=2)
    parser.add_argument(option, dest="kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pause-s", type=float, default=0.15)
    parser.add_argument(
        "--repeat", type=int, default=repeat, help="times the data in an epoch: all rings meet at its end"
    )
    parser.add_argument("--epochs", type=int, default=4 if sites else 1_000_000)
    if sites:
        parser.add_argument("--lost-sites", type=int, default=1, help="times that all workers of a site are killed")
        parser.add_argument("--inner-steps", type=int, default=8, help="train steps of an outer step")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.kills < 1:
        raise UsageError(f"{option}: {asked.kills}, expected at least 1. Without a fault nothing is shown.")
    return asked


def one_by_one(
    options: argparse.Namespace,
    faults: Sequence[str],
    one: Callable[[argparse.Namespace, str, Path], tuple[Any, Any, str]],
) -> tuple[list[Any], dict[str, Any], str]:
    """Run a job for each fault, in its own folder; return each effect, the summary, and the last output."""
    stalls, said, printed = [], {}, ""
    for fault in faults[: options.kills]:
        with tempfile.TemporaryDirectory(prefix="ringweave-rings-") as name:
            stall, said[fault], printed = one(options, fault, Path(name))
        stalls.append(stall)
    return stalls, said, printed


def conclude(options: argparse.Namespace, said: dict[str, Any], stalls: Sequence[Any], printed: str) -> None:
    """Print a run's summary and each kill's effects, and write both to a file."""
    said["server"] = next((line for line in printed.splitlines() if "pushes applied" in line), "")
    for key, value in said.items():
        print(f"{key}: {value}")
    for each in stalls:
        print(json.dumps(asdict(each)))
    told = {"workers": options.workers, "nic": options.rate if options.lab else None, "rings": options.rings}
    name = said.pop("bench")
    lab_jobs.leave(options.out, name, {**told, "seed": options.seed, **said, "each": [asdict(each) for each in stalls]})
