"""`prepare` under `ringweave run --elastic` in the modes with a parameter server, with the rendezvous at the start.

All workers meet in the startup rendezvous, a membership of its own, and report their speeds. The first member forms the
rings and starts the job on the parameter server. The others, and workers that come later, ask the server for their
assignment. If the first member dies, the next one takes its place, until the server has the job: it accepts the first
start.
"""

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ringweave import rpc
from ringweave.comm import default_group, generation_group
from ringweave.comm.generation_group import GenerationGroups
from ringweave.environment import WorkerEnvironment
from ringweave.errors import (
    ConnectionLostError,
    DeadlineError,
    MembershipError,
    RemoteError,
    RpcError,
    TrainingError,
    explain,
)
from ringweave.membership import messages
from ringweave.membership.client import CALL_TIMEOUT_S, MembershipClient
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.member_rules import StopTraining
from ringweave.membership.membership_records import Membership, MemberStatus, parse_member_name
from ringweave.membership.messages import STARTUP_RENDEZVOUS, CoordinatorStatus, CoordinatorStatusRequest, Join
from ringweave.param_server import optimizers
from ringweave.param_server.client import RingClient
from ringweave.param_server.flat import FlatTensors
from ringweave.param_server.messages import RingAssignmentReply
from ringweave.param_server.versions import StalenessPolicy
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed
from ringweave.rpc.state_transfer import StateServer
from ringweave.training import collectives, timing
from ringweave.training.data import order
from ringweave.training.data.order import LoaderSpec
from ringweave.training.data.shared_loader import SampleWeightTable, SharedLoader
from ringweave.training.elastic import ddp, elastic_preparation, trainer_interface
from ringweave.training.elastic.elastic_membership import check_elastic_data
from ringweave.training.elastic.elastic_preparation import PrepareOptions
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.elastic.trainer import ElasticTrainerState, MemberDescription, StateTransport
from ringweave.training.elastic.training_state import IncompleteStep, TrainingState
from ringweave.training.gradients import SampleWeights
from ringweave.training.mode_choice import forecast
from ringweave.training.recorder import ElasticRecorder, Recorder
from ringweave.training.rings import ring_preparation
from ringweave.training.rings.elastic_ring import ElasticRing
from ringweave.training.rings.elastic_trainer import RingCursor, RingTrainerState, SlotAssignment
from ringweave.training.rings.elastic_worker import ElasticRingOptimizer, ElasticRingWorker
from ringweave.training.rings.ring_formation import relative_speeds
from ringweave.training.rings.ring_preparation import RingOptions
from ringweave.training.rings.ring_settings import Asynchronous
from ringweave.training.rings.shard_source import ShardSource
from ringweave.training.timing import StepTimer

_ASSIGNMENT_POLL_S = 0.1
WorkerProfile = dict[str, Any]
BeginJob = Callable[[Sequence[int], Sequence[WorkerProfile]], None]
"""(slots, their profiles): forms rings and starts the job."""


class StartupRendezvous:
    """One worker in the startup rendezvous; the listener of its membership client."""

    def __init__(self, member: str, profile: WorkerProfile) -> None:
        """Create it; `profile` is what the others need to form rings."""
        self._status = MemberStatus(member=member, note=json.dumps(profile))
        self._lock = threading.Lock()
        self._membership: Membership | None = None
        self._stop: StopTraining | None = None

    def pause_training(self, *, is_urgent: bool) -> MemberStatus | None:
        del is_urgent
        return self._status

    def current_status(self) -> MemberStatus:
        return self._status

    def begin_generation(self, membership: Membership) -> None:
        with self._lock:
            self._membership = membership

    def stop_training(self, stop: StopTraining) -> None:
        with self._lock:
            self._stop = stop

    def membership_if_first(self) -> Membership | None:
        """Return the membership if this worker has to form the rings; else None.

        Raises:
            MembershipError: This worker was evicted, or the job is over.
        """
        with self._lock:
            if self._stop is not None:
                raise trainer_interface.stop_error(self._stop)
            is_first = self._membership is not None and self._membership.members[0] == self._status.member
            return self._membership if is_first else None


def wait_ring_assignment(
    rendezvous: StartupRendezvous,
    membership_client: MembershipClient,
    client: RingClient,
    member: str,
    begin: BeginJob,
    *,
    read_end_reason: Callable[[], str] = lambda: "",
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[SlotAssignment, int]:
    """Return this worker's ring and the number of rings, once the job has started on the server.

    Args:
        rendezvous: Rendezvous of all workers.
        membership_client: Client of the rendezvous; started if the job has not begun, and closed.
        client: Client of the server.
        member: Name of this worker.
        begin: Forms rings of these slots from their profiles, and starts the job.
        read_end_reason: Returns the reason why the job is over, if no server answers; empty while it is not.
        sleep: Waits between two polls.

    Raises:
        MembershipError: The job is over, or has begun without this slot, or no server answers.
    """
    slot, _ = parse_member_name(member)
    try:
        reply = _ask_assignment(client, slot, read_end_reason)
        if not reply.rings:
            with _joined_rendezvous(membership_client):
                reply = _wait_job_begun(rendezvous, client, slot, begin, read_end_reason, sleep)
    finally:
        client.close()
    assignment = SlotAssignment.of_slot(slot, reply)
    if assignment is None:
        slots = sorted(each for ring in reply.rings for each in ring)
        do = "Nothing: the job goes on without it"
        raise MembershipError(explain("job is over for worker", got=slot, expected=f"one of {slots}", do=do))
    return assignment, len(reply.rings)


@contextlib.contextmanager
def _joined_rendezvous(membership_client: MembershipClient) -> Iterator[None]:
    membership_client.start()
    try:
        yield
    finally:
        membership_client.leave_membership(is_finished=True)
        membership_client.close(is_graceful=True)


def _wait_job_begun(
    rendezvous: StartupRendezvous,
    client: RingClient,
    slot: int,
    begin: BeginJob,
    read_end_reason: Callable[[], str],
    sleep: Callable[[float], None],
) -> RingAssignmentReply:
    """Wait until the job has started; start it if this worker has to."""
    done = None
    while not (reply := _ask_assignment(client, slot, read_end_reason)).rings:
        membership = rendezvous.membership_if_first()
        if membership is None or membership is done:
            sleep(_ASSIGNMENT_POLL_S)
            continue
        done = membership
        try:
            profiles = [trainer_interface.parse_profile(each.member, each.note) for each in membership.statuses]
            begin([parse_member_name(each)[0] for each in membership.members], profiles)
        except RemoteError as error:
            was_faster = error.error == TrainingError.__name__ and bool(
                _ask_assignment(client, slot, read_end_reason).rings
            )
            if not was_faster:  # the server refuses the same of every worker
                raise
    return reply


def rendezvous_client(
    rendezvous: StartupRendezvous,
    member: str,
    addresses: Sequence[tuple[str, int]],
    authentication: rpc.PeerAuthentication,
    num_workers: int,
) -> MembershipClient:
    """Return a worker's membership client for the startup rendezvous."""
    join = Join(part=STARTUP_RENDEZVOUS, expected=num_workers)
    return MembershipClient(
        member, addresses, authentication, rendezvous, lambda: Heartbeat(is_waiting=True, is_reading=True), join=join
    )


def job_end_reason(addresses: Sequence[tuple[str, int]], authentication: rpc.PeerAuthentication) -> str:
    """Return the coordinators' reason why the job is over; empty if it is not, or none answers."""
    for host, port in addresses:
        with (
            contextlib.suppress(RpcError),
            rpc.RpcClient.connect(host, port, authentication, role="coordinator") as client,
        ):
            status = client.call(CoordinatorStatusRequest(), timeout_s=CALL_TIMEOUT_S).message
            assert isinstance(status, CoordinatorStatus), "the class of the reply"
            if status.ended:
                return status.ended
    return ""


def _ask_assignment(client: RingClient, slot: int, read_end_reason: Callable[[], str]) -> RingAssignmentReply:
    try:
        return client.request_assignment(slot)
    except RpcError as error:
        if reason := read_end_reason():  # the server has ended with the job
            raise MembershipError(f"job is over: {reason}. Nothing is left to do.") from error
        if not isinstance(error, (ConnectionLostError, DeadlineError)):
            raise
        # This worker or the server is cut off: the script itself has not failed.
        raise MembershipError(f"this worker is no member: no parameter server answers: {error}") from error


_RESTARTED_SEARCH_S = 5.0
"""Time that a restarted worker searches for the server before it asks whether the job is over."""
_MUST_MATCH = ("mode", "reduction", "weight", "on_failure", "seed", "optimizer", "local_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRingOptions:
    """Options from the script and the launcher."""

    elastic: PrepareOptions
    mode: str
    reason: str
    settings: Asynchronous


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScriptInputs:
    """Objects from the script, and their properties."""

    model: nn.Module
    optimizer: Optimizer
    loader: DataLoader
    reading: LoaderSpec
    parameters: Sequence[torch.Tensor]
    must_match: dict[str, Any]
    """Values that must be the same on all workers."""
    sample_weights: SampleWeightTable | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Connections:
    """Connections of this worker to other processes."""

    environment: WorkerEnvironment
    authentication: rpc.TlsAuthentication
    connectors: Sequence[Callable[[], rpc.RpcClient]]


def prepare_elastic_rings(
    triple: tuple[nn.Module, Optimizer, DataLoader],
    options: ElasticRingOptions,
    environment: WorkerEnvironment,
    timer: StepTimer,
) -> tuple[DistributedDataParallel, ElasticRingOptimizer, SharedLoader]:
    """Become a member of a ring; return when its first generation with this member has begun.

    Raises:
        TrainingError: The script has its own process group, or its data or optimizer are not supported here.
        DisagreementError: The others have prepared something else.
        MembershipError: The job is over, or does not want this worker.
    """
    elastic_preparation.refuse_process_group()
    inputs = _read_inputs(triple, options)
    authentication = elastic_preparation.peer_authentication(environment)
    connections = _Connections(
        environment=environment,
        authentication=authentication,
        connectors=ring_preparation.server_connectors(environment, authentication),
    )
    assignment, num_rings = _assign_ring(inputs, options, connections)
    joined = _join_ring(inputs, options, connections, timer, assignment)
    weights = SampleWeights(num_ranks=1, is_mean=options.elastic.reduction == "mean")
    parallel = ddp.wrap_elastic_ddp(inputs.model, options.elastic.ddp, joined.session, weights, timer)
    if joined.trainer.progress.has_joined_late:
        joined.worker.adopt_peer_state()
    else:
        joined.worker.refresh_parameters()
    ring = ElasticRing(
        joined.session,
        joined.trainer,
        joined.worker,
        timer,
        IncompleteStep(inputs.optimizer, options.elastic.extra_state, lambda: joined.worker.misses_samples),
        joined.recorder.epoch_accounted,
        num_rings=num_rings,
    )
    source = ShardSource(inputs.loader, inputs.reading, inputs.must_match["seed"], ring)
    loader = SharedLoader(inputs.loader, source, weights, timer, inputs.sample_weights)
    return parallel, ElasticRingOptimizer(inputs.optimizer, joined.worker), loader


def _read_inputs(triple: tuple[nn.Module, Optimizer, DataLoader], options: ElasticRingOptions) -> _ScriptInputs:
    model, optimizer, loader = triple
    ring_preparation.check_optimizer_fresh(optimizer, options.settings)
    spec = order.read_loader(loader)
    check_elastic_data(spec)
    must_match = {
        **asdict(spec),
        "num_prefetched": 0,  # the next shard is known only when the ring has agreed on it
        "mode": options.mode,
        "reduction": options.elastic.reduction,
        "weight": options.elastic.weight_digest,
        "on_failure": options.elastic.on_failure,
        "seed": order.shuffle_seed(loader),
        "optimizer": optimizers.check_optimizer_name(optimizers.optimizer_name(optimizer)),
        "local_steps": options.settings.local_steps,
        "num_parameters": elastic_preparation.count_parameters(model),
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return _ScriptInputs(
        model=model,
        optimizer=optimizer,
        loader=loader,
        reading=spec,
        parameters=parameters,
        must_match=must_match,
        sample_weights=options.elastic.sample_weights,
    )


def _assign_ring(
    inputs: _ScriptInputs, options: ElasticRingOptions, connections: _Connections
) -> tuple[SlotAssignment, int]:
    """Return this worker's ring and the number of rings."""
    environment, name = connections.environment, elastic_preparation.member_name(connections.environment)
    num_workers = int(os.environ.get("WORLD_SIZE", "1"))
    prospects = forecast.describe_own_rank(
        inputs.model, inputs.loader, inputs.reading, environment, is_needed=True, num_workers=num_workers
    )
    profile = {**inputs.must_match, "cap": options.elastic.max_samples, **prospects}
    rendezvous = StartupRendezvous(name, profile)
    is_late = parse_member_name(name)[1] > 0  # then the server started long ago, or has ended
    client = RingClient(
        connections.connectors,
        0,
        reconnect_timeout_s=_RESTARTED_SEARCH_S if is_late else ring_preparation.SERVER_START_TIMEOUT_S,
    )
    membership_client = rendezvous_client(
        rendezvous, name, environment.coordinators, connections.authentication, num_workers
    )

    def begin(slots: Sequence[int], everybody: Sequence[dict[str, Any]]) -> None:
        _begin_server_job(inputs, options, environment, client, dict(zip(slots, everybody, strict=True)))

    def why_over() -> str:
        return job_end_reason(environment.coordinators, connections.authentication)

    return wait_ring_assignment(rendezvous, membership_client, client, name, begin, read_end_reason=why_over)


def _begin_server_job(
    inputs: _ScriptInputs,
    options: ElasticRingOptions,
    environment: WorkerEnvironment,
    client: RingClient,
    profiles_by_slot: Mapping[int, dict[str, Any]],
) -> None:
    """Form rings of the present slots from their profiles, and start the job on the server."""
    slots, profiles = list(profiles_by_slot), list(profiles_by_slot.values())
    collectives.check_equal(profiles, _MUST_MATCH, [f"worker {slot}" for slot in slots])
    _, reason, rings_by_links = forecast.choose_mode(
        (options.mode, options.reason), profiles, options.settings.rings, is_open=False
    )
    ring_options = RingOptions(mode=options.mode, is_mean=True, settings=options.settings, ddp={}, rings=rings_by_links)
    speeds = relative_speeds(profiles)
    ring_indices = ring_preparation.form_initial_rings(ring_options, speeds, profiles).rings
    batch = inputs.reading.batch_samples
    caps = balancing.share_limits(batch, (each["cap"] for each in profiles))
    shares = balancing.apportion(batch, [Speed(s_per_sample=1 / speed) for speed in speeds], caps)
    rings = [[slots[place] for place in ring] for ring in ring_indices]
    setup = ring_preparation.build_server_setup(inputs.model, inputs.optimizer, rings, ring_options)
    update: dict[str, Any] = {"shares": [[shares[place] for place in ring] for ring in ring_indices]}
    if options.settings.local_steps:
        update["local_steps"] = [options.settings.local_steps] * len(ring_indices)
    setup = setup.model_copy(update=update)
    first = FlatTensors(setup.tensors)
    with torch.no_grad():
        torch._foreach_copy_(first.views, [each.detach() for each in inputs.parameters])
    client.start_job(setup, first.buffers())
    recorder = Recorder(environment, 0)
    recorder.training_prepared(mode=options.mode, options=options.elastic.mode, reason=reason, shares=tuple(shares))
    recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).max_versions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _JoinedRingMember:
    """This process as a member of its ring."""

    name: str
    session: ElasticSession
    trainer: RingTrainerState
    worker: ElasticRingWorker
    recorder: ElasticRecorder


# Long: it joins all parts of a member, which refer to each other; each is made elsewhere.
def _join_ring(
    inputs: _ScriptInputs,
    options: ElasticRingOptions,
    connections: _Connections,
    timer: StepTimer,
    assignment: SlotAssignment,
) -> _JoinedRingMember:
    """Join the ring; return once a generation with this member has begun."""
    environment, authentication, own_name = (
        connections.environment,
        connections.authentication,
        elastic_preparation.member_name(connections.environment),
    )
    address, state_server = generation_group.own_address(), StateServer()
    groups = GenerationGroups(address)
    server = elastic_preparation.start_state_server(environment, authentication, state_server, address)
    description = MemberDescription(
        member=own_name,
        state_address=f"{address} {server.port}",
        max_samples=options.elastic.max_samples,
        assumed_speed=default_group.describe_rank(environment, os.environ).speed,
        must_match=inputs.must_match,
    )
    recorder = ElasticRecorder(environment, lambda: session.is_primary)
    share_table = ShareTable(inputs.reading.batch_samples, is_balanced=True, samples_of=assignment.shard_samples)
    identity = (own_name, lambda: session, lambda: trainer)
    worker = ElasticRingWorker(*identity, connections.connectors, inputs.parameters, local_steps=assignment.local_steps)
    state = TrainingState(
        inputs.model, inputs.optimizer, options.elastic.extra_state, extra_tensors=worker.extra_tensors
    )
    job_trainer = ElasticTrainerState(
        description,
        share_table,
        timer,
        state,
        StateTransport(state_server=state_server, authentication=authentication),
        recorder,
    )
    trainer = RingTrainerState(job_trainer, RingCursor(ring=assignment.ring), worker.on_pause)
    session = ElasticSession(
        own_name,
        groups,
        trainer,
        buffers=lambda: elastic_preparation.model_buffers(inputs.model),
        is_mean=True,  # weights scale a sum to a whole step's gradient too, so a lost part is compensated
        num_parameters=inputs.must_match["num_parameters"],
        recomputes=options.elastic.on_failure == "recompute",
    )
    join = Join(part=messages.part_of_ring(assignment.ring), expected=len(assignment.slots))

    def beat() -> Heartbeat:
        worker.check_pause(time.monotonic(), is_paused=session.is_paused)
        return session.heartbeat(trainer_interface.busy_s())

    membership_client = MembershipClient(own_name, environment.coordinators, authentication, session, beat, join=join)
    elastic_preparation.leave_on_sigterm(session)
    trainer_interface.record_exit_failures()
    atexit.register(elastic_preparation.shut_down_member, membership_client, session, server, groups)
    atexit.register(worker.leave_server)
    timing.freeze_garbage_collector()
    session.start(membership_client)
    return _JoinedRingMember(name=own_name, session=session, trainer=trainer, worker=worker, recorder=recorder)
