"""One round of a node: progress and outcome of its workers, and preparation of the services that run on it."""

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave import telemetry
from ringweave.jobs.records import EndCause, GroupPhase, cause_of_exit
from ringweave.launcher.node_context import NodeContext
from ringweave.launcher.outcome import RunRecorder, WorkerFailure, first_cause
from ringweave.launcher.output import write_notice
from ringweave.launcher.restarts import JOB_FINISHED, JOB_OVER, MEMBERSHIP_ERROR, NO_COORDINATOR, NO_SERVER
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.scale_requests import NodeRequests, WantedWorkers
from ringweave.launcher.services import (
    COORDINATOR_ROLE,
    SERVER_ROLE,
    CoordinatorPair,
    CoordinatorProcesses,
    JobServer,
    ServerPairMember,
    ServiceProcesses,
    ServiceSetup,
    SidecarEndpoint,
)
from ringweave.launcher.supervise import NodeWorkers
from ringweave.launcher.workers import HostPort
from ringweave.membership import membership_records
from ringweave.membership.messages import WHOLE_JOB
from ringweave.membership.settings import MemberBounds
from ringweave.param_server.leadership import LogServer
from ringweave.platforms.agent import agent_channel, job_config
from ringweave.platforms.agent.agent_channel import AgentChannel, DesiredState
from ringweave.platforms.agent.job_config import JobConfig, RendezvousResult
from ringweave.rpc import CertificateAuthority, Credentials
from ringweave.telemetry import Event

_READ_EVENT_KINDS = (b'"iterations_done"', b'"generation_begun"', b'"member_lost"', b'"member_returned"')


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeProgress:
    """Training progress of a node, and its knowledge of an elastic job's membership."""

    iterations: int | None = None
    """Train steps done; None if the script reports none."""
    last_loss: float | None = None
    """Loss of the last train step; None if the script reports none."""
    members: tuple[str, ...] = ()
    """Member names of this node's workers, `RANK.INCARNATION`; empty for a job that is not elastic."""
    generation: tuple[int, int] = (0, 0)
    """Term and number of the newest generation that this node's coordinator has reported; zeros if none."""
    evicted: tuple[str, ...] = ()
    """Earlier members that are not in that generation and have not finished, as far as known here."""


@dataclass(slots=True)
class _PartProgress:
    """Membership of a part of the job, as its coordinator has reported it here."""

    generation: tuple[int, int] = (0, 0)
    current: frozenset[str] = frozenset()
    """Members of that generation."""
    known: frozenset[str] = frozenset()
    """Members of that generation and of earlier ones; of each slot the newest."""

    def begin_generation(self, generation: tuple[int, int], members: Sequence[str]) -> None:
        """Take over a generation, unless a newer one is known."""
        if generation >= self.generation:
            self.generation, self.current = generation, frozenset(members)
            self.known = membership_records.newest_of_slots(self.known | self.current)

    def evicted(self, lost: Set[str], finished: Set[str]) -> set[str]:
        """Return the members excluded from a generation; if no member is left, those that were lost before the end."""
        gone = set(self.known - self.current)
        if self.current <= lost | finished:
            gone |= lost
        slots = {member.partition(".")[0] for member in self.current - lost}
        return {each for each in gone - finished if each.partition(".")[0] not in slots}


class ProgressReader:
    """Reads the new lines of an event log, each once."""

    def __init__(self, path: Path) -> None:
        self._lines = telemetry.event_lines(path)
        self._progress = NodeProgress()
        self._parts: dict[str, _PartProgress] = {}
        self._finished_members: Set[str] = set()
        self._lost_members: Set[str] = set()

    def read(self) -> NodeProgress:
        """Return the newest progress without waiting."""
        for line in self._lines.read_new():
            event = telemetry.parse_event(line) if any(kind in line for kind in _READ_EVENT_KINDS) else None
            if event is not None:
                self._apply_event(event)
        return self._progress

    def _apply_event(self, event: Event) -> None:
        try:
            if event["kind"] == "iterations_done":
                self._progress = replace(self._progress, iterations=event["iterations"], last_loss=event["loss"])
                return
            if event["kind"] == "generation_begun":
                part = self._parts.setdefault(event.get("part", WHOLE_JOB), _PartProgress())
                part.begin_generation((event["term"], event["number"]), event["members"])
            elif event["kind"] == "member_returned" and event["term"] >= self._term_of(event["member"]):
                self._lost_members -= {event["member"]}
            elif event["kind"] == "member_lost" and event["reason"] == membership_records.REASON_FINISHED:
                self._finished_members = membership_records.newest_of_slots(self._finished_members | {event["member"]})
            elif event["kind"] == "member_lost":
                self._lost_members = membership_records.newest_of_slots(self._lost_members | {event["member"]})
            self._progress = replace(self._progress, generation=self._newest_generation(), evicted=self._evicted())
        except (KeyError, TypeError, ValueError):  # a line of another program
            return

    def _newest_generation(self) -> tuple[int, int]:
        return max((part.generation for part in self._parts.values()), default=(0, 0))

    def _term_of(self, member: str) -> int:
        """Return the term of the newest generation in the member's part of the job."""
        return max((part.generation[0] for part in self._parts.values() if member in part.known), default=0)

    def _evicted(self) -> tuple[str, ...]:
        """Return the evicted members of all parts: the whole job, or each ring with a membership of its own."""
        known = {member for part in self._parts.values() for member in part.known}
        evicted = [
            part.evicted(self._lost_members - (known - part.known), self._finished_members)
            for part in self._parts.values()
        ]
        return tuple(sorted(set().union(*evicted)))


def wanted_workers(config: JobConfig, desired: DesiredState) -> WantedWorkers:
    """Return the number of workers that the job shall have now."""
    return desired.wanted or WantedWorkers(workers=config.world_size, number=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOutcome:
    """Outcome of a node's workers in a round."""

    phase: GroupPhase
    """SUCCEEDED, FAILED, INTERRUPTED (they blame a peer), or STOPPED."""
    cause: EndCause | None = None
    exit_code: int | None = None
    text: str = ""


class NodeRound:
    """Workers of this node in one round; when `poll` has returned an outcome, none of their processes is left."""

    def __init__(
        self,
        workers: NodeWorkers,
        recorder: RunRecorder,
        progress_reader: ProgressReader,
        requests: NodeRequests | None = None,
    ) -> None:
        """`requests` are those for another number of members of an elastic job; None for another job."""
        self._workers, self._recorder, self._progress_reader = workers, recorder, progress_reader
        self._requests = requests

    def request_workers(self, wanted: WantedWorkers) -> None:
        """Let workers start or leave, as the newest request of an elastic job says."""
        if self._requests is not None:
            self._requests.request(wanted)

    def request_stop(self) -> None:
        """Request the end of the workers, later by force if needed; further calls have no effect."""
        self._workers.request_stop()

    def progress(self) -> NodeProgress:
        return replace(self._progress_reader.read(), members=self._workers.running_members())

    def poll(self) -> NodeOutcome | None:
        """Return the outcome of the workers, or None while one of them runs; it has to be called regularly."""
        failures = self._workers.poll()
        if failures is None:
            return None
        outcome = conclude_elastic_node(failures) if self._requests is not None else conclude_node(failures)
        if self._workers.service_failure:
            text = self._workers.service_failure
            outcome = NodeOutcome(phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text=text)
        run_outcome = {GroupPhase.SUCCEEDED: "done", GroupPhase.STOPPED: "interrupted"}.get(outcome.phase, "failed")
        self._recorder.close(outcome=run_outcome, exit_code=int(run_outcome != "done"), cause=outcome.text or None)
        return outcome


def conclude_node(failures: Sequence[WorkerFailure]) -> NodeOutcome:
    """Return the outcome of a node from the failures of its workers; without any it succeeded."""
    if not failures:
        return NodeOutcome(phase=GroupPhase.SUCCEEDED, exit_code=0)
    first = first_cause(failures)
    if first is None:
        return NodeOutcome(phase=GroupPhase.STOPPED, text="its workers were stopped")
    worker_exit = first.exit
    cause = cause_of_exit(worker_exit.exit_code, worker_exit.signal_name, blames_peer=first.is_peer_error)
    phase = GroupPhase.INTERRUPTED if cause is EndCause.PEER else GroupPhase.FAILED
    text = f"rank {first.global_rank} {first.reason}"
    return NodeOutcome(phase=phase, cause=cause, exit_code=worker_exit.exit_code, text=text)


def conclude_elastic_node(failures: Sequence[WorkerFailure]) -> NodeOutcome:
    """Return the outcome of an elastic job's node; errors of its membership decide who is responsible."""
    first = first_cause(failures)
    exception = (first.exception if first else None) or ""
    if first is None or MEMBERSHIP_ERROR not in exception:
        return conclude_node(failures)
    if JOB_FINISHED in exception:
        return NodeOutcome(phase=GroupPhase.SUCCEEDED, exit_code=0, text="the other nodes had finished")
    text = f"rank {first.global_rank} {first.reason}"
    if any(each in exception for each in (JOB_OVER, NO_COORDINATOR, NO_SERVER)):
        return NodeOutcome(phase=GroupPhase.INTERRUPTED, cause=EndCause.PEER, exit_code=first.exit.exit_code, text=text)
    return NodeOutcome(phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, exit_code=first.exit.exit_code, text=text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreparedRound:
    """Addresses and credentials that an agent has prepared for a round."""

    round: int
    addresses: Mapping[str, HostPort]
    """Role -> offered address of the service on this node."""
    authority: CertificateAuthority
    """Issues the credentials of the parameter server of a job that is not elastic."""


class RoundServices:
    """Prepares and creates the services that run on this node in each round: parameter server and coordinator."""

    def __init__(
        self,
        config: JobConfig,
        node: str,
        node_context: NodeContext,
        channel: AgentChannel,
        host: str | None = None,
    ) -> None:
        """Create the object; makes no service yet.

        Args:
            config: Config of the job.
            node: Name of any node of the job. The best connected one has its server; in an elastic job the first node
                has it, and the first two have coordinators.
            node_context: Context that runs processes on the node.
            channel: Channel that distributes credentials.
            host: Name of this node that stays valid when another agent replaces this one; None: its address stays.
        """
        self._config, self._node, self._node_context = config, node, node_context
        self._channel, self._host = channel, host
        self._server_nodes = job_config.server_nodes(config)
        self._prepared: _PreparedRound | None = None

    def prepare_round(
        self, desired: DesiredState, stop_reason: agent_channel.StopReason = agent_channel.never_stop
    ) -> dict[str, HostPort]:
        """Return the addresses of the round's `server` and `coordinator` here; empty if this node has neither.

        The node of the server or, in an elastic job, its first node also issues the credentials of all processes of the
        round; in an encrypted job without either, the node of rank 0 does. After the start of a round nothing is
        prepared in an elastic job: an agent that replaces another one takes over its addresses.

        Raises:
            RoundOverError: The round is obsolete, as `stop_reason` says.
            LaunchError: There is no free port, or no receiver of the credentials.
            OSError: The credentials cannot be written.
        """
        coordinators = self._config.coordinator_nodes
        is_open = desired.rendezvous is not None and desired.rendezvous.round == desired.round
        nodes_by_role = {SERVER_ROLE: self._server_nodes, COORDINATOR_ROLE: coordinators}
        roles = [role for role, nodes in nodes_by_role.items() if self._node in nodes]
        masters = (self._config.master_node,) if self._config.encrypts else ()
        is_issuer = self._node in (coordinators or self._server_nodes or masters)[:1]
        if not (roles or is_issuer) or (coordinators and is_open):
            return {}
        authority = CertificateAuthority(f"{self._config.job}-{desired.round}-{os.getpid()}")
        if is_issuer:
            self._channel.publish_credentials(desired.round, self._issue_credentials(authority), stop_reason)
        addresses = {role: self._node_context.pick_address(self._node) for role in roles}
        if coordinators and self._host is not None:
            addresses = {role: replace(address, host=self._host) for role, address in addresses.items()}
        self._prepared = _PreparedRound(round=desired.round, addresses=addresses, authority=authority)
        return addresses

    def create_services(
        self, rendezvous: RendezvousResult, run_dir: RunDir, *, initial_members: Sequence[str]
    ) -> list[ServiceProcesses]:
        """Create the services of the started round on this node; they do not run yet."""
        prepared = self._prepared if self._prepared is not None and self._prepared.round == rendezvous.round else None
        setup = ServiceSetup(
            node_context=self._node_context,
            run_dir=run_dir,
            issue=lambda role, index: self._channel.take_credentials(rendezvous.round, f"{role}-{index}"),
            give_up=write_notice,
        )
        services: list[ServiceProcesses] = []
        if self._node in self._server_nodes and len(self._server_nodes) > 1:
            services.append(self._create_server_of_pair(rendezvous, setup))
        elif self._node in self._server_nodes and prepared is not None:
            services.append(self._create_server(prepared, setup))
        coordinators = self._config.coordinator_nodes
        if self._node in coordinators and len(rendezvous.coordinators) == len(coordinators):
            index = coordinators.index(self._node)
            offered = prepared.addresses.get(COORDINATOR_ROLE) if prepared is not None else None
            is_standby = index > 0 or offered != rendezvous.coordinators[index]
            pair = self._coordinator_pair(rendezvous, initial_members)
            services.append(CoordinatorProcesses(pair, setup, {index: is_standby}))
        return services

    def _create_server_of_pair(self, rendezvous: RendezvousResult, setup: ServiceSetup) -> JobServer:
        """Create the server of this node; it follows the other one if that leads already."""
        log_server = LogServer(self._channel.leadership_log(rendezvous.round))
        pairs = zip(self._server_nodes, rendezvous.servers, strict=True)
        member = ServerPairMember(index=self._server_nodes.index(self._node), open_log=log_server.open)
        return JobServer([self._endpoint(node, address) for node, address in pairs], setup, member)

    def _create_server(self, prepared: _PreparedRound, setup: ServiceSetup) -> JobServer:
        """Create the server of this node; only of the agent that has offered it, since another one has no state."""
        if not self._config.coordinator_nodes:
            setup = replace(setup, issue=lambda role, index: prepared.authority.issue(role, str(index)))
        return JobServer([self._endpoint(self._node, prepared.addresses[SERVER_ROLE])], setup)

    def _coordinator_pair(self, rendezvous: RendezvousResult, initial_members: Sequence[str]) -> CoordinatorPair:
        assert self._config.min_workers is not None, "it has coordinators"
        node_addresses = zip(self._config.coordinator_nodes, rendezvous.coordinators, strict=True)
        return CoordinatorPair(
            endpoints=[self._endpoint(node, address) for node, address in node_addresses],
            bounds=MemberBounds(min_members=self._config.min_workers, max_members=self._config.num_slots),
            expected_members=self._count_expected(rendezvous.late_nodes),
            initial_members=initial_members,
        )

    def _count_expected(self, late_nodes: Sequence[str]) -> int:
        """Return the number of members with which the first generation begins."""
        config, wanted = self._config, wanted_workers(self._config, self._channel.desired_state()).workers
        nodes = [node for node in config.nodes if node.name not in late_nodes]
        return sum(rank < wanted for node in nodes for rank in config.slots_of_node(node.index))

    def _endpoint(self, node: str, address: HostPort) -> SidecarEndpoint:
        """Return the endpoint of a service.

        Those of this node listen at the node's present address; the advertised name may still resolve to a lost node.
        """
        is_named = node == self._node and address.host == self._host
        return SidecarEndpoint(
            node=node, advertised=address, listen_host=self._node_context.pick_address(node).host if is_named else None
        )

    def _issue_credentials(self, authority: CertificateAuthority) -> dict[str, list[Credentials]]:
        """Issue the credentials of a round: holder -> credentials.

        Those of an elastic job's worker name it as a member, `RANK.INCARNATION`.
        """
        is_elastic = self._config.min_workers is not None
        num_elastic = self._channel.num_incarnations(self._config.num_slots)
        incarnations = range(num_elastic if is_elastic else agent_channel.NUM_SERVER_INCARNATIONS)
        issued = {
            f"worker-{rank}": [
                authority.issue("worker", f"{rank}.{incarnation}" if is_elastic else str(rank))
                for incarnation in incarnations
            ]
            for rank in range(self._config.num_slots)
        }
        counts = {
            COORDINATOR_ROLE: len(self._config.coordinator_nodes),
            SERVER_ROLE: len(self._config.elastic_server_nodes),
        }
        for role, count in counts.items():
            for index in range(count):
                issued[f"{role}-{index}"] = [authority.issue(role, str(index)) for _ in incarnations]
        return issued
