"""What each process of a job did and who was a member when, from the job's events. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringweave.benchmarks.chaos import deciders, faults
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.telemetry import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One process of a rank, from its start on."""

    rank: int
    node: str
    since_s: float
    steps_s: tuple[float, ...]
    """When it had done each of its steps."""
    level_s: float
    """When it had the state of the others, which it had joined; before, its steps are theirs, done again at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Members from a moment on."""

    time_s: float
    term: int
    ranks: Mapping[int, int]
    """Rank -> incarnation, of all rings where rings have memberships of their own."""
    newcomers: tuple[int, ...]
    own_ranks: frozenset[int]
    """Of the ring whose epoch it is; else all."""


def said_once(events: Iterable[Event]) -> list[Event]:
    """Without the second time that samples of a reduction are said to be lost: two members may, of the same ones."""
    found: list[Event] = []
    known: set[tuple[Any, ...]] = set()
    attempt = 0
    for event in events:
        attempt += event["kind"] == "run_started"
        if event["kind"] == "samples_lost":
            which = (attempt, event["reduction"], *event["members"])
            if which in known:
                continue
            known.add(which)
        found.append(event)
    return found


@dataclass(slots=True)
class _Watched:
    """A process, as its events come."""

    begun: Event
    level_s: float
    steps_s: list[float] = field(default_factory=list)


def workers(events: Sequence[Event]) -> list[Worker]:
    """Every process that was watched."""
    found: list[_Watched] = []
    newest: dict[int, _Watched] = {}
    for event in events:
        if event["kind"] == "worker_watched":
            newest[event["rank"]] = _Watched(event, event["time"])
            found.append(newest[event["rank"]])
        elif event["kind"] == "train_step_done" and event["rank"] in newest:
            newest[event["rank"]].steps_s.append(event["time"])
        elif event["kind"] == "members_level":
            for each in (newest[rank] for rank, _ in map(slot_of, event["members"]) if rank in newest):
                each.level_s = event["time"]
    return [
        Worker(
            rank=each.begun["rank"],
            node=each.begun["node"],
            since_s=each.begun["time"],
            steps_s=tuple(each.steps_s),
            level_s=each.level_s,
        )
        for each in found
    ]


def epochs(events: Sequence[Event]) -> list[Epoch]:
    """Those of an elastic job."""
    found, by_part = [], {}
    for event in deciders.without_repeats(events):
        if event["kind"] == "run_started":
            by_part = {}
        if event["kind"] != "epoch_begun":
            continue
        own = dict(slot_of(member) for member in event["members"])
        others = {
            part: {rank: number for rank, number in ranks.items() if rank not in own} for part, ranks in by_part.items()
        }
        by_part = {**others, event.get("part", ""): own}
        found.append(
            Epoch(
                time_s=event["time"],
                term=event["term"],
                ranks={rank: number for ranks in by_part.values() for rank, number in ranks.items()},
                newcomers=tuple(slot_of(member)[0] for member in event["newcomers"]),
                own_ranks=frozenset(own),
            )
        )
    return found


def begun(events: Sequence[Event]) -> list[tuple[float, Fault]]:
    """(when it really began, fault), in that order."""
    return [
        (event["time"], fault)
        for event in events
        if event["kind"] == "fault_begun"
        for fault in faults.parse(event["fault"])
    ]


def moments(events: Sequence[Event]) -> list[tuple[Fault, str]]:
    """(fault, moment at which its victim said that it died) of every kill at a moment; empty where it said nothing."""
    return [
        (fault, event["target"].partition(" during ")[2])
        for event in events
        if event["kind"] == "fault_begun"
        for fault in faults.parse(event["fault"])
        if fault.moment
    ]


def outcome(events: Sequence[Event]) -> str:
    """How chaos ended, as it said; empty if it did not."""
    return next((event["outcome"] for event in reversed(events) if event["kind"] == "chaos_ended"), "")


def end_s(events: Sequence[Event]) -> float:
    """When the job's time was over: its last step if it was through, the end of chaos if it was stopped or given up.

    What it takes to end the processes is nobody's stall.
    """
    ended = next((event for event in reversed(events) if event["kind"] == "chaos_ended"), None)
    if ended is not None and ended["outcome"] == "done":
        return max(event["time"] for event in events if event["kind"] in ("train_step_done", "fault_begun"))
    return ended["time"] if ended else events[-1]["time"] if events else 0.0


def slot_of(member: str) -> tuple[int, int]:
    """(rank that the launcher gave to it, how many had that rank before) of a member's name."""
    rank, _, incarnation = member.partition(".")
    return int(rank), int(incarnation or 0)
