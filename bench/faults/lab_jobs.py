"""Shared parts of the benches of faults: a job under chaos in a lab of so many workers, and its checks.

Links are slow and the model is small, so that the network limits the speed and processors idle: on two of them, eight
workers that compute would leave nothing to one that starts.

Every figure comes from the job's `events.jsonl`, and from the files in which each process writes the checksum of its
parameters after every train step.
"""

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
from ringweave.errors import UsageError
from ringweave.planning.balancing import SampleAccount
from ringweave.topology import Cluster
from ringweave_bench import machine_description
from ringweave_bench.chaos import chaos_session, fault_script, job_history
from ringweave_bench.chaos.chaos_job import TORCHFT
from ringweave_bench.chaos.chaos_report import ChaosReport
from ringweave_bench.chaos.chaos_session import ChaosPlan
from ringweave_bench.chaos.fault_script import Fault
from ringweave_bench.chaos.member_impacts import FaultImpact

# A long file on purpose: all that the benches of faults share, from the job to the table.


DIGITS = 16
"""Length of a checksum."""
BATCH = 256
"""Batch size of job.py."""
STEPS_AN_EPOCH = 6
"""Train steps of job.py per pass over the data."""
NUM_SUMS = 3
"""Allreduces in a train step of job.py, with layers as wide as here; moments inside a bucket are drawn among them."""
_BEFORE = 3
"""Steps before one that lost samples, from which its members' shares are taken."""
JOB = Path(__file__).with_name("job.py")
RESULTS = Path(__file__).parents[1] / "results" / "faults"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A job after its faults."""

    report: ChaosReport
    events: list[telemetry.Event]
    checks: Path
    """Folder of the checks of each process."""
    end: dict[str, Any] | None
    """Train steps and losses; None if the job was stopped before its end."""
    asked_steps: int | None = None
    """Train steps after which it was to end; None: it was to run for a fixed time."""
    is_elastic: bool = True
    """True if its workers were to be members."""
    has_logs: bool = False
    """True if the script logs by an allreduce of its own after every step."""

    def wrong_end(self) -> list[str]:
        """Return texts about a wrong end of the job; none if it ended as it should."""
        if self.asked_steps is None:
            how = job_history.chaos_outcome(self.events)
            return [] if how == "stopped" else [f"the job did not go on until its time was over: {how or 'no end'}"]
        done = self.end["train_step"] if self.end else "an unknown number of"
        return [] if done == self.asked_steps else [f"the job ended after {done} train steps, not {self.asked_steps}"]

    def check_alike(self) -> int:
        """Count the (process, step) pairs that have the same parameters as the others after that step.

        Raises:
            AssertionError: Two differ by a bit, or there are no pairs.
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

    def check_logs(self) -> int:
        """Count the (process, step) pairs that have logged the same value as the others after that step.

        Raises:
            AssertionError: Two differ, or there are no pairs.
        """
        known: dict[str, str] = {}
        num_pairs = 0
        for member, (word, step, *rest) in self._said():
            if word == "logged" and rest:
                num_pairs += 1
                if known.setdefault(step, rest[0]) != rest[0]:
                    raise AssertionError(f"{member} logged {rest[0]} after step {step}, not {known[step]}")
        assert num_pairs > len(known), f"logs: {num_pairs} values of {len(known)} steps, none to compare with"
        return num_pairs

    def check_samples(self) -> tuple[int, int]:
        """Return (samples committed, samples lost) in complete passes over the data, by the processes' draws.

        A step's samples are those that its members drew. The events `samples_lost` and `samples_recomputed` name the
        members if some processes that drew samples are not among them; else they are those of the last generation
        before the step's commit: an evicted worker may have drawn samples that the others drew again. A step
        that restarts, whose event has 0 samples, counts for nothing.

        Raises:
            AssertionError: No pass is complete; the accounts of a pass have another number, or other samples; or the
                samples missing there were not lost, step by step, with members that were gone.
        """
        gone = [event for event in self.events if event["kind"] == "samples_lost"]
        partial = [event for event in self.events if event["kind"] in ("samples_lost", "samples_recomputed")]
        within = {event["reduction"]: event["members"] if event["samples"] else ["nobody"] for event in partial}
        epochs = [event for event in self.events if event["kind"] == "generation_begun"]
        totals: dict[int, SampleAccount] = {}
        epoch_of: dict[int, int] = {}
        for reduction, member, own, epoch in self._drawn():
            epoch_of[reduction] = epoch
            number = 2 * reduction - 1 if self.has_logs else reduction  # collectives are numbered together with them
            if member in (within.get(reduction) or _members_at(epochs, number) or [member]):
                totals[epoch] = totals.get(epoch, SampleAccount()) + own
        books = {event["epoch"]: event for event in self.events if event["kind"] == "samples_accounted"}
        num_counted = num_lost = 0
        for epoch, event in books.items():
            found = totals.get(epoch, SampleAccount())
            if (found.num_samples, f"{found.fingerprint:016x}") != (event["samples"], event["fingerprint"]):
                raise AssertionError(f"epoch {epoch}: processes drew {found}, the books say {event}")
            num_counted, num_lost = num_counted + found.num_samples, num_lost + event["expected"] - found.num_samples
        assert num_counted, "samples: no epoch of the data is complete, so nothing can be compared with the books"
        told = sum(event["lost"] for event in gone if epoch_of[event["reduction"]] in books)
        assert num_lost == told, f"samples: {num_lost} are missing in the books, {told} are known to be lost"
        self._check_lost(gone)
        return num_counted, num_lost

    def _check_lost(self, gone: Sequence[telemetry.Event]) -> None:
        """Check that no step lost more than the shares of the members that were gone.

        Raises:
            AssertionError: One did.
        """
        drawn: dict[int, int] = {}
        for reduction, _, own, _ in self._drawn():
            drawn[reduction] = max(own.num_samples, drawn.get(reduction, 0))
        members: set[str] = set()
        missing: dict[int, int] = {}
        for event in self.events:
            if event["kind"] == "generation_begun":
                members |= set(event["members"])
            elif event["kind"] == "samples_lost":
                missing[event["reduction"]] = len(members - set(event["members"]))
                members = set(event["members"])
        for event in gone:
            reduction = event["reduction"]
            share = max((drawn.get(reduction - back, 0) for back in range(_BEFORE)), default=0)
            share += 1  # the remainder of a division among members may have been with a lost one
            assert event["lost"] <= missing[reduction] * share, (
                f"step {reduction}: {event['lost']} samples lost with {missing[reduction]} members of {share} at most"
            )

    def _drawn(self) -> Iterator[tuple[int, str, SampleAccount, int]]:
        """Yield (reduction, process, its samples, epoch of the data) of every line about samples."""
        for member, (word, reduction, *rest) in self._said():
            if word == "drawn" and len(rest) == 3:
                account = SampleAccount(num_samples=int(rest[0]), fingerprint=int(rest[1]))
                yield int(reduction), member, account, int(rest[2])

    def _said(self) -> Iterator[tuple[str, list[str]]]:
        """(process, words) of every line."""
        for path in sorted(self.checks.glob("*.txt")):
            member = path.stem.rpartition("-")[0]
            lines = path.read_text(encoding="ascii").splitlines()
            yield from ((member, line.split()) for line in lines if line.count(" ") > 1)


def _members_at(epochs: Sequence[telemetry.Event], number: int) -> list[str]:
    """Return the members of the last generation that began before the operation of that number was committed."""
    before = [event for event in epochs if event["committed"] < number]
    return max(before, key=lambda event: (event["term"], event["number"]), default={"members": []})["members"]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every bench."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workers", type=int, default=8)
    made.add_argument("--rate", default="25Mbit/s", help="of every node's NIC")
    made.add_argument("--width", type=int, default=384, help="of the model's layers; its square sets the bytes")
    made.add_argument("--mode", default="sync", choices=["sync", "balanced"], help="how the job's workers train")
    made.add_argument("--spares", type=int, default=0, help="spares of an elastic job, see ringweave run --spares")
    made.add_argument("--s-per-sample", type=float, default=0.0, help="that workers sleep, as if a device computed it")
    made.add_argument("--log", action="store_true", help="workers log by an allreduce of their own in every step")
    made.add_argument("--again", action="store_true", help="run nothing: judge anew what --keep has kept")
    made.add_argument("--keep", type=Path, help="folder for events and logs; default: a temporary one, which is left")
    made.add_argument(
        "--out", type=Path, help=f"where the JSON document goes; default: {RESULTS.name}/ of bench/results"
    )
    return made


def cluster(options: argparse.Namespace) -> Cluster:
    """Return a cluster of equal nodes on one switch."""
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

    The samples of a step are only needed for systems that do not report them.
    """
    kept = options.keep / name if options.keep else Path(tempfile.mkdtemp(prefix="ringweave-faults-"))
    checks = kept / "checks"
    script = [str(JOB), "{disk}", "--width", str(options.width), "--checks", str(checks), "--mode", options.mode]
    if system == TORCHFT:
        script = [str(JOB.with_name("torchft_job.py")), "--width", str(options.width), "--mended"]
    script += ["--fresh"] if elastic else []
    script += ["--log"] if options.log else []
    script += ["--steps", str(steps)] if steps else []
    script += ["--s-per-sample", str(options.s_per_sample)] if options.s_per_sample else []
    script += more
    plan = ChaosPlan(
        system=system,
        script=script,
        faults=happens,
        out=kept.absolute(),
        options=[f"--elastic={elastic}", f"--spares={options.spares}"] if elastic else [],
        until_s=until_s,
        restart_s=restart_s,
    )
    hit = cluster(options)
    if not options.again:
        print(f"events and logs: {kept}", file=sys.stderr, flush=True)
        chaos_session.run_chaos(plan, hit, lambda text: print(text, file=sys.stderr, flush=True))
    events = job_history.drop_repeated_losses(
        job_history.correct_times(list(telemetry.read_events(kept / "events.jsonl")))
    )
    end = checks / "end.json"
    return Ended(
        report=chaos_session.judge_events(events, hit, happens, restart_s, samples_per_step),
        events=events,
        checks=checks,
        end=json.loads(end.read_text(encoding="ascii")) if end.exists() else None,
        asked_steps=steps,
        is_elastic=elastic is not None,
        has_logs=options.log,
    )


def parse(lines: Sequence[str], options: argparse.Namespace) -> tuple[Fault, ...]:
    """Parse the faults of a bench."""
    return fault_script.parse_faults("\n".join(lines), chaos_session.cluster_targets(cluster(options)))


def toll_rows(found: Sequence[FaultImpact]) -> list[tuple[object, ...]]:
    """Return rows of a table, the head first."""
    head = ("fault", "longest stall of a survivor, s", "new generation after, s", "back after, s", "steps as a zombie")
    return [head, *((each.fault, each.stall_s, each.generation_s, each.back_s, each.steps_as_zombie) for each in found)]


def summary(ended: Ended, found: Sequence[FaultImpact]) -> dict[str, Any]:
    """Summarise an elastic job under faults, as every bench does.

    Samples are compared with the accounts only if the job never restarted as a whole, since its steps then count from 1
    again; a job that is not elastic keeps no accounts. Parameters that differ by a bit, samples that the accounts do
    not have, and a wrong end are in `wrong`, in words; `missed` includes them.
    """
    report, wrong = ended.report, []
    num_counted = num_lost = num_alike = num_logged = None
    try:
        num_alike = ended.check_alike()
        num_logged = ended.check_logs() if ended.has_logs else None
    except AssertionError as error:
        wrong.append(str(error))
    try:
        if ended.is_elastic and report.attempts == 1:
            num_counted, num_lost = ended.check_samples()
    except AssertionError as error:
        wrong.append(str(error))
    if ended.is_elastic and report.elastic is None:
        wrong.append("no generation began: the job had no members")
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
        "samples_recomputed": sum(event["missing"] for event in ended.events if event["kind"] == "samples_recomputed"),
        "checks_alike": num_alike,
        "logs_alike": num_logged,
        "wrong": [*wrong, *ended.wrong_end()],
        "broken": list(report.broken),
        **kept,
        "never_went_on": len(kept.get("never_went_on", ())),
        "each": [asdict(each) for each in found],
        "takeovers": list(members.get("takeovers", ())),
        "joins": list(members.get("joinings", ())),
    }


def missed(said: Mapping[str, Any], *, are_back: bool = False) -> list[str]:
    """Return the requirements of every job that this one missed, in words.

    With `are_back` all victims must have come back, and no member that no fault had hit may have been evicted.
    """
    found = [*said["wrong"], *said["broken"], *(f"{fault}: never began" for fault in said["never_began"])]
    found += said["at_other_moments"]
    found += [f"the job was started {said['attempts']} times"] if said["attempts"] != 1 else []
    if are_back:
        found += [f"{fault}: the victim never came back" for fault in said["never_back"]]
        found += [f"{said['evicted']} members were evicted though no fault hit them"] if said["evicted"] else []
    return found


def verdict(found: Sequence[str]) -> int:
    """Print the missed requirements; return the exit code of a bench."""
    for each in found:
        print(f"missed: {each}")
    return 1 if found else 0


def over(what: str, value: float | None, bar: float) -> list[str]:
    """Return a text if a value is above its bar, or unknown; else nothing."""
    if value is not None and value <= bar:
        return []
    return [f"{what}: {'not known' if value is None else f'{value:g}'}, the bar is {bar:g}"]


def summary_rows(said: Mapping[str, Any], width: int) -> list[tuple[object, ...]]:
    """Return the summary's rows of a table."""
    names = {
        "attempts": "times that the job was started",
        "steps_lost": "train steps lost (bar 0)",
        "samples_counted": "samples that counted, each drawn once, in whole epochs",
        "samples_lost": "samples lost with who had drawn them",
        "samples_recomputed": "samples of lost members that the others computed in the same step",
        "stall_p50_s": "stall p50, s",
        "stall_p95_s": "stall p95, s",
        "taken_over_p50_s": "service replaced after p50, s",
        "taken_over_p95_s": "service replaced after p95, s",
        "takeover_stall_p50_s": "stall by it p50, s",
        "takeover_stall_p95_s": "stall by it p95, s",
        "evicted": "members evicted though no fault hit them",
        "never_went_on": "faults after which a survivor made no step",
        "checks_alike": "parameters after a step, alike bit by bit",
        "logs_alike": "values logged after a step, alike bit by bit",
        "join_stall_steps_p50": f"stall of peers when workers joined ({len(said['joins'])}), in steps, p50",
        "join_stall_steps_p95": "the same, p95",
        "caught_up_p50_s": "newcomers caught up after, s, p50",
        "join_lost_steps_p50": "until then peers are behind by, in steps, p50",
    }
    return [(text, said.get(key), *[""] * (width - 2)) for key, text in names.items()]


def conclude(
    options: argparse.Namespace, name: str, document: Mapping[str, Any], rows: Sequence[Sequence[object]]
) -> None:
    """Print the table, and write the document with place and time of the measurement."""
    show(rows)
    leave(options.out, name, whole(options, document))


def show(rows: Sequence[Sequence[object]]) -> None:
    """Print the table, the head first."""
    widths = [max(len(_cell(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(_cell(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("All of it is measured.", flush=True)


def whole(options: argparse.Namespace, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a bench with its job's options."""
    shared = {"workers": options.workers, "nic": options.rate, "mode": options.mode, "spares": options.spares}
    return {**shared, **document}


def leave(out: Path | None, name: str, document: Mapping[str, Any]) -> None:
    """Write the document of a bench, with place and time of the measurement; None: to the folder of results."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    load = [round(each, 1) for each in os.getloadavg()]
    whole = {"kind": "measured", "bench": name, **document, "machine": {"cpus": os.cpu_count(), "load": load}}
    whole |= {"date": date, "git_commit": machine_description.describe_machine()["git_commit"]}
    path = out or RESULTS / f"{date}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)


def bounds(options: argparse.Namespace, least: int = 1) -> str:
    """Return the value of `--elastic`."""
    if options.workers < 2:
        raise UsageError(f"--workers: {options.workers}, expected at least 2. Somebody has to survive.")
    return f"{least}:{options.workers}"


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
