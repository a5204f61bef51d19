"""Step benchmark: a few steps of mode `balanced` before the first one that counts, to measure real collectives.

Link rates do not explain everything. A rank with a small fraction of a processor moves bytes as slowly as it computes;
its kernel stops it in the middle of a collective, and all others wait. No rate of a NIC predicts that. So ranks load
and compute shares that take all of them about equally long and leave no trace in the model, sum as many bytes as the
gradients have, and let an optimizer like the script's update a copy of the parameters. Then rank 0 exchanges as many
bytes with the parameter server. If these times suggest that each rank alone may be faster than balanced, all ranks run
such rounds at once: a rank that waits for no other has no pauses in which its quota recovers, so it computes more
slowly than in steps of all.
"""

import dataclasses
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
from ringweave.planning import balancing, mode_forecast
from ringweave.planning.balancing import Speed
from ringweave.training import gradients, speed_test
from ringweave.training.collectives import ControlGroup
from ringweave.training.mode_choice import forecast, trial
from ringweave.training.options import Asynchronous
from ringweave.training.rings.server_job import SERVER_START_TIMEOUT_S, server_connectors

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


def benchmark_if_useful(
    reports: list[dict[str, Any]],
    triple: tuple[nn.Module, Optimizer, DataLoader],
    control_group: ControlGroup,
    environment: WorkerEnvironment,
    settings: Asynchronous,
    mode: str,
    *,
    is_open: bool,
) -> list[dict[str, Any]]:
    """Return the ranks' reports, with the results of `benchmark_steps` if these can change the choice."""
    if not is_useful(reports, mode, settings.rings, is_open=is_open):
        return reports
    optimizer = triple[1]
    exchange_args = (
        optimizer,
        reports[0]["num_bytes"],
        control_group.world_size,
        server_connectors(environment, keeps_readable=True),
    )
    server = ServerBenchmark(
        exchange=lambda: benchmark_exchanges(*exchange_args),
        rounds=(lambda: benchmark_rounds(*exchange_args)) if is_open and not settings.local_steps else None,
    )
    return benchmark_steps(reports, triple, control_group, server)


def benchmark_steps(
    reports: Sequence[Mapping[str, Any]],
    triple: tuple[nn.Module, Optimizer, DataLoader],
    control_group: ControlGroup,
    server: ServerBenchmark,
    clock: Callable[[], float] = time.perf_counter,
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
        server: The exchange runs on the first rank, while the others wait; rounds run on all ranks.
        clock: Monotonic clock in seconds.

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
    own_times = _run_steps(
        inner, loader, shares[control_group.rank], message, _copy_optimizer_step(optimizer), num_steps, clock
    )
    exchanged = dataclasses.asdict(server.exchange()) if control_group.rank == 0 else {}
    times_by_rank = control_group.gather_json({**dataclasses.asdict(own_times), **exchanged})
    reducing_s, balanced_s, benchmarked_s = None, None, [None] * len(times_by_rank)
    if not any(each["problem"] for each in times_by_rank):
        reducing_s = _median_collective_s([each["waits_s"] for each in times_by_rank]) * max(
            1.0, num_bytes / _MAX_MESSAGE_BYTES
        )
        if num_steps >= _MIN_STEPS:
            balanced_s = _median_step_s([each["steps_s"] for each in times_by_rank])
            benchmarked_s = [each["samples_s"][1:] for each in times_by_rank]
    common = {
        "reducing_s": reducing_s,
        "balanced_s": balanced_s,
        **{name: times_by_rank[0][name] for name in ("serving_s", "exchanging_s")},
        "rounds_s": None,
    }
    measured = [
        {**each, **common, "benchmarked_s": steps_s} for each, steps_s in zip(reports, benchmarked_s, strict=True)
    ]
    return _with_rounds(measured, (inner, loader), shares[control_group.rank], control_group, server, clock)


def _with_rounds(
    measured: list[dict[str, Any]],
    inputs: tuple[nn.Module, DataLoader],
    share: int,
    control_group: ControlGroup,
    server: ServerBenchmark,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Return the reports with the times of rounds alone; unchanged if there are none, or a rank failed in them."""
    num_rounds = _count_rounds(measured) if server.rounds is not None else 0
    if server.rounds is None or not num_rounds:
        return measured
    with server.rounds() as once:
        control_group.gather_json({})  # some ranks take longer to connect than others
        alone = _run_rounds(*inputs, share, once, num_rounds, clock)
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
    speeds = [
        Speed(s_per_sample=sum(own) / len(own)) for own in trial.denoise_trials([each["trial_s"] for each in reports])
    ]
    batch_samples = reports[0]["batch_samples"]
    caps = balancing.share_limits(batch_samples, (each["cap"] for each in reports))
    shares = balancing.apportion(batch_samples, speeds, caps)
    workers, work = forecast.rates_and_workload(reports)  # over thin links most of a step is the allreduce
    step_s = max(share * speed.s_per_sample for share, speed in zip(shares, speeds, strict=True))
    step_s += mode_forecast.predicted_allreduce_s(workers, min(work.num_bytes, _MAX_MESSAGE_BYTES))
    return shares, max(1, min(_MAX_STEPS, int(BUDGET_S / step_s))) if step_s > 0 else _MAX_STEPS


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


def _run_steps(
    model: nn.Module,
    loader: DataLoader,
    share: int,
    message: torch.Tensor,
    step: Callable[[], object],
    num_steps: int,
    clock: Callable[[], float],
) -> _StepTimes:
    """Run balanced steps. A rank that cannot compute still takes part in the allreduce."""
    times, batch = _StepTimes(), None
    with speed_test.preserve_model_state(model):
        _allreduce(message)  # the first one makes connections
        for _ in range(num_steps):
            started_s = clock()
            batch = _compute_batch(model, loader, share, batch, times)
            began_s = clock()
            _allreduce(message)
            times.samples_s.append((began_s - started_s) / max(1, share))
            times.waits_s.append(clock() - began_s)
            step()
            _synchronize(message.device)
            times.steps_s.append(clock() - started_s)
    return times


def _run_rounds(
    model: nn.Module,
    loader: DataLoader,
    share: int,
    once: Callable[[], object],
    num_rounds: int,
    clock: Callable[[], float],
) -> _StepTimes:
    """Run rounds without waits for other ranks; `once` ends each round."""
    times, batch = _StepTimes(), None
    with speed_test.preserve_model_state(model):
        for _ in range(num_rounds):
            started_s = clock()
            batch = _compute_batch(model, loader, share, batch, times)
            once()
            times.samples_s.append((clock() - started_s) / max(1, share))
    return times


def _compute_batch(model: nn.Module, loader: DataLoader, share: int, batch: Any, times: _StepTimes) -> Any:
    """Load a batch, or reuse the last one if workers load; compute, or record why that fails."""
    try:
        if batch is None or loader.num_workers == 0:
            batch = trial.first_batch(loader, max(1, share), model)
        trial.run_forward_backward(model, batch)
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


def _allreduce(message: torch.Tensor) -> None:
    dist.all_reduce(message)
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
