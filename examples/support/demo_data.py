"""The measurements of a run of the demo, read from the files that it left."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UPLINKS = ("r0->core", "r1->core")
LATE_S = 1.0
"""A worker that joined later goes through old steps again; its lines are older than those of the others by more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What both runs have in common."""

    uplink: str
    limits: str
    """What limits CPU time: `cgroup v1`, `cgroup v2` or `duty cycle`."""
    cpus: Mapping[str, float]
    """Node -> processors that it may use."""
    plan: str
    batch: int
    steps: range
    """The train steps over which both are measured: before the kill."""
    load: float
    num_cpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTimes:
    """Mean seconds of a train step of one worker; they add up to the step."""

    compute_s: float
    wait_s: float
    """Between its own last gradient and that of the slowest worker."""
    communication_s: float
    """From then until it has the gradient of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A worker that was killed."""

    rank: int
    train_step: int
    """The last one that rank 0 was through with."""
    at_s: float
    """Monotonic seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One system's run."""

    name: str
    began_s: float
    ended_s: Mapping[int, float]
    """Train step -> monotonic seconds at which rank 0 was through with it."""
    losses: Mapping[int, float]
    """Train step -> mean loss over the samples of the batch, nats per byte."""
    lines: Mapping[int, Mapping[int, dict[str, float]]]
    """Rank -> train step -> what the worker noted."""
    uplink_bytes: Mapping[int, float]
    """Train step -> bytes that the racks had sent over their uplinks by then, mean of both."""
    kill: Kill | None
    result: Mapping[str, float]
    sample: str
    record: Mapping[str, Any]
    """run.json; empty for torchrun."""
    events: Sequence[Mapping[str, Any]]

    def seconds(self, steps: range) -> float:
        """Returns the wall time of these train steps."""
        return self.ended_s[steps[-1]] - self.ended_s[steps[0] - 1]

    def samples_per_s(self, steps: range, batch: int) -> float:
        """Returns the samples per second over these train steps."""
        return len(steps) * batch / self.seconds(steps)

    def uplink_bytes_per_step(self) -> float:
        """Returns the bytes that a rack sends over its uplink in a train step."""
        first, last = min(self.uplink_bytes), max(self.uplink_bytes)
        return (self.uplink_bytes[last] - self.uplink_bytes[first]) / (last - first)

    def times(self, steps: range) -> dict[int, WorkerTimes]:
        """Returns rank -> mean times of these train steps, for the workers that were in all of them."""
        there = [rank for rank, lines in self.lines.items() if all(step in lines for step in steps)]
        last = {step: max(self.lines[rank][step]["computed_s"] for rank in there) for step in steps}
        return {rank: _worker_times(self.lines[rank], last) for rank in sorted(there)}

    @property
    def scheduled_fraction(self) -> float:
        """Fraction of the bytes of all collectives that went by schedules of ringweave."""
        carried = {name: each["bytes"] for name, each in self.record.get("collectives_by_schedule", {}).items()}
        return 1 - carried.get("native", 0) / sum(carried.values()) if carried else 0.0

    @property
    def shares(self) -> Sequence[int]:
        """The shares of a batch with which the workers computed before the kill."""
        kinds = ("training_prepared", "shares_changed")
        known = [event for event in self.events if event["kind"] in kinds and len(event["shares"]) == len(self.lines)]
        lost = next((event["time"] for event in self.events if event["kind"] == "member_lost"), float("inf"))
        return next((each["shares"] for each in reversed(known) if each["time"] < lost), ())

    @property
    def longest_gap_s(self) -> float:
        """The time between the two steps around the kill; 0 without a kill."""
        if self.kill is None:
            return 0.0
        before = [s for s in self.ended_s.values() if s <= self.kill.at_s]
        after = [s for s in self.ended_s.values() if s > self.kill.at_s]
        return min(after) - max(before)

    @property
    def returned_s(self) -> float | None:
        """Monotonic seconds at which the killed worker's successor began its first step with the others, if it did."""
        if self.kill is None:
            return None
        began = [line["began_s"] for line in self.lines[self.kill.rank].values()]
        return min((s for s in began if s > self.kill.at_s), default=None)


def last_step(folder: Path) -> int | None:
    """Returns the last train step that rank 0 is through with, 0 before the first; None before training."""
    path = folder / "steps-0.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else None


def load_run(name: str, folder: Path, counters: Mapping[int, Mapping[str, int]], kill: Kill | None) -> Run:
    """Reads what a run has left.

    Args:
        name: Name of the system.
        folder: Folder of the run.
        counters: Train step -> link -> bytes that it has carried so far.
        kill: The worker that was killed, if one was.
    """
    every = {int(path.stem.partition("-")[2]): _read_lines(path) for path in folder.glob("steps-*.jsonl")}
    ended_s = {int(line["train_step"]): line["ended_s"] for line in every[0]}
    record, events = folder / "run.json", folder / "events.jsonl"
    in_time = {rank: [each for each in lines if _is_in_time(each, ended_s)] for rank, lines in every.items()}
    return Run(
        name=name,
        began_s=min(lines[0]["began_s"] for lines in every.values()),
        ended_s=ended_s,
        losses=_mean_losses([line for lines in in_time.values() for line in lines]),
        lines={rank: {int(line["train_step"]): line for line in lines} for rank, lines in in_time.items()},
        uplink_bytes={step: sum(links[each] for each in UPLINKS) / len(UPLINKS) for step, links in counters.items()},
        kill=kill,
        result=json.loads((folder / "result.json").read_text()),
        sample=(folder / "sample.txt").read_bytes().decode(errors="replace"),
        record=json.loads(record.read_text()) if record.exists() else {},
        events=_read_lines(events) if events.exists() else (),
    )


def _is_in_time(line: Mapping[str, float], ended_s: Mapping[int, float]) -> bool:
    return abs(line["ended_s"] - ended_s.get(int(line["train_step"]), 0.0)) < LATE_S


def _mean_losses(lines: Sequence[Mapping[str, float]]) -> dict[int, float]:
    total: defaultdict[int, float] = defaultdict(float)
    samples: defaultdict[int, float] = defaultdict(float)
    for line in lines:
        total[int(line["train_step"])] += line["loss"] * line["samples"]
        samples[int(line["train_step"])] += line["samples"]
    return {step: total[step] / samples[step] for step in sorted(total) if samples[step]}


def _worker_times(lines: Mapping[int, Mapping[str, float]], last: Mapping[int, float]) -> WorkerTimes:
    own = [lines[step] for step in last]
    waits = [max(0.0, last[step] - lines[step]["computed_s"]) for step in last]
    computes = [line["computed_s"] - line["began_s"] + line["ended_s"] - line["reduced_s"] for line in own]
    whole = [line["ended_s"] - line["began_s"] for line in own]
    compute_s, wait_s = sum(computes) / len(own), sum(waits) / len(own)
    return WorkerTimes(
        compute_s=compute_s, wait_s=wait_s, communication_s=max(0.0, sum(whole) / len(own) - compute_s - wait_s)
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]
