"""Run directory: its paths, its lock, earlier attempts, and run.json.

```text
RUN_DIR/run.json            what ran, and how it ended
RUN_DIR/events.jsonl        event log of all attempts
RUN_DIR/cluster.yaml        cluster file of the run
RUN_DIR/logs/rank-0.log     output of each worker
RUN_DIR/logs/server.log     output of the parameter server, if there is one
RUN_DIR/logs/server-1.log   output of its standby, if there is one
RUN_DIR/scale.json          request of `ringweave scale`, until the run takes it
RUN_DIR/claims/             leadership log of the parameter server and its standby
RUN_DIR/logs/rank-0.log.1-900, RUN_DIR/events.jsonl.1-900    earlier lines of full logs
RUN_DIR/attempts/1/         run.json, cluster.yaml and logs of the first attempt, once there is a second
```
"""

import fcntl
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringweave.environment import EXACT
from ringweave.errors import RingweaveError, UsageError
from ringweave.files import file_io, rotation
from ringweave.files.file_io import PathBelow
from ringweave.telemetry import Event, read_events
from ringweave.telemetry.run_metrics import RunMetrics

if TYPE_CHECKING:
    from ringweave.schedules import CollectiveKind
    from ringweave.topology import Cluster

ScheduleCounts = dict[str, int]
COUNTS = ("collectives", "bytes", "messages")
"""Keys of it."""

RUN_JSON_FORMAT = 2
"""Version of the keys of run.json."""

MAX_RUN_JSON_BYTES = 64 * 2**20
"""Upper limit of a run.json that is read; a script may add much to it, such as histories."""


def software_versions() -> dict[str, str | None]:
    """Return the versions of ringweave, Python and torch (read without importing it; None if it is not installed)."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {"ringweave": importlib.metadata.version("ringweave"), "python": platform.python_version(), "torch": torch}


def update_run_json(path: Path, changes: Mapping[str, object]) -> None:
    """Set keys of run.json and leave all others, so that the script may add its own to the same file.

    The file is replaced atomically: a reader sees the old or the new record. A file that is not JSON, or too large or
    too deep, is kept beside it.
    """
    record = {**_read_run_json(path), **changes}
    file_io.replace_text(path, json.dumps(record, indent=2) + "\n")


def summarize_events(events: Iterable[Event]) -> dict[str, Any]:
    """Summarize the events of one attempt under the keys of run.json."""
    events = list(events)
    return {
        "collectives_by_schedule": count_collectives(events),
        "networks": list_probed_networks(events),
        "plan": list_agreed_schedules(events),
        "plan_versions": list_plan_versions(events),
        "tuned": list_tuned_schedules(events),
        "training": summarize_training(events),
        "ranks": sum_ranks(events),
    }


def sum_ranks(events: Iterable[Event]) -> dict[str, dict[str, Any]]:
    """Return rank -> sums of its steps and of its traffic to each peer, as the exporters have them."""
    metrics = RunMetrics()
    for event in events:
        metrics.add(event)
    return metrics.by_rank()


def count_collectives(events: Iterable[Event]) -> dict[str, ScheduleCounts]:
    """Return schedule name -> collectives, bytes, messages over the whole run.

    A collective counts once, however many ranks take part: collectives and bytes are those that the lowest rank of each
    group reports. Messages are summed over all ranks.
    """
    last = {(event["group"], event["rank"]): event["by_schedule"] for event in events if event["kind"] == "collectives"}
    lowest: dict[str, int] = {}
    for group, global_rank in last:
        lowest[group] = min(global_rank, lowest.get(group, global_rank))
    totals: dict[str, ScheduleCounts] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for (group, global_rank), by_schedule in last.items():
        for name, counts in by_schedule.items():
            total = totals[name]
            total["messages"] += counts["messages"]
            if global_rank == lowest[group]:
                total["collectives"] += counts["collectives"]
                total["bytes"] += counts["bytes"]
    return dict(totals)


def list_agreed_schedules(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return every schedule that a group agreed on, once: group, collective, schedule, digest, bytes."""
    keys = ("group", "collective", "schedule", "digest", "bytes")
    agreed = {tuple(event[key] for key in keys): None for event in events if event["kind"] == "schedule_agreed"}
    return [dict(zip(keys, values, strict=True)) for values in agreed]


def list_probed_networks(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the networks that groups found by probing, where no cluster file was given."""
    return [
        {key: value for key, value in event.items() if key not in ("time", "kind", "rank")}
        for event in events
        if event["kind"] == "network_measured"
    ]


def list_plan_versions(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return every plan version of every adapting group: group, version, measured rates, reason."""
    events = list(events)
    why = {(e["group"], e["version"]): e["why"] for e in events if e["kind"] == "plan_changed"}
    keys = ("group", "version", "rates")
    return [
        {key: event[key] for key in keys} | {"why": why.get((event["group"], event["version"]))}
        for event in events
        if event["kind"] == "plan_made"
    ]


def list_tuned_schedules(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the tuning results: the group, plan version, collective, bytes, winner, measured seconds of candidates."""
    keys = ("group", "version", "collective", "bytes", "schedule", "measured_s")
    return [{key: event[key] for key in keys} for event in events if event["kind"] == "schedule_tuned"]


MEASURED_KEY = ("group", "version", "collective", "schedule", "wire", "bytes", "num_segments", "lag", "window")
_BOUNDED = ("allreduce", "allgather", "broadcast", "reduce-scatter")
"""Collectives that have a bound; events may name others."""
_MEASURED_VALUES = ("predicted_s", "measured_s", "rounds")


def measured_key(event: Event) -> tuple[Any, ...]:
    """Return the key of a `schedule_measured` event; older logs name no version, collective and wire format."""
    known = {"version": 1, "collective": "allreduce", "wire": EXACT, **event}
    return tuple(known[name] for name in MEASURED_KEY)


def compare_measured(events: Iterable[Event], cluster: "Cluster | None") -> list[dict[str, Any]]:
    """Return the last measurement of each group, plan, collective, size, schedule and pipelining, with its prediction.

    Args:
        events: Events of one attempt; of interest are `schedule_measured`, `plan_made` and `group_formed`.
        cluster: Cluster of the run, whose rates give the bounds of plans that no event tells of, and of other
            collectives than allreduce; None: these have none.
    """
    events = list(events)
    bound_by_plan = {
        (e["group"], e["version"], "allreduce"): e["bound_s_per_byte"] for e in events if e["kind"] == "plan_made"
    }
    last_measured = {measured_key(event): event for event in events if event["kind"] == "schedule_measured"}
    nodes = {event["group"]: tuple(event["nodes"]) for event in events if event["kind"] == "group_formed"}
    rows = [
        dict(zip(MEASURED_KEY, key, strict=True)) | {name: e[name] for name in _MEASURED_VALUES}
        for key, e in sorted(last_measured.items())
    ]
    bounds: dict[tuple[Any, ...], float | None] = {}
    for row in rows:
        predicted_s, kind = row["predicted_s"], row["collective"]
        s_per_byte = bound_by_plan.get((row["group"], row["version"], kind))
        if s_per_byte is None and cluster is not None and (own := nodes.get(row["group"])):
            if (own, kind) not in bounds:
                bounds[own, kind] = _bound_s_per_byte(cluster, own, kind)
            s_per_byte = bounds[own, kind]
        row["measured_over_predicted"] = row["measured_s"] / predicted_s if predicted_s else None
        row["bound_s"] = s_per_byte * row["bytes"] if s_per_byte else None
        has_both = row["bound_s"] and row["measured_s"]
        row["fraction_of_bound"] = row["bound_s"] / row["measured_s"] if has_both else None
    return rows


def _bound_s_per_byte(cluster: "Cluster", nodes: Sequence[str], kind: "CollectiveKind") -> float | None:
    """Return the bound at the rates of the cluster file; None if it has other nodes, or the collective has none."""
    if kind not in _BOUNDED:
        return None
    from ringweave import cost  # numpy; most users of run directories do without

    try:
        return cost.bound(cluster, 1, nodes=nodes, kind=kind).seconds
    except RingweaveError:
        return None


def summarize_training(events: Iterable[Event]) -> dict[str, Any] | None:
    """Summarize the training: mode and reason, last shares and limits of memory, whether the sample accounts are exact.

    Returns None if the script does not call `ringweave.prepare`; the last of several calls counts.
    """
    summary: dict[str, Any] | None = None
    for event in events:
        if event["kind"] == "training_prepared":
            keys = ("mode", "requested_mode", "reason", "batch_samples", "shares")
            summary = {key: event[key] for key in keys} | {
                "changes": 0,
                "epochs_accounted": 0,
                "samples_accounted": 0,
                "exact": None,
                "samples_at_once": {},
            }
        elif event["kind"] == "memory_limited" and summary is not None:
            summary["samples_at_once"][str(event["rank"])] = event["samples_at_once"]
        elif event["kind"] == "shares_changed" and summary is not None:
            summary |= {"shares": event["shares"], "changes": summary["changes"] + 1}
        elif event["kind"] == "samples_accounted" and summary is not None:
            is_exact = event["exact"] and summary["exact"] is not False
            summary |= {
                "epochs_accounted": summary["epochs_accounted"] + 1,
                "samples_accounted": summary["samples_accounted"] + event["samples"],
                "exact": is_exact,
            }
    return summary


def describe_training(summary: Mapping[str, Any] | None) -> str:
    """Return the result of `summarize_training` as one line for people; empty for None."""
    if summary is None:
        return ""
    count, samples = summary["epochs_accounted"], summary["samples_accounted"]
    account = f"{samples} samples in {count} epoch{'' if count == 1 else 's'}, each exactly once"
    if summary["exact"] is None:
        account = "no epoch was completed"
    elif not summary["exact"]:
        account = f"{samples} samples in {count} epochs, not each exactly once: see samples_accounted in events.jsonl"
    why = summary["reason"].rstrip(".")
    limited = "".join(
        f" Rank {rank} computes at most {number} samples at once, limited by memory (predicted)."
        for rank, number in summary["samples_at_once"].items()
        if number < max(summary["shares"], default=0)
    )
    return f"ringweave: trained in mode {summary['mode']}: {why}. {account[0].upper()}{account[1:]}.{limited}\n"


def _read_run_json(path: Path) -> dict[str, Any]:
    try:
        record = file_io.load_json(path, MAX_RUN_JSON_BYTES)
        json.dumps(record, indent=2)  # some values can be read, but are too deep to be written
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        return record
    path.replace(path.with_name(path.name + ".unreadable"))
    return {}


_ATTEMPT_FILES = ("run.json", "cluster.yaml", "logs", "claims")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDir:
    """Paths in a run directory; absolute, because workers may change their current directory."""

    root: Path

    run_json = PathBelow("run.json")
    events = PathBelow("events.jsonl")
    cluster_file = PathBelow("cluster.yaml")
    scale_request = PathBelow("scale.json")
    """Request for another number of workers of an elastic run."""
    leadership_log = PathBelow("claims")
    """Folder in which a parameter server and its standby record which one leads."""

    def worker_log(self, global_rank: int) -> Path:
        return self.root / "logs" / f"rank-{global_rank}.log"

    def logs_by_rank(self) -> dict[int, Path]:
        """Return the paths of the existing worker logs, in order of their global ranks."""
        paths = rotation.find_logs(self.root / "logs", "rank-*.log")
        by_rank = {int(path.stem.removeprefix("rank-")): path for path in paths}
        return dict(sorted(by_rank.items()))

    def server_log(self, index: int = 0) -> Path:
        """Return the path of the parameter server's log, or, with 1, of its standby's."""
        return self.root / "logs" / (f"server-{index}.log" if index else "server.log")


def create_run_dir(parent: Path, target: str, now: datetime) -> RunDir:
    """Create a new directory `<parent>/<date-time>-<script>`; a number is added if the name is taken.

    Raises:
        UsageError: None can be created here.
    """
    name = f"{now:%Y%m%d-%H%M%S}-{Path(target).stem}"
    numbers = itertools.count(1)
    while True:
        number = next(numbers)
        run_dir = RunDir(root=(parent / (name if number == 1 else f"{name}-{number}")).absolute())
        try:
            run_dir.root.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _run_dir_error(run_dir, "one that can be created", f"({error.strerror}) Give a") from error
        return run_dir


@contextmanager
def hold_run_dir(run_dir: RunDir) -> Iterator[None]:
    """Hold the directory for one `ringweave run`, creating it if needed; it is released when this process ends.

    Raises:
        UsageError: Another run is using it, or it cannot be written.
    """
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        do = f"({error.strerror}) Give another"
        raise _run_dir_error(run_dir, "a directory that can be written", do) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        do = "Wait for that run, or give another"
        raise _run_dir_error(run_dir, "one that no other run uses", do) from error
    try:
        yield
    finally:
        os.close(descriptor)


def is_run_dir_held(run_dir: RunDir) -> bool:
    """Return whether a `ringweave run` holds the directory now."""
    try:
        descriptor = os.open(run_dir.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def begin_attempt(run_dir: RunDir, cluster_text: str | None) -> int:
    """Prepare the directory for a run: move an earlier attempt's files away, write the cluster file.

    `cluster_text` None: the machines of the run are not described.

    Returns:
        The number of the new attempt, 1 for the first.

    Raises:
        UsageError: There is a cluster.yaml that no run has written, or an attempt of another format.
    """
    # Refuses another format before anything is moved. All attempts have the format of the first.
    next((event for event in read_events(run_dir.events) if event["kind"] == "run_started"), None)
    number = 1 + sum(1 for _ in (run_dir.root / "attempts").glob("[0-9]*"))
    if run_dir.run_json.exists():
        _archive_attempt(run_dir, number)
        number += 1
    elif run_dir.cluster_file.exists() and run_dir.cluster_file.read_text(encoding="utf-8") != cluster_text:
        raise _run_dir_error(run_dir, "one without a cluster.yaml of another origin", "Give another")
    if cluster_text is not None:
        run_dir.cluster_file.write_text(cluster_text, encoding="utf-8")
    (run_dir.root / "logs").mkdir(exist_ok=True)
    return number


def _archive_attempt(run_dir: RunDir, number: int) -> None:
    target = run_dir.root / "attempts" / str(number)
    target.mkdir(parents=True)
    for name in _ATTEMPT_FILES:
        if (run_dir.root / name).exists():
            shutil.move(run_dir.root / name, target / name)


def path_from_here(path: Path) -> str:
    """Return the path relative to the current directory, if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _run_dir_error(run_dir: RunDir, expected: str, do: str) -> UsageError:
    return UsageError("run directory", got=str(run_dir.root), expected=expected, do=f"{do} --run-dir")
