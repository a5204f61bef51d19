"""Mode forecast: the predicted time per train step of each training mode, from which `auto` chooses.

The time to a given loss is the number of samples that it takes, times seconds per sample. Exact modes need the samples
of synchronous training. The parameter server needs a little more (`SAMPLE_WORTH`) and wins only where waiting costs
more. Wire formats and mode local cost loss by a measured table; they count only within a bound that the user gives.
Times are predicted: computing at measured speeds, transfers at the rates of NICs and switches, plus the overheads that
a benchmark measured for a collective and for an exchange with the server. Mode local is forecast from measured inner
and outer steps.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringweave.environment import EXACT
from ringweave.jobs import modes
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed
from ringweave.planning.loss_table import LossIncrease
from ringweave.planning.sites import FIRST_INNER_STEPS, RoundSplit, Site

SAMPLE_WORTH = 0.98
"""Worth of a sample in training with several rings, relative to synchronous training: simulated runs found losses 0 to
2 % behind after the same samples (docs/decisions/0017)."""
RINGS_LOSS = LossIncrease(lowest=0.0, mean=0.01, highest=0.02)
"""The same as a loss at equal samples, where the user gives a bound on it."""
MIN_RING_GAIN = 0.05
"""Gain over one exact step of all ranks that rings must have, where rounds of rings were benchmarked."""
MIN_RING_GAIN_UNBENCHMARKED = 0.1
"""The same where the rings' time is a sum of predicted parts: in labs with parts of processors it was up to a tenth
short of the measured time, and more (docs/explanation/mode-choice.md)."""
_MIN_GAIN_AMONG_RINGS = 0.03
"""Gain that rings must have over simpler rings, whose forecasts have the same errors."""
MIN_INEXACT_GAIN = 0.1
"""Gain that wire formats and mode local must have over what would be chosen without them."""
_RATE_GROUP_RATIO = 1.25
"""Rates within this ratio are of one class."""

Ring = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRates:
    """Measured and known rates of a rank."""

    sample_s: Sequence[float]
    """Seconds per sample in several trials: if they vary at random, so will steps."""
    rate_bytes_per_s: float = math.inf
    """Summed rate of its NICs."""
    uplinks: Mapping[str, float] = field(default_factory=dict)
    """Name of each switch above it, the nearest first -> bytes per second of that switch's uplink, each direction."""

    reduce_overhead_s: float = 0.0
    """Seconds by which each of its collectives exceeds the link time, for passing all bytes of the gradients twice: its
    processor work, and pauses of a processor that it shares."""

    push_overhead_s: float | None = None
    """The same for an exchange with the parameter server; None uses the time for passing the bytes once."""

    @property
    def mean_s(self) -> float:
        """Return the mean seconds per sample in the long run."""
        return math.fsum(self.sample_s) / len(self.sample_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWorkload:
    """Sizes of a train step, and of the parameter server's work."""

    batch_samples: int
    """Batch size over all workers."""
    caps: Sequence[int] | None = None
    """Largest number of samples of a batch for each worker's memory; None where there is no limit."""
    num_bytes: float
    """Bytes of the gradients, and of the parameters."""
    server_bytes_per_s: float = math.inf
    """Rate of the parameter server's node, each direction."""
    server_uplinks: Mapping[str, float] = field(default_factory=dict)
    """Uplinks above that node, as a worker's."""
    server_processing_s: float = 0.0
    """Seconds of the server's processor for a push and its reply, one after the other for all rings."""
    local_steps: int = 0
    """Steps of a ring between pushes, during which a push is in flight; 0 pushes each step, and waits."""
    epoch_samples: float = math.inf
    """Samples of an epoch, at whose end all rings synchronize."""
    max_pushes_ahead: Callable[[int], float] = lambda _num_rings: math.inf
    """Number of rings -> pushes of all others while a ring computes a round on parameters that it has received: the
    bound on staleness, beyond which they wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeForecast:
    """Forecast of one training mode."""

    mode: str
    step_s: float
    """Predicted: seconds for the progress of one step of synchronous training."""
    computing_s: float
    """Predicted: the part of `step_s` for the slowest ring's computing, and waiting in it for the slowest member."""
    rings: tuple[Ring, ...] = ()
    wire: str = EXACT
    """Wire format of the gradients."""
    inner_steps: int = 0
    """Mode local: train steps in which each parameter gets one outer step."""
    loss_increase: LossIncrease | None = None
    """Measured, on other tasks; None: nothing is lost, or it was not measured."""

    def __str__(self) -> str:
        rings = f", rings {[list(ring) for ring in self.rings]}" if self.rings else ""
        return f"{self.name} {self.step_s:.3g} s, {self.computing_s:.3g} s of it computing{rings}"

    @property
    def name(self) -> str:
        """Mode with its wire format, or with its inner steps."""
        wire = f" in {self.wire}" if self.wire != EXACT else ""
        every = f" with outer steps every {self.inner_steps} steps" if self.inner_steps else ""
        return f"{self.mode}{wire}{every}"


def forecast_modes(
    workers: Sequence[WorkerRates], workload: StepWorkload, rings: Sequence[Sequence[Ring]] = ()
) -> tuple[ModeForecast, ...]:
    """Return the forecast of each mode, simpler modes first.

    `rings`: ring formations to compare; none means that there is no parameter server.
    """
    everyone = tuple(range(len(workers)))
    speeds = [Speed(s_per_sample=each.mean_s) for each in workers]
    equal = balancing.apportion(workload.batch_samples, [Speed(s_per_sample=1.0)] * len(workers), workload.caps)
    shares = balancing.apportion(workload.batch_samples, speeds, workload.caps)
    reducing_s = predicted_allreduce_s(workers, workload.num_bytes)  # in both modes, among the same ranks
    found = [
        ModeForecast(mode=mode, step_s=computing_s + reducing_s, computing_s=computing_s)
        for mode, computing_s in (
            (modes.SYNC, _slowest_compute_s(everyone, equal, workers)),
            (modes.BALANCED, _slowest_compute_s(everyone, shares, workers)),
        )
    ]
    return (*found, *(_forecast_rings(tuple(each), shares, workers, workload) for each in rings))


def forecast_wires(
    exact: ModeForecast, reducing_s: float, wires_s: Mapping[str, float], increases: Mapping[str, LossIncrease]
) -> tuple[ModeForecast, ...]:
    """Return the forecast of an exact mode with its gradients in each wire format whose loss was measured.

    `wires_s`: seconds of an allreduce by format, exact among them, as the plan predicts them: only ratios count.
    """
    return tuple(
        replace(
            exact,
            step_s=exact.step_s - reducing_s * (1 - seconds / wires_s[EXACT]),
            wire=name,
            loss_increase=increases[name],
        )
        for name, seconds in wires_s.items()
        if name in increases
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterSteps:
    """Inner and outer steps of mode local, as they were measured before training."""

    sites: tuple[Site, ...]
    site_steps_s: tuple[float, ...]
    """Measured: seconds of an inner step of each site, from its batch to the end of the optimizer's step."""
    exchange_s: float
    """Measured: seconds of an outer step of one fragment while nobody computes."""
    round_s: float
    """Measured: seconds of a round of `round_steps` train steps, with the outer step of one fragment."""
    round_steps: int
    fragments: int
    inner_steps: int | None
    """As the script asks for; None derives them."""
    max_inner_steps: int
    """Upper limit of derived ones."""
    computing_share: float
    """Least share of the time that is to be computing, if inner steps are derived."""


def forecast_local(workers: Sequence[WorkerRates], workload: StepWorkload, outer: OuterSteps) -> ModeForecast:
    """Return the forecast of mode local, with the inner steps that it would derive from these times.

    Sites compute at the same time, each at its own speed; an exchange has the time of a round, and all wait for what it
    takes longer. No exchange is under way in the first round of an epoch; at its end all wait for one of all fragments.
    """
    first = outer.inner_steps or min(FIRST_INNER_STEPS, outer.max_inner_steps)
    split = RoundSplit(
        batch_samples=workload.batch_samples,
        inner_steps=first,
        speeds=(1.0,) * len(outer.sites),
        num_ranks=tuple(map(len, outer.sites)),
        fragments=min(outer.fragments, first),
        max_inner_steps=outer.max_inner_steps,
    )
    step_s = workload.batch_samples / math.fsum(map(operator.truediv, split.site_batches, outer.site_steps_s))
    outer_step_s = max(0.0, outer.round_s - outer.round_steps * step_s)
    if outer.inner_steps is None:
        split = split.fitted(step_s, outer.exchange_s, min(outer_step_s, outer.exchange_s), outer.computing_share, 0.0)
    round_s = max(outer.round_s + (split.round_steps - outer.round_steps) * step_s, outer.exchange_s)
    num_steps = workload.epoch_samples / workload.batch_samples
    beside_s = (round_s / split.round_steps - step_s) * (1 - min(1.0, split.round_steps / num_steps))
    at_end_s = split.fragments * outer.exchange_s / num_steps
    computing = [
        _site_computing_s([workers[rank] for rank in site], num_samples) / each_s
        for site, num_samples, each_s in zip(outer.sites, split.site_batches, outer.site_steps_s, strict=True)
    ]
    return ModeForecast(
        mode=modes.LOCAL,
        step_s=step_s + beside_s + at_end_s,
        computing_s=step_s * min(1.0, *computing),
        inner_steps=split.inner_steps,
    )


def _site_computing_s(members: Sequence[WorkerRates], num_samples: int) -> float:
    """Return the seconds of computing in an inner step of a site."""
    shares = balancing.apportion(num_samples, [Speed(s_per_sample=each.mean_s) for each in members])
    return _slowest_compute_s(range(len(members)), shares, members)


def with_benchmarked_step(forecasts: Sequence[ModeForecast], balanced_s: float) -> tuple[ModeForecast, ...]:
    """Return the forecasts with the balanced mode's step as benchmarked.

    The benchmark includes effects that a sum of parts lacks: the optimizer's step, the kernel's pauses, and that a
    waiting rank uses less of its part of a processor.
    """
    return tuple(replace(each, step_s=balanced_s) if each.mode == modes.BALANCED else each for each in forecasts)


def with_benchmarked_rounds(
    forecasts: Sequence[ModeForecast], workload: StepWorkload, round_sample_s: Sequence[float]
) -> tuple[ModeForecast, ...]:
    """Return the forecasts with each rank alone as fast as its benchmarked rounds.

    Forecasts of other rings are sums of the same parts: their error for each rank alone applies to them too.

    Args:
        forecasts: Result of `forecast_modes`.
        workload: Its argument.
        round_sample_s: For each rank, mean seconds of a round divided by the round's samples.
    """
    alone = next((each for each in forecasts if each.mode == modes.PS), None)
    if alone is None:
        return tuple(forecasts)
    step_s = workload.batch_samples / math.fsum(1 / each_s for each_s in round_sample_s) / _sample_worth(workload)
    return tuple(
        replace(each, step_s=each.step_s * step_s / alone.step_s) if each.rings else each for each in forecasts
    )


def choose_forecast(forecasts: Sequence[ModeForecast], min_gain: float = MIN_RING_GAIN) -> ModeForecast:
    """Return the fastest forecast; an earlier, simpler one if that is slower by less than the minimum gain.

    `min_gain`: minimum gain of rings over one step of all.
    """
    best_s = min(each.step_s for each in forecasts)
    return next(
        each for each in forecasts if each.step_s <= best_s * (1 + (_MIN_GAIN_AMONG_RINGS if each.rings else min_gain))
    )


def expected_slowest_s(values: Sequence[Sequence[float]]) -> float:
    """Return the expected maximum of several times, each of which takes one of its values, all equally likely."""
    steps = sorted((value, index) for index, own in enumerate(values) for value in own)
    counts, num_without, total, before = [0] * len(values), len(values), 0.0, 0.0
    log_chance = -math.fsum(math.log(len(own)) for own in values)  # that none is larger; tiny at first for thousands
    for value, index in steps:
        counts[index] += 1
        if counts[index] == 1:
            num_without -= 1
        else:
            log_chance += math.log(counts[index] / (counts[index] - 1))
        chance = 0.0 if num_without else math.exp(log_chance)
        total += value * (chance - before)
        before = chance
    return total


def predicted_allreduce_s(workers: Sequence[WorkerRates], num_bytes: float) -> float:
    """Return the predicted seconds of an allreduce of the gradients: the bound by links, and the workers' overhead."""
    count = len(workers)
    if count < 2:
        return 0.0
    return allreduce_bound_s(workers, num_bytes) + (count - 1) / count * math.fsum(
        each.reduce_overhead_s for each in workers
    )


def allreduce_bound_s(workers: Sequence[WorkerRates], num_bytes: float) -> float:
    """Return the least seconds of an allreduce among two or more, by their NICs and by uplinks between them."""
    rates = [each.rate_bytes_per_s for each in workers]
    between = crossed_uplinks([each.uplinks for each in workers])
    return num_bytes * max(2 * (len(rates) - 1) / math.fsum(rates), *(1 / rate for rate in (*rates, *between.values())))


def with_benchmarked_allreduce(
    workers: Sequence[WorkerRates], num_bytes: float, allreduce_s: float
) -> list[WorkerRates]:
    """Return the workers with overheads that explain a measured allreduce among all of them.

    Time beyond the link time is attributed to processors, in proportion to each one's seconds per sample: a worker that
    waits for its processor delays the whole ring. If no rate is known at all, links are assumed to be the limit, equal
    for all.

    `workers`: two or more, not yet adjusted by this function.
    """
    count = len(workers)
    if all(math.isinf(each.rate_bytes_per_s) for each in workers):
        rate = 2 * (count - 1) / count * num_bytes / allreduce_s
        return [replace(each, rate_bytes_per_s=rate) for each in workers]
    more_s = max(0.0, allreduce_s - allreduce_bound_s(workers, num_bytes)) * count / (count - 1)
    all_s = math.fsum(each.mean_s for each in workers)
    return [replace(each, reduce_overhead_s=more_s * each.mean_s / all_s) for each in workers]


def with_benchmarked_exchange(
    workers: Sequence[WorkerRates], num_bytes: float, exchange_s: float, server_bytes_per_s: float
) -> list[WorkerRates]:
    """Return the workers with overheads that explain the first one's measured exchange with the parameter server.

    Time beyond the link time is its processor work; that of others grows with their seconds per sample.
    """
    first = workers[0]
    links_s = 2 * num_bytes / min(first.rate_bytes_per_s, server_bytes_per_s)
    more_s = max(0.0, exchange_s - links_s)
    return [replace(each, push_overhead_s=more_s * each.mean_s / first.mean_s) for each in workers]


def crossed_uplinks(paths: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the uplinks that traffic among these nodes uses: those of switches above some, but not all, of them.

    Args:
        paths: `WorkerRates.uplinks` of each node.
    """
    found = {name: rate for path in paths for name, rate in path.items()}
    return {name: rate for name, rate in found.items() if not all(name in path for path in paths)}


def rings_by_switch(paths: Sequence[Mapping[str, float]]) -> tuple[tuple[Ring, ...], ...]:
    """Return rings of workers below one switch: once by the nearest switches, once by the topmost.

    Args:
        paths: `WorkerRates.uplinks` of each.
    """
    ways = []
    for place in (0, -1):
        rings: dict[str, list[int]] = {}
        for rank, path in enumerate(paths):
            rings.setdefault([*path][place] if path else "", []).append(rank)
        ways.append(tuple(map(tuple, rings.values())))
    return tuple(ways)


def rings_by_rate(rates_bytes_per_s: Sequence[float]) -> tuple[Ring, ...]:
    """Return rings of workers with about equally fast links, the fastest ring first; one ring if all are alike."""
    line = sorted(range(len(rates_bytes_per_s)), key=lambda rank: (-rates_bytes_per_s[rank], rank))
    rings = [[line[0]]]
    for before, rank in itertools.pairwise(line):
        if rates_bytes_per_s[before] > rates_bytes_per_s[rank] * _RATE_GROUP_RATIO:  # unknown links count as equal
            rings.append([])
        rings[-1].append(rank)
    return tuple(map(tuple, rings))


def _slowest_compute_s(ranks: Sequence[int], shares: Sequence[int], workers: Sequence[WorkerRates]) -> float:
    return expected_slowest_s([[shares[rank] * each_s for each_s in workers[rank].sample_s] for rank in ranks])


def _forecast_rings(
    rings: tuple[Ring, ...], shares: Sequence[int], workers: Sequence[WorkerRates], workload: StepWorkload
) -> ModeForecast:
    """Forecast rings that run side by side, share links to the server, and wait by the bound on staleness."""
    rounds_s, slowest_s = [], 0.0
    ways = [crossed_uplinks([workers[ring[0]].uplinks, workload.server_uplinks]) for ring in rings]
    for ring, way in zip(rings, ways, strict=True):
        members = [workers[rank] for rank in ring]
        rates = [each.rate_bytes_per_s for each in members]
        computing_s = _slowest_compute_s(ring, shares, workers)
        between = crossed_uplinks([each.uplinks for each in members])
        broadcasting_s = 0.0
        if len(ring) > 1:  # all bytes pass once
            passing_s = math.fsum(each.reduce_overhead_s for each in members) / 2
            broadcasting_s = workload.num_bytes / min(*rates, *between.values()) + passing_s
        exchanging_s = 2 * workload.num_bytes / min(rates[0], workload.server_bytes_per_s, *way.values())
        exchanging_s += workload.server_processing_s
        exchanging_s += (
            members[0].reduce_overhead_s if members[0].push_overhead_s is None else members[0].push_overhead_s
        )
        stepping_s = computing_s + predicted_allreduce_s(members, workload.num_bytes)
        overlapped_s = max(workload.local_steps * stepping_s, exchanging_s)
        rounds_s.append((overlapped_s if workload.local_steps else stepping_s + exchanging_s) + broadcasting_s)
        slowest_s = max(slowest_s, computing_s)
    steps = max(1, workload.local_steps)
    samples_per_s = math.fsum(
        steps * sum(shares[rank] for rank in ring) / (each_s * wait * crowding)
        for ring, each_s, wait, crowding in zip(
            rings,
            rounds_s,
            _staleness_waits(rounds_s, workload),
            _link_contention(rounds_s, ways, workload),
            strict=True,
        )
    )
    worth = _sample_worth(workload) if len(rings) > 1 else 1.0
    mode = modes.PS if all(len(ring) == 1 for ring in rings) else modes.PS_HRA
    step_s = workload.batch_samples / samples_per_s / worth
    loss_increase = RINGS_LOSS if len(rings) > 1 else None
    return ModeForecast(mode=mode, step_s=step_s, computing_s=slowest_s, rings=rings, loss_increase=loss_increase)


def _sample_worth(workload: StepWorkload) -> float:
    """Return the worth of a sample in several rings that synchronize at the end of an epoch, which costs about a step.

    A ring that has just begun its part of the last batch delays the others, by half a batch. Parts become small towards
    the end, but a round of few samples takes longer for each. Then all exchange their progress. Measured: 0.8 to 1.2
    steps (docs/explanation/mode-choice.md).
    """
    return SAMPLE_WORTH / (1 + workload.batch_samples / workload.epoch_samples)


def _link_contention(
    rounds_s: Sequence[float], ways: Sequence[Mapping[str, float]], workload: StepWorkload
) -> list[float]:
    """Return each ring's slowdown factor from sharing the links to the server with the others."""

    def load(rate: float, users: Sequence[float]) -> float:
        return math.fsum(1 / each_s for each_s in users) * workload.num_bytes / rate

    passed = {name: rate for way in ways for name, rate in way.items()}
    loads = {
        name: load(rate, [each_s for each_s, way in zip(rounds_s, ways, strict=True) if name in way])
        for name, rate in passed.items()
    }
    server = load(workload.server_bytes_per_s, rounds_s)
    serving = math.fsum(workload.server_processing_s / each_s for each_s in rounds_s)
    return [max(1.0, server, serving, *(loads[name] for name in way)) for way in ways]


def _staleness_waits(rounds_s: Sequence[float], workload: StepWorkload) -> list[float]:
    """Return each ring's slowdown factor from waiting for a ring that would be too far behind."""
    depth = 2 if workload.local_steps else 1  # a round that is pushed meanwhile was computed on earlier parameters
    most = workload.max_pushes_ahead(len(rounds_s))
    behind = [
        math.fsum(depth * own_s / each_s for ring, each_s in enumerate(rounds_s) if ring != own) / most
        for own, own_s in enumerate(rounds_s)
    ]
    return [max([1.0, *behind[:ring], *behind[ring + 1 :]]) for ring in range(len(rounds_s))]
