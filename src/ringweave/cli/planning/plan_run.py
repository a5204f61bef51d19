"""`ringweave plan --run`: what the collectives of a run were predicted to take, beside what they took."""

import json
from pathlib import Path
from typing import Any

import click

from ringweave import cost, topology, units
from ringweave.errors import RingweaveError, UsageError, explain
from ringweave.launch.run_dirs import RunDir
from ringweave.telemetry import Event, events

_KEY = ("group", "version", "schedule", "bytes", "num_segments", "lag", "window")
_VALUES = ("predicted_s", "measured_s", "rounds")


def show(run_dir: str, *, as_json: bool) -> int:
    """Print the answer for a run directory.

    Raises:
        UsageError: It is none, or nothing was measured in it.
    """
    place = RunDir(root=Path(run_dir).absolute())
    if not place.events.is_file():
        do = "Name the directory of a run, as `ringweave run --run-dir` does"
        expected = f"a directory with {place.events.name}"
        raise UsageError(explain("--run", got=run_dir, expected=expected, do=do))
    found = events.read_last_attempt(place.events)
    rows = compared(found, _bounds_of_file(place, found))
    if not rows:
        do = "Let it run longer, or train with more than the small messages that the host library takes"
        expected = "at least one schedule_measured event"
        raise UsageError(explain("measured collectives", got="none", expected=expected, do=do, where=str(place.events)))
    click.echo(json.dumps({"run": run_dir, "measured": rows}) if as_json else "\n".join(_table(rows)))
    return 0


def compared(found: list[Event], of_file: dict[str, float]) -> list[dict[str, Any]]:
    """One row for each group, plan version, size, schedule and pipelining: the last that was said of it.

    Args:
        found: The events of one attempt.
        of_file: The bound of each group for which there is one, at the rates of the cluster file, in seconds per byte;
            for plans that no event tells of.
    """
    of_plan = {(e["group"], e["version"]): e["bound_s_per_byte"] for e in found if e["kind"] == "plan_made"}
    last = {_key(event): event for event in found if event["kind"] == "schedule_measured"}
    rows = [dict(zip(_KEY, key, strict=True)) | {name: e[name] for name in _VALUES} for key, e in sorted(last.items())]
    for row in rows:
        predicted_s = row["predicted_s"]
        s_per_byte = of_plan.get((row["group"], row["version"]), of_file.get(row["group"]))
        row["measured_over_predicted"] = row["measured_s"] / predicted_s if predicted_s else None
        row["bound_s"] = s_per_byte * row["bytes"] if s_per_byte else None
        row["fraction_of_bound"] = row["bound_s"] / row["measured_s"] if row["bound_s"] else None
    return rows


def _key(event: Event) -> tuple[Any, ...]:
    """Older logs name no version."""
    return tuple(event.get(name, 1) if name == "version" else event[name] for name in _KEY)


def _bounds_of_file(place: RunDir, found: list[Event]) -> dict[str, float]:
    """None of a run whose cluster file is gone or is another one now."""
    try:
        cluster = topology.load(str(place.cluster))
        return {
            event["group"]: cost.bound(cluster, 1, nodes=event["nodes"]).seconds
            for event in found
            if event["kind"] == "group_formed"
        }
    except (OSError, RingweaveError):
        return {}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    titles = (
        "group",
        "plan",
        "schedule",
        "bytes",
        "segments",
        "bound",
        "predicted",
        "measured",
        "measured/predicted",
        "rounds",
    )
    cells = [titles, *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    notes = [
        "measured: median on the group's first rank, waiting for late ranks included; predicted: by formula;",
        "plan: its version, one more each time that it was changed; bound: at the rates that this plan was made with,",
        "or of the run's cluster file where nothing was tried; a dash where no link is passed or nobody knows rates",
    ]
    return [*lines, "", *notes]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row["measured_over_predicted"]
    return (
        row["group"],
        str(row["version"]),
        row["schedule"],
        units.format_bytes(row["bytes"]),
        str(row["num_segments"]),
        _time(row["bound_s"]),
        _time(row["predicted_s"]),
        _time(row["measured_s"]),
        "-" if ratio is None else f"{ratio:.2f}",
        str(row["rounds"]),
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"
