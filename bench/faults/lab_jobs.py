"""What the benches of faults share: a job under chaos in a lab of so many workers, and what is checked of it always.

Links are slow and the model is small, so that the network sets the pace and processors idle: on two of them, eight
workers that compute would leave nothing to one that starts.

Every figure comes from the job's `events.jsonl`, and from the files in which each process left the check of its
parameters after every train step.
"""

# Longer than a file should be: all that the benches of faults share, from the job to the table.

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringweave import telemetry, topology
from ringweave.benchmarks import machine
from ringweave.benchmarks.chaos import faults, histories, session, times
from ringweave.benchmarks.chaos.accounts import Report
from ringweave.benchmarks.chaos.doing.jobs import TORCHFT
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.benchmarks.chaos.session import Plan
from ringweave.benchmarks.chaos.survivors import Toll
from ringweave.errors import UsageError
from ringweave.planning.balancing import Account
from ringweave.topology import Cluster

DIGITS = 16
"""Of a check."""
STEPS_AN_EPOCH = 6
"""Of job.py."""
NUM_SUMS = 3
"""Of a train step of job.py, with layers as wide as they are here: moments inside a bucket are drawn among so many."""
_BEFORE = 3
"""Steps before one that lost samples, in which its members' shares are looked for."""
JOB = Path(__file__).with_name("job.py")
RESULTS = Path(__file__).parents[1] / "results" / "faults"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A job after its faults."""

    report: Report
    events: list[telemetry.Event]
    checks: Path
    """Folder of the checks of each process."""
    end: dict[str, Any] | None
    """Train steps and losses; None if the job was stopped before its end."""
    asked_steps: int | None = None
    """Train steps after which it was to end; None: when its time was over."""
    is_elastic: bool = True
    """Its workers were to be members."""

    def wrong_end(self) -> list[str]:
        """In words that it ended otherwise than it was to; nothing if it did not."""
        if self.asked_steps is None:
            how = histories.outcome(self.events)
            return [] if how == "stopped" else [f"the job did not go on until its time was over: {how or 'no end'}"]
        done = self.end["train_step"] if self.end else "an unknown number of"
        return [] if done == self.asked_steps else [f"the job ended after {done} train steps, not {self.asked_steps}"]

    def check_alike(self) -> int:
        """How many (process, step) pairs have the same parameters as the others after that step.

        Raises:
            AssertionError: Two differ by a bit, or there are none.
        """
        known: dict[str, str] = {}
        num_pairs = 0
        for member, (word, step, *rest) in self._said():
            if word != "done" or len(rest[0]) != DIGITS:  # a shorter one was cut by a kill
                continue
            num_pairs += 1
            if known.setdefault(step, rest[0]) != rest[0]:
                raise AssertionError(f"parameters of {member} after step {step} are {rest[0]}, not {known[step]}")
        assert num_pairs > len(known), f"parameters: {num_pairs} checks of {len(known)} steps, none to compare with"
        return num_pairs

    def check_samples(self) -> tuple[int, int]:
        """(samples that counted, samples lost) in epochs of the data that are complete, by what each process drew.

        A step's samples are those that its members drew. Who they are the event `samples_lost` says, where some of
        those who drew are not among them; else the last epoch that began before the step was committed: who was put
        out may have drawn what the others drew anew.

        Raises:
            AssertionError: No epoch is complete; an epoch's books say another number, or other samples; or what they
                miss is not what was lost, step by step, with members who were gone.
        """
        gone = [event for event in self.events if event["kind"] == "samples_lost"]
        within = {event["reduction"]: event["members"] for event in gone}
        epochs = [event for event in self.events if event["kind"] == "epoch_begun"]
        totals: dict[int, Account] = {}
        for reduction, member, own in self._drawn():
            if member in (within.get(reduction) or _members_at(epochs, reduction) or [member]):
                epoch = (reduction - 1) // STEPS_AN_EPOCH
                totals[epoch] = totals.get(epoch, Account()) + own
        books = {event["epoch"]: event for event in self.events if event["kind"] == "samples_accounted"}
        num_counted = num_lost = 0
        for epoch, event in books.items():
            found = totals.get(epoch, Account())
            if (found.num_samples, f"{found.fingerprint:016x}") != (event["samples"], event["fingerprint"]):
                raise AssertionError(f"epoch {epoch}: processes drew {found}, the books say {event}")
            num_counted, num_lost = num_counted + found.num_samples, num_lost + event["expected"] - found.num_samples
        assert num_counted, "samples: no epoch of the data is complete, so nothing can be compared with the books"
        told = sum(event["lost"] for event in gone if (event["reduction"] - 1) // STEPS_AN_EPOCH in books)
        assert num_lost == told, f"samples: {num_lost} are missing in the books, {told} are known to be lost"
        self._check_lost(gone)
        return num_counted, num_lost

    def _check_lost(self, gone: Sequence[telemetry.Event]) -> None:
        """No step lost more than the shares of those who were gone.

        Raises:
            AssertionError: One did.
        """
        drawn: dict[int, int] = {}
        for reduction, _, own in self._drawn():
            drawn[reduction] = max(own.num_samples, drawn.get(reduction, 0))
        members: set[str] = set()
        missing: dict[int, int] = {}
        for event in self.events:
            if event["kind"] == "epoch_begun":
                members |= set(event["members"])
            elif event["kind"] == "samples_lost":
                missing[event["reduction"]] = len(members - set(event["members"]))
                members = set(event["members"])
        for event in gone:
            reduction = event["reduction"]
            share = max((drawn.get(reduction - back, 0) for back in range(_BEFORE)), default=0)
            share += 1  # what does not divide among those who were there may have been with who is gone
            assert event["lost"] <= missing[reduction] * share, (
                f"step {reduction}: {event['lost']} samples lost with {missing[reduction]} members of {share} at most"
            )

    def _drawn(self) -> Iterator[tuple[int, str, Account]]:
        """(step, process, its samples) of every line that says so."""
        for member, (word, step, *rest) in self._said():
            if word == "drawn" and len(rest) == 2:
                yield int(step), member, Account(num_samples=int(rest[0]), fingerprint=int(rest[1]))

    def _said(self) -> Iterator[tuple[str, list[str]]]:
        """(process, words) of every line."""
        for path in sorted(self.checks.glob("*.txt")):
            member = path.stem.rpartition("-")[0]
            lines = path.read_text(encoding="ascii").splitlines()
            yield from ((member, line.split()) for line in lines if line.count(" ") > 1)


def _members_at(epochs: Sequence[telemetry.Event], reduction: int) -> list[str]:
    """Of the last of them that began before that step was committed; nobody if there is none."""
    before = [event for event in epochs if event["committed"] < reduction]
    return max(before, key=lambda event: (event["term"], event["number"]), default={"members": []})["members"]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every bench."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workers", type=int, default=8)
    made.add_argument("--rate", default="25Mbit/s", help="of every node's NIC")
    made.add_argument("--width", type=int, default=384, help="of the model's layers; its square sets the bytes")
    made.add_argument("--mode", default="sync", choices=["sync", "balanced"], help="how the job's workers train")
    made.add_argument("--again", action="store_true", help="run nothing: judge anew what --keep has kept")
    made.add_argument("--keep", type=Path, help="folder for events and logs; default: a temporary one, which is left")
    made.add_argument(
        "--out", type=Path, help=f"where the JSON document goes; default: {RESULTS.name}/ of bench/results"
    )
    return made


def cluster(options: argparse.Namespace) -> Cluster:
    """So many nodes that are alike, on one switch."""
    return topology.loads(
        f"name: faults\nnodes:\n  - {{name: a, nic: {options.rate}, devices: 1, count: {options.workers}}}\n"
        "latency: 50us\n"
    )


def run(  # noqa: PLR0913 - one for each thing that a bench may want otherwise
    options: argparse.Namespace,
    happens: Sequence[Fault],
    *,
    until_s: float,
    system: str = "ringweave",
    elastic: str | None = None,
    restart_s: float = 0.0,
    steps: int | None = None,
    samples_per_step: int | None = None,
    more: Sequence[str] = (),
    name: str = "job",
) -> Ended:
    """Run the job in a lab under these faults, for so long or so many steps; `more` are further options of it.

    The samples of a step need be told of systems that do not tell them.
    """
    kept = options.keep / name if options.keep else Path(tempfile.mkdtemp(prefix="ringweave-faults-"))
    checks = kept / "checks"
    script = [str(JOB), "{disk}", "--width", str(options.width), "--checks", str(checks), "--mode", options.mode]
    if system == TORCHFT:
        script = [str(JOB.with_name("torchft_job.py")), "--width", str(options.width), "--mended"]
    script += ["--fresh"] if elastic else []
    script += ["--steps", str(steps)] if steps else []
    script += more
    plan = Plan(
        system=system,
        script=script,
        faults=happens,
        out=kept.absolute(),
        options=[f"--elastic={elastic}"] if elastic else [],
        until_s=until_s,
        restart_s=restart_s,
    )
    hit = cluster(options)
    if not options.again:
        print(f"events and logs: {kept}", file=sys.stderr, flush=True)
        session.run(plan, hit, lambda text: print(text, file=sys.stderr, flush=True))
    events = histories.said_once(times.steady(list(telemetry.read(kept / "events.jsonl"))))
    end = checks / "end.json"
    return Ended(
        report=session.judge(events, hit, happens, restart_s, samples_per_step),
        events=events,
        checks=checks,
        end=json.loads(end.read_text(encoding="ascii")) if end.exists() else None,
        asked_steps=steps,
        is_elastic=elastic is not None,
    )


def parse(lines: Sequence[str], options: argparse.Namespace) -> tuple[Fault, ...]:
    """Faults of a bench."""
    return faults.parse("\n".join(lines), session.targets(cluster(options)))


def toll_rows(found: Sequence[Toll]) -> list[tuple[object, ...]]:
    """Rows of a table, the head first."""
    head = ("fault", "longest stall of a survivor, s", "new epoch after, s", "back after, s", "steps as a zombie")
    return [head, *((each.fault, each.stall_s, each.epoch_s, each.back_s, each.steps_as_zombie) for each in found)]


def summary(ended: Ended, found: Sequence[Toll]) -> dict[str, Any]:
    """What every bench that hurts an elastic job says of it.

    Samples are compared with the books where the job was never started anew, for then its steps count from 1 again; a
    job that is not elastic keeps none. Parameters that differ by a bit, samples that are not those which the books
    know, and an end that was not wanted are `wrong`, in words: `missed` has them.
    """
    report, wrong = ended.report, []
    num_counted = num_lost = num_alike = None
    try:
        num_alike = ended.check_alike()
    except AssertionError as error:
        wrong.append(str(error))
    try:
        if ended.is_elastic and report.attempts == 1:
            num_counted, num_lost = ended.check_samples()
    except AssertionError as error:
        wrong.append(str(error))
    if ended.is_elastic and report.elastic is None:
        wrong.append("no epoch began: the job had no members")
    members = asdict(report.elastic) if report.elastic else {}
    kept = {key: value for key, value in members.items() if key not in ("tolls", "takeovers", "joinings", "joins")}
    return {
        "faults": len(found),
        "begun": report.faults,
        "never_began": list(report.never_began),
        "moments": report.moments,
        "at_other_moments": list(report.at_other_moments),
        "steps": report.steps,
        "steps_lost": report.steps_lost,
        "attempts": report.attempts,
        "samples_counted": num_counted,
        "samples_lost": num_lost,
        "checks_alike": num_alike,
        "wrong": [*wrong, *ended.wrong_end()],
        "broken": list(report.broken),
        **kept,
        "never_went_on": len(kept.get("never_went_on", ())),
        "each": [asdict(each) for each in found],
        "takeovers": list(members.get("takeovers", ())),
        "joins": list(members.get("joinings", ())),
    }


def missed(said: Mapping[str, Any], *, are_back: bool = False) -> list[str]:
    """What every job of these has to do, under faults or not, and this one did not, in words.

    With `are_back` all victims have to have come back, and nobody to have been put out whom no fault had hit.
    """
    found = [*said["wrong"], *said["broken"], *(f"{fault}: never began" for fault in said["never_began"])]
    found += said["at_other_moments"]
    found += [f"the job was started {said['attempts']} times"] if said["attempts"] != 1 else []
    if are_back:
        found += [f"{fault}: the victim never came back" for fault in said["never_back"]]
        found += [f"{said['put_out']} members were put out though no fault hit them"] if said["put_out"] else []
    return found


def verdict(found: Sequence[str]) -> int:
    """Say what was missed; the exit code of a bench."""
    for each in found:
        print(f"missed: {each}")
    return 1 if found else 0


def over(what: str, value: float | None, bar: float) -> list[str]:
    """In words that a value is above its bar, or not known; nothing if it is not."""
    if value is not None and value <= bar:
        return []
    return [f"{what}: {'not known' if value is None else f'{value:g}'}, the bar is {bar:g}"]


def summary_rows(said: Mapping[str, Any], width: int) -> list[tuple[object, ...]]:
    """The same for a table."""
    names = {
        "attempts": "times that the job was started",
        "steps_lost": "train steps lost (bar 0)",
        "samples_counted": "samples that counted, each drawn once, in whole epochs",
        "samples_lost": "samples lost with who had drawn them",
        "stall_p50_s": "stall p50, s",
        "stall_p95_s": "stall p95, s",
        "taken_over_p50_s": "service replaced after p50, s",
        "taken_over_p95_s": "service replaced after p95, s",
        "takeover_stall_p50_s": "stall by it p50, s",
        "takeover_stall_p95_s": "stall by it p95, s",
        "put_out": "members put out though no fault hit them",
        "never_went_on": "faults after which a survivor made no step",
        "checks_alike": "parameters after a step, alike bit by bit",
        "join_stall_steps_p50": f"stall of peers when workers joined ({len(said['joins'])}), in steps, p50",
        "join_stall_steps_p95": "the same, p95",
        "level_p50_s": "newcomers level after, s, p50",
        "join_lost_steps_p50": "until then peers are behind by, in steps, p50",
    }
    return [(text, said.get(key), *[""] * (width - 2)) for key, text in names.items()]


def conclude(
    options: argparse.Namespace, name: str, document: Mapping[str, Any], rows: Sequence[Sequence[object]]
) -> None:
    """Print the table, and leave the document with where and when it was measured."""
    show(rows)
    leave(options.out, name, whole(options, document))


def show(rows: Sequence[Sequence[object]]) -> None:
    """Print the table, the head first."""
    widths = [max(len(_cell(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(_cell(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("All of it is measured.", flush=True)


def whole(options: argparse.Namespace, document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a bench with what its job was."""
    return {"workers": options.workers, "nic": options.rate, "mode": options.mode, **document}


def leave(out: Path | None, name: str, document: Mapping[str, Any]) -> None:
    """Write the document of a bench, with where and when it was measured; None is the folder of results."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    load = [round(each, 1) for each in os.getloadavg()]
    whole = {"kind": "measured", "bench": name, **document, "machine": {"cpus": os.cpu_count(), "load": load}}
    whole |= {"date": date, "git_commit": machine.describe()["git_commit"]}
    path = out or RESULTS / f"{date}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)


def bounds(options: argparse.Namespace, least: int = 1) -> str:
    """What `--elastic` is given."""
    if options.workers < 2:
        raise UsageError(f"--workers: {options.workers}, expected at least 2. Somebody has to survive.")
    return f"{least}:{options.workers}"


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
