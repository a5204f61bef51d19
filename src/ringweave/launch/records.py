"""run.json: what ran, on what, how it ended, and by which schedules its collectives went."""

import importlib.metadata
import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ringweave.files import json_text
from ringweave.telemetry import Event

Counts = dict[str, int]

MAX_BYTES = 64 * 2**20
"""Of a record that is read: what a script adds to it, histories for instance, may be much."""


def versions() -> dict[str, str | None]:
    """Versions of what computes; torch's without importing it, None if it is not installed."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {"ringweave": importlib.metadata.version("ringweave"), "python": platform.python_version(), "torch": torch}


def update(path: Path, changes: Mapping[str, object]) -> None:
    """Set keys of the record and leave all others, so that the script may add its own to the same file.

    The file is replaced in one go: a reader sees the old or the new record. One that is not JSON, or too much or too
    deep to be gone on with, is kept beside it.
    """
    record = {**_read(path), **changes}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def summarize(events: Iterable[Event]) -> dict[str, Any]:
    """What the events of one attempt say, by the keys that run.json has for it."""
    events = list(events)
    return {
        "collectives_by_schedule": count_collectives(events),
        "networks": list_networks(events),
        "plan": list_agreed(events),
        "plan_versions": list_versions(events),
        "tuned": list_tuned(events),
        "training": sum_up_training(events),
    }


def count_collectives(events: Iterable[Event]) -> dict[str, Counts]:
    """Schedule name -> collectives, bytes, messages over the whole run.

    A collective is one, however many ranks take part: its number and message size are those that the lowest rank of
    each group reports. Messages are summed over all ranks.
    """
    last = {(event["group"], event["rank"]): event["by_schedule"] for event in events if event["kind"] == "collectives"}
    lowest: dict[str, int] = {}
    for group, global_rank in last:
        lowest[group] = min(global_rank, lowest.get(group, global_rank))
    totals: dict[str, Counts] = defaultdict(lambda: {"collectives": 0, "bytes": 0, "messages": 0})
    for (group, global_rank), by_schedule in last.items():
        for name, counts in by_schedule.items():
            total = totals[name]
            total["messages"] += counts["messages"]
            if global_rank == lowest[group]:
                total["collectives"] += counts["collectives"]
                total["bytes"] += counts["bytes"]
    return dict(totals)


def list_agreed(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Every schedule that a group agreed on, once: group, schedule, digest, bytes."""
    keys = ("group", "schedule", "digest", "bytes")
    agreed = {tuple(event[key] for key in keys): None for event in events if event["kind"] == "schedule_agreed"}
    return [dict(zip(keys, values, strict=True)) for values in agreed]


def list_networks(events: Iterable[Event]) -> list[dict[str, Any]]:
    """What groups found by probing the network, where no cluster file was given."""
    return [
        {key: value for key, value in event.items() if key not in ("time", "kind", "rank")}
        for event in events
        if event["kind"] == "network_known"
    ]


def list_versions(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Every plan of every group that adapts: group, version, the measured rates it was made with, and why."""
    events = list(events)
    why = {(e["group"], e["version"]): e["why"] for e in events if e["kind"] == "plan_changed"}
    keys = ("group", "version", "rates")
    return [
        {key: event[key] for key in keys} | {"why": why.get((event["group"], event["version"]))}
        for event in events
        if event["kind"] == "plan_made"
    ]


def list_tuned(events: Iterable[Event]) -> list[dict[str, Any]]:
    """What trials found: group, plan version, bytes, the schedule that won, measured seconds of all candidates."""
    keys = ("group", "version", "bytes", "schedule", "measured_s")
    return [{key: event[key] for key in keys} for event in events if event["kind"] == "schedule_tuned"]


def sum_up_training(events: Iterable[Event]) -> dict[str, Any] | None:
    """How workers trained together: the mode and why, the last shares, and whether every epoch's account is exact.

    None if the script does not call `ringweave.prepare`; of several calls the last counts.
    """
    found: dict[str, Any] | None = None
    for event in events:
        if event["kind"] == "training_prepared":
            keys = ("mode", "asked", "reason", "batch_samples", "shares")
            found = {key: event[key] for key in keys} | {
                "changes": 0,
                "epochs_accounted": 0,
                "samples_accounted": 0,
                "exact": None,
            }
        elif event["kind"] == "shares_changed" and found is not None:
            found |= {"shares": event["shares"], "changes": found["changes"] + 1}
        elif event["kind"] == "samples_accounted" and found is not None:
            is_exact = event["exact"] and found["exact"] is not False
            found |= {
                "epochs_accounted": found["epochs_accounted"] + 1,
                "samples_accounted": found["samples_accounted"] + event["samples"],
                "exact": is_exact,
            }
    return found


def tell_training(found: Mapping[str, Any] | None) -> str:
    """What `sum_up_training` found, in one line for people; empty where it found nothing."""
    if found is None:
        return ""
    count, samples = found["epochs_accounted"], found["samples_accounted"]
    account = f"{samples} samples in {count} epoch{'' if count == 1 else 's'}, each exactly once"
    if found["exact"] is None:
        account = "no epoch came to its end"
    elif not found["exact"]:
        account = f"{samples} samples in {count} epochs, not each exactly once: see samples_accounted in events.jsonl"
    why = found["reason"].rstrip(".")
    return f"ringweave: trained in mode {found['mode']}: {why}. {account[0].upper()}{account[1:]}.\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json_text.load(path, MAX_BYTES)
        json.dumps(record, indent=2)  # some values are too deep to be written, but not to be read
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        return record
    path.replace(path.with_name(path.name + ".unreadable"))
    return {}
