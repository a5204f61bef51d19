"""`prepare` in the modes with a parameter server."""

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import rpc
from ringweave.environment import WorkerEnvironment
from ringweave.errors import DisagreementError, TrainingError, UsageError, explain
from ringweave.param_server import flat, optimizers
from ringweave.param_server.client import RingClient
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import ParameterGroup, ServerSetup
from ringweave.param_server.versions import StalenessPolicy
from ringweave.param_server.worker import ParameterServerOptimizer, UnpushedSamples
from ringweave.planning import balancing, modes
from ringweave.planning.balancing import Speed
from ringweave.training import gradients, timing
from ringweave.training.collectives import ControlGroup
from ringweave.training.data.order import LoaderSpec
from ringweave.training.data.shared_loader import SampleWeightTable, SharedLoader
from ringweave.training.gradients import GradientReducer, SampleWeights
from ringweave.training.mode_choice import forecast
from ringweave.training.mode_choice.forecast import RingReconsideration
from ringweave.training.recorder import Recorder
from ringweave.training.rings.ring_assignment import RingAssignment, RingRegrouper, create_ring_groups, ring_index
from ringweave.training.rings.ring_formation import (
    RingFormation,
    RingShares,
    completion_queue,
    form_rings,
    relative_speeds,
)
from ringweave.training.rings.ring_settings import Asynchronous
from ringweave.training.rings.shard_source import ShardSource
from ringweave.training.rings.static_ring import StaticRing
from ringweave.training.timing import StepTimer

SERVER_START_TIMEOUT_S = 300.0
"""Time that the server may take to start: on a busy node it imports torch for a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingOptions:
    """Options of the script that concern rings."""

    mode: str
    is_mean: bool
    settings: Asynchronous
    ddp: dict[str, Any]
    rings: tuple[tuple[int, ...], ...] | None = None
    """Ranks of each ring; None forms them by speed."""
    is_open: bool = False
    """The mode was chosen by a forecast."""
    sample_weights: SampleWeightTable | None = None


# Long: one sequence, in the order that all ranks share; each part is made elsewhere.
def prepare_rings(
    triple: tuple[nn.Module, Optimizer, DataLoader],
    spec: LoaderSpec,
    reports: list[dict[str, Any]],
    options: RingOptions,
    context: tuple[WorkerEnvironment, ControlGroup, Recorder],
) -> tuple[DistributedDataParallel, Optimizer, SharedLoader]:
    """Return model, optimizer and loader of this rank in its ring.

    Raises:
        UsageError: There is no server.
        TrainingError: The optimizer or the data do not fit this mode.
        DisagreementError: Ranks load different numbers of batches ahead.
    """
    (model, optimizer, loader), (environment, control, recorder) = triple, context
    check_optimizer_fresh(optimizer, options.settings)
    check_same_prefetch(reports)
    connectors = server_connectors(environment)
    speeds = relative_speeds(reports)
    formation = form_initial_rings(options, speeds, reports)
    rings = formation.rings
    ring_groups, index = create_ring_groups(rings, control.rank), ring_index(rings, control.rank)
    weights = SampleWeights(num_ranks=len(rings[index]), is_mean=options.is_mean)
    timer = StepTimer(timing.choose_timeline(model))
    reducer = GradientReducer(process_group=ring_groups[0], timer=timer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    broadcast_untrained(model, parameters, control)
    parallel = gradients.wrap_ddp(model, weights, reducer, options.ddp)
    timing.attach_timer(timer, parallel, optimizer)  # the script's own optimizer: it takes the local steps
    setup = build_server_setup(parallel.module, optimizer, rings, options)
    _start_server_job(
        setup, parameters, RingClient(connectors, index, reconnect_timeout_s=SERVER_START_TIMEOUT_S), control
    )
    assignment = _start_assignment(RingAssignment(connectors, control, setup, parameters, ring_groups))
    samples = UnpushedSamples()
    ring_optimizer = ParameterServerOptimizer(
        optimizer, assignment.current.worker, samples, options.settings.local_steps
    )
    shares = _initial_shares(spec.batch_samples, speeds, reports, timer, control, recorder)
    shares.join_ring(assignment.current.ring, assignment.current.speed_control)
    regrouping = RingRegrouper(
        assignment=assignment,
        settings=options.settings,
        formation=formation,
        parallel=parallel,
        reducer=reducer,
        weights=weights,
        optimizer=ring_optimizer,
        shares=shares,
        recorder=recorder,
        reconsideration=_ring_reconsideration(reports, options, control, recorder),
    )
    ring = StaticRing(
        control, assignment, shares, ring_optimizer, samples, regrouping.regroup_if_faster, recorder.epoch_accounted
    )
    recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).max_versions)
    source = ShardSource(loader, spec, reports[0]["seed"], ring)
    return parallel, ring_optimizer, SharedLoader(loader, source, weights, timer, options.sample_weights)


def _initial_shares(
    num_samples: int,
    speeds: Sequence[float],
    reports: list[dict[str, Any]],
    timer: StepTimer,
    control: ControlGroup,
    recorder: Recorder,
) -> RingShares:
    """Return each rank's share by its speed, so that rings push equally often and slow rings' pushes are no staler."""
    caps = balancing.share_limits(num_samples, (each["cap"] for each in reports))
    per_rank = balancing.apportion(num_samples, [Speed(s_per_sample=1 / speed) for speed in speeds], caps)
    ahead = max(each["num_prefetched"] for each in reports)
    return RingShares(per_rank, timer, control, recorder.shares_changed, caps=caps, num_prefetched=ahead)


def form_initial_rings(
    options: RingOptions, speeds: Sequence[float], reports: Sequence[Mapping[str, Any]]
) -> RingFormation:
    """Form the initial rings; those by links, and rings of one rank, are not regrouped when speeds drift.

    Args:
        options: Options of the script.
        speeds: Relative speed of each rank.
        reports: Reports of all ranks.
    """
    by_speed = form_rings(speeds, options.mode, options.settings.rings, queue=completion_queue(reports))
    rings = options.rings or by_speed
    is_by_speed = sorted(map(sorted, rings)) == sorted(map(sorted, by_speed))
    is_by_links = not is_by_speed and sorted(map(sorted, rings)) in [
        sorted(map(sorted, way)) for way in forecast.rings_by_links(reports)
    ]
    return RingFormation(
        rings=rings,
        follows_speeds=options.mode == modes.PS_HRA and not is_by_links,
        num_rings=options.settings.rings if is_by_speed else len(rings),
    )


def _ring_reconsideration(
    reports: list[dict[str, Any]], options: RingOptions, control: ControlGroup, recorder: Recorder
) -> RingReconsideration | None:
    """Return the later forecasts; None if the script named a mode, or a number of rings."""
    if not options.is_open or options.settings.rings is not None:
        return None
    local_steps = options.settings.local_steps
    return RingReconsideration(
        reports=reports, control=control, local_steps=local_steps, record_choice=recorder.mode_reconsidered
    )


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
            explain(
                "parameter server",
                got="none in this run",
                expected="one that the launcher has started",
                do="Use ringweave run --mode ps-hra or ringweave submit; torchrun starts no server",
            )
        )
    authentication = authentication or rpc.TlsAuthentication(
        rpc.Credentials.load_from(environment.credentials, keep_open=keeps_readable)
    )
    addresses = [address.rpartition(":") for address in environment.server.split(",")]
    return [
        lambda host=host, port=port: rpc.RpcClient.connect(host, int(port), authentication, role="server")
        for host, _, port in addresses
    ]


def build_server_setup(
    module: nn.Module, optimizer: Optimizer, rings: Sequence[Sequence[int]], options: RingOptions
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
    overlaps = options.settings.local_steps > 0
    tensors = flat.tensor_specs(named)
    check_model_size(sum(flat.buffer_sizes(tensors)))
    return ServerSetup(
        tensors=tensors,
        optimizer=optimizers.check_optimizer_name(optimizers.optimizer_name(optimizer)),
        groups=groups,
        rings=[list(ring) for ring in rings],
        overlaps=overlaps,
        compensation=0.0 if overlaps else options.settings.compensation,
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
            explain(
                f"batches that rank {odd} loads ahead (num_workers x prefetch_factor)",
                got=ahead[odd],
                expected=f"{ahead[0]} as on rank 0, since the members of a ring draw samples together",
                do="Give the DataLoader the same num_workers and prefetch_factor on all ranks, or use mode balanced",
            )
        )


def check_model_size(num_bytes: int) -> None:
    """Refuse a model whose parameters exceed one message, before any rank has started.

    Raises:
        TrainingError: They do.
    """
    if num_bytes > forecast.MAX_RING_MODEL_BYTES:
        raise TrainingError(
            explain(
                "parameters in rings",
                got=f"{num_bytes} bytes",
                expected=f"at most {forecast.MAX_RING_MODEL_BYTES}, which a ring pushes in one message",
                do="Use mode balanced, or give the optimizer fewer parameters, or ones of smaller dtypes",
            )
        )


@torch.no_grad()
def broadcast_untrained(model: nn.Module, trained: Sequence[torch.Tensor], control: ControlGroup) -> None:
    """Give all ranks rank 0's frozen parameters and buffers; DDP does so in a ring only, the server not at all.

    Buffers that change later, such as those of batch norm, differ between rings from here on.
    """
    trained_set = set(trained)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in trained_set:
            tensor.copy_(control.broadcast(tensor.detach().cpu().contiguous()))


def _start_assignment(assignment: RingAssignment) -> RingAssignment:
    """Take the server's parameters, and leave the server at the end of the process."""
    assignment.current.worker.refresh()
    atexit.register(assignment.leave_server)
    return assignment


@torch.no_grad()
def _start_server_job(
    setup: ServerSetup, parameters: Sequence[torch.Tensor], client: RingClient, control: ControlGroup
) -> None:
    """Let rank 0 give the server the first parameters; all ranks wait for that."""
    if control.rank == 0:
        first = FlatTensors(setup.tensors)
        torch._foreach_copy_(first.views, [each.detach() for each in parameters])
        client.start_job(setup, first.buffers())
        client.close()
    control.broadcast(torch.zeros(1))
