"""Step benchmark: a few steps of mode `balanced` before the first one that counts, to measure real collectives.

Link rates do not explain everything. A rank with a small fraction of a processor moves bytes as slowly as it computes;
its kernel stops it in the middle of a collective, and all others wait. No rate of a NIC predicts that. So ranks load
and compute shares that take all of them about equally long and leave no trace in the model, sum as many bytes as the
gradients have, and let an optimizer like the script's update a copy of the parameters. Then rank 0 exchanges as many
bytes with the parameter server. If these times suggest that each rank alone may be faster than balanced, all ranks run
such rounds at once: a rank that waits for no other has no pauses in which its quota recovers, so it computes more
slowly than in steps of all.

Where mode local is a candidate, sites run inner steps, outer steps alone, and whole rounds of both, with outer
gradients of zero.
"""

import dataclasses
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import rpc
from ringweave.environment import WorkerEnvironment
from ringweave.jobs import modes
from ringweave.param_server import optimizers
from ringweave.param_server.client import RingClient
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ExchangeBenchmarkResult, ParameterGroup, ServerSetup, TensorSpec
from ringweave.planning import balancing, mode_forecast, sites
from ringweave.planning.balancing import Speed
from ringweave.training import gradients, speed_test
from ringweave.training.collectives import ControlGroup
from ringweave.training.mode_choice import forecast
from ringweave.training.options import Local, Script
from ringweave.training.outer_optimizer import OuterOptimizer
from ringweave.training.outer_steps import OuterExchange, SiteExchange, SiteReport
from ringweave.training.rings.ring_formation import SERVER_START_TIMEOUT_S, server_connectors

_BENCHMARK_KEYS = ("reducing_s", "balanced_s", "serving_s", "exchanging_s", "benchmarked_s", "rounds_s")
"""Keys that the benchmark adds to the ranks' reports."""
BUDGET_S = 5.0
"""Time budget of all steps: as many run as fit, at least one."""
_MAX_STEPS = 12
_MIN_STEPS = 4
"""With fewer steps, computing times say less than trials do. The first step warms up and does not count."""
_MAX_MESSAGE_BYTES = 256 * 2**20
"""Limit of a message; larger ones are assumed to take proportionally longer."""
_MAX_ROUND_BYTES = 32 * 2**20
"""Limit of a round, in which all ranks exchange as many bytes: the server holds a model of them, and an answer for each
rank."""
_MAX_ROUND_RATIO = 1.1
"""Limit in multiples of a balanced step: if each rank alone is predicted to take longer, its rounds are not run."""
_SITE_KEYS = ("inner_step_s", "outer_exchange_s", "round_s", "round_steps")
"""Keys that the benchmark of sites adds."""
_SITE_BUDGET_S = 2.0
"""Time budget of inner steps, and of rounds: at least three run."""
_MAX_SITE_STEPS = 200
_MAX_OUTER_VALUES = 2**19
"""Limit of a fragment; larger ones are assumed to take proportionally longer."""
EXCHANGE_BUDGET_S = 1.0
"""Time budget of all exchanges but the first: as many run as fit, at least one."""
_MAX_EXCHANGES = 16
_MAX_PUSH_BYTES = 4 * 2**20
"""Limit of a push; larger ones are assumed to take proportionally longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTimes:
    """Measured times of an exchange."""

    serving_s: float
    """Seconds per exchange at which the server's processor has no pause left."""
    exchanging_s: float
    """Seconds that an exchange takes this rank alone, without the server's computing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerBenchmark:
    """Benchmarks with the parameter server."""

    exchange: Callable[[], ExchangeTimes]
    """Exchanges with the server while no other rank does; see `benchmark_exchanges`."""
    rounds: Callable[[], AbstractContextManager[Callable[[], object]]] | None = None
    """Connects a rank to the server and returns its work in each round, without computing; see `benchmark_rounds`. None
    if each rank alone is no candidate, or rounds have several steps."""


@dataclass(kw_only=True, slots=True)
class _StepTimes:
    """Times of this rank's steps."""

    samples_s: list[float] = field(default_factory=list)
    """Seconds of a sample, for each step."""
    steps_s: list[float] = field(default_factory=list)
    """Seconds of each step, to the end of the optimizer's step."""
    waits_s: list[float] = field(default_factory=list)
    """Seconds from the end of computing to the end of the step."""
    problem: str = ""
    """Reason why it could not compute; empty if it could."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepRunner:
    """Steps of a group, as this rank runs them."""

    model: nn.Module
    loader: DataLoader
    share: int
    message: torch.Tensor
    update: Callable[[], object]
    """Step of the optimizer."""
    group: dist.ProcessGroup | None = None

    def run(self, num_steps: int) -> _StepTimes:
        """Run steps. A rank that cannot compute still takes part in the allreduce."""
        times, batch = _StepTimes(), None
        with speed_test.preserve_model_state(self.model):
            for _ in range(num_steps):
                started_s = time.perf_counter()
                batch = _compute_batch(self.model, self.loader, self.share, batch, times)
                began_s = time.perf_counter()
                _allreduce(self.message, self.group)
                times.samples_s.append((began_s - started_s) / max(1, self.share))
                times.waits_s.append(time.perf_counter() - began_s)
                self.update()
                _synchronize(self.message.device)
                times.steps_s.append(time.perf_counter() - started_s)
        return times


def benchmark_if_useful(
    reports: list[dict[str, Any]],
    script: Script,
    control_group: ControlGroup,
    environment: WorkerEnvironment,
    mode: str,
    *,
    is_open: bool,
) -> tuple[list[dict[str, Any]], SiteExchange | None]:
    """Return the ranks' reports with the results of benchmarks that can change the choice; and the sites, if they ran.

    Within a bound on the loss `benchmark_steps` runs also without a parameter server, and `benchmark_sites`.
    """
    triple, has_bound = (script.model, script.optimizer, script.loader), script.max_loss_increase is not None
    if is_useful(reports, mode, script.settings.rings, is_open=is_open):
        exchange_args = (
            script.optimizer,
            reports[0]["num_bytes"],
            control_group.world_size,
            server_connectors(environment, keeps_readable=True),
        )
        server = ServerBenchmark(
            exchange=lambda: benchmark_exchanges(*exchange_args),
            rounds=(lambda: benchmark_rounds(*exchange_args)) if is_open and not script.settings.local_steps else None,
        )
        reports = benchmark_steps(reports, triple, control_group, server)
    elif is_open and has_bound:
        reports = benchmark_steps(reports, triple, control_group, None)
    if not (is_open and has_bound and all(each["trial_s"] for each in reports)):
        return reports, None
    all_sites = sites.sites_of(script.local.sites, reports)
    if len(all_sites) < 2:
        return reports, None
    exchange = SiteExchange(all_sites, control_group.rank)
    return benchmark_sites(reports, triple, control_group, exchange, script.local), exchange


def benchmark_steps(
    reports: Sequence[Mapping[str, Any]],
    triple: tuple[nn.Module, Optimizer, DataLoader],
    control_group: ControlGroup,
    server: ServerBenchmark | None,
) -> list[dict[str, Any]]:
    """Return the ranks' reports with measured times in seconds; None for unknown times.

    `reducing_s` is the time of collectives, `balanced_s` of whole steps, `serving_s` and `exchanging_s` of an exchange
    with the parameter server, see `ExchangeTimes`. Of each rank, `benchmarked_s` has the time of a sample in each step,
    and `rounds_s` in each round alone, with the exchange that ends it.

    All ranks call it alike, since all have the same reports.

    Args:
        reports: Reports of all ranks, as in `forecast_modes`, with `cap`, the limit of samples or None.
        triple: The model, as in `run_model_trial`, an optimizer that the server supports, and the loader; none of them
            is changed.
        control_group: Messages among all ranks.
        server: The exchange runs on the first rank, while the others wait; rounds run on all ranks. None: neither.

    Raises:
        CommunicationError: A rank is gone.
        RpcError: The server cannot be reached.
    """
    if len(reports) < 2 or not all(each["trial_s"] for each in reports):
        return [{**each, **dict.fromkeys(_BENCHMARK_KEYS)} for each in reports]
    shares, num_steps = _plan_steps(reports)
    model, optimizer, loader = triple
    inner = gradients.unwrap_ddp(model)
    num_bytes = reports[0]["num_bytes"]
    message = torch.zeros(max(1, min(num_bytes, _MAX_MESSAGE_BYTES) // 4), device=next(inner.parameters()).device)
    update = _copy_optimizer_step(optimizer)
    runner = _StepRunner(model=inner, loader=loader, share=shares[control_group.rank], message=message, update=update)
    began_s = time.perf_counter()
    _allreduce(message)  # the first one makes connections
    first_s = max(each["first_s"] for each in control_group.gather_json({"first_s": time.perf_counter() - began_s}))
    at_least = _MIN_STEPS if first_s <= BUDGET_S else 1  # links of unknown rates may be thin
    num_steps = min(num_steps, max(at_least, int(2 * BUDGET_S / max(first_s, 1e-9))))
    own_times = runner.run(num_steps)
    exchanged = dataclasses.asdict(server.exchange()) if server and control_group.rank == 0 else {}
    times_by_rank = control_group.gather_json({**dataclasses.asdict(own_times), **exchanged})
    measured = _with_steps(reports, times_by_rank, num_steps)
    return _with_rounds(measured, (inner, loader), shares[control_group.rank], control_group, server)


def _with_steps(
    reports: Sequence[Mapping[str, Any]], times_by_rank: Sequence[Mapping[str, Any]], num_steps: int
) -> list[dict[str, Any]]:
    """Return the ranks' reports with what their `_StepTimes`, and the first one's exchange, say."""
    reducing_s, balanced_s, benchmarked_s = None, None, [None] * len(times_by_rank)
    if not any(each["problem"] for each in times_by_rank):
        reducing_s = _median_collective_s([each["waits_s"] for each in times_by_rank]) * max(
            1.0, reports[0]["num_bytes"] / _MAX_MESSAGE_BYTES
        )
        if num_steps >= _MIN_STEPS:
            balanced_s = _median_step_s([each["steps_s"] for each in times_by_rank])
            benchmarked_s = [each["samples_s"][1:] for each in times_by_rank]
    common = {
        "reducing_s": reducing_s,
        "balanced_s": balanced_s,
        **{name: times_by_rank[0].get(name) for name in ("serving_s", "exchanging_s")},
        "rounds_s": None,
    }
    return [{**each, **common, "benchmarked_s": steps_s} for each, steps_s in zip(reports, benchmarked_s, strict=True)]


def benchmark_sites(
    reports: Sequence[Mapping[str, Any]],
    triple: tuple[nn.Module, Optimizer, DataLoader],
    control_group: ControlGroup,
    exchange: SiteExchange,
    local: Local,
) -> list[dict[str, Any]]:
    """Return the ranks' reports with measured seconds of mode local; None if a rank could not compute.

    Of each rank `inner_step_s`, of an inner step in its site; `outer_exchange_s` of an outer step of one fragment while
    nobody computes; `round_s` of a round with it of `round_steps` train steps, about those of the mode. All ranks call
    it alike.

    Args:
        reports: As in `benchmark_steps`.
        triple: As there; nothing of it is changed.
        control_group: Messages among all ranks.
        exchange: The sites.
        local: Settings of mode local.

    Raises:
        CommunicationError: A rank is gone.
    """
    model, optimizer, loader = triple
    inner, index = gradients.unwrap_ddp(model), exchange.site_control.rank
    site_samples = -(-reports[0]["batch_samples"] * len(exchange.site) // len(reports))
    shares = balancing.apportion(site_samples, _speeds_of([reports[rank] for rank in exchange.site]))
    device, num_values = next(inner.parameters()).device, min(reports[0]["num_bytes"], _MAX_MESSAGE_BYTES) // 4
    runner = _StepRunner(
        model=inner,
        loader=loader,
        share=shares[index],
        message=torch.zeros(max(1, num_values), device=device),
        update=_copy_optimizer_step(optimizer),
        group=exchange.site_group,
    )
    first = runner.run(2)  # the first one makes connections
    seen = control_group.gather_json({"step_s": first.steps_s[-1], "problem": first.problem})
    if any(each["problem"] for each in seen):
        return [{**each, **dict.fromkeys(_SITE_KEYS)} for each in reports]
    num_steps = _count_in_budget(max(each["step_s"] for each in seen))
    own = _settled_mean(runner.run(num_steps).steps_s)
    steps_s = [each["step_s"] for each in control_group.gather_json({"step_s": own})]
    outer = _OuterRounds(runner, inner, exchange, local, control_group)
    common = outer.measure([max(steps_s[rank] for rank in site) for site in exchange.sites])
    return [{**each, "inner_step_s": step_s, **common} for each, step_s in zip(reports, steps_s, strict=True)]


def _count_in_budget(seconds: float) -> int:
    """Return the number of runs of so many seconds."""
    return max(3, min(_MAX_SITE_STEPS, int(_SITE_BUDGET_S / max(seconds, 1e-9))))


def _settled_mean(seconds: Sequence[float]) -> float:
    """Return the mean without the first quarter, in which schedules are tried, as training does at its start only."""
    return statistics.fmean(seconds[len(seconds) // 4 :])


class _OuterRounds:
    """Rounds of mode local with outer gradients of zero, as this rank runs them."""

    def __init__(
        self, runner: _StepRunner, model: nn.Module, exchange: SiteExchange, local: Local, control_group: ControlGroup
    ) -> None:
        """Create them."""
        self._runner, self._exchange, self._local, self._control = runner, exchange, local, control_group
        self._fragments = min(local.fragments, local.inner_steps or min(sites.FIRST_INNER_STEPS, local.max_inner_steps))
        copied, self._in_proportion = _copy_fragment(model, self._fragments)
        self._outer = OuterOptimizer(copied, local, 1)
        self._outer.take_parameters_once()

    def measure(self, site_steps_s: Sequence[float]) -> dict[str, Any]:
        """Return the measured times that are the same for all ranks, by the seconds of the sites' inner steps."""
        self._seconds_of(2, 0)  # the first one makes connections
        exchange_s = self._seconds_of(_count_in_budget(self._seconds_of(1, 0)), 0)
        num_ranks = [len(site) for site in self._exchange.sites]
        step_s = sum(num_ranks) / math.fsum(map(operator.truediv, num_ranks, site_steps_s))
        split = sites.RoundSplit(batch_samples=1, inner_steps=self._fragments, speeds=(1.0,), fragments=self._fragments)
        if self._local.inner_steps:
            split = dataclasses.replace(split, inner_steps=self._local.inner_steps)
        else:
            split = split.fitted(step_s, exchange_s * self._in_proportion, 0.0, self._local.computing_share, 0.0)
        round_steps = max(1, min(split.round_steps, int(_SITE_BUDGET_S / step_s)))
        own_steps = max(1, round(round_steps * step_s / site_steps_s[self._exchange.index]))
        round_s = self._seconds_of(_count_in_budget(max(exchange_s, round_steps * step_s)), own_steps)
        exchange_s = min(exchange_s, round_s)  # a round has one
        outer_s = (round_s - max(exchange_s, round_steps * step_s)) * self._in_proportion
        exchange_s *= self._in_proportion
        round_s = max(exchange_s, round_steps * step_s) + outer_s
        self._exchange.exchange_s = 0.0
        return {"outer_exchange_s": exchange_s, "round_s": round_s, "round_steps": round_steps}

    def _seconds_of(self, num_rounds: int, num_steps: int) -> float:
        """Return the mean seconds of a settled round with so many inner steps of this site, over all ranks."""
        seconds = list[float]()
        for _ in range(num_rounds):
            began_s = time.perf_counter()
            gradient = self._outer.begin_step([0])
            running = OuterExchange(self._exchange, self._local.format, gradient, SiteReport(weight=1.0))
            self._runner.run(num_steps)
            running.wait()
            self._outer.apply_step(gradient)
            seconds.append(time.perf_counter() - began_s)
        own = {"seconds": _settled_mean(seconds)}
        return statistics.fmean(each["seconds"] for each in self._control.gather_json(own))


def _copy_fragment(model: nn.Module, num_fragments: int) -> tuple[nn.Module, float]:
    """Return copies of as many parameters as a fragment has, or of fewer; and the values of a fragment for each."""
    trained = [each.detach().flatten() for each in model.parameters() if each.requires_grad]
    num_values = sum(map(len, trained)) / num_fragments
    left, copied = max(1, min(math.ceil(num_values), _MAX_OUTER_VALUES)), []
    for each in trained:
        if left:
            copied.append(nn.Parameter(each[:left].clone()))
            left -= len(copied[-1])
    return nn.ParameterList(copied), num_values / sum(map(len, copied))


def _with_rounds(
    measured: list[dict[str, Any]],
    inputs: tuple[nn.Module, DataLoader],
    share: int,
    control_group: ControlGroup,
    server: ServerBenchmark | None,
) -> list[dict[str, Any]]:
    """Return the reports with the times of rounds alone; unchanged if there are none, or a rank failed in them."""
    num_rounds = _count_rounds(measured) if server and server.rounds else 0
    if server is None or server.rounds is None or not num_rounds:
        return measured
    with server.rounds() as once:
        control_group.gather_json({})  # some ranks take longer to connect than others
        alone = _run_rounds(*inputs, share, once, num_rounds)
    times_by_rank = control_group.gather_json(dataclasses.asdict(alone))
    if any(each["problem"] for each in times_by_rank):
        return measured
    return [
        {**each, "rounds_s": of_rank["samples_s"][1:]} for each, of_rank in zip(measured, times_by_rank, strict=True)
    ]


def is_useful(reports: Sequence[Mapping[str, Any]], mode: str, num_rings: int | None, *, is_open: bool) -> bool:
    """Return whether the benchmark can change the mode, or the rings.

    Args:
        reports: Reports of all ranks.
        mode: The mode if it is not open.
        num_rings: Number of rings that the script asks for.
        is_open: The mode may be chosen.
    """
    are_open = is_open or (mode == modes.PS_HRA and num_rings is None)
    return are_open and forecast.fits_parameter_server(reports)


def _plan_steps(reports: Sequence[Mapping[str, Any]]) -> tuple[Sequence[int], int]:
    """Return each rank's samples in a step, by trials, and the number of steps in the budget.

    Args:
        reports: As in `benchmark_steps`.
    """
    speeds = _speeds_of(reports)
    batch_samples = reports[0]["batch_samples"]
    caps = balancing.share_limits(batch_samples, (each["cap"] for each in reports))
    shares = balancing.apportion(batch_samples, speeds, caps)
    workers, work = forecast.rates_and_workload(reports)  # over thin links most of a step is the allreduce
    step_s = max(share * speed.s_per_sample for share, speed in zip(shares, speeds, strict=True))
    step_s += mode_forecast.predicted_allreduce_s(workers, min(work.num_bytes, _MAX_MESSAGE_BYTES))
    return shares, max(1, min(_MAX_STEPS, int(BUDGET_S / step_s))) if step_s > 0 else _MAX_STEPS


def _speeds_of(reports: Sequence[Mapping[str, Any]]) -> list[Speed]:
    """Return the ranks' speeds by trials."""
    trials = speed_test.denoise_trials([each["trial_s"] for each in reports])
    return [Speed(s_per_sample=sum(own) / len(own)) for own in trials]


def _count_rounds(reports: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of rounds of each rank alone; 0 if they cannot make it the fastest mode.

    Args:
        reports: As `benchmark_steps` returns it, without rounds.
    """
    balanced_s = reports[0]["balanced_s"]
    if balanced_s is None or reports[0]["num_bytes"] > _MAX_ROUND_BYTES:
        return 0
    alone = tuple((rank,) for rank in range(len(reports)))
    *_, found = forecast.forecast_modes(reports, [alone]).forecasts
    num_rounds = min(_MAX_STEPS, int(BUDGET_S / found.step_s))
    return num_rounds if found.step_s < _MAX_ROUND_RATIO * balanced_s and num_rounds >= _MIN_STEPS else 0


def _median_collective_s(waits_s: Sequence[Sequence[float]]) -> float:
    """Return the median over steps; in each step, the last rank to arrive waits for no other.

    Args:
        waits_s: Of each rank, seconds from the end of its computing to the end of the step, for each step.
    """
    return statistics.median(min(of_step) for of_step in zip(*waits_s, strict=True))


def _median_step_s(steps_s: Sequence[Sequence[float]]) -> float:
    """Return the median time of a step without the first one, which has start-up costs.

    Args:
        steps_s: Of each rank, seconds of each step; at least two.
    """
    return statistics.median([statistics.fmean(of_step) for of_step in zip(*steps_s, strict=True)][1:])


def _run_rounds(
    model: nn.Module,
    loader: DataLoader,
    share: int,
    once: Callable[[], object],
    num_rounds: int,
) -> _StepTimes:
    """Run rounds without waits for other ranks; `once` ends each round."""
    times, batch = _StepTimes(), None
    with speed_test.preserve_model_state(model):
        for _ in range(num_rounds):
            started_s = time.perf_counter()
            batch = _compute_batch(model, loader, share, batch, times)
            once()
            times.samples_s.append((time.perf_counter() - started_s) / max(1, share))
    return times


def _compute_batch(model: nn.Module, loader: DataLoader, share: int, batch: Any, times: _StepTimes) -> Any:
    """Load a batch, or reuse the last one if workers load; compute, or record why that fails."""
    try:
        if batch is None or loader.num_workers == 0:
            batch = speed_test.first_batch(loader, max(1, share), model)
        speed_test.run_forward_backward(model, batch)
    except Exception as error:  # the script's own code, at an untried size
        times.problem = times.problem or f"{type(error).__name__}: {error}"
    return batch


def _copy_optimizer_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the step of an optimizer of the same kind, on copies of the parameters; a no-op for very large ones."""
    groups = [
        {name: value for name, value in group.items() if name != "param_names"}
        | {"params": [each for each in group["params"] if each.requires_grad]}
        for group in optimizer.param_groups
    ]
    if sum(each.nbytes for group in groups for each in group["params"]) > _MAX_MESSAGE_BYTES:
        return lambda: None
    for group in groups:
        group["params"] = [each.detach().clone() for each in group["params"]]
        for each in group["params"]:
            each.grad = torch.zeros_like(each)
    optimizer_class: Any = type(optimizer)
    return optimizer_class(groups).step


def _allreduce(message: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(message, group=group)
    _synchronize(message.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def benchmark_exchanges(
    optimizer: Optimizer,
    num_bytes: int,
    num_rings: int,
    servers: Sequence[Callable[[], rpc.RpcClient]],
    clock: Callable[[], float] = time.perf_counter,
) -> ExchangeTimes:
    """Exchange parameters of zero, as many bytes as the model's, or scaled from fewer.

    Link rates do not explain everything. A server with a small fraction of a processor takes longer to apply a push
    than to receive it, rings that push at the same time wait for each other there, and a pushing rank has to encrypt
    and decrypt. The server is assumed to use one processor, or the fraction of one that its quota allows.

    Args:
        optimizer: The script's optimizer: the server runs the same kind, with the options of the first group.
        num_bytes: Bytes of the parameters.
        num_rings: Rings that push in a train step.
        servers: Connectors, one for each server of the job, which has not started.
        clock: Monotonic clock in seconds.

    Raises:
        RpcError: None of them can be reached, or it refuses.
        TrainingError: The server cannot run this optimizer.
    """
    pushed_bytes = min(num_bytes, _MAX_PUSH_BYTES)
    with _open_exchange(optimizer, pushed_bytes, num_rings, servers) as (_, exchange):
        first = last = exchange()  # the first one makes the connection, and memory
        began_s, count = clock(), 0
        while not count or (count < _MAX_EXCHANGES and clock() - began_s < EXCHANGE_BUDGET_S):
            last, count = exchange(), count + 1
        took_s = (clock() - began_s) / count
    of_one_s = (last.processor_s - first.processor_s) / count
    in_proportion = max(1.0, num_bytes / max(1, pushed_bytes))
    return ExchangeTimes(
        serving_s=of_one_s / min(1.0, last.cores or 1.0) * in_proportion,
        exchanging_s=max(0.0, took_s - of_one_s) * in_proportion,
    )


@contextmanager
def benchmark_rounds(
    optimizer: Optimizer, num_bytes: int, num_rings: int, servers: Sequence[Callable[[], rpc.RpcClient]]
) -> Iterator[Callable[[], object]]:
    """Return the work of a one-rank ring after computing, on all ranks at once: take samples, and exchange.

    Args:
        optimizer: As in `benchmark_exchanges`.
        num_bytes: Bytes of the parameters, all of which are exchanged.
        num_rings: Number of ranks.
        servers: As in `benchmark_exchanges`.

    Raises:
        RpcError: None of them can be reached, or it refuses.
        TrainingError: The server cannot run this optimizer.
    """
    with _open_exchange(optimizer, num_bytes, num_rings, servers) as (client, exchange):

        def once() -> None:
            client.status()  # as short a call as that for samples, which do not exist before the job starts
            exchange()

        once()  # the first one makes the connection, and memory
        yield once


@contextmanager
def _open_exchange(
    optimizer: Optimizer, num_bytes: int, num_rings: int, servers: Sequence[Callable[[], rpc.RpcClient]]
) -> Iterator[tuple[RingClient, Callable[[], ExchangeBenchmarkResult]]]:
    """Open a connection; yield it with a function that sends parameters of zero there and back."""
    setup = _benchmark_setup(optimizer, max(1, num_bytes // 4), num_rings)
    gradient, parameters = FlatTensors(setup.tensors), FlatTensors(setup.tensors)
    for piece in gradient.pieces:
        piece.zero_()
    client = RingClient(servers, 0, reconnect_timeout_s=SERVER_START_TIMEOUT_S)
    try:
        yield client, lambda: client.benchmark_exchange(setup, gradient.buffers(), parameters.buffers())
        client.end_benchmark()
    finally:
        client.close()


def _benchmark_setup(optimizer: Optimizer, num_elements: int, num_rings: int) -> ServerSetup:
    """Return a set-up with one tensor in place of all tensors."""
    options = optimizers.group_options(optimizer.param_groups[0])
    return ServerSetup(
        tensors=[TensorSpec(name="benchmark", shape=[num_elements], dtype="float32")],
        optimizer=optimizers.check_optimizer_name(optimizers.optimizer_name(optimizer)),
        groups=[ParameterGroup(parameters=[0], options=options)],
        rings=[[ring] for ring in range(num_rings)],
        overlaps=False,
        compensation=0.0,
    )
