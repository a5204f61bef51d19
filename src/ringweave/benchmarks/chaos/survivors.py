"""What a fault did to the workers that it did not hit, and to those that came back: from the events of an elastic job.

Pure; all of it is measured. A survivor's stall is its longest time between two steps from the fault to its first step
without the victims, less the usual time of a step.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.telemetry import Event

_USUAL_STEPS = 40
"""Steps before an event whose median is the usual one."""
_HORIZON_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One process of a rank, from its start on."""

    rank: int
    node: str
    since_s: float
    steps_s: tuple[float, ...]
    """When it had done each of its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Members from a moment on."""

    time_s: float
    term: int
    ranks: Mapping[int, int]
    """Rank -> incarnation."""
    newcomers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Toll:
    """What one fault cost the others."""

    fault: str
    victims: tuple[int, ...]
    survivors: int
    stall_s: float | None
    """Of the survivor that it was longest for; None if one made no step any more."""
    stall_median_s: float | None
    epoch_s: float | None
    """From the fault to the epoch without the victims; None if there was none."""
    steps_as_zombie: int
    """That victims did after the epoch without them had begun."""
    back_s: float | None
    """From the fault to the last victim's first step as a member again; None if one never was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """What it cost the others that workers joined."""

    newcomers: int
    peers: int
    stall_s: float
    """Of the peer that it was longest for, until the newcomers are level, and its second step at least."""
    usual_s: float
    """Seconds of a step before."""
    lost_s: float
    """What all of its steps until then took longer than usual, of the peer that it was most for."""
    level_s: float | None
    """From the epoch until all newcomers had done what the others had; None if one never had."""


def workers(events: Sequence[Event]) -> list[Worker]:
    """Every process that was watched."""
    found: list[tuple[Event, list[float]]] = []
    newest: dict[int, list[float]] = {}
    for event in events:
        if event["kind"] == "worker_watched":
            newest[event["rank"]] = []
            found.append((event, newest[event["rank"]]))
        elif event["kind"] == "train_step_done":
            newest.setdefault(event["rank"], []).append(event["time"])
    return [
        Worker(rank=event["rank"], node=event["node"], since_s=event["time"], steps_s=tuple(steps))
        for event, steps in found
    ]


def epochs(events: Sequence[Event]) -> list[Epoch]:
    """Those of an elastic job."""
    return [
        Epoch(
            time_s=event["time"],
            term=event["term"],
            ranks=dict(_parts(member) for member in event["members"]),
            newcomers=tuple(_parts(member)[0] for member in event["newcomers"]),
        )
        for event in events
        if event["kind"] == "epoch_begun"
    ]


def tolls(events: Sequence[Event]) -> list[Toll]:
    """Of every kill, pause and cut that began, in their order."""
    everybody, all_epochs = workers(events), epochs(events)
    begun = [
        (event["time"], fault)
        for event in events
        if event["kind"] == "fault_begun"
        for fault in faults.parse(event["fault"])
    ]
    return [_toll(time_s, fault, everybody, all_epochs, begun) for time_s, fault in begun if _victims(fault, everybody)]


def joinings(events: Sequence[Event]) -> list[Joining]:
    """Of every epoch that let workers in while others went on."""
    everybody, found = workers(events), []
    for epoch in epochs(events):
        staying = set(epoch.ranks) - set(epoch.newcomers)
        peers = [each for each in _alive(everybody, epoch.time_s) if each.rank in staying]
        level_s = _level_s(events, epoch)
        gaps = [_gaps_s(each, epoch.time_s, level_s) for each in peers]
        lasting = [each for each in gaps if each]
        if epoch.newcomers and lasting:
            usual_s = max(_usual_s(each, epoch.time_s) for each in peers)
            found.append(
                Joining(
                    newcomers=len(epoch.newcomers),
                    peers=len(lasting),
                    stall_s=round(max(map(max, lasting)) - usual_s, 3),
                    usual_s=round(usual_s, 3),
                    lost_s=round(max(sum(each) - len(each) * usual_s for each in lasting), 3),
                    level_s=None if level_s is None else round(level_s - epoch.time_s, 3),
                )
            )
    return found


def _level_s(events: Sequence[Event], epoch: Epoch) -> float | None:
    """When the last of an epoch's newcomers was level."""
    wanted = {f"{rank}.{epoch.ranks[rank]}" for rank in epoch.newcomers}
    for event in events:
        if event["kind"] == "members_level" and event["time"] >= epoch.time_s:
            wanted -= set(event["members"])
            if not wanted:
                return event["time"]
    return None


def _gaps_s(worker: Worker, time_s: float, level_s: float | None) -> list[float]:
    """Between its steps, from the one under way at a moment to the first after another, and two of them at least."""
    found = [(after, after - before) for before, after in itertools.pairwise(worker.steps_s) if after > time_s]
    until = sum(after <= (level_s or 0.0) for after, _ in found) + 1
    return [gap for _, gap in found[: max(2, until)]]


def _toll(
    time_s: float,
    fault: Fault,
    everybody: Sequence[Worker],
    all_epochs: Sequence[Epoch],
    begun: Sequence[tuple[float, Fault]],
) -> Toll:
    hit = _victims(fault, everybody)
    before = next((each for each in reversed(all_epochs) if each.time_s <= time_s), None)
    was = {rank: before.ranks.get(rank) for rank in hit} if before else {}
    within = [each for each in all_epochs if time_s < each.time_s <= time_s + fault.lasts_s + _HORIZON_S]
    without = next((each for each in within if all(each.ranks.get(rank) != was.get(rank) for rank in hit)), None)
    settled_s = without.time_s if without else time_s
    stayed = set(without.ranks) - set(without.newcomers) if without else None
    survivors = [
        each
        for each in _alive(everybody, time_s)
        if each.rank not in hit and (stayed is None or each.rank in stayed) and not _is_hit_later(each, time_s, begun)
    ]
    stalls = [max(0.0, _longest_s(each, time_s, settled_s) - _usual_s(each, time_s)) for each in survivors]
    victims = [each for each in _alive(everybody, time_s) if each.rank in hit]
    late = sum(1 for each in victims for step_s in each.steps_s if without and step_s > without.time_s)
    return Toll(
        fault=str(fault),
        victims=tuple(sorted(hit)),
        survivors=len(survivors),
        stall_s=round(max(stalls), 3) if stalls and max(stalls) < float("inf") else None,
        stall_median_s=round(statistics.median(stalls), 3) if stalls else None,
        epoch_s=round(without.time_s - time_s, 3) if without else None,
        steps_as_zombie=late,
        back_s=_back_s(time_s, hit, everybody),
    )


def _victims(fault: Fault, everybody: Sequence[Worker]) -> set[int]:
    if fault.kind == faults.CUT:
        return {each.rank for each in everybody if each.node == fault.target}
    return {int(fault.target)} if fault.hits_worker else set()


def _alive(everybody: Sequence[Worker], time_s: float) -> list[Worker]:
    """Of each rank the newest process that had done a step by then."""
    newest = {each.rank: each for each in everybody if each.steps_s and each.steps_s[0] <= time_s}
    return list(newest.values())


def _is_hit_later(worker: Worker, time_s: float, begun: Sequence[tuple[float, Fault]]) -> bool:
    """It made no step any more because of a fault of its own."""
    if worker.steps_s[-1] > time_s:
        return False
    return any(time_s <= at_s and worker.rank in _victims(fault, [worker]) for at_s, fault in begun)


def _usual_s(worker: Worker, time_s: float) -> float:
    gaps = [after - before for before, after in itertools.pairwise(worker.steps_s) if after <= time_s]
    return statistics.median(gaps[-_USUAL_STEPS:]) if gaps else 0.0


def _longest_s(worker: Worker, time_s: float, settled_s: float) -> float:
    """Of the times between two steps that end after a moment, up to the first that ends after another."""
    last_s = next((after for after in worker.steps_s if after > settled_s), None)
    if last_s is None:
        return float("inf")
    return max(after - before for before, after in itertools.pairwise(worker.steps_s) if time_s < after <= last_s)


def _back_s(time_s: float, hit: set[int], everybody: Sequence[Worker]) -> float | None:
    firsts = [
        min(
            (each.steps_s[0] for each in everybody if each.rank == rank and each.since_s > time_s and each.steps_s),
            default=None,
        )
        for rank in hit
    ]
    found = [each for each in firsts if each is not None]
    return round(max(found) - time_s, 3) if len(found) == len(firsts) else None


def _parts(member: str) -> tuple[int, int]:
    rank, _, incarnation = member.partition(".")
    return int(rank), int(incarnation)
