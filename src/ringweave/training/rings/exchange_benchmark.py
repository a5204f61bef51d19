"""Exchange benchmark: a few exchanges with the parameter server before the job starts, to measure processor times.

Link rates do not explain everything. A server with a small fraction of a processor takes longer to apply a push than to
receive it, and rings that push at the same time wait for each other there. A pushing rank also has to encrypt and
decrypt.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.optim import Optimizer

from ringweave import rpc
from ringweave.param_server import optimizers
from ringweave.param_server.client import RingClient
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ExchangeBenchmarkResult, ParameterGroup, ServerSetup, TensorSpec
from ringweave.training.rings.server_job import SERVER_START_TIMEOUT_S

BUDGET_S = 1.0
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


def benchmark_exchanges(
    optimizer: Optimizer,
    num_bytes: int,
    num_rings: int,
    servers: Sequence[Callable[[], rpc.RpcClient]],
    clock: Callable[[], float] = time.perf_counter,
) -> ExchangeTimes:
    """Exchange parameters of zero, as many bytes as the model's, or scaled from fewer.

    The server is assumed to use one processor, or the fraction of one that its quota allows.

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
        while not count or (count < _MAX_EXCHANGES and clock() - began_s < BUDGET_S):
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
