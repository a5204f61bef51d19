"""Impact of faults on members of an elastic job: stalls, generations, zombies, joins. Pure; all is measured.

A survivor's stall is its longest time between two steps, from the fault to its first step without the victims, less
its usual step time.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringweave.telemetry import Event
from ringweave_bench.chaos import fault_script, job_history
from ringweave_bench.chaos.fault_script import Fault
from ringweave_bench.chaos.job_history import (
    GenerationRecord,
    LeaderTracker,
    WorkerHistory,
    begun_faults,
    list_generations,
    worker_histories,
)


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """Return a quantile of measured values, to the thousandth, interpolated between neighbours; None without values."""
    if len(values) < 2:
        return values[0] if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[round(fraction * 100) - 1], 3)


_USUAL_STEPS = 40
"""Steps before an event whose median is the usual step time."""
_HORIZON_S = 60.0
_GRACE_S = 10.0
"""Events within this time after all is settled, or after a fault of a coordinator or server without a takeover, are
attributed to the fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultImpact:
    """Cost of one fault to the surviving workers."""

    fault: str
    victims: tuple[int, ...]
    survivors: int
    evicted: tuple[int, ...]
    """Ranks that no fault had hit, and that were evicted before they had made a step without the victims."""
    stall_s: float | None
    """Longest stall of all survivors; None if one made no step any more."""
    stall_median_s: float | None
    generation_s: float | None
    """Time from the fault to the generation without the victims; None if there was none."""
    steps_as_zombie: int
    """Steps that victims did after the generation without them had begun."""
    back_s: float | None
    """Time from the fault to the last victim's first step as a member again; None if one never was."""
    watched_s: float
    """Time from the fault to the end of the job; longer effects are unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeoverImpact:
    """Cost of a fault of a coordinator or a parameter server to the workers."""

    fault: str
    survivors: int
    stall_s: float | None
    """Longest stall of all workers until the takeover, or for ten seconds if none is needed; None if one made no step
    any more."""
    stall_median_s: float | None
    taken_over_s: float | None
    """Time from the fault to the first generation of another coordinator, or until another server leads. None without a
    takeover within ten seconds, or if the fault hit a standby. A coordinator publishes a generation only if members
    join or leave."""
    watched_s: float
    """Time from the fault to the end of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinImpact:
    """Cost of joining workers to the others."""

    newcomers: int
    peers: int
    stall_s: float
    """Longest stall of a peer until the newcomers have caught up, and at least until its second step."""
    usual_s: float
    """Usual step time before."""
    lost_s: float
    """Additional time of all steps until then, of the peer with the most."""
    caught_up_s: float | None
    """Time from the generation until all newcomers had caught up; None if one never had."""


def measure_fault_impacts(events: Sequence[Event]) -> list[FaultImpact]:
    """Measure every kill, pause and cut of workers, in order."""
    history = _JobHistory(events)
    return [
        _fault_impact(time_s, fault, history)
        for time_s, fault in history.begun_faults
        if _victims(fault, history.all_workers)
    ]


def measure_takeover_impacts(events: Sequence[Event]) -> list[TakeoverImpact]:
    """Measure every kill and pause of a coordinator or a parameter server, in order."""
    history, found = _JobHistory(events), []
    for time_s, fault in [each for each in history.begun_faults if each[1].hits_service]:
        after_s = _takeover_time_s(events, time_s, fault)
        later_s = min((other for other, _ in history.begun_faults if other > time_s), default=float("inf"))
        settled_s = after_s or min(later_s, time_s + fault.lasts_s + _GRACE_S, history.end_s)
        survivors, _ = history.survivors(time_s, settled_s, set())
        stalls = [_stall_s(each, survivors, time_s, settled_s) for each in survivors]
        found.append(
            TakeoverImpact(
                fault=str(fault),
                survivors=len(survivors),
                stall_s=_longest_stall(stalls),
                stall_median_s=_median_stall(stalls),
                taken_over_s=round(after_s - time_s, 3) if after_s else None,
                watched_s=round(history.end_s - time_s, 3),
            )
        )
    return found


def measure_join_impacts(events: Sequence[Event]) -> list[JoinImpact]:
    """Measure every generation in which workers joined while others continued."""
    all_workers, found = worker_histories(events), []
    for epoch in list_generations(events):
        staying = epoch.own_ranks - set(epoch.newcomers)
        peers = [each for each in _alive_workers(all_workers, epoch.time_s) if each.rank in staying]
        caught_up_s = _caught_up_s(events, epoch)
        gaps = [_step_gaps_s(each, epoch.time_s, caught_up_s) for each in peers]
        lasting = [each for each in gaps if each]
        if epoch.newcomers and lasting:
            usual_s = max(_usual_step_s(each, epoch.time_s) for each in peers)
            found.append(
                JoinImpact(
                    newcomers=len(epoch.newcomers),
                    peers=len(lasting),
                    stall_s=round(max(map(max, lasting)) - usual_s, 3),
                    usual_s=round(usual_s, 3),
                    lost_s=round(max(sum(each) - len(each) * usual_s for each in lasting), 3),
                    caught_up_s=None if caught_up_s is None else round(caught_up_s - epoch.time_s, 3),
                )
            )
    return found


def _caught_up_s(events: Sequence[Event], epoch: GenerationRecord) -> float | None:
    """Return the time at which the last of a generation's newcomers had caught up."""
    wanted = {f"{rank}.{epoch.ranks[rank]}" for rank in epoch.newcomers}
    for event in events:
        if event["kind"] == "members_caught_up" and event["time"] >= epoch.time_s:
            wanted -= set(event["members"])
            if not wanted:
                return event["time"]
    return None


def _step_gaps_s(worker: WorkerHistory, time_s: float, caught_up_s: float | None) -> list[float]:
    """Return the times between steps, from the one under way at a time to the first after another; at least two."""
    found = [(after, after - before) for before, after in itertools.pairwise(worker.steps_s) if after > time_s]
    until = sum(after <= (caught_up_s or 0.0) for after, _ in found) + 1
    return [gap for _, gap in found[: max(2, until)]]


class _JobHistory:
    """History of members and faults."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.all_workers, self.epochs, self.begun_faults = (
            worker_histories(events),
            list_generations(events),
            begun_faults(events),
        )
        self.end_s = job_history.job_end_s(events)

    def survivors(
        self, time_s: float, settled_s: float, hit: set[int]
    ) -> tuple[list[WorkerHistory], list[WorkerHistory]]:
        """Return (workers that had to continue after a fault until it was settled, those evicted instead)."""
        before = self.generation_at(time_s)
        alive = [
            each
            for each in _alive_workers(self.all_workers, time_s)
            if each.rank not in hit
            and (before is None or each.rank in before.ranks)
            and not self._is_replaced(each, time_s)
        ]
        unhurt = [each for each in alive if not self._is_hit(each, time_s, settled_s)]
        stayed = [each for each in unhurt if before is None or self._stays(each, before, settled_s)]
        return stayed, [each for each in unhurt if each not in stayed]

    def generation_at(self, time_s: float) -> GenerationRecord | None:
        """Return the generation at a time."""
        return next((each for each in reversed(self.epochs) if each.time_s <= time_s), None)

    def _is_replaced(self, worker: WorkerHistory, time_s: float) -> bool:
        """True if its rank has another process by then, which may have made no step yet."""
        return any(each.rank == worker.rank and worker.since_s < each.since_s <= time_s for each in self.all_workers)

    def _is_hit(self, worker: WorkerHistory, time_s: float, settled_s: float) -> bool:
        """True if a fault of its own came before its first step after all was settled, or had ended it before."""
        shows_s = _next_step_s(worker, settled_s) or float("inf")
        own = [at_s for at_s, fault in self.begun_faults if worker.rank in _victims(fault, [worker])]
        own = [at_s for at_s in own if at_s > worker.since_s]
        is_hit = any(time_s <= at_s < min(shows_s, settled_s + _GRACE_S) for at_s in own)
        return is_hit or any(at_s < time_s and not _next_step_s(worker, at_s) for at_s in own)

    def _stays(self, worker: WorkerHistory, before: GenerationRecord, settled_s: float) -> bool:
        """True if it is a member up to its first step after all was settled."""
        until_s = min(_next_step_s(worker, settled_s) or float("inf"), settled_s + _HORIZON_S)
        within = [each for each in self.epochs if before.time_s < each.time_s <= until_s]
        return all(each.ranks.get(worker.rank) == before.ranks[worker.rank] for each in within)


def _fault_impact(time_s: float, fault: Fault, history: _JobHistory) -> FaultImpact:
    hit = _victims(fault, history.all_workers)
    before = history.generation_at(time_s)
    was = {rank: before.ranks.get(rank) for rank in hit} if before else {}
    within = [each for each in history.epochs if time_s < each.time_s <= time_s + fault.lasts_s + _HORIZON_S]
    without = next((each for each in within if all(each.ranks.get(rank) != was.get(rank) for rank in hit)), None)
    settled_s = without.time_s if without else time_s
    survivors, evicted = history.survivors(time_s, settled_s, hit)
    stalls = [_stall_s(each, survivors, time_s, settled_s) for each in survivors]
    victims = [each for each in _alive_workers(history.all_workers, time_s) if each.rank in hit]
    late = sum(1 for each in victims for step_s in each.steps_s if without and step_s > without.time_s)
    return FaultImpact(
        fault=str(fault),
        victims=tuple(sorted(hit)),
        survivors=len(survivors),
        evicted=tuple(sorted(each.rank for each in evicted)),
        stall_s=_longest_stall(stalls),
        stall_median_s=_median_stall(stalls),
        generation_s=round(without.time_s - time_s, 3) if without else None,
        steps_as_zombie=late,
        back_s=_back_s(time_s, hit, history.all_workers),
        watched_s=round(history.end_s - time_s, 3),
    )


def _takeover_time_s(events: Sequence[Event], time_s: float, fault: Fault) -> float | None:
    """Return the time of the takeover after a fault of a coordinator or server; None if there was none."""
    if fault.target not in (fault_script.COORDINATOR, fault_script.SERVER):
        return None
    is_of_server, until_s = fault.target == fault_script.SERVER, time_s + fault.lasts_s + _GRACE_S
    tracker, first = LeaderTracker(), 0 if is_of_server else None
    for event in events:
        is_new_epoch = tracker.observe(event)
        acting = tracker.server if is_of_server else tracker.coordinator
        acts = event["kind"] == "params_leader_changed" if is_of_server else is_new_epoch
        if event["time"] <= time_s:
            first = first if acting is None else acting
        elif acts and acting != first and event["time"] <= until_s:
            return event["time"]
    return None


def _stall_s(worker: WorkerHistory, survivors: Sequence[WorkerHistory], time_s: float, settled_s: float) -> float:
    return max(0.0, _longest_gap_s(worker, time_s, settled_s) - _usual_step_s(worker, time_s, survivors))


def _longest_stall(stalls: Sequence[float]) -> float | None:
    return round(max(stalls), 3) if stalls and max(stalls) < float("inf") else None


def _median_stall(stalls: Sequence[float]) -> float | None:
    known = [each for each in stalls if each < float("inf")]
    return round(statistics.median(known), 3) if known else None


def _victims(fault: Fault, all_workers: Sequence[WorkerHistory]) -> set[int]:
    if fault.kind == fault_script.CUT:
        return {each.rank for each in all_workers if each.node == fault.target}
    return {int(fault.target)} if fault.hits_worker else set()


def _alive_workers(all_workers: Sequence[WorkerHistory], time_s: float) -> list[WorkerHistory]:
    """Return the newest process of each rank that had done a step by then."""
    newest = {each.rank: each for each in all_workers if each.steps_s and each.steps_s[0] <= time_s}
    return list(newest.values())


def _next_step_s(worker: WorkerHistory, time_s: float) -> float | None:
    """Return the time of its first step after a time."""
    return next((step_s for step_s in worker.steps_s if step_s > time_s), None)


def _usual_step_s(worker: WorkerHistory, time_s: float, peers: Sequence[WorkerHistory] = ()) -> float:
    """Return its usual step time after it had caught up: steps that it replayed took no time, and its peers' count."""
    own = _caught_up_steps(worker, time_s)
    of_peers = [] if own else [step_s for each in peers for step_s in _caught_up_steps(each, time_s)]
    usual = own or of_peers or [end - begin for begin, end in itertools.pairwise(worker.steps_s) if end <= time_s]
    return statistics.median(usual) if usual else 0.0


def _caught_up_steps(worker: WorkerHistory, time_s: float) -> list[float]:
    """Return the seconds of its last steps before a time that began after it had caught up."""
    steps = [(begin, end) for begin, end in itertools.pairwise(worker.steps_s) if end <= time_s]
    return [end - begin for begin, end in steps if begin >= worker.caught_up_s][-_USUAL_STEPS:]


def _longest_gap_s(worker: WorkerHistory, time_s: float, settled_s: float) -> float:
    """Return the longest time between two steps that ends after a time, up to the first that ends after another."""
    last_s = _next_step_s(worker, settled_s)
    if last_s is None:
        return float("inf")
    return max(after - before for before, after in itertools.pairwise(worker.steps_s) if time_s < after <= last_s)


def _back_s(time_s: float, hit: set[int], all_workers: Sequence[WorkerHistory]) -> float | None:
    firsts = [
        min(
            (each.steps_s[0] for each in all_workers if each.rank == rank and each.since_s > time_s and each.steps_s),
            default=None,
        )
        for rank in hit
    ]
    found = [each for each in firsts if each is not None]
    return round(max(found) - time_s, 3) if len(found) == len(firsts) else None


MIN_WATCHED_S = 10.0
"""A job that was watched for less time after a fault has no known outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticReport:
    """Summary of the members of an elastic job."""

    stall_p50_s: float | None
    """Median over faults of workers: longest stall of a survivor."""
    stall_p95_s: float | None
    stall_max_s: float | None
    generation_p50_s: float | None
    """Time from such a fault to the generation without its victims."""
    generation_p95_s: float | None
    taken_over_p50_s: float | None
    """Time from a fault of a coordinator or a parameter server to the takeover."""
    taken_over_p95_s: float | None
    takeover_stall_p50_s: float | None
    """Median over such faults: longest stall of a worker."""
    takeover_stall_p95_s: float | None
    steps_as_zombie: int
    """Steps done by victims after the generation without them had begun."""
    evicted: int
    """Members that no fault had hit, and that were evicted after one that hit others."""
    never_went_on: tuple[str, ...]
    """Faults after which a survivor made no step, though there was time."""
    never_back: tuple[str, ...]
    """Faults whose victims never made a step again, perhaps for lack of time."""
    joins: int
    """Generations in which workers joined while others continued."""
    join_stall_steps_p50: float | None
    """Longest stall of a peer at such a join, in usual steps."""
    join_stall_steps_p95: float | None
    caught_up_p50_s: float | None
    """Time from such a generation until its newcomers had caught up."""
    join_lost_steps_p50: float | None
    """Additional time of its peers' steps until then, in usual steps."""
    tolls: tuple[FaultImpact, ...]
    takeovers: tuple[TakeoverImpact, ...]
    joinings: tuple[JoinImpact, ...]


def summarize_members(events: Sequence[Event]) -> ElasticReport | None:
    """Summarise the members' impacts; None for a job that is not elastic."""
    if not any(event["kind"] == "generation_begun" for event in events):
        return None
    fault_impacts, takeover_impacts = measure_fault_impacts(events), measure_takeover_impacts(events)
    join_impacts = measure_join_impacts(events)
    stalls = _without_none(each.stall_s for each in fault_impacts)
    epochs = _without_none(each.generation_s for each in fault_impacts)
    taken_over = _without_none(each.taken_over_s for each in takeover_impacts)
    takeover_stalls = _without_none(each.stall_s for each in takeover_impacts)
    in_steps = [each.stall_s / each.usual_s for each in join_impacts if each.usual_s]
    behind = [each.lost_s / each.usual_s for each in join_impacts if each.usual_s]
    return ElasticReport(
        stall_p50_s=quantile(stalls, 0.5),
        stall_p95_s=quantile(stalls, 0.95),
        stall_max_s=max(stalls, default=None),
        generation_p50_s=quantile(epochs, 0.5),
        generation_p95_s=quantile(epochs, 0.95),
        taken_over_p50_s=quantile(taken_over, 0.5),
        taken_over_p95_s=quantile(taken_over, 0.95),
        takeover_stall_p50_s=quantile(takeover_stalls, 0.5),
        takeover_stall_p95_s=quantile(takeover_stalls, 0.95),
        steps_as_zombie=sum(each.steps_as_zombie for each in fault_impacts),
        evicted=sum(len(each.evicted) for each in fault_impacts),
        never_went_on=tuple(each.fault for each in (*fault_impacts, *takeover_impacts) if _never_went_on(each)),
        never_back=tuple(each.fault for each in fault_impacts if each.back_s is None),
        joins=len(join_impacts),
        join_stall_steps_p50=quantile(in_steps, 0.5),
        join_stall_steps_p95=quantile(in_steps, 0.95),
        caught_up_p50_s=quantile(_without_none(each.caught_up_s for each in join_impacts), 0.5),
        join_lost_steps_p50=quantile(behind, 0.5),
        tolls=tuple(fault_impacts),
        takeovers=tuple(takeover_impacts),
        joinings=tuple(join_impacts),
    )


def _never_went_on(impact: FaultImpact | TakeoverImpact) -> bool:
    return impact.stall_s is None and impact.survivors > 0 and impact.watched_s >= MIN_WATCHED_S


def _without_none(values: Iterable[float | None]) -> list[float]:
    return [each for each in values if each is not None]
