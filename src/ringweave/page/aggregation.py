"""Aggregates of a run of any length, in memory that does not grow with it: buckets whose width doubles; pure."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringweave.launcher import run_dir
from ringweave.membership import membership_records
from ringweave.telemetry import Event, events

Document = dict[str, Any]
Floats = npt.NDArray[np.float64]

MAX_BUCKETS = 240
"""Points of a curve; with more, two neighbours become one."""
FIRST_WIDTH_S = 0.5
"""Width of a bucket in a short run."""
SUMMED = ("steps", "samples", "wall_s", "input_s", "compute_s", "exchange_s", "update_s")
"""Fields of `steps_measured` that add up."""
PARTS = ("compute", "input", "update", "script", "wait", "communication")
"""Parts of a train step; together they are its wall time."""


def rounded(values: Any) -> list[float | None]:
    """Return numbers with four digits, and None for those that are not finite."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


class BucketedSeries:
    """Least, mean and greatest value in buckets of time."""

    def __init__(self, begin_s: float) -> None:
        """`begin_s` is the time of the first bucket's begin; earlier values go into the first."""
        self._begin_s, self._width_s = begin_s, FIRST_WIDTH_S
        self._buckets: list[list[float] | None] = []

    def add(self, time_s: float, value: float) -> None:
        """Add a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        while (index := max(0, int((time_s - self._begin_s) / self._width_s))) >= MAX_BUCKETS:
            self._double()
        self._buckets += [None] * (index + 1 - len(self._buckets))
        self._buckets[index] = _merged(self._buckets[index], [value, value, value, 1.0])

    def document(self) -> Document:
        """Return times (seconds since 1970, middles of buckets), and min, mean and max at each of them."""
        found = [(index, bucket) for index, bucket in enumerate(self._buckets) if bucket is not None]
        times = [round(self._begin_s + (index + 0.5) * self._width_s, 2) for index, _ in found]
        columns = [rounded(column) for column in zip(*(bucket[:3] for _, bucket in found), strict=True)]
        low, mean, high = columns or ([], [], [])
        return {"times": times, "min": low, "mean": mean, "max": high}

    def _double(self) -> None:
        pairs = zip(self._buckets[::2], [*self._buckets[1::2], None], strict=False)
        self._buckets = [_merged(first, second) for first, second in pairs]
        self._width_s *= 2


def _merged(first: list[float] | None, second: list[float] | None) -> list[float] | None:
    """Merge two buckets of least, mean, greatest, and number of values."""
    if first is None or second is None:
        return first or second
    count = first[3] + second[3]
    mean = first[1] + (second[1] - first[1]) * second[3] / count
    return [min(first[0], second[0]), mean, max(first[2], second[2]), count]


class StepGrid:
    """Measured steps of all ranks in common buckets of time.

    A window of steps is spread over the buckets that it covers. All ranks leave an exchange of gradients together, so
    the least exchange of a group of ranks is its communication, and what a rank has beyond it is its wait for others.
    """

    def __init__(self, begin_s: float) -> None:
        self._begin_s, self._width_s = begin_s, FIRST_WIDTH_S
        self._rows: dict[int, int] = {}
        self._sums: Floats = np.zeros((0, MAX_BUCKETS, len(SUMMED)))
        self._end_s: dict[int, float] = {}

    def add(self, event: Event) -> None:
        """Add an event `steps_measured`.

        Raises:
            KeyError, TypeError, ValueError, ArithmeticError: It has not the fields of one.
        """
        rank, end_s = int(event["rank"]), float(event["time"]) - self._begin_s
        span_s = min(max(float(event["wall_s"]), 1e-3), max(end_s, 1e-3))
        values = np.array([float(event[name]) for name in SUMMED])
        if not np.isfinite(values).all():
            raise ValueError("sums that are not finite")
        while end_s >= MAX_BUCKETS * self._width_s:
            self._double()
        if rank not in self._rows:
            self._rows[rank] = len(self._rows)
            self._sums = np.concatenate([self._sums, np.zeros((1, MAX_BUCKETS, len(SUMMED)))])
        edges = np.arange(MAX_BUCKETS + 1) * self._width_s
        first, last = (max(0, int(moment_s / self._width_s)) for moment_s in (end_s - span_s, end_s))
        overlaps = np.diff(np.clip(edges[first : last + 2], end_s - span_s, end_s)) / span_s
        self._sums[self._rows[rank], first : last + 1] += overlaps[:, None] * values
        self._end_s[rank] = max(end_s, self._end_s.get(rank, 0.0))

    def document(self, groups: Sequence[Sequence[int]] = ()) -> Document | None:
        """Return the course of steps over time; None without a step.

        Args:
            groups: Ranks that exchange gradients among themselves; those of no group are one together.
        """
        shown = self._shown()
        if not len(shown):
            return None
        sums = self._sums[:, shown.start : shown.stop]
        parts, wall_s = self._parts(sums, groups), _per_step(sums, "wall_s")
        stepping = np.isfinite(wall_s)
        empty = np.where(stepping.any(axis=0), 0.0, np.nan)
        step_s = [reduce(np.where(stepping, wall_s, fill), 0) + empty for reduce, fill in _REDUCTIONS]
        ranks = sorted(self._rows)
        waits = (parts["wait"] / wall_s)[[self._rows[rank] for rank in ranks]]
        return {
            "times": [round(self._begin_s + (index + 0.5) * self._width_s, 2) for index in shown],
            "width_s": self._width_s,
            "samples_per_s": rounded(sums[..., SUMMED.index("samples")].sum(axis=0) / self._width_s),
            "step_s": dict(zip(("min", "mean", "max"), map(rounded, step_s), strict=True)),
            "parts": {name: rounded(_mean_over_ranks(parts[name])) for name in PARTS},
            "waits": {"ranks": ranks, "rows": [[_hundredth(each) for each in row] for row in waits]},
        }

    def ranks(self, last_s: float | None, groups: Sequence[Sequence[int]] = ()) -> dict[int, Document]:
        """Return rank -> mean step of the last so many seconds (None: of all): parts in seconds, steps, samples."""
        shown = self._shown(last_s)
        sums = self._sums[:, shown.start : shown.stop].sum(axis=1, keepdims=True)
        parts = self._parts(sums, groups)
        found = {}
        for rank, row in sorted(self._rows.items()):
            mean = {f"{name}_s": rounded(parts[name][row])[0] for name in PARTS}
            counts = {name: round(float(self._sums[row, :, SUMMED.index(name)].sum())) for name in ("steps", "samples")}
            found[rank] = mean | counts | {"wall_s": rounded(_per_step(sums, "wall_s")[row])[0]}
        return found

    def samples_per_s(self, last_s: float | None) -> float | None:
        """Return the samples per second of all ranks together, over the last so many seconds (None: of all)."""
        shown = self._shown(last_s)
        samples = self._sums[:, shown.start : shown.stop, SUMMED.index("samples")].sum()
        return rounded([samples / (len(shown) * self._width_s)])[0] if len(shown) else None

    def _shown(self, last_s: float | None = None) -> range:
        """Return the buckets from the first step on that all ranks have reported, but for those long silent."""
        if not self._end_s:
            return range(0)
        newest_s = max(self._end_s.values())
        alive_s = [each for each in self._end_s.values() if each >= newest_s - max(30.0, self._width_s)]
        first = int(np.argmax(self._sums[..., SUMMED.index("steps")].any(axis=0)))
        end = min(MAX_BUCKETS, max(first + 1, int(min(alive_s) / self._width_s)))
        return range(first if last_s is None else max(first, end - math.ceil(last_s / self._width_s)), end)

    def _parts(self, sums: Floats, groups: Sequence[Sequence[int]]) -> dict[str, Floats]:
        """Return part -> seconds of a mean step, by row and bucket; NaN where a rank made no step."""
        parts = {name: _per_step(sums, f"{name}_s") for name in ("compute", "input", "update")}
        exchange_s = _per_step(sums, "exchange_s")
        communication_s = np.full_like(exchange_s, np.nan)
        grouped = [[self._rows[rank] for rank in group if rank in self._rows] for group in groups]
        rest = sorted(set(self._rows.values()).difference(*grouped))
        for rows in [each for each in (*grouped, rest) if each]:
            communication_s[rows] = np.fmin.reduce(exchange_s[rows], axis=0)
        script_s = _per_step(sums, "wall_s") - exchange_s - sum(parts.values())
        waits = {"wait": exchange_s - communication_s, "communication": np.minimum(communication_s, exchange_s)}
        return {**parts, "script": np.maximum(script_s, 0.0), **waits}

    def _double(self) -> None:
        self._width_s *= 2
        half = self._sums.reshape(len(self._sums), MAX_BUCKETS // 2, 2, len(SUMMED)).sum(axis=2)
        self._sums = np.concatenate([half, np.zeros_like(half)], axis=1)


_REDUCTIONS = (
    (np.min, np.inf),
    (lambda each, axis: each.sum(axis) / np.maximum((each > 0).sum(axis), 1), 0.0),
    (np.max, 0.0),
)


def _per_step(sums: Floats, name: str) -> Floats:
    """Return a field of a mean step, by row and bucket; NaN where a rank made less than a hundredth of a step."""
    steps = sums[..., SUMMED.index("steps")]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(steps > 0.01, sums[..., SUMMED.index(name)] / steps, np.nan)


def _mean_over_ranks(values: Floats) -> Floats:
    known = np.isfinite(values)
    count = known.sum(axis=0)
    return np.where(count > 0, np.where(known, values, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)


def _hundredth(value: float) -> int | None:
    """Return a fraction in hundredths, as short as can be."""
    return round(100 * value) if math.isfinite(value) else None


class WindowSums:
    """Events `steps_measured` and `traffic_measured` for the verdict: in a long run, two windows of a rank become one.

    The first window of a rank stays as it is: the verdict leaves it out.
    """

    MAX_WINDOWS = 60

    def __init__(self) -> None:
        self._windows: dict[tuple[str, int], list[Event]] = {}

    def add(self, event: Event) -> None:
        """Add an event."""
        windows = self._windows.setdefault((event["kind"], event["rank"]), [])
        windows.append(event)
        if len(windows) > self.MAX_WINDOWS:
            pairs = zip(windows[1::2], [*windows[2::2], None], strict=False)
            windows[1:] = [first if second is None else events.sum_windows(first, second) for first, second in pairs]

    def events(self) -> list[Event]:
        """Return the windows of all ranks."""
        return [event for windows in self._windows.values() for event in windows]


class CollectiveCounts:
    """Collectives of each schedule, from counts that each rank of a group reports again and again.

    Of groups that have not reported for long, such as those of earlier generations, sums alone are kept.
    """

    MAX_GROUPS = 32

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, Event]] = {}
        self._ended: dict[str, run_dir.ScheduleCounts] = {}

    def add(self, event: Event) -> None:
        """Add an event `collectives`, in place of the one before of that rank and group."""
        ranks = self._groups.pop(event["group"], {})
        ranks[event["rank"]] = event
        self._groups[event["group"]] = ranks
        if len(self._groups) > self.MAX_GROUPS:
            oldest = self._groups.pop(next(iter(self._groups)))
            self._ended = _sum_counts(self._ended, run_dir.count_collectives(oldest.values()))

    def document(self) -> Document | None:
        """Return schedule -> collectives, bytes, messages; None without any."""
        kept = [event for ranks in self._groups.values() for event in ranks.values()]
        return _sum_counts(self._ended, run_dir.count_collectives(kept)) or None


def _sum_counts(
    first: Mapping[str, run_dir.ScheduleCounts], second: Mapping[str, run_dir.ScheduleCounts]
) -> dict[str, run_dir.ScheduleCounts]:
    return {
        name: {key: sum(each.get(name, {}).get(key, 0) for each in (first, second)) for key in run_dir.COUNTS}
        for name in [*first, *(name for name in second if name not in first)]
    }


FAILURES = frozenset(
    {
        "checkpoint_failed",
        "checkpoint_refused",
        "communication_failed",
        "fault_begun",
        "member_lost",
        "move_failed",
        "rpc_refused",
        "server_exited",
        "standstill",
        "worker_exited",
    }
)
"""Kinds of events that mean trouble, unless a process has ended as it should."""
_MARKED = frozenset(
    {
        "blocks_moved",
        "member_returned",
        "mode_reconsidered",
        "params_leader_changed",
        "plan_changed",
        "shares_changed",
        "workers_scaled",
    }
)
"""Other kinds that get a mark on the time line."""
_GOOD_REASONS = (
    membership_records.REASON_ALL_DONE,
    membership_records.REASON_ALL_LEFT,
    membership_records.REASON_FINISHED,
)


def is_failure(event: Event) -> bool:
    """Return whether an event means trouble."""
    if event["kind"] in ("worker_exited", "server_exited"):
        return not event["stopped"] and event["exit_code"] != 0
    return event["kind"] in FAILURES and event.get("reason") not in _GOOD_REASONS


class RunTimeline:
    """Attempts, lives of workers, generations and remarkable events of a run, over time: the newest, and how many."""

    MAX_ROWS = 200
    """Ended lives, generations and marks that are kept, of each."""
    MAX_ATTEMPTS = 100

    def __init__(self) -> None:
        self._round: int | None = None
        self._attempts: deque[Document] = deque(maxlen=self.MAX_ATTEMPTS)
        self._alive: dict[int, Document] = {}
        self._ended: deque[Document] = deque(maxlen=self.MAX_ROWS)
        self._generations: deque[Document] = deque(maxlen=self.MAX_ROWS)
        self._marks: deque[Document] = deque(maxlen=self.MAX_ROWS)
        self._counts = dict.fromkeys(("deaths", "generations", "lives", "marks"), 0)
        self._is_new = True

    def begin_attempt(self, round_: int | None = None) -> None:
        """Take the next `run_started` for a new attempt, of that round of a job; each of its nodes writes one."""
        self._is_new, self._round = True, round_

    def add(self, event: Event, text: str) -> None:
        """Add an event of any kind; `text` describes it."""
        kind, time_s = event["kind"], event["time"]
        if kind == "run_started":
            if self._is_new:
                number = event["attempt"] if self._round is None else self._round
                self._attempts.append({"number": number, "begin_s": time_s, "end_s": None, "outcome": None})
            self._is_new = False
        elif kind == "run_ended" and self._attempts:
            last = self._attempts[-1]
            last["end_s"] = max(time_s, last["end_s"] or 0.0)
            if last["outcome"] in (None, "done"):
                last |= {"outcome": event["outcome"], "cause": event["cause"]}
        elif kind == "worker_started":
            self._end_life(event["rank"], time_s, "its end was not reported")
            self._alive[event["rank"]] = {
                "rank": event["rank"],
                "node": event["node"],
                "begin_s": time_s,
                "end_s": None,
            }
            self._counts["lives"] += 1
        elif kind == "worker_exited":
            is_death = is_failure(event)
            self._counts["deaths"] += is_death
            how = event["signal"] or f"exit code {event['exit_code']}"
            self._end_life(event["rank"], time_s, how, is_death=is_death)
        elif kind == "generation_begun":
            keys = ("term", "number", "part")
            row = {key: event[key] for key in keys} | {"time_s": time_s, "num_members": len(event["members"])}
            self._generations.append(row)
            self._counts["generations"] += 1
        elif kind in _MARKED or is_failure(event):
            self._marks.append({"time_s": time_s, "kind": kind, "text": text})
            self._counts["marks"] += 1

    def _end_life(self, rank: int, end_s: float, how: str, *, is_death: bool = False) -> None:
        life = self._alive.pop(rank, None)
        if life is not None:
            self._ended.append(life | {"end_s": end_s, "how": how, "is_death": is_death})

    def document(self) -> Document | None:
        """Return all of it; None before the first worker."""
        if not self._counts["lives"]:
            return None
        return {
            "attempts": list(self._attempts),
            "lives": sorted([*self._ended, *self._alive.values()], key=lambda life: life["begin_s"]),
            "generations": list(self._generations),
            "marks": list(self._marks),
            **{f"num_{name}": count for name, count in self._counts.items()},
        }
