"""One round of a node: progress and outcome of its workers, and preparation of the services that run on it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave import telemetry
from ringweave.jobs.records import EndCause, GroupPhase, cause_of_exit
from ringweave.launcher.node_context import NodeContext
from ringweave.launcher.outcome import RunRecorder, WorkerFailure, first_cause
from ringweave.launcher.restarts import JOB_FINISHED, JOB_OVER, MEMBERSHIP_ERROR, NO_COORDINATOR
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.services import (
    COORDINATOR_ROLE,
    SERVER_ROLE,
    CoordinatorPair,
    CoordinatorProcesses,
    JobServer,
    ServiceProcesses,
    SidecarEndpoint,
)
from ringweave.launcher.supervise import NodeWorkers
from ringweave.launcher.workers import HostPort
from ringweave.membership.membership_records import REASON_FINISHED
from ringweave.membership.settings import MemberBounds
from ringweave.platforms.agent import node_layout
from ringweave.platforms.agent.agent_channel import (
    NUM_SERVER_INCARNATIONS,
    AgentChannel,
    DesiredState,
    RendezvousResult,
    StopReason,
    never_stop,
)
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.rpc import CertificateAuthority, Credentials, Identity
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


class ProgressReader:
    """Reads the new lines of an event log, each once."""

    def __init__(self, path: Path) -> None:
        self._lines = telemetry.LineReader(path)
        self._progress = NodeProgress()
        self._known_members: set[str] = set()
        self._current_members: set[str] = set()
        self._finished_members: set[str] = set()
        self._lost_members: set[str] = set()

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
            elif event["kind"] == "generation_begun":
                self._begin_generation(event)
            elif event["kind"] == "member_returned" and event["term"] >= self._progress.generation[0]:
                self._lost_members.discard(event["member"])
                self._progress = replace(self._progress, evicted=self._evicted())
            elif event["kind"] == "member_lost":
                (self._finished_members if event["reason"] == REASON_FINISHED else self._lost_members).add(
                    event["member"]
                )
                self._progress = replace(self._progress, evicted=self._evicted())
        except (KeyError, TypeError):  # a line of another program
            return

    def _begin_generation(self, event: Event) -> None:
        generation = (event["term"], event["number"])
        if generation < self._progress.generation:
            return
        self._current_members = set(event["members"])
        self._known_members |= self._current_members
        self._progress = replace(self._progress, generation=generation)
        self._progress = replace(self._progress, evicted=self._evicted())

    def _evicted(self) -> tuple[str, ...]:
        """Return the members excluded from a generation; if no member is left, those that were lost before the end."""
        gone = self._known_members - self._current_members
        if self._current_members <= self._lost_members | self._finished_members:
            gone |= self._lost_members
        slots = {member.partition(".")[0] for member in self._current_members - self._lost_members}
        return tuple(sorted(each for each in gone - self._finished_members if each.partition(".")[0] not in slots))


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
        self, workers: NodeWorkers, recorder: RunRecorder, progress_reader: ProgressReader, *, is_elastic: bool = False
    ) -> None:
        """`is_elastic` says that the workers are members of an elastic job."""
        self._workers, self._recorder, self._progress_reader = workers, recorder, progress_reader
        self._is_elastic = is_elastic

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
        outcome = conclude_elastic_node(failures) if self._is_elastic else conclude_node(failures)
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
    if JOB_OVER in exception or NO_COORDINATOR in exception:
        return NodeOutcome(phase=GroupPhase.INTERRUPTED, cause=EndCause.PEER, exit_code=first.exit.exit_code, text=text)
    return NodeOutcome(phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, exit_code=first.exit.exit_code, text=text)


class RoundServices:
    """Prepares and creates the services that run on this node in each round: parameter server or coordinator."""

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
            node: Name of any node of the job; the best connected one has its server, the first two have coordinators.
            node_context: Context that runs processes on the node.
            channel: Channel that distributes credentials.
            host: Name of this node that stays valid when another agent replaces this one; None: its address stays.
        """
        self._config, self._node, self._node_context = config, node, node_context
        self._channel, self._host = channel, host
        self._has_server = node_layout.server_node(config) == node
        self._prepared: tuple[int, HostPort, CertificateAuthority] | None = None

    def prepare_round(self, desired: DesiredState, stop_reason: StopReason = never_stop) -> dict[str, HostPort]:
        """Return the address of the round's `server` or `coordinator` here; empty if this node has neither.

        The node of the server, and the first node of an elastic job, also issue the credentials of all processes of the
        round. After the start of a round no coordinator is prepared: an agent that replaces another one takes over its
        address.

        Raises:
            RoundOverError: The round is obsolete, as `stop_reason` says.
            LaunchError: There is no free port, or no receiver of the credentials.
            OSError: The credentials cannot be written.
        """
        is_open = desired.rendezvous is not None and desired.rendezvous.round == desired.round
        coordinators = () if is_open else self._config.coordinator_nodes
        if not self._has_server and self._node not in coordinators:
            return {}
        role = SERVER_ROLE if self._has_server else COORDINATOR_ROLE
        identity = Identity(job=f"{self._config.job}-{desired.round}-{os.getpid()}", role=role, name="0")
        authority = CertificateAuthority(identity.job)
        if self._has_server or self._node == coordinators[0]:
            self._channel.publish_credentials(desired.round, self._issue_credentials(authority), stop_reason)
        address = self._node_context.pick_address(self._node)
        if not self._has_server:
            address = replace(address, host=self._host or address.host)
        self._prepared = (desired.round, address, authority)
        return {role: address}

    def create_services(
        self, rendezvous: RendezvousResult, run_dir: RunDir, *, initial_members: Sequence[str]
    ) -> list[ServiceProcesses]:
        """Create the services of the started round on this node; they do not run yet.

        Args:
            rendezvous: Rendezvous result of the round.
            run_dir: Run directory of this round on this node.
            initial_members: Member names of this node's workers, if the job is elastic.
        """
        prepared = self._prepared if self._prepared is not None and self._prepared[0] == rendezvous.round else None
        if self._has_server:
            if prepared is None:
                return []
            _, address, authority = prepared
            endpoint = SidecarEndpoint(node=self._node, advertised=address)
            return [JobServer([endpoint], self._node_context, run_dir, authority)]
        coordinators = self._config.coordinator_nodes
        if self._node not in coordinators or len(rendezvous.coordinators) < len(coordinators):
            return []
        index = coordinators.index(self._node)
        has_offered = prepared is not None and prepared[1] == rendezvous.coordinators[index]
        return [
            CoordinatorProcesses(
                self._coordinator_pair(rendezvous, initial_members),
                self._node_context,
                run_dir,
                credentials=lambda which: self._channel.take_credentials(
                    rendezvous.round, f"{COORDINATOR_ROLE}-{which}"
                ),
                standby_by_index={index: index > 0 or not has_offered},
                give_up=write_warning,
            )
        ]

    def _coordinator_pair(self, rendezvous: RendezvousResult, initial_members: Sequence[str]) -> CoordinatorPair:
        assert self._config.min_workers is not None, "it has coordinators"
        node_addresses = zip(self._config.coordinator_nodes, rendezvous.coordinators, strict=True)
        return CoordinatorPair(
            endpoints=[self._endpoint(node, address) for node, address in node_addresses],
            bounds=MemberBounds(min_members=self._config.min_workers, max_members=self._config.world_size),
            expected_members=sum(node.workers for node in self._config.nodes if node.name not in rendezvous.late_nodes),
            initial_members=initial_members,
        )

    def _endpoint(self, node: str, address: HostPort) -> SidecarEndpoint:
        """Return a coordinator's endpoint.

        This node's own coordinator listens at the node's present address; its advertised name may still resolve to a
        lost node.
        """
        is_named = node == self._node and self._host is not None
        return SidecarEndpoint(
            node=node, advertised=address, listen_host=self._node_context.pick_address(node).host if is_named else None
        )

    def _issue_credentials(self, authority: CertificateAuthority) -> dict[str, list[Credentials]]:
        """Issue the credentials of a round: holder -> credentials.

        Those of an elastic job's worker name it as a member, `RANK.INCARNATION`.
        """
        is_elastic = self._config.min_workers is not None
        num_elastic = self._channel.num_incarnations(self._config.world_size)
        incarnations = range(num_elastic if is_elastic else NUM_SERVER_INCARNATIONS)
        issued = {
            f"worker-{rank}": [
                authority.issue("worker", f"{rank}.{incarnation}" if is_elastic else str(rank))
                for incarnation in incarnations
            ]
            for rank in range(self._config.world_size)
        }
        for index in range(len(self._config.coordinator_nodes)):
            issued[f"{COORDINATOR_ROLE}-{index}"] = [
                authority.issue(COORDINATOR_ROLE, str(index)) for _ in incarnations
            ]
        return issued


def write_warning(text: str) -> None:
    """Write a warning for people to the agent's own log."""
    sys.stderr.write(f"ringweave: {text}\n")
    sys.stderr.flush()
