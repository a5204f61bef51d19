"""Rendezvous of the workers of an elastic job of rings at its start.

All workers meet in the startup rendezvous, a membership of its own, and report their speeds. The first member forms the
rings and starts the job on the parameter server. The others, and workers that come later, ask the server for their
assignment. If the first member dies, the next one takes its place, until the server has the job: it accepts the first
start.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringweave import errors, rpc
from ringweave.comm import group_info
from ringweave.comm.probing import measure
from ringweave.comm.probing.network_measurement import NetworkMeasurement
from ringweave.environment import WorkerEnvironment
from ringweave.jobs import modes
from ringweave.membership.client import CALL_TIMEOUT_S, MembershipClient
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus, StopTraining, parse_member_name
from ringweave.membership.messages import STARTUP_RENDEZVOUS, CoordinatorStatus, CoordinatorStatusRequest, Join
from ringweave.param_server.client import RingClient
from ringweave.param_server.messages import RingAssignmentReply
from ringweave.param_server.versions import StalenessPolicy
from ringweave.planning import sites
from ringweave.topology.inference.tree import NodeSpec
from ringweave.training import collectives
from ringweave.training.elastic import member_details, member_process
from ringweave.training.mode_choice import forecast
from ringweave.training.options import Script
from ringweave.training.recorder import Recorder
from ringweave.training.rings import ring_formation
from ringweave.training.rings.elastic_ring import AssignedMember
from ringweave.training.rings.ring_formation import relative_speeds
from ringweave.training.rings.ring_progress import SlotAssignment

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
                raise member_details.stop_error(self._stop)
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
        raise errors.MembershipError("job is over for worker", got=slot, expected=f"one of {slots}", do=do)
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
            profiles = [member_details.parse_profile(each.member, each.note) for each in membership.statuses]
            begin([parse_member_name(each)[0] for each in membership.members], profiles)
        except errors.RemoteError as error:
            was_faster = error.error == errors.TrainingError.__name__ and bool(
                _ask_assignment(client, slot, read_end_reason).rings
            )
            if not was_faster:  # the server refuses the same of every worker
                raise
    return reply


def job_end_reason(addresses: Sequence[tuple[str, int]], authentication: rpc.PeerAuthentication) -> str:
    """Return the coordinators' reason why the job is over; empty if it is not, or none answers."""
    for host, port in addresses:
        with (
            contextlib.suppress(errors.RpcError),
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
    except errors.RpcError as error:
        if reason := read_end_reason():  # the server has ended with the job
            raise errors.MembershipError(f"job is over: {reason}. Nothing is left to do.") from error
        if not isinstance(error, (errors.ConnectionLostError, errors.DeadlineError)):
            raise
        # This worker or the server is cut off: the script itself has not failed.
        raise errors.MembershipError(f"this worker is no member: no parameter server answers: {error}") from error


_RESTARTED_SEARCH_S = 5.0
"""Time that a restarted worker searches for the server before it asks whether the job is over."""
_MUST_MATCH = ("mode", "reduction", "weight", "on_failure", "seed", "optimizer", "local_steps", "outer")


def assign_ring(
    script: Script,
    environment: WorkerEnvironment,
    authentication: rpc.TlsAuthentication,
    must_match: dict[str, Any],
    reason: str,
) -> AssignedMember:
    """Return this worker's ring, once the job has started on the server.

    Raises:
        MembershipError: The job is over, or has begun without this worker, or no server answers.
    """
    connectors = ring_formation.server_connectors(environment, authentication)
    name, num_workers = member_process.member_name(environment), int(os.environ.get("WORLD_SIZE", "1"))
    is_needed = forecast.is_served(environment)
    prospects = forecast.describe_own_rank(
        script.model, script.loader, script.spec, environment, is_needed=is_needed, num_workers=num_workers
    )
    place = group_info.locate_process(environment, os.environ)
    own = {"cap": script.max_samples, "node": place.node, "address": place.address, "nics": sorted(place.nics)}
    rendezvous = StartupRendezvous(name, {**must_match, **own, **prospects})
    is_late = parse_member_name(name)[1] > 0  # then the server started long ago, or has ended
    client = RingClient(
        connectors, 0, reconnect_timeout_s=_RESTARTED_SEARCH_S if is_late else ring_formation.SERVER_START_TIMEOUT_S
    )
    join = Join(part=STARTUP_RENDEZVOUS, expected=num_workers)
    membership_client = MembershipClient(
        name,
        environment.coordinators,
        authentication,
        rendezvous,
        lambda: Heartbeat(is_waiting=True, is_reading=True),
        join=join,
    )

    def begin(slots: Sequence[int], profiles: Sequence[WorkerProfile]) -> None:
        _begin_server_job(script, environment, client, reason, slots, profiles)

    def read_end_reason() -> str:
        return job_end_reason(environment.coordinators, authentication)

    assignment, num_rings = wait_ring_assignment(
        rendezvous, membership_client, client, name, begin, read_end_reason=read_end_reason
    )
    return AssignedMember(assignment=assignment, num_rings=num_rings, connectors=connectors)


def add_measured_sites(
    profiles: Sequence[WorkerProfile], find_kept: Callable[[Sequence[NodeSpec]], NetworkMeasurement | None]
) -> Sequence[WorkerProfile]:
    """Return the profiles, the first one with sites by an earlier measurement of these nodes, if there is one.

    An elastic job measures no links itself, since a generation that forms after a loss cannot wait for it. Runs that do
    keep what they find for a day, on each node.

    Args:
        profiles: Profiles of the workers, with `node`, `address` and `nics`.
        find_kept: Returns the measurement of nodes that this node has kept.
    """
    nodes = {each["node"]: each for each in profiles}
    hosts = [
        NodeSpec(name=name, address=each["address"], num_devices=1, nics=tuple(each["nics"]))
        for name, each in nodes.items()
    ]
    measured = find_kept(hosts)
    found = measured and sites.group_nodes_by_links(list(nodes), measured.cluster(), measured.link_rates)
    if not measured or not found:
        return profiles
    text = f"{found}, in an earlier run"
    return [{**profiles[0], "measured_sites": found.nodes, "measured_sites_text": text}, *profiles[1:]]


def _begin_server_job(
    script: Script,
    environment: WorkerEnvironment,
    client: RingClient,
    reason: str,
    slots: Sequence[int],
    profiles: Sequence[WorkerProfile],
) -> None:
    """Form rings of the present slots from their profiles, and start the job on the server."""
    collectives.check_equal(profiles, _MUST_MATCH, [f"worker {slot}" for slot in slots])
    settings, mode = script.settings, profiles[0]["mode"]
    _, reason, rings_by_links = forecast.choose_mode((mode, reason), profiles, settings.rings, is_open=False)
    speeds = relative_speeds(profiles)
    if mode == modes.LOCAL:
        if not environment.describes_links:
            profiles = add_measured_sites(profiles, measure.kept_measurement)
        ring_indices = sites.sites_of(script.local.sites, profiles)
        reason += sites.explain_sites(script.local.sites, profiles)
    else:
        ring_indices = ring_formation.form_initial_rings(mode, settings, speeds, profiles, rings_by_links).rings
    shares = ring_formation.initial_shares(script.spec.batch_samples, speeds, profiles)
    rings = [[slots[place] for place in ring] for ring in ring_indices]
    setup = ring_formation.build_server_setup(script.model, script.optimizer, rings, settings)
    update: dict[str, Any] = {"shares": [[shares[place] for place in ring] for ring in ring_indices]}
    if settings.local_steps:
        update["local_steps"] = [settings.local_steps] * len(ring_indices)
    if mode == modes.LOCAL and len(rings) > 1:
        setup = ring_formation.with_outer_optimizer(setup, script)
    elif mode == modes.LOCAL:  # every push has all parameters
        update["local_steps"] = [script.local.elastic_inner_steps]
    ring_formation.start_server_job(client, setup.model_copy(update=update), script.parameters)
    recorder = Recorder(environment, 0)
    recorder.training_prepared(mode=mode, options=script.mode, reason=reason, shares=tuple(shares))
    recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).max_versions)
