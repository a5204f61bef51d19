"""What `prepare` does under `ringweave run --elastic` in the modes with a parameter server."""

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import wire
from ringweave.comm import joining, regrouping
from ringweave.comm.regrouping import EpochGroups
from ringweave.environment import WorkerEnvironment
from ringweave.membership import messages
from ringweave.membership.agent import Agent
from ringweave.membership.messages import Enter
from ringweave.membership.rules.records import slot_of
from ringweave.membership.rules.signs import Beat
from ringweave.params.flat import Flat
from ringweave.params.ring.client import RingClient
from ringweave.params.rules import StalenessPolicy
from ringweave.params.serving import optimizers
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed
from ringweave.training import control, garbage, wrapping
from ringweave.training.choosing import forecasting
from ringweave.training.elastic import exits, seams
from ringweave.training.elastic import preparing as elastic
from ringweave.training.elastic.crew import Facts, JobCrew, Means
from ringweave.training.elastic.loader import check_reading
from ringweave.training.elastic.preparing import Wanted
from ringweave.training.elastic.recording import ElasticRecorder
from ringweave.training.elastic.rosters import Rosters
from ringweave.training.elastic.session import Session
from ringweave.training.elastic.state import JobState
from ringweave.training.loading import orders
from ringweave.training.loading.orders import Reading
from ringweave.training.recording import Recorder
from ringweave.training.reducing import SampleWeights
from ringweave.training.rings import preparing as rings_preparing
from ringweave.training.rings.elastic import lobby
from ringweave.training.rings.elastic.crew import RingCrew
from ringweave.training.rings.elastic.loader import KeptParts, KeptRingLoader
from ringweave.training.rings.elastic.lobby import Lobby
from ringweave.training.rings.elastic.member import RingMember
from ringweave.training.rings.elastic.optimizer import KeptOptimizer
from ringweave.training.rings.elastic.places import RingPlace, Seat
from ringweave.training.rings.forming import speeds_of
from ringweave.training.rings.preparing import Asked
from ringweave.training.rings.settings import Asynchronous
from ringweave.training.timing import StepTimer
from ringweave.wire.states import Shelf

_LATE_S = 5.0
"""How long a worker that is started again looks for the server before it asks whether the job is over."""
_ALIKE = ("mode", "reduction", "seed", "optimizer", "local_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptAsked:
    """What the script said, and what follows from it and the launcher."""

    elastic: Wanted
    mode: str
    reason: str
    settings: Asynchronous


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """What the script gave, and what is read off it."""

    model: nn.Module
    optimizer: Optimizer
    loader: DataLoader
    reading: Reading
    parameters: Sequence[torch.Tensor]
    alike: dict[str, Any]
    """What has to be the same on all workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reach:
    """How this worker speaks to others."""

    environment: WorkerEnvironment
    trust: wire.Tls
    servers: Sequence[Callable[[], wire.Client]]


def prepare(
    triple: tuple[nn.Module, Optimizer, DataLoader],
    asked: KeptAsked,
    environment: WorkerEnvironment,
    timer: StepTimer,
) -> tuple[DistributedDataParallel, KeptOptimizer, KeptRingLoader]:
    """Become a member of a ring; returns when its first epoch with this member has begun.

    Raises:
        TrainingError: The script has a process group of its own, or has data or an optimizer that do not go with it.
        DisagreementError: The others have prepared something else.
        MembershipError: The job is over, or does not want this worker.
    """
    elastic.check_group()
    given = _read(triple, asked)
    trust = elastic.trust_of(environment)
    reach = _Reach(environment=environment, trust=trust, servers=rings_preparing.servers_of(environment, trust))
    seat, num_rings = _take_seat(given, asked, reach)
    enlisted = _enlist(given, asked, reach, timer, seat)
    weights = SampleWeights(num_ranks=1, is_mean=asked.elastic.reduction == "mean")
    parallel = wrapping.wrap(given.model, asked.elastic.ddp, enlisted.session, weights, timer)
    if enlisted.crew.place.is_latecomer:
        enlisted.member.join()
    else:
        enlisted.member.refresh()
    parts = KeptParts(
        name=enlisted.name,
        session=enlisted.session,
        crew=enlisted.crew,
        member=enlisted.member,
        weights=weights,
        timer=timer,
        num_rings=num_rings,
        note=enlisted.recorder.accounted,
    )
    loader = KeptRingLoader(given.loader, given.reading, given.alike["seed"], parts)
    return parallel, KeptOptimizer(given.optimizer, enlisted.member), loader


def _read(triple: tuple[nn.Module, Optimizer, DataLoader], asked: KeptAsked) -> _Given:
    model, optimizer, loader = triple
    rings_preparing.check_state(optimizer, asked.settings)
    reading = orders.read(loader)
    check_reading(reading)
    alike = {
        **asdict(reading),
        "num_prefetched": 0,  # what comes next is known only when the ring has agreed on it
        "mode": asked.mode,
        "reduction": asked.elastic.reduction,
        "seed": orders.seed_of(loader),
        "optimizer": optimizers.check_name(optimizers.name_of(optimizer)),
        "local_steps": asked.settings.local_steps,
        "num_parameters": elastic.num_parameters_of(model),
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return _Given(model=model, optimizer=optimizer, loader=loader, reading=reading, parameters=parameters, alike=alike)


def _take_seat(given: _Given, asked: KeptAsked, reach: _Reach) -> tuple[Seat, int]:
    """This worker's ring, and how many rings there are."""
    environment, name = reach.environment, elastic.name_of(reach.environment)
    num_workers = int(os.environ.get("WORLD_SIZE", "1"))
    prospects = forecasting.own_prospects(
        given.model, given.loader, given.reading, environment, is_needed=True, num_workers=num_workers
    )
    said = {**given.alike, "cap": asked.elastic.max_samples, **prospects}
    hall = Lobby(name, said)
    is_late = slot_of(name)[1] > 0  # then the server has started long ago, or has ended
    client = RingClient(reach.servers, 0, reconnect_s=_LATE_S if is_late else rings_preparing.START_S)
    agent = lobby.agent_of(hall, name, environment.coordinators, reach.trust, num_workers)

    def begin(slots: Sequence[int], everybody: Sequence[dict[str, Any]]) -> None:
        _begin(given, asked, environment, client, dict(zip(slots, everybody, strict=True)))

    def why_over() -> str:
        return lobby.why_over(environment.coordinators, reach.trust)

    return lobby.take_seat(hall, agent, client, name, begin, why_over=why_over)


def _begin(
    given: _Given,
    asked: KeptAsked,
    environment: WorkerEnvironment,
    client: RingClient,
    said: Mapping[int, dict[str, Any]],
) -> None:
    """Form rings of the slots that are there, by what each says of itself, and begin the job on the server."""
    slots, everybody = list(said), list(said.values())
    control.check_alike(everybody, _ALIKE, [f"worker {slot}" for slot in slots])
    _, reason, by_links = forecasting.decide((asked.mode, asked.reason), everybody, asked.settings.rings, is_open=False)
    wanted = Asked(mode=asked.mode, is_mean=True, settings=asked.settings, ddp={}, rings=by_links)
    speeds = speeds_of(everybody)
    places = rings_preparing.form(wanted, speeds, everybody).rings
    batch = given.reading.batch_samples
    caps = balancing.limits(batch, (each["cap"] for each in everybody))
    shares = balancing.apportion(batch, [Speed(s_per_sample=1 / speed) for speed in speeds], caps)
    rings = [[slots[place] for place in ring] for ring in places]
    setup = rings_preparing.setup_of(given.model, given.optimizer, rings, wanted)
    update: dict[str, Any] = {"shares": [[shares[place] for place in ring] for ring in places]}
    if asked.settings.local_steps:
        update["local_steps"] = [asked.settings.local_steps] * len(places)
    setup = setup.model_copy(update=update)
    first = Flat(setup.tensors)
    with torch.no_grad():
        torch._foreach_copy_(first.views, [each.detach() for each in given.parameters])
    client.start(setup, first.buffers())
    recorder = Recorder(environment, 0)
    recorder.prepared(mode=asked.mode, asked=asked.elastic.mode, reason=reason, shares=tuple(shares))
    recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).most_versions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Enlisted:
    """This process as a member of its ring."""

    name: str
    session: Session
    crew: RingCrew
    member: RingMember
    recorder: ElasticRecorder


def _enlist(given: _Given, asked: KeptAsked, reach: _Reach, timer: StepTimer, seat: Seat) -> _Enlisted:
    """Become a member of the ring; returns once an epoch with this member has begun."""
    environment, trust, name = reach.environment, reach.trust, elastic.name_of(reach.environment)
    address, shelf = regrouping.own_address(), Shelf()
    groups = EpochGroups(address)
    server = elastic.serve_state(environment, trust, shelf, address)
    facts = Facts(
        member=name,
        state_place=f"{address} {server.port}",
        cap=asked.elastic.max_samples,
        assumed_speed=joining.assumed(environment, os.environ).speed,
        alike=given.alike,
    )
    recorder = ElasticRecorder(environment, lambda: session.is_teller)
    rosters = Rosters(given.reading.batch_samples, is_balanced=True, samples_of=seat.samples_of)
    whose = (name, lambda: session, lambda: crew)
    member = RingMember(*whose, reach.servers, given.parameters, local_steps=seat.local_steps)
    state = JobState(given.model, given.optimizer, asked.elastic.carried, beside=member.beside)
    job_crew = JobCrew(facts, rosters, timer, state, Means(shelf=shelf, trust=trust), recorder)
    crew = RingCrew(job_crew, RingPlace(ring=seat.ring), member.pausing)
    session = Session(
        name,
        groups,
        crew,
        buffers=lambda: elastic.buffers_of(given.model),
        is_mean=True,  # weights make a whole step's gradient of a sum too: what a lost part was of it is made up for
        num_parameters=given.alike["num_parameters"],
    )
    enter = Enter(part=messages.ring_part(seat.ring), expected=len(seat.slots))

    def beat() -> Beat:
        member.look(time.monotonic(), is_frozen=session.is_frozen)
        return session.beat(seams.at_work_s())

    agent = Agent(name, environment.coordinators, trust, session, beat, enter=enter)
    elastic.leave_on_terminate(session)
    exits.watch()
    atexit.register(elastic.end_member, agent, session, server, groups)
    atexit.register(member.leave)
    garbage.spare_collections()
    session.start(agent)
    return _Enlisted(name=name, session=session, crew=crew, member=member, recorder=recorder)
