"""What `auto` is: from what ranks said of their speeds and links, the mode that is predicted to be the fastest."""

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ringweave.comm import joining
from ringweave.environment import WorkerEnvironment
from ringweave.params.rules import StalenessPolicy
from ringweave.params.serving import optimizers
from ringweave.planning import balancing, grouping, modes
from ringweave.planning.grouping import forecasts
from ringweave.planning.grouping.forecasts import Forecast, Ring, Work, Worker
from ringweave.training.choosing import trials
from ringweave.training.choosing.trials import Trial
from ringweave.training.loading.orders import Reading
from ringweave.training.rings.forming import queue_of, rings_of, speeds_of
from ringweave.training.speed_test import Referee
from ringweave.wire import Limits

MOST_BYTES = Limits().max_message_bytes
"""Of the parameters of a model that trains in rings: each push has all of them in one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What was predicted for each mode, and what follows."""

    forecasts: tuple[Forecast, ...]
    chosen: Forecast
    reducing_s: float | None = None
    """Measured in a rehearsal: an allreduce among all ranks; None if there was none."""
    serving_s: float | None = None
    """Likewise: what an exchange needs at the parameter server."""
    are_measured: bool = False
    """What balanced takes, and each rank alone, was rehearsed whole."""
    untried: str = ""
    """Which rank could not try out the model, and why; with what follows from that."""

    @property
    def reason(self) -> str:
        """In words, with the numbers."""
        others = "; ".join(map(str, self.forecasts))
        said = f"predicted for the samples of a train step: {others}"
        if self.are_measured:
            said += ", of which balanced and ps by rehearsed steps (measured)"
        least = _least_gain(are_measured=self.are_measured)
        said += f"; rings are taken for a gain of {least:.0%} or more"
        if self.reducing_s is not None:
            said += f"; a sum over all ranks took {self.reducing_s:.3g} s in a rehearsal (measured)"
        if self.serving_s is not None:
            said += f"; the parameter server needs {self.serving_s:.3g} s for an exchange (measured)"
        return said + self.untried


def own_prospects(
    model: nn.Module,
    loader: DataLoader,
    reading: Reading,
    environment: WorkerEnvironment,
    *,
    is_needed: bool,
    num_workers: int | None = None,
    referee: Referee | None = None,
) -> dict[str, Any]:
    """What this rank says of itself, for `decide`; the model is tried out only where that can change anything.

    `num_workers` share a batch; None means those of the process group. With a referee it is told which place this rank
    has in the queue of completions.

    Raises:
        PeerError: Another rank does not come to the speed test.
    """
    known = joining.assumed(environment, os.environ)
    is_served = environment.server is not None and environment.credentials is not None
    num_samples = max(1, reading.batch_samples // (num_workers or dist.get_world_size()))
    is_tried = is_served and is_needed
    trial = trials.measure(model, loader, num_samples, referee=referee) if is_tried else Trial()
    return {
        **dataclasses.asdict(known),
        "arrival": _arrival(referee) if referee else None,
        "trial_s": trial.sample_s,
        "trial_problem": trial.problem,
        "num_bytes": sum(each.nbytes for each in model.parameters() if each.requires_grad),
        "is_served": is_served and reading.num_samples is not None,
    }


def _arrival(referee: Referee) -> int | None:
    """This rank's place in the queue of completions, from 0; None if not all ranks were tried out."""
    referee.withdraw()
    order = referee.arrivals()
    return order.index(dist.get_rank()) if order else None


def goes_with_server(said: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a parameter server is there on all ranks, and takes the model, its optimizer, and how data are loaded."""
    return len({each.get("num_prefetched", 0) for each in said}) == 1 and all(
        each["is_served"]
        and each["optimizer"] in optimizers.NAMES
        and not each.get("loses_state")
        and each["num_bytes"] <= MOST_BYTES
        for each in said
    )


def decide(
    decided: tuple[str, str],
    said: Sequence[Mapping[str, Any]],
    num_rings: int | None,
    *,
    is_open: bool,
    local_steps: int = 0,
) -> tuple[str, str, tuple[Ring, ...] | None]:
    """The mode, why, and its rings; None for rings leaves them to the speeds.

    Args:
        decided: Mode and reason without a forecast.
        said: What all ranks said.
        num_rings: How many rings the script wants, if it has any.
        is_open: The mode may be chosen; else only its rings.
        local_steps: Those that the script wants between two pushes.
    """
    mode, reason = decided
    is_number_said = num_rings is not None and not is_open
    if not goes_with_server(said) or is_number_said or not (is_open or mode == modes.PS_HRA):
        return mode, reason, None
    ways = _ways(said, modes.AUTO if is_open else mode)
    if num_rings is not None:
        ways = [rings_of(speeds_of(said), modes.PS_HRA, num_rings, queue=queue_of(said))]
    outlook = look_ahead(said, ways, local_steps)
    if is_open:
        return outlook.chosen.mode, outlook.reason, outlook.chosen.rings or None
    found = [each for each in outlook.forecasts if each.rings]
    return mode, reason + outlook.untried, forecasts.choose(found).rings if found else None


def reconsider(
    said: Sequence[Mapping[str, Any]],
    recent_s: Sequence[Sequence[float]],
    rings: tuple[Ring, ...],
    local_steps: int = 0,
) -> Outlook | None:
    """Other rings for a run that trains in rings, by the times of its own steps; None if it may stay as it is.

    One ring of all ranks is looked at as well: exact, as balanced is, and what `auto` goes back to when ranks no longer
    stall.

    Args:
        said: What all ranks said in `prepare`.
        recent_s: Of each rank, seconds of a sample in its latest steps.
        rings: The present ones.
        local_steps: As `decide` has it.
    """
    of_trials = {"rehearsed_s": None, "balanced_s": None, "rounds_s": None, "arrival": None}
    measured = [
        {**each, **of_trials, "trial_s": list(own_s), "speed": 1 / statistics.median(own_s)}
        for each, own_s in zip(said, recent_s, strict=True)
    ]
    everyone = tuple(range(len(said)))
    present_sets = set(map(frozenset, rings))
    ways = (*_ways(measured, modes.AUTO), (everyone,))
    others = [way for way in ways if set(map(frozenset, way)) != present_sets]
    found = look_ahead(measured, [rings, *others], local_steps).forecasts
    present, *rest = (each for each in found if each.rings)
    best = min(rest, key=lambda each: each.step_s, default=present)
    if best.step_s * (1 + grouping.MIN_GAIN) >= present.step_s:
        return None
    reducing_s, serving_s = _rehearsed(said)
    return Outlook(forecasts=(present, *rest), chosen=best, reducing_s=reducing_s, serving_s=serving_s)


def _ways(said: Sequence[Mapping[str, Any]], mode: str) -> list[tuple[Ring, ...]]:
    """Ways to form rings that are worth a forecast."""
    speeds, half = speeds_of(said), len(said) // 2
    numbers = [None, *itertools.takewhile(lambda number: number <= half, (2**power for power in itertools.count(1)))]
    by_speed = [rings_of(speeds, modes.PS_HRA, number, queue=queue_of(said)) for number in numbers]
    by_link = by_links(said)
    return rings_to_look_at(by_speed, by_link, len(said), mode)


def by_links(said: Sequence[Mapping[str, Any]]) -> list[tuple[Ring, ...]]:
    """Ways to form rings that follow from links alone: workers of about equal rates, or below the same switches."""
    by_rate = forecasts.by_rate([each["rate"] or float("inf") for each in said])
    return [by_rate, *forecasts.by_switch([each["uplinks"] for each in said])]


def look_ahead(said: Sequence[Mapping[str, Any]], rings: Sequence[Sequence[Ring]], local_steps: int = 0) -> Outlook:
    """The same on all ranks, since all have heard the same.

    Args:
        said: Of each rank: `trial_s`, seconds of a sample in trials or None, then with a `trial_problem`; `speed`,
            relative, by the cluster file; `rate`, bytes per second or None; `batch_samples`; `cap`, the most of them
            that it takes, or none; `num_bytes`; `num_samples` of an epoch, if known; `server_rate`; `uplinks` of the
            switches above it, and `server_uplinks`, bytes per second by name; `reducing_s`, `balanced_s`, `serving_s`,
            `exchanging_s`, `rehearsed_s` and `rounds_s` as `rehearsing.rehearse` says them, or none.
        rings: Ways to form rings; none where no server is there, or the script does not go with one.
        local_steps: As `decide` has it.
    """

    def most_ahead(count: int) -> int:
        policy = StalenessPolicy(num_rings=count, overlaps=local_steps > 0)
        return policy.most_versions - policy.reserve_versions

    are_tried = all(each["trial_s"] for each in said)
    workers = [
        Worker(sample_s=tuple(own_s), rate_bytes_per_s=each["rate"] or float("inf"), uplinks=each["uplinks"])
        for own_s, each in zip(_times_s(said), said, strict=True)
    ]
    reducing_s, serving_s = _rehearsed(said) if are_tried else (None, None)
    if reducing_s:
        workers = forecasts.rehearsed(workers, said[0]["num_bytes"], reducing_s)
    server_bytes_per_s = said[0]["server_rate"] or float("inf")
    if are_tried and said[0].get("exchanging_s") is not None:
        workers = forecasts.exchanged(workers, said[0]["num_bytes"], said[0]["exchanging_s"], server_bytes_per_s)
    # Where computing is known in relation only, transfers cannot be told beside it: computing alone decides.
    work = Work(
        batch_samples=said[0]["batch_samples"],
        caps=balancing.limits(said[0]["batch_samples"], (each.get("cap") for each in said)),
        num_bytes=said[0]["num_bytes"] if are_tried else 0,
        server_bytes_per_s=server_bytes_per_s,
        server_uplinks=said[0]["server_uplinks"],
        serving_s=serving_s or 0.0,
        local_steps=local_steps,
        epoch_samples=said[0].get("num_samples") or math.inf,
        most_ahead=most_ahead,
    )
    found = forecasts.forecast(workers, work, rings)
    if are_tried and said[0].get("balanced_s"):
        found = forecasts.stepped(found, said[0]["balanced_s"])
    are_measured = are_tried and all(each.get("rounds_s") for each in said)
    if are_measured:
        rounds_s = trials.spread([each["rounds_s"] for each in said])
        found = forecasts.turned(found, work, [statistics.fmean(own_s) for own_s in rounds_s])
    # Balanced is sync while all are equally fast, and follows when they are not.
    chosen = forecasts.choose(
        [each for each in found if each.mode != modes.SYNC], _least_gain(are_measured=are_measured)
    )
    return Outlook(
        forecasts=found,
        chosen=chosen,
        reducing_s=reducing_s,
        serving_s=serving_s,
        are_measured=are_measured,
        untried=_untried(said),
    )


def sample_s(said: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of a sample on each rank, by the best that is known; by a cluster file's speeds in relation only."""
    return [statistics.median(own_s) for own_s in _times_s(said)]


def _times_s(said: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Seconds of a sample that each rank may take in a step: as rehearsed, else as tried out, else by its speed."""
    if all(each.get("rehearsed_s") for each in said):
        return trials.spread([each["rehearsed_s"] for each in said])
    if all(each["trial_s"] for each in said):
        return trials.settle([each["trial_s"] for each in said])
    return [[1 / each["speed"]] for each in said]


def _least_gain(*, are_measured: bool) -> float:
    """Of rings over one step of all, for which they are taken."""
    return forecasts.MIN_GAIN if are_measured else forecasts.MIN_GAIN_UNREHEARSED


def _rehearsed(said: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """`reducing_s` and `serving_s` of a rehearsal, the same for all ranks; None where there was none."""
    return said[0].get("reducing_s"), said[0].get("serving_s")


def _untried(said: Sequence[Mapping[str, Any]]) -> str:
    """The first problem of a trial, as the end of a reason; empty where there is none."""
    for rank, each in enumerate(said):
        if problem := each.get("trial_problem"):
            return f"; rank {rank} could not try out the model ({problem}), so speeds are those of the cluster file"
    return ""


def rings_to_look_at(
    by_speed: Sequence[Sequence[Ring]], by_link: Sequence[tuple[Ring, ...]], num_ranks: int, mode: str = modes.AUTO
) -> list[tuple[Ring, ...]]:
    """Ways to form rings: by speed (so many rings as there are kinds, and more), by links, and each rank alone."""
    alone = tuple((rank,) for rank in range(num_ranks))
    ways = [*map(tuple, by_speed[:1]), *by_link, *map(tuple, by_speed[1:]), *([alone] if mode == modes.AUTO else [])]
    return [way for place, way in enumerate(ways) if len(way) > 1 and way not in ways[:place]]
