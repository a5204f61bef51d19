"""Mode forecast of `auto`: predicts the step time of each mode from all ranks' reports, and chooses the fastest.

Wire formats and mode local are forecast only within a bound that the user gives on the loss at equal samples.
"""

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ringweave.comm import default_group
from ringweave.environment import EXACT, WorkerEnvironment
from ringweave.jobs import modes
from ringweave.param_server import optimizers
from ringweave.param_server.versions import StalenessPolicy
from ringweave.planning import balancing, mode_forecast, ring_grouping, sites
from ringweave.planning.balancing import Speed
from ringweave.planning.loss_table import LossTable, load_loss_table
from ringweave.planning.mode_forecast import ModeForecast, OuterSteps, Ring, StepWorkload, WorkerRates
from ringweave.planning.plans import Plan
from ringweave.rpc import RpcLimits
from ringweave.training import speed_test
from ringweave.training.collectives import ControlGroup
from ringweave.training.data.order import LoaderSpec
from ringweave.training.options import Local, Script
from ringweave.training.rings.ring_formation import completion_queue, form_rings, relative_speeds
from ringweave.training.speed_test import ModelTrial, SpeedTestParticipant

_NO_WIRES = "wire formats are not forecast: the plan has none"
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
    """Return this rank's report for `choose_mode`, with a model trial if it is needed.

    `num_workers` share a batch; None means those of the process group. With a speed test participant, the report has
    this rank's place in the order of completion.

    Raises:
        PeerError: Another rank does not take part in the speed test.
    """
    assumed = default_group.describe_rank(environment, os.environ)
    num_samples = max(1, spec.batch_samples // (num_workers or dist.get_world_size()))
    trial = (
        speed_test.run_model_trial(model, loader, num_samples, participant=participant) if is_needed else ModelTrial()
    )
    return {
        **dataclasses.asdict(assumed),
        "arrival": _arrival_index(participant) if participant else None,
        "trial_s": trial.sample_s,
        "trial_problem": trial.problem,
        "num_bytes": sum(each.nbytes for each in model.parameters() if each.requires_grad),
        "is_served": is_served(environment) and spec.num_samples is not None,
    }


def is_served(environment: WorkerEnvironment) -> bool:
    """Return whether this rank has a parameter server."""
    return environment.server is not None and environment.credentials is not None


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
    have_trials = all(each["trial_s"] for each in reports)
    reducing_s, serving_s = _benchmarked_s(reports) if have_trials else (None, None)
    workers, work = rates_and_workload(reports, local_steps)
    found = mode_forecast.forecast_modes(workers, work, rings)
    if have_trials and reports[0].get("balanced_s"):
        found = mode_forecast.with_benchmarked_step(found, reports[0]["balanced_s"])
    are_measured = have_trials and all(each.get("rounds_s") for each in reports)
    if are_measured:
        rounds_s = speed_test.spread_step_times([each["rounds_s"] for each in reports])
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


def rates_and_workload(
    reports: Sequence[Mapping[str, Any]], local_steps: int = 0
) -> tuple[list[WorkerRates], StepWorkload]:
    """Return the rates of all ranks, and their train step."""

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
    return workers, work


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBound:
    """Bound on the loss at equal samples, and what `auto` may take within it."""

    max_increase: float
    """As a fraction of the loss of synchronous training."""
    is_mode_open: bool
    is_wire_open: bool
    local: Local
    """The script's settings of mode local."""
    local_steps: int = 0
    """As in `choose_mode`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedChoice:
    """Mode and wire format within a bound on the loss."""

    mode: str
    reason: str
    rings: tuple[Ring, ...] | None
    wire: str = EXACT
    max_inner_steps: int = 0
    """Most inner steps of mode local whose measured loss is within the bound; 0 if none is."""


def choose_within_bound(
    exact: tuple[str, str, tuple[Ring, ...] | None],
    reports: Sequence[Mapping[str, Any]],
    bound: LossBound,
    table: LossTable,
) -> BoundedChoice:
    """Choose among the mode that is chosen without a bound, wire formats and mode local: the fastest within the bound.

    Methods that cost less loss come first; each other has to gain a tenth over those before it. The same on all ranks,
    as all have the same reports.

    Args:
        exact: Result of `choose_mode`.
        reports: Reports of all ranks; that of rank 0 has `wires_s`, predicted seconds of an allreduce by wire format.
        bound: The bound.
        table: Measured losses.
    """
    mode, reason, rings = exact
    reason += _explain_bound(bound.max_increase)
    if not all(each["trial_s"] for each in reports):
        reason += f", but times of computing are unknown{_trial_failure(reports)}"
        return BoundedChoice(mode=mode, reason=reason, rings=rings)
    all_modes = {
        each.mode: each for each in forecast_modes(reports, [rings] if rings else [], bound.local_steps).forecasts
    }
    if mode not in all_modes:  # sites, or rings that are formed later: the table says nothing of their formats
        return BoundedChoice(mode=mode, reason=f"{reason}; `auto` has no format in mode {mode}", rings=rings)
    best, batch_samples = all_modes[mode], reports[0]["batch_samples"]
    candidates = list[ModeForecast]()
    if bound.is_mode_open and best.loss_increase is not None:
        best, candidates = all_modes[modes.BALANCED], [best]
    texts = [_describe_candidate(best, batch_samples)]
    if bound.is_wire_open:
        wires = _forecast_wires(all_modes[modes.BALANCED if bound.is_mode_open else mode], reports, table)
        candidates += wires
        texts += [] if wires else [_NO_WIRES]
    limit = 0
    if bound.is_mode_open:
        found, limit = _forecast_local(reports, bound, table)
        texts += [found] if isinstance(found, str) else []
        candidates += [] if isinstance(found, str) else [found]
    best, more = _fastest_within(best, candidates, bound.max_increase, batch_samples)
    texts += more
    return BoundedChoice(
        mode=best.mode,
        reason=reason + _explain_choice(best, texts),
        rings=rings if best.mode == mode else None,
        wire=best.wire,
        max_inner_steps=limit,
    )


def _fastest_within(
    best: ModeForecast, candidates: Sequence[ModeForecast], max_increase: float, batch_samples: int
) -> tuple[ModeForecast, list[str]]:
    """Return the fastest forecast within the bound on the loss, and descriptions of the candidates."""
    texts = []
    for each in sorted(candidates, key=_highest_loss):
        is_allowed = _highest_loss(each) <= max_increase
        texts.append(_describe_candidate(each, batch_samples) + ("" if is_allowed else ", too much"))
        if is_allowed and best.step_s >= (1 + mode_forecast.MIN_INEXACT_GAIN) * each.step_s:
            best = each
    return best, texts


class ElasticWireForecast:
    """Forecast of the wire formats of an elastic job within a bound on the loss, in each generation."""

    def __init__(self, script: Script, mode: str, *, num_bytes: int, schedule: str | None, trial: ModelTrial) -> None:
        """Create it.

        Args:
            script: The script, with a bound.
            mode: Mode of the job.
            num_bytes: Bytes of the gradients; 0 if they cannot be encoded.
            schedule: Schedule that is forced; None if none is.
            trial: Trial of this member before it joined.
        """
        assert script.max_loss_increase is not None, "there is a bound"
        self._max_increase, self._batch_samples = script.max_loss_increase, script.spec.batch_samples
        self._mode, self._num_bytes, self._schedule, self._trial = mode, num_bytes, schedule, trial
        self._table = load_loss_table()
        self._predicted_s: Mapping[str, float] = {}
        """Predicted seconds of an allreduce by format, in the last generation."""

    def propose(self, plan: Plan, members: Sequence[Mapping[str, Any]], present: str) -> tuple[str, str]:
        """Return the format for a generation, and the reason as the end of a sentence.

        Args:
            plan: Plan of the generation's group.
            members: Details of its members.
            present: Format in the generation before.
        """
        reason = _explain_bound(self._max_increase)
        speeds = _speeds_of_members(members)
        if speeds is None:
            problem = f" ({self._trial.problem})" if self._trial.problem else ""
            return present, f"{reason}, but times of computing are unknown{problem}"
        earlier_s, self._predicted_s = self._predicted_s.get(present), {}
        if self._num_bytes:
            found_s = plan.allreduce_s_by_wire(self._num_bytes, self._schedule)
            self._predicted_s = found_s if all(map(math.isfinite, found_s.values())) else {}
        computing_s = self._computing_s(speeds)
        reducing_s = self._predicted_s.get(EXACT, 0.0) * _waiting_part(members, earlier_s)
        exact = ModeForecast(mode=self._mode, step_s=computing_s + reducing_s, computing_s=computing_s)
        texts = [_describe_candidate(exact, self._batch_samples)]
        wires = mode_forecast.forecast_wires(exact, reducing_s, self._predicted_s, self._table.wires)
        best, more = _fastest_within(exact, wires, self._max_increase, self._batch_samples)
        return best.wire, reason + _explain_choice(best, [*texts, *(more or [_NO_WIRES])])

    def _computing_s(self, speeds: Sequence[Speed]) -> float:
        """Return the seconds of computing in a step."""
        equal = [Speed(s_per_sample=1.0)] * len(speeds)
        shares = balancing.apportion(self._batch_samples, speeds if self._mode == modes.BALANCED else equal)
        return balancing.slowest_compute_s(shares, speeds)


def _speeds_of_members(members: Sequence[Mapping[str, Any]]) -> list[Speed] | None:
    """Return the members' speeds in training, or else in trials; of those without either, that of a typical one.

    None if none is known.
    """
    found = [
        Speed.of_numbers(each["speed"]) if each["speed"] is not None else _speed_in_trial(each.get("trial_s"))
        for each in members
    ]
    known = sorted((each for each in found if each is not None), key=lambda each: each.s_per_sample)
    return [each or known[len(known) // 2] for each in found] if known else None


def _speed_in_trial(trial_s: float | None) -> Speed | None:
    return Speed(s_per_sample=trial_s) if trial_s else None


def _waiting_part(members: Sequence[Mapping[str, Any]], predicted_s: float | None) -> float:
    """Return the part of an allreduce for which a step waits, as measured in the last generation; 1 if it was not.

    The least time of all members counts: the others wait for the slowest member too. It is above 1 where allreduces
    take longer than predicted.
    """
    waited_s = [each["exchange_s"] for each in members if each["exchange_s"] > 0]
    return min(waited_s) / predicted_s if waited_s and predicted_s else 1.0


def _explain_bound(max_increase: float) -> str:
    """Return a bound on the loss in words, as the end of a sentence."""
    return f"; up to {100 * max_increase:.3g} % more loss at equal samples is allowed"


def _explain_choice(best: ModeForecast, texts: Sequence[str]) -> str:
    gain = f"{mode_forecast.MIN_INEXACT_GAIN:.0%}"
    return f", for a gain of {gain} or more; predicted: {'; '.join(texts)}; chosen: {best.name}"


def _forecast_wires(
    exact: ModeForecast, reports: Sequence[Mapping[str, Any]], table: LossTable
) -> tuple[ModeForecast, ...]:
    """Return the forecasts of wire formats; none where the plan has none."""
    wires_s = reports[0].get("wires_s")
    if not wires_s:
        return ()
    workers, work = rates_and_workload(reports)
    reducing_s = _benchmarked_s(reports)[0] or mode_forecast.predicted_allreduce_s(workers, work.num_bytes)
    return mode_forecast.forecast_wires(exact, reducing_s, wires_s, table.wires)


def _forecast_local(
    reports: Sequence[Mapping[str, Any]], bound: LossBound, table: LossTable
) -> tuple[ModeForecast | str, int]:
    """Return the forecast of mode local, or the reason why there is none; and the most inner steps within the bound."""
    local = bound.local
    all_sites = sites.sites_of(local.sites, reports)
    if len(all_sites) < 2 or not reports[0].get("round_steps"):
        why = "all workers are in one site" if len(all_sites) < 2 else "a rank could not try inner steps"
        return f"mode local is not forecast: {why}", 0
    own = {name: getattr(local, name) for name in table.local_settings}
    limit = table.max_inner_steps(len(all_sites), local.wire, bound.max_increase)
    if own != table.local_settings or table.of_local(len(all_sites), local.wire, 1) is None:
        return f"mode local is not forecast: no loss is measured with {len(all_sites)} sites, {local.wire}, {own}", 0
    found = forecast_sites(reports, all_sites, local, limit or sites.MAX_INNER_STEPS)
    return replace(found, loss_increase=table.of_local(len(all_sites), local.wire, found.inner_steps)), limit


def forecast_sites(
    reports: Sequence[Mapping[str, Any]], all_sites: tuple[sites.Site, ...], local: Local, max_inner_steps: int
) -> ModeForecast:
    """Return the forecast of mode local from reports with the times of `benchmark_sites`."""
    outer = OuterSteps(
        sites=all_sites,
        site_steps_s=tuple(max(reports[rank]["inner_step_s"] for rank in site) for site in all_sites),
        exchange_s=reports[0]["outer_exchange_s"],
        round_s=reports[0]["round_s"],
        round_steps=reports[0]["round_steps"],
        fragments=local.fragments,
        inner_steps=local.inner_steps,
        max_inner_steps=min(max_inner_steps, local.max_inner_steps),
        computing_share=local.computing_share,
    )
    return mode_forecast.forecast_local(*rates_and_workload(reports), outer)


def _highest_loss(candidate: ModeForecast) -> float:
    return candidate.loss_increase.highest if candidate.loss_increase else math.inf


def _describe_candidate(candidate: ModeForecast, batch_samples: int) -> str:
    rate = f"{candidate}, {batch_samples / candidate.step_s:.3g} samples/s"
    if candidate.loss_increase is not None:
        return f"{rate}, loss {candidate.loss_increase} (measured on other tasks)"
    return f"{rate}, loss unknown for so many steps" if candidate.mode == modes.LOCAL else rate


def sample_times_s(reports: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of a sample on each rank, as well as known; relative if only from the cluster file."""
    return [statistics.median(own_s) for own_s in _rank_sample_times_s(reports)]


def _rank_sample_times_s(reports: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the seconds of a sample that each rank may take in a step: from benchmarks, trials or its speed."""
    if all(each.get("benchmarked_s") for each in reports):
        return speed_test.spread_step_times([each["benchmarked_s"] for each in reports])
    if all(each["trial_s"] for each in reports):
        return speed_test.denoise_trials([each["trial_s"] for each in reports])
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
