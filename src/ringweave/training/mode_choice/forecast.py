"""Mode forecast of `auto`: predicts the step time of each mode from all ranks' reports, and chooses the fastest."""

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ringweave.comm import default_group
from ringweave.environment import WorkerEnvironment
from ringweave.param_server import optimizers
from ringweave.param_server.versions import StalenessPolicy
from ringweave.planning import balancing, mode_forecast, modes, ring_grouping
from ringweave.planning.mode_forecast import ModeForecast, Ring, StepWorkload, WorkerRates
from ringweave.rpc import RpcLimits
from ringweave.training.collectives import ControlGroup
from ringweave.training.data.order import LoaderSpec
from ringweave.training.mode_choice import trial as mode_choice_trial
from ringweave.training.mode_choice.trial import ModelTrial
from ringweave.training.rings.ring_formation import completion_queue, form_rings, relative_speeds
from ringweave.training.speed_test import SpeedTestParticipant

MAX_RING_MODEL_BYTES = RpcLimits().max_message_bytes
"""Limit of a model that trains in rings: each push has all parameters in one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeChoice:
    """Forecasts of all modes, and the chosen one."""

    forecasts: tuple[ModeForecast, ...]
    chosen: ModeForecast
    allreduce_s: float | None = None
    """Benchmarked seconds of an allreduce among all ranks; None without a benchmark."""
    serving_s: float | None = None
    """Benchmarked seconds that an exchange needs at the parameter server; None without a benchmark."""
    are_measured: bool = False
    """Whole steps of balanced, and of each rank alone, were benchmarked."""
    trial_failure: str = ""
    """Rank that could not run the model trial, the reason and the consequence, as the end of a sentence."""

    @property
    def reason(self) -> str:
        """Reason of the choice as text, with the numbers."""
        others = "; ".join(map(str, self.forecasts))
        text = f"predicted for the samples of a train step: {others}"
        if self.are_measured:
            text += ", of which balanced and ps by benchmarked steps (measured)"
        min_gain = _min_gain(are_measured=self.are_measured)
        text += f"; rings are taken for a gain of {min_gain:.0%} or more"
        if self.allreduce_s is not None:
            text += f"; a sum over all ranks took {self.allreduce_s:.3g} s in a benchmark (measured)"
        if self.serving_s is not None:
            text += f"; the parameter server needs {self.serving_s:.3g} s for an exchange (measured)"
        return text + self.trial_failure


def describe_own_rank(
    model: nn.Module,
    loader: DataLoader,
    spec: LoaderSpec,
    environment: WorkerEnvironment,
    *,
    is_needed: bool,
    num_workers: int | None = None,
    participant: SpeedTestParticipant | None = None,
) -> dict[str, Any]:
    """Return this rank's report for `choose_mode`; the model trial runs only if it can change anything.

    `num_workers` share a batch; None means those of the process group. With a speed test participant, the report has
    this rank's place in the order of completion.

    Raises:
        PeerError: Another rank does not take part in the speed test.
    """
    assumed = default_group.describe_rank(environment, os.environ)
    is_served = environment.server is not None and environment.credentials is not None
    num_samples = max(1, spec.batch_samples // (num_workers or dist.get_world_size()))
    runs_trial = is_served and is_needed
    trial = (
        mode_choice_trial.run_model_trial(model, loader, num_samples, participant=participant)
        if runs_trial
        else ModelTrial()
    )
    return {
        **dataclasses.asdict(assumed),
        "arrival": _arrival_index(participant) if participant else None,
        "trial_s": trial.sample_s,
        "trial_problem": trial.problem,
        "num_bytes": sum(each.nbytes for each in model.parameters() if each.requires_grad),
        "is_served": is_served and spec.num_samples is not None,
    }


def _arrival_index(participant: SpeedTestParticipant) -> int | None:
    """Return this rank's place in the order of completion, from 0; None unless all ranks ran trials."""
    participant.withdraw()
    order = participant.finish_order()
    return order.index(dist.get_rank()) if order else None


def fits_parameter_server(reports: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all ranks have a parameter server that supports model, optimizer and data loading."""
    return len({each.get("num_prefetched", 0) for each in reports}) == 1 and all(
        each["is_served"]
        and each["optimizer"] in optimizers.OPTIMIZER_NAMES
        and not each.get("loses_state")
        and each["num_bytes"] <= MAX_RING_MODEL_BYTES
        for each in reports
    )


def choose_mode(
    preset: tuple[str, str],
    reports: Sequence[Mapping[str, Any]],
    num_rings: int | None,
    *,
    is_open: bool,
    local_steps: int = 0,
) -> tuple[str, str, tuple[Ring, ...] | None]:
    """Choose the mode; return it, the reason and its rings. Rings None: formed by speed.

    Args:
        preset: Mode and reason without a forecast.
        reports: Reports of all ranks.
        num_rings: Number of rings that the script asks for; None if it does not.
        is_open: The mode may be chosen; else only its rings.
        local_steps: Local steps between two pushes, as the script asks for.
    """
    mode, reason = preset
    has_number_of_rings = num_rings is not None and not is_open
    if not fits_parameter_server(reports) or has_number_of_rings or not (is_open or mode == modes.PS_HRA):
        return mode, reason, None
    candidates = _ring_candidates(reports, modes.AUTO if is_open else mode)
    if num_rings is not None:
        candidates = [form_rings(relative_speeds(reports), modes.PS_HRA, num_rings, queue=completion_queue(reports))]
    choice = forecast_modes(reports, candidates, local_steps)
    if is_open:
        return choice.chosen.mode, choice.reason, choice.chosen.rings or None
    found = [each for each in choice.forecasts if each.rings]
    return mode, reason + choice.trial_failure, mode_forecast.choose_forecast(found).rings if found else None


def reconsider_rings(
    reports: Sequence[Mapping[str, Any]],
    recent_s: Sequence[Sequence[float]],
    rings: tuple[Ring, ...],
    local_steps: int = 0,
) -> ModeChoice | None:
    """Choose other rings for a run in rings, by the times of its own steps; None to keep the present ones.

    One ring of all ranks is a candidate too: it is exact, as balanced is, and `auto` returns to it when ranks no longer
    stall.

    Args:
        reports: Reports of all ranks in `prepare`.
        recent_s: Of each rank, seconds of a sample in its latest steps.
        rings: Present rings.
        local_steps: As in `choose_mode`.
    """
    of_trials = {"benchmarked_s": None, "balanced_s": None, "rounds_s": None, "arrival": None}
    measured = [
        {**each, **of_trials, "trial_s": list(own_s), "speed": 1 / statistics.median(own_s)}
        for each, own_s in zip(reports, recent_s, strict=True)
    ]
    everyone = tuple(range(len(reports)))
    present_sets = set(map(frozenset, rings))
    candidates = (*_ring_candidates(measured, modes.AUTO), (everyone,))
    others = [way for way in candidates if set(map(frozenset, way)) != present_sets]
    found = forecast_modes(measured, [rings, *others], local_steps).forecasts
    present, *rest = (each for each in found if each.rings)
    best = min(rest, key=lambda each: each.step_s, default=present)
    if best.step_s * (1 + ring_grouping.MIN_REGROUPING_GAIN) >= present.step_s:
        return None
    reducing_s, serving_s = _benchmarked_s(reports)
    return ModeChoice(forecasts=(present, *rest), chosen=best, allreduce_s=reducing_s, serving_s=serving_s)


def _ring_candidates(reports: Sequence[Mapping[str, Any]], mode: str) -> list[tuple[Ring, ...]]:
    """Return the candidate rings that are worth a forecast."""
    speeds, half = relative_speeds(reports), len(reports) // 2
    numbers = [None, *itertools.takewhile(lambda number: number <= half, (2**power for power in itertools.count(1)))]
    by_speed = [form_rings(speeds, modes.PS_HRA, number, queue=completion_queue(reports)) for number in numbers]
    by_link = rings_by_links(reports)
    return select_ring_candidates(by_speed, by_link, len(reports), mode)


def rings_by_links(reports: Sequence[Mapping[str, Any]]) -> list[tuple[Ring, ...]]:
    """Return candidate rings by links alone: workers of about equal rates, or below the same switches."""
    by_rate = mode_forecast.rings_by_rate([each["rate"] or float("inf") for each in reports])
    return [by_rate, *mode_forecast.rings_by_switch([each["uplinks"] for each in reports])]


# Long: its docstring has every key of a report; one sequence from reports to forecasts, computed elsewhere.
def forecast_modes(
    reports: Sequence[Mapping[str, Any]], rings: Sequence[Sequence[Ring]], local_steps: int = 0
) -> ModeChoice:
    """Forecast all modes; the same on all ranks, since all have the same reports.

    Args:
        reports: Of each rank: `trial_s`, seconds of a sample in trials, or None with a `trial_problem`; `speed`,
            relative, from the cluster file; `rate`, bytes per second or None; `batch_samples`; `cap`, its limit of
            samples, or None; `num_bytes`; `num_samples` of an epoch, if known; `server_rate`; `uplinks` of the
            switches above it, and `server_uplinks`, bytes per second by name; `reducing_s`, `balanced_s`, `serving_s`,
            `exchanging_s`, `benchmarked_s` and `rounds_s` from `benchmark_steps`, or none.
        rings: Candidate rings; none without a server, or if the script does not support one.
        local_steps: As in `choose_mode`.
    """

    def most_ahead(count: int) -> int:
        policy = StalenessPolicy(num_rings=count, overlaps=local_steps > 0)
        return policy.max_versions - policy.reserve_versions

    have_trials = all(each["trial_s"] for each in reports)
    workers = [
        WorkerRates(sample_s=tuple(own_s), rate_bytes_per_s=each["rate"] or float("inf"), uplinks=each["uplinks"])
        for own_s, each in zip(_rank_sample_times_s(reports), reports, strict=True)
    ]
    reducing_s, serving_s = _benchmarked_s(reports) if have_trials else (None, None)
    if reducing_s:
        workers = mode_forecast.with_benchmarked_allreduce(workers, reports[0]["num_bytes"], reducing_s)
    server_bytes_per_s = reports[0]["server_rate"] or float("inf")
    if have_trials and reports[0].get("exchanging_s") is not None:
        workers = mode_forecast.with_benchmarked_exchange(
            workers, reports[0]["num_bytes"], reports[0]["exchanging_s"], server_bytes_per_s
        )
    # If computing times are only relative, transfers cannot be compared with them: computing alone decides.
    work = StepWorkload(
        batch_samples=reports[0]["batch_samples"],
        caps=balancing.share_limits(reports[0]["batch_samples"], (each.get("cap") for each in reports)),
        num_bytes=reports[0]["num_bytes"] if have_trials else 0,
        server_bytes_per_s=server_bytes_per_s,
        server_uplinks=reports[0]["server_uplinks"],
        server_processing_s=serving_s or 0.0,
        local_steps=local_steps,
        epoch_samples=reports[0].get("num_samples") or math.inf,
        max_pushes_ahead=most_ahead,
    )
    found = mode_forecast.forecast_modes(workers, work, rings)
    if have_trials and reports[0].get("balanced_s"):
        found = mode_forecast.with_benchmarked_step(found, reports[0]["balanced_s"])
    are_measured = have_trials and all(each.get("rounds_s") for each in reports)
    if are_measured:
        rounds_s = mode_choice_trial.spread_step_times([each["rounds_s"] for each in reports])
        found = mode_forecast.with_benchmarked_rounds(found, work, [statistics.fmean(own_s) for own_s in rounds_s])
    # Balanced equals sync while all ranks are equally fast, and adapts when they are not.
    chosen = mode_forecast.choose_forecast(
        [each for each in found if each.mode != modes.SYNC], _min_gain(are_measured=are_measured)
    )
    return ModeChoice(
        forecasts=found,
        chosen=chosen,
        allreduce_s=reducing_s,
        serving_s=serving_s,
        are_measured=are_measured,
        trial_failure=_trial_failure(reports),
    )


def sample_times_s(reports: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of a sample on each rank, as well as known; relative if only from the cluster file."""
    return [statistics.median(own_s) for own_s in _rank_sample_times_s(reports)]


def _rank_sample_times_s(reports: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the seconds of a sample that each rank may take in a step: from benchmarks, trials or its speed."""
    if all(each.get("benchmarked_s") for each in reports):
        return mode_choice_trial.spread_step_times([each["benchmarked_s"] for each in reports])
    if all(each["trial_s"] for each in reports):
        return mode_choice_trial.denoise_trials([each["trial_s"] for each in reports])
    return [[1 / each["speed"]] for each in reports]


def _min_gain(*, are_measured: bool) -> float:
    """Return the minimal gain over one step of all ranks at which rings are chosen."""
    return mode_forecast.MIN_RING_GAIN if are_measured else mode_forecast.MIN_RING_GAIN_UNBENCHMARKED


def _benchmarked_s(reports: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return `reducing_s` and `serving_s` of the benchmark, the same for all ranks; None without one."""
    return reports[0].get("reducing_s"), reports[0].get("serving_s")


def _trial_failure(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the first problem of a trial as the end of a sentence; empty if there is none."""
    for rank, each in enumerate(reports):
        if problem := each.get("trial_problem"):
            return f"; rank {rank} could not try out the model ({problem}), so speeds are those of the cluster file"
    return ""


def select_ring_candidates(
    by_speed: Sequence[Sequence[Ring]], by_link: Sequence[tuple[Ring, ...]], num_ranks: int, mode: str = modes.AUTO
) -> list[tuple[Ring, ...]]:
    """Return candidate rings: by speed (one ring per kind, and more), by links, and each rank alone."""
    alone = tuple((rank,) for rank in range(num_ranks))
    candidates = [
        *map(tuple, by_speed[:1]),
        *by_link,
        *map(tuple, by_speed[1:]),
        *([alone] if mode == modes.AUTO else []),
    ]
    return [way for place, way in enumerate(candidates) if len(way) > 1 and way not in candidates[:place]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RingReconsideration:
    """Forecasts new rings at the ends of epochs, by the times of recent steps."""

    reports: Sequence[Mapping[str, Any]]
    """Reports of all ranks in `prepare`: about links and the model."""
    control: ControlGroup
    local_steps: int
    record_choice: Callable[[tuple[Ring, ...], str], object]
    """Called with other rings and the reason."""

    def find_better_rings(self, rings: tuple[Ring, ...], recent_s: Sequence[float]) -> tuple[Ring, ...] | None:
        """Return other rings if the predicted gain exceeds their cost; all ranks call it alike.

        Args:
            rings: Present rings.
            recent_s: Seconds of a sample in the latest steps of this rank.
        """
        recent_by_rank = [each["recent_s"] for each in self.control.gather_json({"recent_s": list(recent_s)})]
        choice = reconsider_rings(self.reports, recent_by_rank, rings, self.local_steps)
        if choice is None:
            return None
        self.record_choice(choice.chosen.rings, choice.reason)
        return choice.chosen.rings
