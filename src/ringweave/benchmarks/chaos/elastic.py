"""What faults did to an elastic job, in a few figures: stalls, epochs, zombies, newcomers. Pure; all is measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringweave.benchmarks.chaos import survivors
from ringweave.benchmarks.chaos.quantiles import quantile
from ringweave.benchmarks.chaos.survivors import Joining, Takeover, Toll
from ringweave.telemetry import Event

PATIENCE_S = 10.0
"""Of a job that was watched for less after a fault it is not known whether it would have gone on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """What the members of an elastic job went through."""

    stall_p50_s: float | None
    """Over faults that hit workers, of the survivor's stall that was the longest."""
    stall_p95_s: float | None
    stall_max_s: float | None
    epoch_p50_s: float | None
    """From such a fault to the epoch without its victims."""
    epoch_p95_s: float | None
    taken_over_p50_s: float | None
    """From a fault that hit a coordinator or a parameter server until another one acts."""
    taken_over_p95_s: float | None
    takeover_stall_p50_s: float | None
    """Over such faults, of the worker's stall that was the longest."""
    takeover_stall_p95_s: float | None
    steps_as_zombie: int
    """Done by victims after the epoch without them had begun."""
    put_out: int
    """Members that no fault had hit, and that were put out after one that hit others."""
    never_went_on: tuple[str, ...]
    """Faults after which a survivor made no step, though there was time."""
    never_back: tuple[str, ...]
    """Faults whose victims never made a step again, perhaps for want of time."""
    joins: int
    """Epochs that let workers in while others went on."""
    join_stall_steps_p50: float | None
    """Longest stall of a peer at such a join, in usual steps."""
    join_stall_steps_p95: float | None
    level_p50_s: float | None
    """From such an epoch until its newcomers were level."""
    join_lost_steps_p50: float | None
    """What its peers' steps until then took longer than usual, in usual steps."""
    tolls: tuple[Toll, ...]
    takeovers: tuple[Takeover, ...]
    joinings: tuple[Joining, ...]


def sum_up(events: Sequence[Event]) -> Elastic | None:
    """The figures; None of a job that is not elastic."""
    if not any(event["kind"] == "epoch_begun" for event in events):
        return None
    tolls, takeovers = survivors.tolls(events), survivors.takeovers(events)
    joinings = survivors.joinings(events)
    stalls = _known(each.stall_s for each in tolls)
    epochs = _known(each.epoch_s for each in tolls)
    taken_over = _known(each.taken_over_s for each in takeovers)
    takeover_stalls = _known(each.stall_s for each in takeovers)
    in_steps = [each.stall_s / each.usual_s for each in joinings if each.usual_s]
    behind = [each.lost_s / each.usual_s for each in joinings if each.usual_s]
    return Elastic(
        stall_p50_s=quantile(stalls, 0.5),
        stall_p95_s=quantile(stalls, 0.95),
        stall_max_s=max(stalls, default=None),
        epoch_p50_s=quantile(epochs, 0.5),
        epoch_p95_s=quantile(epochs, 0.95),
        taken_over_p50_s=quantile(taken_over, 0.5),
        taken_over_p95_s=quantile(taken_over, 0.95),
        takeover_stall_p50_s=quantile(takeover_stalls, 0.5),
        takeover_stall_p95_s=quantile(takeover_stalls, 0.95),
        steps_as_zombie=sum(each.steps_as_zombie for each in tolls),
        put_out=sum(len(each.put_out) for each in tolls),
        never_went_on=tuple(each.fault for each in (*tolls, *takeovers) if _never_went_on(each)),
        never_back=tuple(each.fault for each in tolls if each.back_s is None),
        joins=len(joinings),
        join_stall_steps_p50=quantile(in_steps, 0.5),
        join_stall_steps_p95=quantile(in_steps, 0.95),
        level_p50_s=quantile(_known(each.level_s for each in joinings), 0.5),
        join_lost_steps_p50=quantile(behind, 0.5),
        tolls=tuple(tolls),
        takeovers=tuple(takeovers),
        joinings=tuple(joinings),
    )


def _never_went_on(toll: Toll | Takeover) -> bool:
    return toll.stall_s is None and toll.survivors > 0 and toll.watched_s >= PATIENCE_S


def _known(values: Iterable[float | None]) -> list[float]:
    return [each for each in values if each is not None]
