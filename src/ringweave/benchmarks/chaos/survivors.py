"""What a fault did to the workers that it did not hit, and to those that came back: from the events of an elastic job.

Pure; all of it is measured. A survivor's stall is its longest time between two steps from the fault to its first step
without the victims, less the usual time of a step.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.benchmarks.chaos import faults, histories
from ringweave.benchmarks.chaos.deciders import Deciders
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.benchmarks.chaos.histories import Epoch, Worker, begun, epochs, workers
from ringweave.telemetry import Event

_USUAL_STEPS = 40
"""Steps before an event whose median is the usual one."""
_HORIZON_S = 60.0
_GRACE_S = 10.0
"""So long after all is settled, or after a coordinator or server was hit that nobody takes over from, what comes is
laid to the fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toll:
    """What one fault cost the others."""

    fault: str
    victims: tuple[int, ...]
    survivors: int
    put_out: tuple[int, ...]
    """Ranks that no fault had hit, and that were members no longer before they had made a step without the victims."""
    stall_s: float | None
    """Of the survivor that it was longest for; None if one made no step any more."""
    stall_median_s: float | None
    epoch_s: float | None
    """From the fault to the epoch without the victims; None if there was none."""
    steps_as_zombie: int
    """That victims did after the epoch without them had begun."""
    back_s: float | None
    """From the fault to the last victim's first step as a member again; None if one never was."""
    watched_s: float
    """From the fault to the end of the job: what takes longer is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Takeover:
    """What it cost the workers that a coordinator or a parameter server was hit."""

    fault: str
    survivors: int
    stall_s: float | None
    """Of the worker that it was longest for, until the other one has taken over, or for ten seconds where none has to;
    None if one made no step any more."""
    stall_median_s: float | None
    taken_over_s: float | None
    """From the fault to the first epoch of another coordinator, or until another server leads; None if there was none
    in the ten seconds after it, or it hit a standby. A coordinator forms an epoch only where members come or go."""
    watched_s: float
    """From the fault to the end of the job."""


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


def tolls(events: Sequence[Event]) -> list[Toll]:
    """Of every kill, pause and cut that hit workers, in their order."""
    story = _Story(events)
    return [_toll(time_s, fault, story) for time_s, fault in story.happened if _victims(fault, story.everybody)]


def takeovers(events: Sequence[Event]) -> list[Takeover]:
    """Of every kill and pause that hit a coordinator or a parameter server, in their order."""
    story, found = _Story(events), []
    for time_s, fault in [each for each in story.happened if each[1].hits_service]:
        after_s = _takeover_s(events, time_s, fault)
        later_s = min((other for other, _ in story.happened if other > time_s), default=float("inf"))
        settled_s = after_s or min(later_s, time_s + fault.lasts_s + _GRACE_S, story.end_s)
        survivors, _ = story.survivors(time_s, settled_s, set())
        stalls = [_stall_s(each, time_s, settled_s) for each in survivors]
        found.append(
            Takeover(
                fault=str(fault),
                survivors=len(survivors),
                stall_s=_longest(stalls),
                stall_median_s=_median(stalls),
                taken_over_s=round(after_s - time_s, 3) if after_s else None,
                watched_s=round(story.end_s - time_s, 3),
            )
        )
    return found


def joinings(events: Sequence[Event]) -> list[Joining]:
    """Of every epoch that let workers in while others went on."""
    everybody, found = workers(events), []
    for epoch in epochs(events):
        staying = epoch.own_ranks - set(epoch.newcomers)
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


class _Story:
    """What happened to whom."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.everybody, self.epochs, self.happened = workers(events), epochs(events), begun(events)
        self.end_s = histories.end_s(events)

    def survivors(self, time_s: float, settled_s: float, hit: set[int]) -> tuple[list[Worker], list[Worker]]:
        """(workers that had to go on after a fault until it was settled, those that were put out instead)."""
        before = self.before(time_s)
        alive = [
            each
            for each in _alive(self.everybody, time_s)
            if each.rank not in hit
            and (before is None or each.rank in before.ranks)
            and not self._is_replaced(each, time_s)
        ]
        unhurt = [each for each in alive if not self._is_hit(each, time_s, settled_s)]
        stayed = [each for each in unhurt if before is None or self._stays(each, before, settled_s)]
        return stayed, [each for each in unhurt if each not in stayed]

    def before(self, time_s: float) -> Epoch | None:
        """The epoch of a moment."""
        return next((each for each in reversed(self.epochs) if each.time_s <= time_s), None)

    def _is_replaced(self, worker: Worker, time_s: float) -> bool:
        """Its rank has another process by then, which may have made no step yet."""
        return any(each.rank == worker.rank and worker.since_s < each.since_s <= time_s for each in self.everybody)

    def _is_hit(self, worker: Worker, time_s: float, settled_s: float) -> bool:
        """A fault of its own came before its first step after all was settled, or had ended it before."""
        shows_s = _next_step_s(worker, settled_s) or float("inf")
        own = [at_s for at_s, fault in self.happened if worker.rank in _victims(fault, [worker])]
        own = [at_s for at_s in own if at_s > worker.since_s]
        is_hit = any(time_s <= at_s < min(shows_s, settled_s + _GRACE_S) for at_s in own)
        return is_hit or any(at_s < time_s and not _next_step_s(worker, at_s) for at_s in own)

    def _stays(self, worker: Worker, before: Epoch, settled_s: float) -> bool:
        """It is a member up to its first step after all was settled."""
        until_s = min(_next_step_s(worker, settled_s) or float("inf"), settled_s + _HORIZON_S)
        within = [each for each in self.epochs if before.time_s < each.time_s <= until_s]
        return all(each.ranks.get(worker.rank) == before.ranks[worker.rank] for each in within)


def _toll(time_s: float, fault: Fault, story: _Story) -> Toll:
    hit = _victims(fault, story.everybody)
    before = story.before(time_s)
    was = {rank: before.ranks.get(rank) for rank in hit} if before else {}
    within = [each for each in story.epochs if time_s < each.time_s <= time_s + fault.lasts_s + _HORIZON_S]
    without = next((each for each in within if all(each.ranks.get(rank) != was.get(rank) for rank in hit)), None)
    settled_s = without.time_s if without else time_s
    survivors, put_out = story.survivors(time_s, settled_s, hit)
    stalls = [_stall_s(each, time_s, settled_s) for each in survivors]
    victims = [each for each in _alive(story.everybody, time_s) if each.rank in hit]
    late = sum(1 for each in victims for step_s in each.steps_s if without and step_s > without.time_s)
    return Toll(
        fault=str(fault),
        victims=tuple(sorted(hit)),
        survivors=len(survivors),
        put_out=tuple(sorted(each.rank for each in put_out)),
        stall_s=_longest(stalls),
        stall_median_s=_median(stalls),
        epoch_s=round(without.time_s - time_s, 3) if without else None,
        steps_as_zombie=late,
        back_s=_back_s(time_s, hit, story.everybody),
        watched_s=round(story.end_s - time_s, 3),
    )


def _takeover_s(events: Sequence[Event], time_s: float, fault: Fault) -> float | None:
    """When another coordinator or server had taken over after a fault; None if none did."""
    if fault.target not in (faults.COORDINATOR, faults.SERVER):
        return None
    is_of_server, until_s = fault.target == faults.SERVER, time_s + fault.lasts_s + _GRACE_S
    deciders, first = Deciders(), 0 if is_of_server else None
    for event in events:
        is_new_epoch = deciders.note(event)
        acting = deciders.server if is_of_server else deciders.coordinator
        acts = event["kind"] == "params_led" if is_of_server else is_new_epoch
        if event["time"] <= time_s:
            first = first if acting is None else acting
        elif acts and acting != first and event["time"] <= until_s:
            return event["time"]
    return None


def _stall_s(worker: Worker, time_s: float, settled_s: float) -> float:
    return max(0.0, _longest_s(worker, time_s, settled_s) - _usual_s(worker, time_s))


def _longest(stalls: Sequence[float]) -> float | None:
    return round(max(stalls), 3) if stalls and max(stalls) < float("inf") else None


def _median(stalls: Sequence[float]) -> float | None:
    known = [each for each in stalls if each < float("inf")]
    return round(statistics.median(known), 3) if known else None


def _victims(fault: Fault, everybody: Sequence[Worker]) -> set[int]:
    if fault.kind == faults.CUT:
        return {each.rank for each in everybody if each.node == fault.target}
    return {int(fault.target)} if fault.hits_worker else set()


def _alive(everybody: Sequence[Worker], time_s: float) -> list[Worker]:
    """Of each rank the newest process that had done a step by then."""
    newest = {each.rank: each for each in everybody if each.steps_s and each.steps_s[0] <= time_s}
    return list(newest.values())


def _next_step_s(worker: Worker, time_s: float) -> float | None:
    """When its first step after a moment was done."""
    return next((step_s for step_s in worker.steps_s if step_s > time_s), None)


def _usual_s(worker: Worker, time_s: float) -> float:
    """Of a step of its own, once it no longer catches up with the others, if it has done any."""
    done = [(before, after) for before, after in itertools.pairwise(worker.steps_s) if after <= time_s]
    level = [each for each in done if each[0] >= worker.level_s] or done
    return statistics.median(after - before for before, after in level[-_USUAL_STEPS:]) if level else 0.0


def _longest_s(worker: Worker, time_s: float, settled_s: float) -> float:
    """Of the times between two steps that end after a moment, up to the first that ends after another."""
    last_s = _next_step_s(worker, settled_s)
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
