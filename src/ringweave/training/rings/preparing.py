"""What `prepare` does in the modes with a parameter server."""

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import wire
from ringweave.environment import WorkerEnvironment
from ringweave.errors import UsageError, explain
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
from ringweave.planning.grouping.forecasts import Ring
from ringweave.training import reducing
from ringweave.training.control import Control
from ringweave.training.loading.orders import Reading
from ringweave.training.recording import Recorder
from ringweave.training.reducing import GradientReducer, SampleWeights
from ringweave.training.rings.forming import rings_of, speeds_of
from ringweave.training.rings.loader import RingLoader, RingParts
from ringweave.training.rings.regrouping import Regrouping
from ringweave.training.rings.seating import Seating, groups_of, index_of
from ringweave.training.rings.settings import Asynchronous, local_steps_of
from ringweave.training.rings.sharing import RingShares
from ringweave.training.timing import HostTimeline, StepTimer

_START_S = 300.0
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
    """
    (model, optimizer, loader), (environment, control, recorder) = triple, surroundings
    servers = _servers(environment)
    speeds = speeds_of(said)
    rings, follows = _form(asked, speeds)
    groups = groups_of(rings, control.rank)
    index = index_of(rings, control.rank)
    weights = SampleWeights(num_ranks=len(rings[index]), is_mean=asked.is_mean)
    timer = StepTimer(HostTimeline())
    reducer = GradientReducer(process_group=groups[0], timer=timer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    share_rest(model, parameters, control)
    parallel = reducing.attach(model, weights, reducer, asked.ddp)
    setup = _setup(parallel.module, optimizer, rings, asked)
    _begin(setup, parameters, RingClient(servers, index, reconnect_s=_START_S), control)
    places = Seating(servers, control, setup, parameters, groups)
    places.seat.member.refresh()
    atexit.register(places.leave)
    # Each as fast as it is, so that all rings push equally often: what a slow ring pushes is no older then.
    caps = [reading.batch_samples if each["cap"] is None else each["cap"] for each in said]
    per_rank = balancing.apportion(reading.batch_samples, [Speed(s_per_sample=1 / speed) for speed in speeds], caps)
    samples = Samples()
    pushed = PushedOptimizer(
        optimizer, places.seat.member, samples, local_steps_of(asked.settings, rings, speeds)[index]
    )
    ahead = max(each["num_prefetched"] for each in said)
    shares = RingShares(per_rank, timer, control, recorder.shares_changed, caps=caps, num_prefetched=ahead)
    shares.sit(places.seat.ring, places.seat.speeds)
    regrouping = Regrouping(
        places=places,
        settings=asked.settings if follows else None,
        parallel=parallel,
        reducer=reducer,
        weights=weights,
        optimizer=pushed,
        shares=shares,
        recorder=recorder,
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


def _form(asked: Asked, speeds: Sequence[float]) -> tuple[tuple[Ring, ...], bool]:
    """The rings, and whether they follow speeds: those by links stay as they are, and so do rings of one."""
    by_speed = rings_of(speeds, asked.mode, asked.settings.rings)
    rings = asked.rings or by_speed
    return rings, asked.mode == modes.PS_HRA and sorted(map(sorted, rings)) == sorted(map(sorted, by_speed))


def _servers(environment: WorkerEnvironment) -> list[Callable[[], wire.Client]]:
    if environment.server is None or environment.credentials is None:
        raise UsageError(
            explain(
                "parameter server",
                got="none in this run",
                expected="one that the launcher has started",
                do="Use ringweave run --mode ps-hra",
            )
        )
    where = environment.credentials
    kind, _, number = where.partition(":")
    credentials = wire.Credentials.from_descriptor(int(number)) if kind == "fd" else wire.Credentials.load(Path(where))
    trust = wire.Tls(credentials)
    addresses = [address.rpartition(":") for address in environment.server.split(",")]
    return [
        lambda host=host, port=port: wire.Client.connect(host, int(port), trust, role="server")
        for host, _, port in addresses
    ]


def _setup(module: nn.Module, optimizer: Optimizer, rings: Sequence[Sequence[int]], asked: Asked) -> Setup:
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
    return Setup(
        tensors=flat.specs_of(named),
        optimizer=optimizers.check_name(type(optimizer).__name__),
        groups=groups,
        rings=[list(ring) for ring in rings],
        overlaps=overlaps,
        compensation=0.0 if overlaps else asked.settings.compensation,
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


@torch.no_grad()
def _begin(setup: Setup, parameters: Sequence[torch.Tensor], client: RingClient, control: Control) -> None:
    """Rank 0 gives the server the first parameters; nobody goes on before it has."""
    if control.rank == 0:
        first = Flat(setup.tensors)
        torch._foreach_copy_(first.views, [each.detach() for each in parameters])
        client.start(setup, first.buffers())
        client.close()
    control.broadcast(torch.zeros(1))
