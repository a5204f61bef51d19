"""Cost of faults from a job's events: steps lost, time to recover, goodput. Pure; all of it is measured.

A train step is done when the first rank has done it. A step is lost if it was done and has to be repeated; its samples
are lost with it, or alone if a step is committed without a dead worker's samples. Goodput divides the committed
samples by those that the surviving workers would have done without faults.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringweave.telemetry import Event
from ringweave_bench.chaos import fault_script, job_history, member_impacts
from ringweave_bench.chaos.fault_script import Fault
from ringweave_bench.chaos.member_impacts import ElasticReport, quantile

HORIZON_S = 10.0
"""Pauses of the training that begin within this time after a fault's end are attributed to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRecovery:
    """Effect of one fault."""

    fault: str
    at_s: float
    """Actual start, after the first train step."""
    stall_s: float | None
    """Longest time without a finished train step that overlaps with its effect; None: no step was done after it."""
    recover_s: float | None
    """Time from the fault's start to the end of the stall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosReport:
    """Results of a job under faults."""

    wall_s: float
    """Time from the first train step to the end."""
    steps: int
    """Train steps committed."""
    steps_lost: int
    """Train steps done, and repeated later."""
    samples: int | None
    """Samples in the committed steps; None if the samples per step are unknown."""
    samples_lost: int | None
    samples_unaccounted: int | None
    """Samples of complete passes over the data that are neither committed nor known to be lost; None if no pass is
    complete, or samples are not accounted for."""
    attempts: int
    """Times that the job was started."""
    faults: int
    """Number of faults that began."""
    never_began: tuple[str, ...]
    """Requested faults that did not happen: their target was absent, or the job ended."""
    moments: dict[str, int]
    """Moment -> number of kills that victims confirmed at it, whatever the request was."""
    at_other_moments: tuple[str, ...]
    """Texts about kills whose victims died at another moment than requested, or did not confirm one."""
    recover_p50_s: float | None
    recover_p95_s: float | None
    fault_free_steps_per_s: float | None
    """Rate before the first fault."""
    alive_fraction: float
    """Fraction of all worker-seconds that the faults left."""
    goodput: float | None
    """(steps less their lost samples' equivalent) / (fault_free_steps_per_s x wall_s x alive_fraction)."""
    recoveries: tuple[FaultRecovery, ...]
    elastic: ElasticReport | None
    """Summary of its members; None for a job that is not elastic."""
    broken: tuple[str, ...]
    """Texts about violated guarantees."""

    def to_document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletedStep:
    """A train step of the job."""

    time_s: float
    train_step: int


def build_report(
    events: Sequence[Event],
    *,
    num_workers: int,
    workers_on: dict[str, int],
    restart_s: float,
    wanted: Sequence[Fault] = (),
    samples_per_step: int | None = None,
) -> ChaosReport:
    """Summarise a job by its events.

    Args:
        events: Events of all attempts, oldest first.
        num_workers: Workers of the job.
        workers_on: Node -> its workers.
        restart_s: Seconds after which a killed worker may be started again; it does not count as alive for this time,
            or until its restart if that is earlier.
        wanted: Requested faults.
        samples_per_step: Samples of a train step; None takes the value that `ringweave.prepare` reported.
    """
    events = job_history.drop_repeated_losses(events)
    done, lost = count_steps(events)
    if not done:
        return _empty_report(wanted)
    begin_s, end_s = done[0].time_s, done[-1].time_s
    begun_events = job_history.begun_faults(events)
    wall_s = max(end_s, job_history.job_end_s(events)) - begin_s
    first_s = min((time_s for time_s, _ in begun_events), default=end_s)
    calm = [each for each in done if each.time_s < first_s]
    rate = (len(calm) - 1) / (calm[-1].time_s - begin_s) if len(calm) > 2 else None
    away_s = sum(_worker_seconds_lost(time_s, fault, workers_on, restart_s, events) for time_s, fault in begun_events)
    alive = max(0.0, 1 - away_s / (wall_s * num_workers)) if wall_s else 1.0
    recoveries = tuple(_fault_recovery(time_s, fault, begun_events, done, begin_s) for time_s, fault in begun_events)
    times = [each.recover_s for each in recoveries if each.recover_s is not None and _stops_workers(each.fault)]
    steps = len(done) - lost
    samples = samples_per_step or _batch_samples(events)
    lost_alone = sum(event["lost"] for event in events if event["kind"] == "samples_lost" and event["time"] <= end_s)
    whole_steps = steps - (lost_alone / samples if samples else 0)
    members, unaccounted = member_impacts.summarize_members(events), _unaccounted_samples(events)
    return ChaosReport(
        wall_s=round(wall_s, 3),
        steps=steps,
        steps_lost=lost,
        samples=steps * samples - lost_alone if samples else None,
        samples_lost=lost * samples + lost_alone if samples else None,
        samples_unaccounted=unaccounted,
        attempts=max(1, sum(event["kind"] == "run_started" for event in events)),
        faults=len(begun_events),
        never_began=_never_began(wanted, [fault for _, fault in begun_events]),
        moments=dict(Counter(reached for _, reached in job_history.kill_moments(events) if reached)),
        at_other_moments=_at_other_moments(events),
        recover_p50_s=quantile(times, 0.5),
        recover_p95_s=quantile(times, 0.95),
        fault_free_steps_per_s=rate,
        alive_fraction=round(alive, 4),
        goodput=round(whole_steps / (rate * wall_s * alive), 4) if rate and wall_s and alive else None,
        recoveries=recoveries,
        elastic=members,
        broken=_broken_promises(lost, unaccounted, members, recoveries, wall_s),
    )


def count_steps(events: Iterable[Event]) -> tuple[list[CompletedStep], int]:
    """Return (every train step done, repetitions included; number of steps that had to be repeated).

    The job went back if all of its workers restarted. While one continues, those that join it lose nothing.
    """
    bases: dict[int, int] = {}
    positions: dict[int, int] = {}
    done: list[CompletedStep] = []
    lost = front = 0
    for event in job_history.without_repeated_generations(events):
        kind, rank = event["kind"], event.get("rank", 0)
        if kind == "worker_watched":
            bases[rank] = positions[rank] = 0
        elif kind == "checkpoint_loaded":
            bases[rank] = event["train_step"]
        elif kind == "generation_begun" and len(event["newcomers"]) < len(event["members"]):
            bases |= {
                job_history.parse_member(member)[0]: max(positions.values(), default=0) for member in event["newcomers"]
            }
        elif kind == "train_step_done":
            began_anew = not any(positions.values())
            positions[rank] = bases.get(rank, 0) + event["steps_since_start"]
            reached = max(positions.values())
            if began_anew and done:
                lost += max(0, front - (reached - 1))
            if began_anew or reached > front:
                done.append(CompletedStep(time_s=event["time"], train_step=reached))
                front = reached
    return done, lost


def _fault_recovery(
    time_s: float, fault: Fault, begun: Sequence[tuple], done: Sequence[CompletedStep], begin_s: float
) -> FaultRecovery:
    """Find the longest gap between steps that ends after the fault and begins before its effect ends.

    The step during which the next fault comes is the next one's, unless it is late by then.
    """
    later = min((other for other, _ in begun if other > time_s), default=float("inf"))
    last_s = min(later, time_s + fault.lasts_s + HORIZON_S)
    steps = [(after.time_s - before.time_s, before.time_s, after.time_s) for before, after in itertools.pairwise(done)]
    usual_s = statistics.median(seconds for seconds, *_ in steps) if steps else 0.0
    gaps = [
        (seconds, end_s)
        for seconds, from_s, end_s in steps
        if end_s > time_s and from_s < last_s and (end_s <= later or from_s < later - usual_s)
    ]
    stall_s, end_s = max(gaps, key=lambda gap: gap[0], default=(None, None))
    return FaultRecovery(
        fault=str(fault),
        at_s=round(time_s - begin_s, 3),
        stall_s=None if stall_s is None else round(stall_s, 3),
        recover_s=None if end_s is None else round(end_s - time_s, 3),
    )


_START_KINDS = ("worker_started", "worker_watched")
"""Event of a worker started by ringweave, and of a worker of any system."""


def _worker_seconds_lost(
    time_s: float, fault: Fault, workers_on: dict[str, int], restart_s: float, events: Sequence[Event]
) -> float:
    """Return the worker-seconds that a fault takes away, independent of the system's reaction."""
    if fault.kind == fault_script.CUT:
        return fault.lasts_s * workers_on.get(fault.target, 0)
    if not fault.hits_worker:
        return 0.0
    if fault.kind == fault_script.PAUSE:
        return fault.lasts_s
    rank = int(fault.target)
    starts = (
        event["time"] - time_s
        for event in events
        if event["kind"] in _START_KINDS and event["rank"] == rank and event["time"] > time_s
    )
    return min(restart_s, next(starts, restart_s))


def _stops_workers(text: str) -> bool:
    fault = fault_script.parse_faults(text)[0]
    return fault.hits_worker or fault.kind == fault_script.CUT


def _batch_samples(events: Iterable[Event]) -> int | None:
    found = [event["batch_samples"] for event in events if event["kind"] == "training_prepared"]
    return found[-1] or None if found else None


def _unaccounted_samples(events: Iterable[Event]) -> int | None:
    """Count samples of complete passes that are neither committed nor known to be lost, or are counted twice."""
    missing: dict[tuple[int, int], int] = {}
    attempt = lost = lost_then = 0
    for event in events:
        if event["kind"] == "run_started":
            attempt += 1
        elif event["kind"] == "samples_lost":
            lost += event["lost"]
        elif event["kind"] == "samples_accounted":
            missing[attempt, event["epoch"]] = event["expected"] - event["samples"]
            lost_then = lost
    if not missing:
        return None
    doubled = -sum(each for each in missing.values() if each < 0)
    return doubled + max(0, sum(each for each in missing.values() if each > 0) - lost_then)


def _never_began(wanted: Iterable[Fault], begun: Iterable[Fault]) -> tuple[str, ...]:
    left = list(map(str, wanted))
    for fault in map(str, begun):
        if fault in left:
            left.remove(fault)
    return tuple(left)


def _at_other_moments(events: Sequence[Event]) -> tuple[str, ...]:
    wrong = [(fault, reached) for fault, reached in job_history.kill_moments(events) if reached != fault.moment]
    return tuple(f"{fault}: it died during {reached or 'a moment that is not known'}" for fault, reached in wrong)


def _broken_promises(
    lost: int,
    unaccounted: int | None,
    members: ElasticReport | None,
    recoveries: Sequence[FaultRecovery],
    wall_s: float,
) -> tuple[str, ...]:
    """Return the violated guarantees; only an elastic job guarantees that no step is lost."""
    found = [f"{lost} train steps were lost"] if members and lost else []
    found += [f"{unaccounted} samples neither count nor are known to be lost"] if unaccounted else []
    stuck = [
        each.fault for each in recoveries if each.stall_s is None and wall_s - each.at_s >= member_impacts.MIN_WATCHED_S
    ]
    stuck += [each for each in (members.never_went_on if members else ()) if each not in stuck]
    return (*found, *(f"training did not go on after: {fault}" for fault in stuck))


def _empty_report(wanted: Iterable[Fault]) -> ChaosReport:
    return ChaosReport(
        wall_s=0.0,
        steps=0,
        steps_lost=0,
        samples=None,
        samples_lost=None,
        samples_unaccounted=None,
        attempts=0,
        faults=0,
        never_began=_never_began(wanted, ()),
        moments={},
        at_other_moments=(),
        recover_p50_s=None,
        recover_p95_s=None,
        fault_free_steps_per_s=None,
        alive_fraction=1.0,
        goodput=None,
        recoveries=(),
        elastic=None,
        broken=("the job made no train step",),
    )
