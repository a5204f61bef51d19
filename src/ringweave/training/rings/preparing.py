"""What `prepare` does in the modes with a parameter server."""

import atexit
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import wire
from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError, UsageError, explain
from ringweave.params import flat
from ringweave.params.flat import Flat
from ringweave.params.messages import Group, Setup
from ringweave.params.ring.client import RingClient
from ringweave.params.ring.member import Member, Place, Samples
from ringweave.params.ring.optimizer import PushedOptimizer
from ringweave.params.rules import StalenessPolicy, local_steps
from ringweave.params.serving import optimizers
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed
from ringweave.training import reducing
from ringweave.training.control import Control
from ringweave.training.loading.orders import Reading
from ringweave.training.recording import Recorder
from ringweave.training.reducing import GradientReducer, SampleWeights
from ringweave.training.rings.forming import rings_of, speeds_of
from ringweave.training.rings.loader import RingLoader, RingParts, Take
from ringweave.training.rings.sharing import RingShares
from ringweave.training.timing import HostTimeline, StepTimer

_START_S = 300.0
"""How long the server may take to start: on a busy node it imports torch for a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asynchronous:
    """How rings train beside each other, in modes `ps-hra` and `ps`."""

    rings: int | None = None
    """How many; None means as many as there are kinds of workers, two at least. Mode `ps` does not look at it."""
    local_steps: int = 0
    """Steps that the fastest ring takes on its own from one push to the next, slower rings fewer, all with the
    script's optimizer; the push is under way meanwhile. 0 pushes the gradients of every step, and waits."""
    compensation: float = 0.0
    """Lambda of delay compensation, g + lambda g g (theta_now - theta_base). It costs the server a copy of the
    parameters for each ring, and changed no loss that was measured; 0.04 is what its authors take."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.local_steps < 0:
            raise TrainingError(
                explain("local_steps", got=self.local_steps, expected="0 or more", do="Leave it out to push every step")
            )


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
    connect = _connector(environment)
    speeds = speeds_of(said)
    rings = asked.rings or rings_of(speeds, asked.mode, asked.settings.rings)
    index = next(index for index, ring in enumerate(rings) if control.rank in ring)
    ring = rings[index]
    process_group, small_group = _groups(rings, index)
    weights = SampleWeights(num_ranks=len(ring), is_mean=asked.is_mean)
    timer = StepTimer(HostTimeline())
    reducer = GradientReducer(process_group=process_group, timer=timer)
    parallel = reducing.attach(model, weights, reducer, asked.ddp)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    setup = _setup(parallel.module, optimizer, rings, asked)
    _begin(setup, parameters, RingClient(connect, index, reconnect_s=_START_S), control)
    client = RingClient(connect, index) if control.rank == ring[0] else None
    place = Place(process_group=process_group, representative=ring[0], client=client)
    member = Member(place, parameters, overlaps=setup.overlaps)
    member.refresh()
    atexit.register(member.leave)
    # Each as fast as it is, so that all rings push equally often: what a slow ring pushes is no older then.
    caps = [reading.batch_samples if each["cap"] is None else each["cap"] for each in said]
    per_rank = balancing.apportion(reading.batch_samples, [Speed(s_per_sample=1 / speed) for speed in speeds], caps)
    samples = Samples()
    pushed = PushedOptimizer(optimizer, member, samples, _local_steps(asked, rings, speeds)[index])
    parts = RingParts(
        control=control,
        weights=weights,
        samples=samples,
        take=_taker(client, small_group, ring[0]),
        shares=RingShares(per_rank, ring, timer, control, recorder.shares_changed, caps=caps),
        ring_rank=ring.index(control.rank),
        settle=pushed.rest,
        refresh=member.refresh,
        note=recorder.accounted,
    )
    recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).most_versions)
    return parallel, pushed, RingLoader(loader, reading, said[0]["seed"], parts)


def _connector(environment: WorkerEnvironment) -> Any:
    if environment.server is None or environment.credentials is None:
        raise UsageError(
            explain(
                "parameter server",
                got="none in this run",
                expected="one that the launcher has started",
                do="Use ringweave run --mode ps-hra",
            )
        )
    host, _, port = environment.server.rpartition(":")
    where = environment.credentials
    kind, _, number = where.partition(":")
    credentials = wire.Credentials.from_descriptor(int(number)) if kind == "fd" else wire.Credentials.load(Path(where))
    trust = wire.Tls(credentials)
    return lambda: wire.Client.connect(host, int(port), trust, role="server")


def _groups(rings: Sequence[Sequence[int]], index: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This ring's group for tensors, and one for small numbers that shall not queue behind them."""
    large = [dist.new_group(list(ring), backend="ringweave") for ring in rings]
    small = [dist.new_group(list(ring), backend="gloo") for ring in rings]
    found, small_one = large[index], small[index]
    assert isinstance(found, dist.ProcessGroup), "a rank is in its own ring"
    assert isinstance(small_one, dist.ProcessGroup), "a rank is in its own ring"
    return found, small_one


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
def _begin(setup: Setup, parameters: Sequence[torch.Tensor], client: RingClient, control: Control) -> None:
    """Rank 0 gives the server the first parameters; nobody goes on before it has."""
    if control.rank == 0:
        first = Flat(setup.tensors)
        torch._foreach_copy_(first.views, [each.detach() for each in parameters])
        client.start(setup, first.buffers())
        client.close()
    control.broadcast(torch.zeros(1))


def _taker(client: RingClient | None, group: dist.ProcessGroup, representative: int) -> Take:
    """Draws tickets: the representative asks the server, and tells its ring."""

    def take(epoch: int, wanted: int, total: int) -> tuple[int, int]:
        drawn = torch.tensor(client.take(epoch, wanted, total) if client else (0, 0))
        dist.broadcast(drawn, representative, group=group)
        return int(drawn[0]), int(drawn[1])

    return take


def _local_steps(asked: Asked, rings: Sequence[Sequence[int]], speeds: Sequence[float]) -> Sequence[int]:
    most = asked.settings.local_steps
    if not most:
        return [0] * len(rings)
    return local_steps.by_speed(most, [min(speeds[rank] for rank in ring) for ring in rings])
