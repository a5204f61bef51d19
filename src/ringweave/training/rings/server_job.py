"""Job on the parameter server, as rings start it: its set-up, the rings at the start, and checks of what they train."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ringweave import rpc
from ringweave.environment import WorkerEnvironment
from ringweave.errors import DisagreementError, TrainingError, UsageError
from ringweave.jobs import modes
from ringweave.param_server import flat, optimizers
from ringweave.param_server.client import RingClient
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ParameterGroup, ServerSetup
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed
from ringweave.planning.balancing.shares import Shares
from ringweave.planning.mode_forecast import Ring
from ringweave.training.mode_choice import forecast
from ringweave.training.options import Asynchronous
from ringweave.training.rings.ring_formation import RingFormation, completion_queue, form_rings

SERVER_START_TIMEOUT_S = 300.0
"""Time that the server may take to start: on a busy node it imports torch for a minute."""


def server_connectors(
    environment: WorkerEnvironment,
    authentication: rpc.PeerAuthentication | None = None,
    *,
    keeps_readable: bool = False,
) -> list[Callable[[], rpc.RpcClient]]:
    """Return connectors, one for each server of the job.

    Args:
        environment: Has the addresses, and the location of this worker's credentials.
        authentication: Credentials, if they were read before: a descriptor can be read only once.
        keeps_readable: Keep the descriptor readable.

    Raises:
        UsageError: The run has no server.
    """
    if environment.server is None or environment.credentials is None:
        raise UsageError(
            "parameter server",
            got="none in this run",
            expected="one that the launcher has started",
            do="Use ringweave run --mode ps-hra or ringweave submit; torchrun starts no server",
        )
    authentication = authentication or rpc.TlsAuthentication(
        rpc.Credentials.load_from(environment.credentials, keep_open=keeps_readable or environment.encrypts)
    )
    addresses = [address.rpartition(":") for address in environment.server.split(",")]
    return [
        lambda host=host, port=port: rpc.RpcClient.connect(host, int(port), authentication, role="server")
        for host, _, port in addresses
    ]


def build_server_setup(
    module: nn.Module, optimizer: Optimizer, rings: Sequence[Sequence[int]], settings: Asynchronous
) -> ServerSetup:
    """Return the server's set-up of the job.

    Raises:
        TrainingError: The server does not support the optimizer, or the model is larger than a message.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    named = [
        (names.get(parameter, f"parameter {number}"), parameter)
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    ]
    groups, first = [], 0
    for group in optimizer.param_groups:
        indices = list(range(first, first + len(group["params"])))
        first += len(indices)
        groups.append(ParameterGroup(parameters=indices, options=optimizers.group_options(group)))
    overlaps = settings.local_steps > 0
    tensors = flat.tensor_specs(named)
    check_model_size(sum(flat.buffer_sizes(tensors)))
    return ServerSetup(
        tensors=tensors,
        optimizer=optimizers.check_optimizer_name(optimizers.optimizer_name(optimizer)),
        groups=groups,
        rings=[list(ring) for ring in rings],
        overlaps=overlaps,
        compensation=0.0 if overlaps else settings.compensation,
    )


def check_optimizer_fresh(optimizer: Optimizer, settings: Asynchronous) -> None:
    """Refuse an optimizer that has taken steps if the server has the state, which starts without them.

    Raises:
        TrainingError: It has taken steps.
    """
    if not settings.local_steps:
        optimizers.check_fresh(optimizer.state.values())


def check_same_prefetch(reports: Sequence[Mapping[str, Any]]) -> None:
    """Refuse unequal numbers of load workers: members of a ring draw shards together, as far ahead as each loads.

    Raises:
        DisagreementError: Ranks load different numbers of batches ahead.
    """
    ahead = [each["num_prefetched"] for each in reports]
    odd = next((rank for rank, each in enumerate(ahead) if each != ahead[0]), None)
    if odd is not None:
        raise DisagreementError(
            f"batches that rank {odd} loads ahead (num_workers x prefetch_factor)",
            got=ahead[odd],
            expected=f"{ahead[0]} as on rank 0, since the members of a ring draw samples together",
            do="Give the DataLoader the same num_workers and prefetch_factor on all ranks, or use mode balanced",
        )


def check_model_size(num_bytes: int) -> None:
    """Refuse a model whose parameters exceed one message, before any rank has started.

    Raises:
        TrainingError: They do.
    """
    if num_bytes > forecast.MAX_RING_MODEL_BYTES:
        raise TrainingError(
            "parameters in rings",
            got=f"{num_bytes} bytes",
            expected=f"at most {forecast.MAX_RING_MODEL_BYTES}, which a ring pushes in one message",
            do="Use mode balanced, or give the optimizer fewer parameters, or ones of smaller dtypes",
        )


def form_initial_rings(
    mode: str,
    settings: Asynchronous,
    speeds: Sequence[float],
    reports: Sequence[Mapping[str, Any]],
    rings: tuple[Ring, ...] | None = None,
) -> RingFormation:
    """Form the initial rings; those by links, and rings of one rank, are not regrouped when speeds drift.

    Args:
        mode: `ps-hra` or `ps`.
        settings: Settings of the script.
        speeds: Relative speed of each rank.
        reports: Reports of all ranks.
        rings: Ranks of each ring; None forms them by speed.
    """
    by_speed = form_rings(speeds, mode, settings.rings, queue=completion_queue(reports))
    rings = rings or by_speed
    is_by_speed = sorted(map(sorted, rings)) == sorted(map(sorted, by_speed))
    is_by_links = not is_by_speed and sorted(map(sorted, rings)) in [
        sorted(map(sorted, way)) for way in forecast.rings_by_links(reports)
    ]
    return RingFormation(
        rings=rings,
        follows_speeds=mode == modes.PS_HRA and not is_by_links,
        num_rings=settings.rings if is_by_speed else len(rings),
    )


@torch.no_grad()
def start_server_job(client: RingClient, setup: ServerSetup, parameters: Sequence[torch.Tensor]) -> None:
    """Give the server the job, with its first parameters."""
    first = FlatTensors(setup.tensors)
    torch._foreach_copy_(first.views, [each.detach() for each in parameters])
    client.start_job(setup, first.buffers())


def initial_shares(batch_samples: int, speeds: Sequence[float], reports: Sequence[Mapping[str, Any]]) -> Shares:
    """Return each rank's share by its speed, so that rings push equally often and slow rings' pushes are no staler."""
    caps = balancing.share_limits(batch_samples, (each["cap"] for each in reports))
    return balancing.apportion(batch_samples, [Speed(s_per_sample=1 / speed) for speed in speeds], caps)
