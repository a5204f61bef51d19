"""This process as a member of an elastic job: its credentials, its parts, and its end."""

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ringweave import rpc
from ringweave.comm import default_group, generation_group
from ringweave.comm.generation_group import GenerationGroups
from ringweave.environment import WorkerEnvironment
from ringweave.errors import TrainingError
from ringweave.jobs import modes
from ringweave.membership import messages
from ringweave.membership.client import MembershipClient
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import parse_member_name
from ringweave.membership.messages import Join
from ringweave.rpc.state_transfer import StateServer
from ringweave.telemetry import event_writer
from ringweave.training import timing
from ringweave.training.elastic import member_details
from ringweave.training.elastic.script_collectives import STARTUP_STATE, StartupLog
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.elastic.trainer import MemberDescription, StateTransport, TrainerState
from ringweave.training.elastic.training_state import TrainingState
from ringweave.training.elastic.wire_choice import WireChoice
from ringweave.training.options import Script
from ringweave.training.recorder import ElasticRecorder
from ringweave.training.rings.elastic_ring import AssignedMember, SessionExchange
from ringweave.training.rings.ring_worker import RingWorker
from ringweave.training.timing import StepTimer

_LOGGER = logging.getLogger("ringweave")
_EVICTED_CLOSE_TIMEOUT_S = 0.5
"""Time that an evicted process waits at its end for each of its threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberParts:
    """Parts of this member, once it has joined its job or its ring."""

    session: ElasticSession
    trainer: TrainerState
    recorder: ElasticRecorder
    exchange: SessionExchange | None
    worker: RingWorker | None
    """Only in rings."""


# Long: it joins all parts of a member, which refer to each other; each is made elsewhere.
def join_job(
    script: Script,
    environment: WorkerEnvironment,
    authentication: rpc.TlsAuthentication,
    timer: StepTimer,
    must_match: dict[str, Any],
    wires: WireChoice,
    assigned: AssignedMember | None = None,
) -> MemberParts:
    """Join the job, or the assigned ring; return when a generation with this member has begun and it has the state."""
    own_name, address, state_server = member_name(environment), generation_group.own_address(), StateServer()
    groups = GenerationGroups(address)
    server = start_state_server(environment, authentication, state_server, address, groups.revokes)
    description = MemberDescription(
        member=own_name,
        state_address=f"{address} {server.port}",
        max_samples=script.max_samples,
        assumed_speed=default_group.describe_rank(environment, os.environ).speed,
        must_match=must_match,
        wires=wires,
    )
    recorder = ElasticRecorder(environment, lambda: session.is_primary)
    transport, startup_log = StateTransport(state_server=state_server, authentication=authentication), StartupLog()
    exchange, worker, join = None, None, None
    extra_state: dict[str, Any] = {**script.extra_state, STARTUP_STATE: startup_log}
    if assigned is not None:
        seat, extra_state = assigned.assignment, dict(script.extra_state)
        exchange = SessionExchange(assigned, own_name, lambda: session, lambda: trainer)
        worker = _make_ring_worker(script, must_match["mode"], exchange)
        join = Join(part=messages.part_of_ring(seat.ring), expected=len(seat.slots))
    unpushed = () if worker is None or worker.changes is None else worker.changes.joining_tensors
    training_state = TrainingState(script.model, script.optimizer, extra_state, extra_tensors=unpushed)
    share_table = _share_table(script, must_match["mode"], assigned)
    make_ring = None if exchange is None else exchange.make_progress
    trainer = TrainerState(description, share_table, timer, training_state, transport, recorder, ring=make_ring)
    session = ElasticSession(
        own_name,
        groups,
        trainer,
        buffers=lambda: list(script.model.buffers()),
        # In rings, weights scale a sum to a whole step's gradient too, so a lost part is compensated.
        is_mean=script.is_mean or assigned is not None,
        num_parameters=must_match["num_parameters"],
        recomputes=script.on_failure == "recompute",
    )
    if assigned is None:
        session.repeat_collectives(startup_log)
    ring_slots = None if assigned is None else frozenset(map(str, assigned.assignment.slots))
    groups.find_revoked = lambda name: session.revokes(name) or _is_of_another_ring(name, ring_slots)

    def beat() -> Heartbeat:
        if exchange is not None:
            exchange.check_pause(time.monotonic(), is_paused=session.is_paused)
        return session.heartbeat(member_details.busy_s())

    client = MembershipClient(own_name, environment.coordinators, authentication, session, beat, join=join)
    leave_on_sigterm(session)
    member_details.record_exit_failures()
    atexit.register(shut_down_member, client, session, server, groups)
    timing.freeze_garbage_collector()
    session.start(client)
    return MemberParts(session=session, trainer=trainer, recorder=recorder, exchange=exchange, worker=worker)


def _make_ring_worker(script: Script, mode: str, exchange: SessionExchange) -> RingWorker:
    """Return this rank of its ring; in mode local the ring is a site, which pushes fragments if there are others."""
    is_local, assigned = mode == modes.LOCAL, exchange.assigned
    is_derived = is_local and script.local.inner_steps is None
    return RingWorker(
        exchange,
        script.parameters,
        local_steps=assigned.assignment.local_steps,
        max_local_steps=script.local.max_inner_steps if is_derived else None,
        fragments=script.fragments_between(assigned.num_rings) if is_local else (),
    )


def _share_table(script: Script, mode: str, assigned: AssignedMember | None) -> ShareTable:
    if assigned is None:
        return ShareTable(script.spec.batch_samples, is_balanced=mode == modes.BALANCED)
    samples_of = assigned.assignment.shard_samples
    return ShareTable(script.spec.batch_samples, is_balanced=True, samples_of=samples_of)


def _is_of_another_ring(member: str, ring_slots: frozenset[str] | None) -> bool:
    """Return whether a process is of another ring than this one, whose slots are given; its members never call here."""
    return ring_slots is not None and member.partition(".")[0] not in ring_slots


def member_name(environment: WorkerEnvironment) -> str:
    """Return this worker's name among the members of its job."""
    assert environment.member is not None, "the launcher sets it"
    return environment.member


def is_first_of_slot(environment: WorkerEnvironment) -> bool:
    """Return whether no earlier process of the job had this worker's slot."""
    return parse_member_name(member_name(environment))[1] == 0


def peer_authentication(environment: WorkerEnvironment) -> rpc.TlsAuthentication:
    """Load this worker's credentials and return its authentication of peers."""
    assert environment.credentials is not None, "the launcher sets them"
    credentials = rpc.Credentials.load_from(environment.credentials, keep_open=environment.encrypts)
    return rpc.TlsAuthentication(credentials)


def start_state_server(
    environment: WorkerEnvironment,
    authentication: rpc.PeerAuthentication,
    state_server: StateServer,
    address: str,
    revokes: Callable[[str], bool] = lambda name: False,
) -> rpc.RpcServer:
    """Start the server from which joining members read this member's state; it logs refused peers.

    `revokes` tells whether the certificate of that member counts no more.
    """
    server = rpc.RpcServer(
        authentication,
        state_server.handlers(),
        roles=("worker",),
        is_revoked=lambda peer: revokes(peer.name),
        write_event=event_writer(environment.events_path),
        on_handler_error=_log_server_error,
    )
    return server.start(address, within=environment.ports)


def _log_server_error(peer: rpc.Identity, kind: str, error: Exception) -> None:
    _LOGGER.error("state of this member: %s of %s: %s: %s", kind, peer.name, type(error).__name__, error)


def refuse_process_group() -> None:
    """Refuse a script that has created a process group.

    Raises:
        TrainingError: There is a process group.
    """
    if dist.is_initialized():
        raise TrainingError(
            "process group of an elastic job",
            got="one that the script has made",
            expected="none before prepare",
            do="Leave out init_process_group: prepare makes a new one whenever workers come or go",
        )


def leave_on_sigterm(session: ElasticSession) -> None:
    """Let SIGTERM finish this member's step and leave, unless the script has a handler; a second SIGTERM ends it.

    A handler of the script has to call `loader.leave`; so has a script that calls `prepare` outside of the main thread,
    where Python sets no handlers.
    """
    is_ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )

    def leave(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        session.leave_nowait()

    if is_ours:
        signal.signal(signal.SIGTERM, leave)


def shut_down_member(
    membership_client: MembershipClient, session: ElasticSession, server: rpc.RpcServer, groups: GenerationGroups
) -> None:
    """Announce at the end of the process that this member has finished, unless an exception ends it."""
    if session.has_stopped:  # no member waits for it, and its slot waits for another process
        membership_client.close(_EVICTED_CLOSE_TIMEOUT_S)
        session.close(_EVICTED_CLOSE_TIMEOUT_S)
        server.close(timeout_s=_EVICTED_CLOSE_TIMEOUT_S)
        return
    if not member_details.script_has_failed():
        membership_client.leave_membership(is_finished=True)
    membership_client.close()
    session.close()
    server.close(timeout_s=0.5)
    groups.leave_group()
