"""History of a job from its events: processes, generations, leaders, and times corrected for clock jumps. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringweave.telemetry import Event
from ringweave_bench.chaos import fault_script
from ringweave_bench.chaos.fault_script import Fault

_FIRST_SERVER = 0


class LeaderTracker:
    """Tracks the active coordinator and the leading server, one event after the other.

    A coordinator writes an event for each generation that it publishes. After a takeover it repeats the event of the
    present generation, so the active coordinator is known even if no member joins or leaves.
    """

    coordinator: int | None
    """Index of the active coordinator; None before the first generation."""
    server: int | None
    """Index of the leading server; None for a job without one."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.coordinator = self.server = None
        self._last: dict[str, tuple[tuple[int, int], int]] = {}
        """Part of the job -> id of the newest generation, and the coordinator that published it."""

    def observe(self, event: Event) -> bool:
        """Process an event; return True if it begins a new generation (not a repeated one)."""
        kind = event["kind"]
        if kind == "run_started":  # events of another attempt do not count
            self._reset()
        elif kind == "generation_begun":
            return self._observe_generation(event)
        elif kind == "server_started" and self.server is None:  # the first one leads until another reports that it does
            self.server = _FIRST_SERVER
        elif kind == "params_leader_changed":
            self.server = event["server"]
        return False

    def _observe_generation(self, event: Event) -> bool:
        part, generation_id = event.get("part", ""), (event["term"], event["number"])
        last, announcer = self._last.get(part, ((0, 0), 0))
        is_new = generation_id > last
        self.coordinator = coordinator_index(event["term"]) if is_new else 1 - announcer
        self._last[part] = (generation_id, self.coordinator)
        return is_new


def track_leaders(events: Iterable[Event]) -> LeaderTracker:
    """Return a tracker after these events."""
    found = LeaderTracker()
    for event in events:
        found.observe(event)
    return found


def without_repeated_generations(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events except repeated generations, whose members have joined long ago."""
    tracker = LeaderTracker()
    for event in events:
        if tracker.observe(event) or event["kind"] != "generation_begun":
            yield event


def count_takeovers(events: Iterable[Event]) -> int:
    """Count the changes of the active coordinator within attempts."""
    tracker, found = LeaderTracker(), 0
    for event in events:
        before = tracker.coordinator
        tracker.observe(event)
        found += before is not None and tracker.coordinator not in (None, before)
    return found


def coordinator_index(term: int) -> int:
    """Return the index of the coordinator that owns a term: 0 has odd ones."""
    return (term + 1) % 2


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHistory:
    """One process of a rank, from its start on."""

    rank: int
    node: str
    since_s: float
    steps_s: tuple[float, ...]
    """Times at which it had done each of its steps."""
    caught_up_s: float
    """Time at which it had caught up with the others that it joined; earlier steps are the others' steps, replayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRecord:
    """Members from a time on."""

    time_s: float
    term: int
    ranks: Mapping[int, int]
    """Rank -> incarnation; of all rings where each ring has its own membership."""
    newcomers: tuple[int, ...]
    own_ranks: frozenset[int]
    """Ranks of the ring whose generation it is; else all."""


def drop_repeated_losses(events: Iterable[Event]) -> list[Event]:
    """Drop repeated reports of the same reduction's lost or missing samples: two members may write one each."""
    found: list[Event] = []
    known: set[tuple[Any, ...]] = set()
    attempt = 0
    for event in events:
        attempt += event["kind"] == "run_started"
        if event["kind"] in ("samples_lost", "samples_recomputed"):
            loss = (attempt, event["reduction"], *event["members"])
            if loss in known:
                continue
            known.add(loss)
        found.append(event)
    return found


@dataclass(slots=True)
class _WorkerEvents:
    """Events of one process, as they come."""

    begun: Event
    caught_up_s: float
    steps_s: list[float] = field(default_factory=list)


def worker_histories(events: Sequence[Event]) -> list[WorkerHistory]:
    """Return the history of every watched process."""
    found: list[_WorkerEvents] = []
    newest: dict[int, _WorkerEvents] = {}
    for event in events:
        if event["kind"] == "worker_watched":
            newest[event["rank"]] = _WorkerEvents(event, event["time"])
            found.append(newest[event["rank"]])
        elif event["kind"] == "train_step_done" and event["rank"] in newest:
            newest[event["rank"]].steps_s.append(event["time"])
        elif event["kind"] == "members_caught_up":
            for each in (newest[rank] for rank, _ in map(parse_member, event["members"]) if rank in newest):
                each.caught_up_s = event["time"]
    return [
        WorkerHistory(
            rank=each.begun["rank"],
            node=each.begun["node"],
            since_s=each.begun["time"],
            steps_s=tuple(each.steps_s),
            caught_up_s=each.caught_up_s,
        )
        for each in found
    ]


def list_generations(events: Sequence[Event]) -> list[GenerationRecord]:
    """Return the generations of an elastic job."""
    found, by_part = [], {}
    for event in without_repeated_generations(events):
        if event["kind"] == "run_started":
            by_part = {}
        if event["kind"] != "generation_begun":
            continue
        own = dict(parse_member(member) for member in event["members"])
        others = {
            part: {rank: number for rank, number in ranks.items() if rank not in own} for part, ranks in by_part.items()
        }
        by_part = {**others, event.get("part", ""): own}
        found.append(
            GenerationRecord(
                time_s=event["time"],
                term=event["term"],
                ranks={rank: number for ranks in by_part.values() for rank, number in ranks.items()},
                newcomers=tuple(parse_member(member)[0] for member in event["newcomers"]),
                own_ranks=frozenset(own),
            )
        )
    return found


def begun_faults(events: Sequence[Event]) -> list[tuple[float, Fault]]:
    """Return (actual start, fault), in that order."""
    return [
        (event["time"], fault)
        for event in events
        if event["kind"] == "fault_begun"
        for fault in fault_script.parse_faults(event["fault"])
    ]


def kill_moments(events: Sequence[Event]) -> list[tuple[Fault, str]]:
    """Return (fault, confirmed moment) of every kill at a moment; empty if the victim confirmed none."""
    return [
        (fault, event["target"].partition(" during ")[2])
        for event in events
        if event["kind"] == "fault_begun"
        for fault in fault_script.parse_faults(event["fault"])
        if fault.moment
    ]


def chaos_outcome(events: Sequence[Event]) -> str:
    """Return the reported outcome of chaos; empty if there is none."""
    return next((event["outcome"] for event in reversed(events) if event["kind"] == "chaos_ended"), "")


def job_end_s(events: Sequence[Event]) -> float:
    """Return the end of the job: its last step if it completed, the end of chaos if it was stopped or abandoned.

    The time to end its processes is not part of a stall.
    """
    ended = next((event for event in reversed(events) if event["kind"] == "chaos_ended"), None)
    if ended is not None and ended["outcome"] == "done":
        return max(event["time"] for event in events if event["kind"] in ("train_step_done", "fault_begun"))
    return ended["time"] if ended else events[-1]["time"] if events else 0.0


def parse_member(member: str) -> tuple[int, int]:
    """Parse (the launcher's rank, number of earlier processes of that rank) from a member's name."""
    rank, _, incarnation = member.partition(".")
    return int(rank), int(incarnation or 0)


_STEADY_KINDS = (
    "worker_watched",
    "train_step_done",
    "fault_begun",
    "fault_lifted",
    "chaos_ended",
    "worker_started",
    "worker_exited",
)
"""Events written by the clock of the chaos session, or by processes outside of all nodes."""


def correct_times(events: Sequence[Event]) -> list[Event]:
    """Return the same events; an impossible time becomes that of the last event before it with a steady clock.

    Lines are appended as things happen, so events between two steady events have happened between them. A time off by
    less than a second is left alone: processes overtake each other on their way to the file.
    """
    latest_s = [0.0] * len(events)
    next_s = float("inf")
    for index in range(len(events) - 1, -1, -1):
        latest_s[index] = next_s
        if events[index]["kind"] in _STEADY_KINDS:
            next_s = min(next_s, events[index]["time"])
    found, before_s = [], float("-inf")
    for event, after_s in zip(events, latest_s, strict=True):
        if event["kind"] in _STEADY_KINDS:
            before_s = max(before_s, event["time"])
            found.append(event)
        elif before_s - 1 <= event["time"] <= after_s + 1 or before_s == float("-inf"):
            found.append(event)
        else:
            found.append({**event, "time": before_s})
    return found
