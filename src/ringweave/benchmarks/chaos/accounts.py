"""What faults cost, from the events of a job: steps lost, time to recover, goodput. Pure; all of it is measured.

A train step is done when the first rank has done it. A step is lost when it was done and has to be done again; samples
are lost with it, or alone, where a step counts without those of a worker that died. Goodput divides the samples that
count by those that the workers which the faults left would have done without faults.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringweave.benchmarks.chaos import deciders, elastic, faults, histories
from ringweave.benchmarks.chaos.elastic import Elastic
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.benchmarks.chaos.quantiles import quantile
from ringweave.telemetry import Event

HORIZON_S = 10.0
"""So long after a fault is over a pause of the training is its doing; later ones are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What one fault did."""

    fault: str
    at_s: float
    """When it really began, after the first train step."""
    stall_s: float | None
    """The longest time without a finished train step that it had a part in; None: no step was done after it."""
    recover_s: float | None
    """From its begin to the end of that time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a job did under faults."""

    wall_s: float
    """From the first train step to the end."""
    steps: int
    """Train steps that count."""
    steps_lost: int
    """Done, and done again."""
    samples: int | None
    """In the steps that count; None where nobody says how many a step has."""
    samples_lost: int | None
    samples_unaccounted: int | None
    """Of the epochs of the data that are complete, those that neither count nor are known to be lost; None where no
    epoch is complete, or nobody keeps books."""
    attempts: int
    """Times that the job was started."""
    faults: int
    """That really began."""
    never_began: tuple[str, ...]
    """Faults that were wanted and did not happen: what they were to hit was not there, or time was over."""
    moments: dict[str, int]
    """Moment -> kills at which the victim said that it had come, whatever was asked for."""
    at_other_moments: tuple[str, ...]
    """Kills whose victims died at another moment than was asked for, or did not say at which, in words."""
    recover_p50_s: float | None
    recover_p95_s: float | None
    fault_free_steps_per_s: float | None
    """Before the first fault."""
    alive_fraction: float
    """Worker-seconds that the faults left, of all."""
    goodput: float | None
    """(steps less what their lost samples come to) / (fault_free_steps_per_s x wall_s x alive_fraction)."""
    recoveries: tuple[Recovery, ...]
    elastic: Elastic | None
    """What its members went through; None of a job that is not elastic."""
    broken: tuple[str, ...]
    """Promises that were broken, in words."""

    def to_document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A train step of the job."""

    time_s: float
    train_step: int


def report(
    events: Sequence[Event],
    *,
    num_workers: int,
    workers_on: dict[str, int],
    restart_s: float,
    wanted: Sequence[Fault] = (),
    samples_per_step: int | None = None,
) -> Report:
    """Judge a job by its events.

    Args:
        events: Of all attempts, oldest first.
        num_workers: Workers of the job.
        workers_on: Node -> its workers.
        restart_s: Seconds after which a killed worker may be started again; so long it does not count as alive, or
            until it is started, if that is earlier.
        wanted: Faults that were to happen.
        samples_per_step: Samples of a train step; None takes what `ringweave.prepare` said.
    """
    events = histories.said_once(events)
    done, lost = count_steps(events)
    if not done:
        return _nothing(wanted)
    begin_s, end_s = done[0].time_s, done[-1].time_s
    begun = histories.begun(events)
    wall_s = max(end_s, histories.end_s(events)) - begin_s
    first_s = min((time_s for time_s, _ in begun), default=end_s)
    calm = [each for each in done if each.time_s < first_s]
    rate = (len(calm) - 1) / (calm[-1].time_s - begin_s) if len(calm) > 2 else None
    away_s = sum(_away_s(time_s, fault, workers_on, restart_s, events) for time_s, fault in begun)
    alive = max(0.0, 1 - away_s / (wall_s * num_workers)) if wall_s else 1.0
    recoveries = tuple(_recovery(time_s, fault, begun, done, begin_s) for time_s, fault in begun)
    times = [each.recover_s for each in recoveries if each.recover_s is not None and _stops_workers(each.fault)]
    steps = len(done) - lost
    samples = samples_per_step or _batch_samples(events)
    alone = sum(event["lost"] for event in events if event["kind"] == "samples_lost" and event["time"] <= end_s)
    whole_steps = steps - (alone / samples if samples else 0)
    members, unaccounted = elastic.sum_up(events), _unaccounted(events)
    return Report(
        wall_s=round(wall_s, 3),
        steps=steps,
        steps_lost=lost,
        samples=steps * samples - alone if samples else None,
        samples_lost=lost * samples + alone if samples else None,
        samples_unaccounted=unaccounted,
        attempts=max(1, sum(event["kind"] == "run_started" for event in events)),
        faults=len(begun),
        never_began=_never_began(wanted, [fault for _, fault in begun]),
        moments=dict(Counter(reached for _, reached in histories.moments(events) if reached)),
        at_other_moments=_at_other_moments(events),
        recover_p50_s=quantile(times, 0.5),
        recover_p95_s=quantile(times, 0.95),
        fault_free_steps_per_s=rate,
        alive_fraction=round(alive, 4),
        goodput=round(whole_steps / (rate * wall_s * alive), 4) if rate and wall_s and alive else None,
        recoveries=recoveries,
        elastic=members,
        broken=_broken(lost, unaccounted, members, recoveries, wall_s),
    )


def count_steps(events: Iterable[Event]) -> tuple[list[Done], int]:
    """(every train step that was done, again where it was done again; how many had to be done again).

    The job went back when all of its workers began anew. While one goes on, those that join it lose nothing.
    """
    bases: dict[int, int] = {}
    positions: dict[int, int] = {}
    done: list[Done] = []
    lost = front = 0
    for event in deciders.without_repeats(events):
        kind, rank = event["kind"], event.get("rank", 0)
        if kind == "worker_watched":
            bases[rank] = positions[rank] = 0
        elif kind == "checkpoint_loaded":
            bases[rank] = event["train_step"]
        elif kind == "epoch_begun" and len(event["newcomers"]) < len(event["members"]):
            bases |= {histories.slot_of(member)[0]: max(positions.values(), default=0) for member in event["newcomers"]}
        elif kind == "train_step_done":
            began_anew = not any(positions.values())
            positions[rank] = bases.get(rank, 0) + event["steps_since_start"]
            reached = max(positions.values())
            if began_anew and done:
                lost += max(0, front - (reached - 1))
            if began_anew or reached > front:
                done.append(Done(time_s=event["time"], train_step=reached))
                front = reached
    return done, lost


def _recovery(time_s: float, fault: Fault, begun: Sequence[tuple], done: Sequence[Done], begin_s: float) -> Recovery:
    """The longest gap between steps that ends after the fault, and begins before its effect, or the next one, does."""
    later = min((other for other, _ in begun if other > time_s), default=float("inf"))
    last_s = min(later, time_s + fault.lasts_s + HORIZON_S)
    gaps = [
        (after.time_s - before.time_s, after.time_s)
        for before, after in itertools.pairwise(done)
        if after.time_s > time_s and before.time_s < last_s
    ]
    stall_s, end_s = max(gaps, key=lambda gap: gap[0], default=(None, None))
    return Recovery(
        fault=str(fault),
        at_s=round(time_s - begin_s, 3),
        stall_s=None if stall_s is None else round(stall_s, 3),
        recover_s=None if end_s is None else round(end_s - time_s, 3),
    )


_STARTS = ("worker_started", "worker_watched")
"""By ringweave, and of any system's worker."""


def _away_s(
    time_s: float, fault: Fault, workers_on: dict[str, int], restart_s: float, events: Sequence[Event]
) -> float:
    """Worker-seconds that a fault takes away, whatever the system makes of it."""
    if fault.kind == faults.CUT:
        return fault.lasts_s * workers_on.get(fault.target, 0)
    if not fault.hits_worker:
        return 0.0
    if fault.kind == faults.PAUSE:
        return fault.lasts_s
    rank = int(fault.target)
    starts = (
        event["time"] - time_s
        for event in events
        if event["kind"] in _STARTS and event["rank"] == rank and event["time"] > time_s
    )
    return min(restart_s, next(starts, restart_s))


def _stops_workers(text: str) -> bool:
    fault = faults.parse(text)[0]
    return fault.hits_worker or fault.kind == faults.CUT


def _batch_samples(events: Iterable[Event]) -> int | None:
    found = [event["batch_samples"] for event in events if event["kind"] == "training_prepared"]
    return found[-1] or None if found else None


def _unaccounted(events: Iterable[Event]) -> int | None:
    """Samples of complete epochs that the books neither count nor know to be lost, or count twice."""
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
    wrong = [(fault, reached) for fault, reached in histories.moments(events) if reached != fault.moment]
    return tuple(f"{fault}: it died during {reached or 'a moment that is not known'}" for fault, reached in wrong)


def _broken(
    lost: int, unaccounted: int | None, members: Elastic | None, recoveries: Sequence[Recovery], wall_s: float
) -> tuple[str, ...]:
    """What no job may do under faults, and no elastic one: only that one promises that no step is lost."""
    found = [f"{lost} train steps were lost"] if members and lost else []
    found += [f"{unaccounted} samples neither count nor are known to be lost"] if unaccounted else []
    stuck = [each.fault for each in recoveries if each.stall_s is None and wall_s - each.at_s >= elastic.PATIENCE_S]
    stuck += [each for each in (members.never_went_on if members else ()) if each not in stuck]
    return (*found, *(f"training did not go on after: {fault}" for fault in stuck))


def _nothing(wanted: Iterable[Fault]) -> Report:
    return Report(
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
