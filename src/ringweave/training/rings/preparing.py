"""What `prepare` does in the modes with a parameter server."""

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import wire
from ringweave.environment import WorkerEnvironment
from ringweave.errors import DisagreementError, TrainingError, UsageError, explain
from ringweave.params import flat
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Setup
from ringweave.params.ring.client import RingClient
from ringweave.params.ring.member import Samples
from ringweave.params.ring.optimizer import PushedOptimizer
from ringweave.params.rules import StalenessPolicy
from ringweave.params.serving import optimizers
from ringweave.planning import balancing, modes
from ringweave.planning.balancing import Speed
from ringweave.training import reducing, timing
from ringweave.training.choosing import forecasting
from ringweave.training.choosing.reconsidering import Reconsidering
from ringweave.training.control import Control
from ringweave.training.loading.orders import Reading
from ringweave.training.recording import Recorder
from ringweave.training.reducing import GradientReducer, SampleWeights
from ringweave.training.rings.forming import Formed, queue_of, rings_of, speeds_of
from ringweave.training.rings.loader import RingLoader, RingParts
from ringweave.training.rings.regrouping import Regrouping
from ringweave.training.rings.seating import Seating, groups_of, index_of
from ringweave.training.rings.settings import Asynchronous
from ringweave.training.rings.sharing import RingShares
from ringweave.training.timing import StepTimer

START_S = 300.0
"""How long the server may take to start: on a busy node it imports torch for a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the script said, as far as it concerns rings."""

    mode: str
    is_mean: bool
    settings: Asynchronous
    ddp: dict[str, Any]
    rings: tuple[tuple[int, ...], ...] | None = None
    """Ranks of each ring; None forms them by speed."""
    is_open: bool = False
    """The mode was chosen by a forecast."""


def prepare(
    triple: tuple[nn.Module, Optimizer, DataLoader],
    reading: Reading,
    said: list[dict[str, Any]],
    asked: Asked,
    surroundings: tuple[WorkerEnvironment, Control, Recorder],
) -> tuple[DistributedDataParallel, Optimizer, RingLoader]:
    """Model, optimizer and loader of this rank in its ring.

    Raises:
        UsageError: There is no server.
        TrainingError: The optimizer or the data do not fit this mode.
        DisagreementError: Ranks load different numbers of batches ahead.
    """
    (model, optimizer, loader), (environment, control, recorder) = triple, surroundings
    check_state(optimizer, asked.settings)
    _check_prefetched(said)
    servers = servers_of(environment)
    speeds = speeds_of(said)
    formed = form(asked, speeds, said)
    rings = formed.rings
    groups, index = groups_of(rings, control.rank), index_of(rings, control.rank)
    weights = SampleWeights(num_ranks=len(rings[index]), is_mean=asked.is_mean)
    timer = StepTimer(timing.timeline_of(model))
    reducer = GradientReducer(process_group=groups[0], timer=timer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    share_rest(model, parameters, control)
    parallel = reducing.attach(model, weights, reducer, asked.ddp)
    timing.watch(timer, parallel, optimizer)  # the script's own: it steps where there are local steps
    setup = setup_of(parallel.module, optimizer, rings, asked)
    _begin(setup, parameters, RingClient(servers, index, reconnect_s=START_S), control)
    places = _seated(Seating(servers, control, setup, parameters, groups))
    samples = Samples()
    pushed = PushedOptimizer(optimizer, places.seat.member, samples, asked.settings.local_steps)
    shares = _shares_of(reading.batch_samples, speeds, said, timer, control, recorder)
    shares.sit(places.seat.ring, places.seat.speeds)
    regrouping = Regrouping(
        places=places,
        settings=asked.settings,
        formed=formed,
        parallel=parallel,
        reducer=reducer,
        weights=weights,
        optimizer=pushed,
        shares=shares,
        recorder=recorder,
        reconsidering=_reconsidering(said, asked, control, recorder),
    )
    parts = RingParts(
        control=control,
        weights=weights,
        samples=samples,
        places=places,
        shares=shares,
        pushed=pushed,
        regroup=regrouping.look,
        note=recorder.accounted,
    )
    recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).most_versions)
    return parallel, pushed, RingLoader(loader, reading, said[0]["seed"], parts)


def _shares_of(
    num_samples: int,
    speeds: Sequence[float],
    said: list[dict[str, Any]],
    timer: StepTimer,
    control: Control,
    recorder: Recorder,
) -> RingShares:
    """Each rank's by its speed, so that all rings push equally often: what a slow ring pushes is no older then."""
    caps = balancing.limits(num_samples, (each["cap"] for each in said))
    per_rank = balancing.apportion(num_samples, [Speed(s_per_sample=1 / speed) for speed in speeds], caps)
    ahead = max(each["num_prefetched"] for each in said)
    return RingShares(per_rank, timer, control, recorder.shares_changed, caps=caps, num_prefetched=ahead)


def form(asked: Asked, speeds: Sequence[float], said: Sequence[Mapping[str, Any]]) -> Formed:
    """The rings, and what becomes of them when speeds drift: those by links stay as they are, and so do rings of one.

    Args:
        asked: What the script wants.
        speeds: Relative, of each rank.
        said: What each rank says of itself.
    """
    by_speed = rings_of(speeds, asked.mode, asked.settings.rings, queue=queue_of(said))
    rings = asked.rings or by_speed
    is_by_speed = sorted(map(sorted, rings)) == sorted(map(sorted, by_speed))
    is_by_links = not is_by_speed and sorted(map(sorted, rings)) in [
        sorted(map(sorted, way)) for way in forecasting.by_links(said)
    ]
    return Formed(
        rings=rings,
        follows=asked.mode == modes.PS_HRA and not is_by_links,
        num_rings=asked.settings.rings if is_by_speed else len(rings),
    )


def _reconsidering(
    said: list[dict[str, Any]], asked: Asked, control: Control, recorder: Recorder
) -> Reconsidering | None:
    """Only where `auto` has chosen; whoever names a mode, or a number of rings, keeps it."""
    if not asked.is_open or asked.settings.rings is not None:
        return None
    local_steps = asked.settings.local_steps
    return Reconsidering(said=said, control=control, local_steps=local_steps, note=recorder.reconsidered)


def servers_of(
    environment: WorkerEnvironment, trust: wire.Trust | None = None, *, keeps: bool = False
) -> list[Callable[[], wire.Client]]:
    """Each connects to one server of the job.

    Args:
        environment: Says where they are, and where this worker's credentials.
        trust: These credentials, where they were read before: a descriptor can be read once only.
        keeps: It can be read once more nevertheless.

    Raises:
        UsageError: There is none.
    """
    if environment.server is None or environment.credentials is None:
        raise UsageError(
            explain(
                "parameter server",
                got="none in this run",
                expected="one that the launcher has started",
                do="Use ringweave run --mode ps-hra",
            )
        )
    trust = trust or wire.Tls(wire.Credentials.load_from(environment.credentials, keeps=keeps))
    addresses = [address.rpartition(":") for address in environment.server.split(",")]
    return [
        lambda host=host, port=port: wire.Client.connect(host, int(port), trust, role="server")
        for host, _, port in addresses
    ]


def setup_of(module: nn.Module, optimizer: Optimizer, rings: Sequence[Sequence[int]], asked: Asked) -> Setup:
    """What the server has to know of the job.

    Raises:
        TrainingError: The optimizer cannot be the server's, or the model is larger than a message.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    named = [
        (names.get(parameter, f"parameter {number}"), parameter)
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    ]
    groups, first = [], 0
    for group in optimizer.param_groups:
        places = list(range(first, first + len(group["params"])))
        first += len(places)
        groups.append(Group(parameters=places, options=optimizers.options_of(group)))
    overlaps = asked.settings.local_steps > 0
    tensors = flat.specs_of(named)
    check_size(sum(flat.sizes_of(tensors)))
    return Setup(
        tensors=tensors,
        optimizer=optimizers.check_name(optimizers.name_of(optimizer)),
        groups=groups,
        rings=[list(ring) for ring in rings],
        overlaps=overlaps,
        compensation=0.0 if overlaps else asked.settings.compensation,
    )


def check_state(optimizer: Optimizer, settings: Asynchronous) -> None:
    """Refuse an optimizer that has taken steps where its state is the server's: that begins without it.

    Raises:
        TrainingError: It has.
    """
    if not settings.local_steps:
        optimizers.check_fresh(optimizer.state.values())


def _check_prefetched(said: Sequence[Mapping[str, Any]]) -> None:
    """Refuse load workers of unequal number: members of a ring draw tickets together, as far ahead as each loads.

    Raises:
        DisagreementError: Ranks load different numbers of batches ahead.
    """
    ahead = [each["num_prefetched"] for each in said]
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


def check_size(num_bytes: int) -> None:
    """Refuse a model whose parameters are more than one message takes, before anybody has begun.

    Raises:
        TrainingError: They are.
    """
    if num_bytes > forecasting.MOST_BYTES:
        raise TrainingError(
            explain(
                "parameters in rings",
                got=f"{num_bytes} bytes",
                expected=f"at most {forecasting.MOST_BYTES}, which a ring pushes in one message",
                do="Use mode balanced, or give the optimizer fewer parameters, or ones of smaller dtypes",
            )
        )


@torch.no_grad()
def share_rest(model: nn.Module, trained: Sequence[torch.Tensor], control: Control) -> None:
    """Give all ranks rank 0's frozen parameters and buffers: DDP does so within a ring, the server has what is trained.

    Buffers that go on changing, such as those of batch norm, are each ring's own from here on.
    """
    known = set(trained)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in known:
            tensor.copy_(control.broadcast(tensor.detach().cpu().contiguous()))


def _seated(places: Seating) -> Seating:
    """With the server's parameters, until the process ends."""
    places.seat.member.refresh()
    atexit.register(places.leave)
    return places


@torch.no_grad()
def _begin(setup: Setup, parameters: Sequence[torch.Tensor], client: RingClient, control: Control) -> None:
    """Rank 0 gives the server the first parameters; nobody goes on before it has."""
    if control.rank == 0:
        first = Flat(setup.tensors)
        torch._foreach_copy_(first.views, [each.detach() for each in parameters])
        client.start(setup, first.buffers())
        client.close()
    control.broadcast(torch.zeros(1))
